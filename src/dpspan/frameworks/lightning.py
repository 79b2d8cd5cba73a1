"""Lightning: a callback that makes `trainer.fit` private (the extra `lightning`)."""

import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from dpspan.engine.engine import PrivacyEngine
from dpspan.frameworks.private_fit import Privacy, PrivateFit, refuse

try:
    from pytorch_lightning import Callback  # of the package `lightning`, too
except ImportError as error:
    needed = "the package pytorch-lightning: pip install 'dpspan[lightning]'"
    raise ModuleNotFoundError(f"PrivateTraining needs {needed}.") from error

__all__ = ["Privacy", "PrivateTraining"]

_PRECISIONS = ("32-true", "64-true", "bf16-mixed")
_FINDERS = {"LearningRateFinder", "BatchSizeFinder"}  # of either package
_SCHEDULES = {"GradientAccumulationScheduler"}


class PrivateTraining(Callback):
    """Makes the training of a LightningModule private, with automatic or manual optimization.

    The batch size of the train dataloader is the expected batch size; at most `physical` records
    are on the device at once. `gradient_clip_val` clips the gradient of each record, where
    `privacy.method` has no clip of its own. `ledger.json` and `certificate.json` are kept in the
    Trainer's `default_root_dir`; `engine` is that of the last fit.
    """

    engine: PrivacyEngine | None = None

    def __init__(self, privacy: Privacy, physical: int | None = None) -> None:
        self._privacy, self._physical = privacy, physical
        self._fit: PrivateFit | None = None
        self._saved: Mapping[str, Any] | None = None
        self._undo = ExitStack()

    # -- the life of a fit ------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """What is logged goes through here."""
        if stage == "fit":  # before any callback does something
            refuse("Lightning", _finders(trainer))
        log = pl_module.log

        def only_what_may_be_seen(name: str, value: Any, *args: Any, **options: Any) -> None:
            shown = self._privacy.logged_as(name, evaluating=not trainer.training)
            if shown is not None:
                log(shown, value, *args, **options)

        pl_module.log = only_what_may_be_seen
        self._undo.callback(vars(pl_module).pop, "log")
        self._undo.callback(setattr, self, "_saved", None)  # of a checkpoint, for one fit
        for callback in trainer.callbacks:
            callback.log = only_what_may_be_seen

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """There is an optimizer now, and no batch yet."""
        source = trainer.fit_loop._data_source
        loader = source.dataloader()
        refuse("Lightning", _problems(trainer, loader, self._privacy))
        # The part that is called on a batch, so that it can be looked at; mostly there is just one.
        parts = [part for part in pl_module.children() if any(True for _ in part.parameters())]
        stated = self._privacy.method.clip is not None
        limits = (trainer.max_epochs, trainer.max_steps)
        epochs, most = (math.inf if limit in (None, -1) else limit for limit in limits)
        self._fit = PrivateFit.begun(
            self._privacy,
            Path(trainer.default_root_dir),
            module=parts[0] if len(parts) == 1 else pl_module,
            optimizer=trainer.optimizers[0],
            loader=loader,
            physical=self._physical,
            steps=lambda in_an_epoch: min(most, epochs * in_an_epoch),
            clip=None if stated else trainer.gradient_clip_val,
            saved=self._saved,
            evaluation=_evaluation(trainer),
        )
        self._undo.callback(self._fit.close)
        self.engine, source.instance = self._fit.engine, _FirstPieces(self._fit)
        pl_module.training_step = _in_pieces(trainer, pl_module, source.instance)
        self._undo.callback(vars(pl_module).pop, "training_step")
        self.on_train_batch_end(trainer)  # there may be none to come

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self._fit is not None and not self._fit.affordable:  # steps were lost, or these are all
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._fit is not None:
            pl_module.log("epsilon", self._fit.engine.get_epsilon())

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        if self._fit is not None:
            self._fit.write_ledger(evaluated=True)

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint; what was spent is on the disk before it."""
        return {} if self._fit is None else self._fit.engine.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved = state or None

    def on_fit_end(self, trainer: Any, *_: Any) -> None:
        if self._fit is not None:
            self._fit.certify(Path(trainer.default_root_dir))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._undo.close()

    def on_exception(self, *_: Any) -> None:
        self._undo.close()


class _FirstPieces:
    """An epoch: of each private batch the first piece. The others are drawn in the step."""

    pieces: Iterator[tuple[Any, bool]]
    last: bool

    def __init__(self, fit: PrivateFit) -> None:
        self.fit = fit

    def __len__(self) -> int:
        return self.fit.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.fit.left_of_epoch):
            if not self.fit.affordable:  # where `min_epochs` or `min_steps` ask for more
                return
            self.pieces = self.fit.pieces()
            batch, self.last = next(self.pieces)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """It goes on where the engine does; to Lightning, which asks, this says that it can."""
        return {}

    def load_state_dict(self, _: Any) -> None:
        return


def _evaluation(trainer: Any) -> dict[str, Any]:
    """The loaders by which it will validate; there may be several, in a list or by names."""
    if not trainer.enable_validation:
        return {}
    given = trainer.fit_loop.epoch_loop.val_loop._data_source.dataloader()
    loaders = getattr(given, "flattened", None) or tree_leaves(given)
    return {f"val_dataloader {place}": each for place, each in enumerate(loaders, start=1)}


def _in_pieces(trainer: Any, pl_module: Any, batches: _FirstPieces) -> Any:
    """`training_step` for every piece of a batch, the last of which is for the loop to step."""
    step = pl_module.training_step

    @functools.wraps(step)
    def in_pieces(batch: Any, *args: Any, **options: Any) -> Any:
        result, last = step(batch, *args, **options), batches.last
        while not last:
            if pl_module.automatic_optimization:
                loss = result["loss"] if isinstance(result, Mapping) else result
                with torch.autocast(pl_module.device.type, enabled=False):
                    loss.backward()
                    batches.fit.add_piece()
            batch, last = next(batches.pieces)
            batch = pl_module._on_before_batch_transfer(batch, dataloader_idx=0)
            batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
            result = step(batch, *args, **options)
        return result

    return in_pieces


def _finders(trainer: Any) -> Iterator[str]:
    for callback in trainer.callbacks:
        for name in _FINDERS & {kind.__name__ for kind in type(callback).__mro__}:
            yield (
                f"{name} trains without privacy before the fit, and without other callbacks: leave "
                "it out, and search on public data"
            )


def _problems(trainer: Any, loader: Any, privacy: Privacy) -> Iterator[str]:
    if trainer.world_size > 1 or trainer.num_devices > 1:
        yield "several devices add up gradients before they are clipped: Trainer(devices=1)"
    if trainer.precision not in _PRECISIONS:
        yield (
            f"precision='{trainer.precision}' scales the loss, or rounds what is released: use one "
            f"of {', '.join(_PRECISIONS)}"
        )
    accumulating = ["accumulate_grad_batches"] * (trainer.accumulate_grad_batches != 1)
    kinds = {kind.__name__ for each in trainer.callbacks for kind in type(each).__mro__}
    for name in (*accumulating, *sorted(_SCHEDULES & kinds)):
        yield (
            f"{name} counts batches of a fixed size: leave it out, give the loader the batch size "
            "of a step and PrivateTraining physical=, what fits"
        )
    if trainer.gradient_clip_algorithm == "value":
        yield "gradient_clip_algorithm='value' bounds no record: leave it out"
    if len(trainer.optimizers) != 1:
        yield f"{len(trainer.optimizers)} optimizers would share one batch: use one"
    if trainer.max_epochs in (None, -1) and trainer.max_steps == -1:
        yield "it is unknown how long it will train: set max_epochs or max_steps"
    if not isinstance(loader, DataLoader):
        yield f"the train dataloader is a {type(loader).__name__}: give one DataLoader"
    for callback in trainer.callbacks:
        if getattr(callback, "monitor", None) is not None and not privacy.eval_is_public:
            yield (
                f"{type(callback).__name__} decides by evaluation data: if they are nobody's "
                "secret, say so, Privacy(eval_is_public=True)"
            )
