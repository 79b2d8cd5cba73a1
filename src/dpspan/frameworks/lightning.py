"""Lightning: a callback that makes `trainer.fit` private (the extra `lightning`)."""

import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from dpspan.accounting.certificate import write_certificate
from dpspan.engine.engine import PrivacyEngine
from dpspan.frameworks.private_fit import CERTIFICATE, Privacy, PrivateFit
from dpspan.support.files import locked

try:
    from pytorch_lightning import Callback  # of the package `lightning`, too
except ImportError as error:
    raise ModuleNotFoundError(
        "PrivateTraining needs the package pytorch-lightning: pip install 'dpspan[lightning]'."
    ) from error

__all__ = ["Privacy", "PrivateTraining"]

_PRECISIONS = ("32-true", "64-true", "bf16-mixed")


class PrivateTraining(Callback):
    """Makes the training of a LightningModule private, with automatic or manual optimization.

    The batch size of the train dataloader is the expected batch size; at most `physical` records
    are on the device at once. `gradient_clip_val` clips the gradient of each record, where
    `privacy.method` has no clip of its own. `ledger.json` and `certificate.json` are kept in the
    Trainer's `default_root_dir`.
    """

    def __init__(self, privacy: Privacy, physical: int | None = None) -> None:
        self._privacy, self._physical = privacy, physical
        self._fit: PrivateFit | None = None
        self._saved: Mapping[str, Any] | None = None
        self._lock = ExitStack()

    @property
    def engine(self) -> PrivacyEngine:
        """Of the last `trainer.fit`."""
        if self._fit is None:
            raise RuntimeError("No private training yet: call trainer.fit first.")
        return self._fit.engine

    # -- the life of a fit ------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """What the module logs goes through here."""
        log = pl_module.log

        def only_what_may_be_seen(name: str, value: Any, *args: Any, **options: Any) -> None:
            shown = self._privacy.logged_as(name, evaluating=not trainer.training)
            if shown is not None:
                log(shown, value, *args, **options)

        self._lock.callback(vars(pl_module).pop, "log")
        pl_module.log = only_what_may_be_seen
        for callback in trainer.callbacks:
            callback.log = only_what_may_be_seen

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """There is an optimizer now, and no batch yet."""
        source = trainer.fit_loop._data_source
        loader = source.dataloader()
        self._refuse(trainer, loader)
        folder = Path(trainer.default_root_dir)
        self._lock.enter_context(locked(folder))
        # The part that is called on a batch, so that it can be looked at; mostly there is just one.
        parts = [part for part in pl_module.children() if any(True for _ in part.parameters())]
        stated = self._privacy.method.clip is not None
        self._fit = PrivateFit(
            self._privacy,
            folder,
            module=parts[0] if len(parts) == 1 else pl_module,
            optimizer=trainer.optimizers[0],
            loader=loader,
            physical=self._physical,
            steps=functools.partial(_steps, trainer),
            clip=None if stated else trainer.gradient_clip_val,
            saved=self._saved,
        )
        batches = _FirstPieces(self._fit)
        source.instance = batches
        pl_module.training_step = self._in_pieces(trainer, pl_module, batches)
        self._lock.callback(vars(pl_module).pop, "training_step")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self._fit is not None and not self._fit.affordable:  # steps were lost, or these are all
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("epsilon", self.engine.get_epsilon())

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        if self._fit is not None and not self._privacy.eval_is_public:
            self._fit.write_ledger("results on evaluation data not declared public were logged")

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint; what was spent is on the disk before it."""
        if self._fit is None:
            return {}
        self._fit.write_ledger()
        return self._fit.engine.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved = state or None

    def on_fit_end(self, trainer: Any, *_: Any) -> None:
        assert self._fit is not None
        document = self._fit.engine.certificate()  # which may put a warning on record
        self._fit.write_ledger()
        write_certificate(Path(trainer.default_root_dir, CERTIFICATE), document)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._end()

    def on_exception(self, *_: Any) -> None:
        self._end()

    def _end(self) -> None:
        if self._fit is not None and not self._fit.over:
            self._fit.close()
        self._lock.close()

    # -- a step -----------------------------------------------------------------------------------

    def _in_pieces(self, trainer: Any, pl_module: Any, batches: "_FirstPieces") -> Any:
        """`training_step` for every piece of a batch, the last of which is for the loop to step."""
        step, fit = pl_module.training_step, batches.fit

        @functools.wraps(step)
        def in_pieces(batch: Any, *args: Any, **options: Any) -> Any:
            result, last = step(batch, *args, **options), batches.last
            while not last:
                if pl_module.automatic_optimization:
                    loss = result["loss"] if isinstance(result, Mapping) else result
                    with torch.autocast(pl_module.device.type, enabled=False):
                        loss.backward()
                        fit.add_piece()
                batch, last = next(batches.pieces)
                batch = pl_module._on_before_batch_transfer(batch, dataloader_idx=0)
                batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
                result = step(batch, *args, **options)
            return result

        return in_pieces

    def _refuse(self, trainer: Any, loader: Any) -> None:
        """ValueError for what cannot be private, with what to do instead."""
        chosen = [c for c in trainer.callbacks if getattr(c, "monitor", None) is not None]
        problems = {
            f"{trainer.world_size} processes or devices add up gradients before they are clipped. "
            "Train on one: Trainer(devices=1)": trainer.world_size > 1 or trainer.num_devices > 1,
            f"precision='{trainer.precision}' scales the loss, or rounds what is released. Use one "
            f"of {', '.join(_PRECISIONS)}": trainer.precision not in _PRECISIONS,
            "accumulate_grad_batches counts batches of a fixed size. Leave it out, give the loader "
            "the batch size of a step and PrivateTraining physical=, what fits": (
                trainer.accumulate_grad_batches != 1
            ),
            "gradient_clip_algorithm='value' bounds no record. Leave it out": (
                trainer.gradient_clip_algorithm == "value"
            ),
            f"{len(trainer.optimizers)} optimizers would share one batch. Use one": (
                len(trainer.optimizers) != 1
            ),
            f"{''.join(type(c).__name__ for c in chosen[:1])} decides by evaluation data. If they "
            "are nobody's secret, say so: Privacy(eval_is_public=True)": (
                bool(chosen) and not self._privacy.eval_is_public
            ),
            "it is unknown how long it will train. Set max_epochs or max_steps": (
                trainer.max_epochs in (None, -1) and trainer.max_steps == -1
            ),
            f"the train dataloader is a {type(loader).__name__}. Give one DataLoader": (
                not isinstance(loader, DataLoader)
            ),
        }
        for problem, there in problems.items():
            if there:
                raise ValueError(f"PrivateTraining refuses this: {problem}.")


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
            self.pieces = self.fit.pieces()
            batch, self.last = next(self.pieces)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """It goes on where the engine does; to Lightning, which asks, this says that it can."""
        return {}

    def load_state_dict(self, _: Any) -> None:
        return


def _steps(trainer: Any, in_an_epoch: int) -> int:
    most = math.inf if trainer.max_steps == -1 else trainer.max_steps
    epochs = math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs
    return int(min(most, epochs * in_an_epoch))
