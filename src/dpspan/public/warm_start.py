"""Training on labelled public data before the first private step: the warm start.

Public samples cost no privacy, so this is ordinary training of the trainable parameters. Some
samples are held out to find the number of epochs; then the model goes back to the weights it had
and trains on all samples for as many. Nothing else is learnt from the held-out samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpspan.gradients.capture import captures_on
from dpspan.model.per_sample import SampleLosses, check_one_each
from dpspan.model.trainable import Model, Trainable, chosen_parameters, train_only
from dpspan.public.data import PublicData
from dpspan.public.gradients import PieceLosses, RealLabels, losses_by
from dpspan.support import checks
from dpspan.support.checks import describe, expect
from dpspan.support.randomness import seeded

# Of fewer samples, the one held out would say nothing about the others.
FEWEST_TO_SPLIT = 5

Augment = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class WarmStart:
    """Trains a model on labelled public data by Adam, until a held-out part stops improving.

    Args:
        data: a Dataset, DataLoader, tensors or `PublicData`, with labels.
        max_epochs: the maximum; exactly this number where nothing is held out.
        batch_size: the maximum; an epoch is cut into minibatches of even size.
        learning_rate: Adam's.
        weight_decay: Adam's.
        validation: share of the samples held out to find the number of epochs; 0 for none.
        patience: stop after this number of epochs without a better held-out loss.
        loss: `loss(model, inputs, labels)` gives one loss per sample, instead of the criterion.
        augment: changes the inputs of each minibatch at random (`RandomAffine()`, for images), not
            those of the held-out samples. Give it more epochs.
        seed: for the split, the order of the samples, augmentation and the model's dropout.
    """

    data: object = field(repr=False)
    max_epochs: int = 200
    batch_size: int = 50
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    validation: float = 0.2
    patience: int = 20
    loss: SampleLosses | None = None
    augment: Augment | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_epochs", "batch_size", "patience"):
            checks.check_count(name, getattr(self, name))
        checks.check_positive("learning_rate", self.learning_rate)
        decay = checks.check_number("weight_decay", self.weight_decay)
        expect(0 <= decay < math.inf, "weight_decay >= 0", self.weight_decay)
        share = checks.check_number("validation", self.validation)
        expect(0 <= share < 1, "0 <= validation < 1", self.validation)
        for name in ("loss", "augment"):
            function = getattr(self, name)
            expect(function is None or callable(function), f"{name} to be a function", function)
        checks.check_seed(self.seed)

    def describe(self) -> dict[str, Any]:
        """The configuration, without the data."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "data"}
        named = ("loss", "augment", "trainable")
        return {n: describe(v) if n in named and v is not None else v for n, v in plain.items()}

    def summary(self, result: WarmStartResult) -> str:
        """For the record: what was done with the data."""
        augmented = "" if self.augment is None else f", augmented by {describe(self.augment)}"
        return (
            f"warm start: {result.epochs} epochs of Adam at {self.learning_rate:g}, batches of "
            f"{self.batch_size}{augmented}, seed {self.seed}"
        )

    def run(self, model: nn.Module, criterion: nn.Module | None) -> WarmStartResult:
        """Train the trainable parameters of the model, in place.

        Where training does not lower the held-out loss, and after an error or an interruption,
        the model is as it was. Its modes and torch's random state always are.
        """
        _check_model(model)
        with seeded(self.seed) as reseed, _kept(model) as put_back, torch.enable_grad():
            data = PublicData.of(self.data)
            if not data.labelled:
                raise ValueError(
                    f"Expected labelled public data for a warm start, got '{data.name}' without "
                    "labels. Pass inputs and labels, or leave the warm start out."
                )
            instead = "WarmStart(loss=...)"
            losses = losses_by(criterion, self.loss, RealLabels(), data, instead=instead)
            searched, held_out = self._split(data.count)

            def from_the_start(samples: Tensor) -> _Trainer:
                put_back()
                reseed()
                return _Trainer(self, model, losses, data, samples)

            curve: list[float] = []
            if len(held_out):
                curve = self._held_out_curve(from_the_start(searched), held_out)
            epochs = curve.index(min(curve)) if curve else self.max_epochs
            trainer = from_the_start(torch.arange(data.count))
            for _ in range(epochs):
                trainer.epoch()
        return WarmStartResult(epochs, tuple(curve))

    def _split(self, count: int) -> tuple[Tensor, Tensor]:
        if self.validation == 0:
            return torch.arange(count), torch.arange(0)
        if count < FEWEST_TO_SPLIT:
            raise ValueError(
                f"Expected at least {FEWEST_TO_SPLIT} public samples to hold some out, got "
                f"{count}. Pass more, or validation=0 to train for exactly max_epochs."
            )
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self.seed))
        held_out = min(max(round(count * self.validation), 1), count - 1)
        return order[held_out:], order[:held_out]

    def _held_out_curve(self, trainer: _Trainer, held_out: Tensor) -> list[float]:
        """The held-out loss before training and after each epoch."""
        curve, best = [trainer.mean_loss(held_out)], 0
        for epoch in range(1, self.max_epochs + 1):
            trainer.epoch()
            curve.append(trainer.mean_loss(held_out))
            if curve[epoch] < curve[best]:
                best = epoch
            elif epoch - best >= self.patience:
                break
        return curve


class WarmStartResult(NamedTuple):
    """How often a warm start went over all samples, 0 if that did not help; and how it knows."""

    epochs: int
    held_out: tuple[float, ...]  # losses before training and after each epoch of the search


@dataclass(frozen=True, kw_only=True, eq=False)
class SecondPhase(WarmStart):
    """A warm start of one set of parameters of a pre-trained model (Gu, Kamath, Wu 2023).

    Private training then goes on with the same set. `model = phase.prepare(model)` freezes the
    rest; then build the optimizer and call `make_private(..., warm_start=phase)`, which trains on
    the public data, keeps them apart from the private data and puts them on record. The other
    arguments are `WarmStart`'s.

    Args:
        trainable: `LastLayers(2)`, `FirstAndLast()`, `Named(("fc",))`, `BiasOnly()`, `LoRA(rank=8)`
            or your own.
    """

    trainable: Trainable

    def __post_init__(self) -> None:
        super().__post_init__()
        what = "trainable to be a set of parameters, such as LastLayers(1)"
        expect(isinstance(self.trainable, Trainable), what, self.trainable)

    def prepare(self, model: Model) -> Model:
        """Freeze everything else, in place; the model with what the set adds to it."""
        return train_only(model, self.trainable)

    def run(self, model: nn.Module, criterion: nn.Module | None) -> WarmStartResult:
        chosen = chosen_parameters(model, self.trainable)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad != (parameter in chosen):
                state = "trainable" if parameter.requires_grad else "frozen"
                raise ValueError(
                    f"The model is not prepared for {self.trainable!r}: '{name}' is {state}. Call "
                    "phase.prepare(model) first, and build the optimizer after it."
                )
        return super().run(model, criterion)

    def summary(self, result: WarmStartResult) -> str:
        return f"second phase of {describe(self.trainable)}, {super().summary(result)}"


@dataclass(eq=False, repr=False)
class _Trainer:
    """Adam on some of the public samples, with its own state, an epoch at a time."""

    config: WarmStart
    model: nn.Module
    losses: PieceLosses
    data: PublicData
    samples: Tensor

    def __post_init__(self) -> None:
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.Adam(
            self._parameters, lr=self.config.learning_rate, weight_decay=self.config.weight_decay
        )
        # Another seed than the split's, or the first order would be the split's order.
        self._shuffle = torch.Generator().manual_seed(self.config.seed + 1)

    def epoch(self) -> None:
        self.model.train()
        order = self.samples[torch.randperm(len(self.samples), generator=self._shuffle)]
        finite = []
        for batch in order.tensor_split(math.ceil(len(order) / self.config.batch_size)):
            self._optimizer.zero_grad()
            # Samples of other shapes come as other pieces.
            for losses in self._losses_of(batch, self.config.augment):
                loss = losses.sum() / len(batch)
                loss.backward()
                finite.append(loss.detach().isfinite())
            self._optimizer.step()
        # Once an epoch, as it waits for the device. Weights too: gradients may not be finite.
        finite += [p.detach().isfinite().all() for p in self._parameters]
        if not all(map(bool, finite)):
            raise ValueError(_DIVERGED)

    def mean_loss(self, samples: Tensor) -> float:
        self.model.eval()
        with torch.no_grad():
            sums = [x.double().sum() for x in self._losses_of(samples)]
        mean = float(torch.stack(sums).sum()) / len(samples)
        if not math.isfinite(mean):
            if self._optimizer.state:
                raise ValueError(_DIVERGED)
            raise ValueError(
                "The loss on the public data is not finite even before the warm start. Look for "
                "NaN and infinity in the model's weights, and for inputs of too large a scale."
            )
        return mean

    def _losses_of(self, samples: Tensor, augment: Augment | None = None) -> Iterator[Tensor]:
        """One loss per sample, in as few pieces as the batch size and their shapes allow."""
        device, chosen = self._parameters[0].device, samples.sort().values
        for piece in self.data.pieces(self.config.batch_size, chosen, device):
            if augment is not None:
                piece = piece._replace(inputs=augment(piece.inputs))
            yield check_one_each(self.losses(self.model, piece, 0), len(piece.indices))


_DIVERGED = (
    "The warm start diverged: the loss or the weights are no longer finite. Lower learning_rate. "
    "The model is as it was before."
)


@contextmanager
def _kept(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Whatever goes wrong, an interruption too, the model is as it was; or when it is asked for.

    Its modes are as before in any case, and no gradient of public data stays.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    contents = [(tensor, tensor.detach().clone()) for tensor in (*trained, *model.buffers())]
    modules = [(m, m.training, dict(m._buffers)) for m in model.modules()]

    def put_back() -> None:
        with torch.no_grad():
            for tensor, content in contents:
                tensor.copy_(content)
        for module, _, buffers in modules:
            module._buffers.clear()
            module._buffers.update(buffers)

    try:
        yield put_back
    except BaseException:
        put_back()
        raise
    finally:
        for module, training, _ in modules:
            module.training = training
        for parameter in trained:
            parameter.grad = None


def _check_model(model: nn.Module) -> None:
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            "Expected a model with a trainable parameter: unfreeze what the warm start is to train."
        )
    if captures_on(model):
        raise ValueError(
            "The model belongs to a private run, which would take public samples for private ones. "
            "Warm start it before make_private, or call detach() on its engine first."
        )
