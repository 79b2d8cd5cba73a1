"""Hugging Face's Trainer, made private: the same script with `privacy=` (the extra `transformers`).

Its loop stays as it is. A step of it draws a Poisson sample, runs it piece by piece, and hands the
optimizer one noisy gradient. What leaves the process otherwise is looked through: the loss of a
batch, its size, the number of its tokens and the state of the random numbers do not.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler

from dpspan.engine.engine import PrivacyEngine
from dpspan.frameworks.private_fit import Privacy, PrivateFit, refuse
from dpspan.public.data import like
from dpspan.support.left_as_found import left_as_found

try:
    import accelerate  # noqa: F401, without which there is no Trainer
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as error:
    needed = "the packages transformers and accelerate: pip install 'dpspan[transformers]'"
    raise ModuleNotFoundError(f"PrivateTrainer needs {needed}.") from error

__all__ = ["Privacy", "PrivateTrainer"]

_IGNORED = -100  # the label of tokens that do not count
_TRIED = 8  # records, to find out what the model's own loss is


class PrivateTrainer(Trainer):
    """A `Trainer` whose training is (ε, δ)-private.

    The expected batch is `per_device_train_batch_size` × `gradient_accumulation_steps` records, of
    which at most `per_device_train_batch_size` are on the device at once. `max_grad_norm` clips the
    gradient of each record, where `privacy.method` has no clip of its own. The loss of a text is
    the mean over its own tokens, whatever the other texts of its batch are. `engine` is that of the
    last training.
    """

    engine: PrivacyEngine | None = None
    loss_is_scaled_for_ga = True  # accumulation is the engine's
    compute_loss_func: Any
    _evaluating = False
    _fit: PrivateFit | None = None
    _saved: Mapping[str, Any] | None = None
    _shift: int | None = None  # of labels against logits

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *others: Any,
        privacy: Privacy,
        **options: Any,  # the Trainer's own
    ) -> None:
        given = TrainingArguments("tmp_trainer") if args is None else args
        refuse("PrivateTrainer", _problems(given, privacy))
        self.privacy = privacy
        self._accumulated, self._clip = given.gradient_accumulation_steps, given.max_grad_norm
        own = copy.copy(given)
        own.gradient_accumulation_steps, own.max_grad_norm = 1, 0.0
        super().__init__(model, own, *others, **options)
        if self.compute_loss_func is not None:  # as a module, which the guard looks at
            self.compute_loss_func = _Criterion(self.compute_loss_func)
        self.add_callback(_StopWhenSpent(self))

    # -- training -------------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *others: Any, **options: Any
    ) -> Any:
        """Train; `resume_from_checkpoint` goes on with what `ledger.json` says was spent."""
        folder, path = Path(self.args.output_dir), resume_from_checkpoint or None
        if path is True:
            path = get_last_checkpoint(str(folder))
            if path is None:
                raise ValueError(f"There is no checkpoint in {folder} to go on from.")
        # The books first: weights must never be restored without what they cost.
        self._saved = PrivateFit.saved_in(path)
        try:
            output = super().train(path, *others, **options)
            if self._fit is not None:
                self._fit.certify(folder)
        finally:
            if self._fit is not None:
                self._fit.close()
        loss = output.training_loss if self.privacy.unprivate_metrics else math.nan
        return output._replace(training_loss=loss, metrics=self._shown(output.metrics))

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Make everything private, and give the loop what stands for batches."""
        sampler = self._get_train_sampler()
        if sampler is not None and type(sampler) not in (RandomSampler, SequentialSampler):
            raise ValueError(
                f"The train sampler is a {type(sampler).__name__}, and private batches are Poisson "
                "samples: leave out group_by_length, train_sampling_strategy and samplers of your "
                "own."
            )
        plain, args = super().get_train_dataloader(), self.args
        epochs: float = args.num_train_epochs
        loader = like(
            plain,
            batch_size=args.per_device_train_batch_size * self._accumulated,
            worker_init_fn=None,
            pin_memory=plain.pin_memory,
            persistent_workers=plain.persistent_workers,
        )
        sets: Any = {} if self.eval_dataset is None else {"eval_dataset": self.eval_dataset}
        if isinstance(self.eval_dataset, dict):
            sets = {f"eval_dataset.{name}": each for name, each in self.eval_dataset.items()}
        evaluation = {name: self.get_eval_dataloader(each) for name, each in sets.items()}
        self._shift = self._found_shift(loader)
        optimizer: Any = self.create_optimizer()
        default = TrainingArguments.max_grad_norm
        stated = self.privacy.method.clip is not None and self._clip == default
        criterion = self.compute_loss_func or self.privacy.criterion
        self._fit = PrivateFit.begun(
            replace(self.privacy, criterion=criterion),
            Path(args.output_dir),
            module=self.model,
            optimizer=getattr(optimizer, "optimizer", optimizer),  # of accelerate's
            loader=loader,
            physical=args.per_device_train_batch_size,
            steps=lambda n: args.max_steps if args.max_steps > 0 else math.ceil(epochs * n),
            clip=None if stated else self._clip or None,
            saved=self._saved,
            evaluation=evaluation,
        )
        self.engine = self._fit.engine
        steps = _Steps(self._fit)
        return DataLoader(steps, batch_size=1, sampler=steps, collate_fn=lambda _: {})

    def training_step(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Tensor:
        """Run the pieces of a batch; after the last of them the loop takes the step."""
        if self._fit is None or self._fit.over or inputs:
            raise RuntimeError(
                "The training loop got a batch that was not drawn privately: do not override "
                "get_train_dataloader; a dataset and a data_collator are all that it needs."
            )
        losses = []
        for batch, last in self._fit.pieces():
            losses.append(super().training_step(model, batch))
            if not last:
                self._fit.add_piece()
        loss = torch.stack(losses).mean()
        return loss if self.privacy.unprivate_metrics else torch.zeros_like(loss)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any
    ) -> Any:
        """Without the number of tokens in the batch, by which the Trainer divides otherwise."""
        if self._shift is None or not model.training:
            return super().compute_loss(model, inputs, return_outputs)
        outputs, labels = self._called(model, inputs)
        loss = self._of_tokens(outputs, labels, self._shift)
        return (loss, outputs) if return_outputs else loss

    # -- the loss of a text -----------------------------------------------------------------------

    def _found_shift(self, loader: DataLoader[Any]) -> int | None:
        """By how much labels are ahead of logits, if its own tokens decide a record's loss.

        The mean over the tokens of one record is then the model's own loss of it, but that of a
        batch divides by the tokens of all.
        """
        for index in range(min(_TRIED, len(loader.dataset))):  # type: ignore[arg-type]
            record = self._prepare_inputs(loader.collate_fn([loader.dataset[index]]))
            labels: Any = record.get("labels") if isinstance(record, Mapping) else None
            if not isinstance(labels, Tensor) or labels.dim() != 2 or labels.is_floating_point():
                return None
            with left_as_found(self.model, mode="evaluation"), torch.no_grad():
                own = super().compute_loss(self.model, dict(record))
                outputs, labels = self._called(self.model, record)
            logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
            if self.compute_loss_func is not None or logits.shape[:2] != labels.shape:
                return None
            tried = [self._of_tokens(outputs, labels, shift) for shift in (0, 1)]
            found = [s for s, loss in enumerate(tried) if math.isclose(own, loss, rel_tol=1e-4)]
            if len(found) == 1:
                return found[0]
        return None

    def _called(self, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Any, Tensor]:
        """The outputs without a loss, and the labels."""
        rest = {name: value for name, value in inputs.items() if name != "labels"}
        labels: Tensor = inputs["labels"]
        shifted = getattr(self.model, "prepare_decoder_input_ids_from_labels", None)
        if shifted is not None and "decoder_input_ids" not in rest:
            rest["decoder_input_ids"] = shifted(labels=labels)
        return model(**rest), labels

    def _of_tokens(self, outputs: Any, labels: Tensor, shift: int) -> Tensor:
        """The mean over records of the mean over each record's tokens."""
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
        labels = labels[:, shift:]
        logits = logits[:, : labels.shape[1]].transpose(1, 2)
        losses = F.cross_entropy(
            logits.to(torch.promote_types(logits.dtype, torch.float32)),
            labels,
            ignore_index=_IGNORED,
            label_smoothing=self.args.label_smoothing_factor,
            reduction="none",
        )
        return (losses.sum(1) / (labels != _IGNORED).sum(1).clamp(min=1)).mean()

    # -- what leaves the process ------------------------------------------------------------------

    def log(self, logs: dict[str, float], *others: Any) -> None:
        """What is private is left out, or called so; ε is there."""
        shown = self._shown(logs)
        if self._fit is not None:
            self._fit.write_ledger(evaluated=self._evaluating)
            shown["epsilon"] = self._fit.engine.get_epsilon()
        super().log(shown, *others)
        logs.update({name: shown[name] for name in ("epoch", "epsilon") if name in shown})

    def _shown(self, logs: Mapping[str, float]) -> dict[str, float]:
        names = {n: self.privacy.logged_as(n, evaluating=self._evaluating) for n in logs}
        return {new: logs[name] for name, new in names.items() if new is not None}

    def evaluate(self, *others: Any, **options: Any) -> dict[str, float]:
        before, self._evaluating = self._evaluating, True
        try:
            metrics: dict[str, float] = super().evaluate(*others, **options)
        finally:
            self._evaluating = before
        return metrics

    def floating_point_ops(self, inputs: Any) -> int:
        """None are counted: they tell how many records were drawn, and how long they are."""
        return 0

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """With a certificate; the state of the engine, too, where training may go on."""
        folder = Path(output_dir or self.args.output_dir)
        if self._fit is not None:
            self._fit.certify(folder)
            if _internal_call and not self._fit.over:
                self._fit.save(folder)
        super().save_model(output_dir, _internal_call)

    def _save_rng_state(self, *_: Any) -> None:
        """Never: who knows the dropout of a batch may see one record in the gradients of others."""

    def _load_rng_state(self, *_: Any) -> None:
        """Nothing is drawn twice."""

    def _load_best_model(self) -> None:
        assert self._fit is not None
        state = self._fit.engine.state_dict()
        super()._load_best_model()
        self._fit.engine.load_state_dict(state)  # other weights now, and all of them released

    def hyperparameter_search(self, *_: Any, **__: Any) -> None:
        """Refused: every trial is a release."""
        raise RuntimeError(
            "A search on private records is a release for each trial: search on public data with "
            "a plain Trainer, and train once here."
        )


class _Criterion(nn.Module):
    """A loss function of the user's."""

    ignore_index = _IGNORED  # where tokens are ignored, a mean over the others mixes records

    def __init__(self, function: Any) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


class _Steps(Dataset[int]):
    """One entry a step, in order; what it stands for is drawn when the step is taken."""

    def __init__(self, fit: PrivateFit) -> None:
        self._fit = fit

    def __len__(self) -> int:
        return self._fit.steps_per_epoch

    def __getitem__(self, step: int) -> int:
        return step

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self) if self._fit.affordable else 0))


class _StopWhenSpent(TrainerCallback):
    """Ends training where a run that lost steps cannot pay for all that are left, or for any."""

    def __init__(self, trainer: PrivateTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.on_step_end(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        fit = self._trainer._fit
        if state.global_step < state.max_steps and fit is not None and not fit.affordable:
            control.should_training_stop = True


def _problems(args: TrainingArguments, privacy: Privacy) -> Iterator[str]:
    if max(args.world_size, args.n_gpu) > 1 or args.fsdp or args.deepspeed:
        yield (
            "several processes or GPUs add up gradients before they are clipped: start one process "
            "without torchrun, fsdp and deepspeed, and let it see one GPU (CUDA_VISIBLE_DEVICES=0)"
        )
    if args.fp16:
        yield "fp16 scales the loss by what gradients overflow, and so the clip: use bf16"
    if args.gradient_checkpointing:
        yield (
            "gradient_checkpointing runs layers again where nothing is recorded: lower "
            "per_device_train_batch_size, and raise gradient_accumulation_steps"
        )
    if args.auto_find_batch_size:
        yield "auto_find_batch_size tries sizes: set per_device_train_batch_size to what fits"
    if getattr(args, "include_num_input_tokens_seen", "no") not in (False, "no"):
        yield "include_num_input_tokens_seen counts the tokens of private batches: leave it out"
    if args.neftune_noise_alpha is not None:
        yield "neftune_noise_alpha scales its noise by the longest text of a batch: leave it out"
    if any(word in str(args.optim).lower() for word in ("lomo", "layerwise")):
        yield f"optim={args.optim} updates weights during the backward pass: choose another"
    if args.metric_for_best_model is not None and not privacy.eval_is_public:
        yield (
            "metric_for_best_model (load_best_model_at_end, reduce_lr_on_plateau, early stopping) "
            "decides by evaluation data: if they are nobody's secret, say so, "
            "Privacy(eval_is_public=True)"
        )
