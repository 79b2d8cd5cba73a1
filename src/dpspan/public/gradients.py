"""Gradients of public samples: what a subspace is spanned by.

Nothing here sees private data except through the model's released parameters, and everything that
is random (labels, which samples, dropout) comes from public seeds: every process of a run, and a
run that was resumed, computes the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dpspan.gradients.capture import Capture
from dpspan.gradients.operator import PerSampleGradients
from dpspan.model.per_sample import recorded
from dpspan.public.data import PublicData, Samples, move
from dpspan.public.losses import SampleCriterion, call, check_classes, shapes, takes_classes
from dpspan.support.checks import check_count, expect, shown
from dpspan.support.errors import DPSpanError
from dpspan.support.randomness import seeded

# One seed serves several purposes; each draws from a stream of its own.
_LABELS, _SUBSET, _MODEL = range(3)

_Samples = tuple[Tensor, Any, Any | None]  # indices, inputs, labels


class PublicPiece(NamedTuple):
    """Public samples on the model's device, and the refresh they are used in."""

    refresh: int
    indices: Tensor  # which samples of the public data they are, on the CPU
    inputs: Any
    labels: Any | None


# -- labels -------------------------------------------------------------------------------------

LabelSource = Callable[[PublicPiece, Tensor], Any]  # from a piece and the model's outputs for it


@runtime_checkable
class Labels(Protocol):
    """Where the labels of public samples come from."""

    real: ClassVar[bool]  # whether they are the data's own

    def source(self, criterion: nn.Module, data: Samples) -> LabelSource:
        """What gives the labels of the data; ValueError if there are none for this criterion."""


@dataclass(frozen=True)
class RealLabels:
    """The labels that the public data come with.

    `otherwise` is what an error advises if they are not the model's classes.

    Examples:
        >>> import torch
        >>> import dpspan
        >>> public = torch.randn(100, 64), torch.randint(10, (100,))
        >>> method = dpspan.GEP(public=public, rank=10, public_labels=dpspan.RealLabels())
    """

    otherwise: str = field(default="pass public_labels='random'", repr=False, compare=False)

    real: ClassVar[bool] = True

    def source(self, criterion: nn.Module, data: Samples) -> LabelSource:
        return _GivenLabels(criterion, data, self.otherwise)


@dataclass(frozen=True)
class RandomLabels:
    """Labels that are drawn once and kept, or drawn anew at every refresh of the subspace.

    The samples need no labels then: GEP's setting. The seed is no secret, as the data are public.

    Examples:
        >>> import torch
        >>> import dpspan
        >>> labels = dpspan.RandomLabels(redraw=True)
        >>> method = dpspan.GEP(public=torch.randn(100, 64), rank=10, public_labels=labels)
    """

    redraw: bool = False
    seed: int = 0

    real: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_seed(self.seed)

    def source(self, criterion: nn.Module, data: Samples) -> LabelSource:
        draw = _draw_for(criterion)
        if draw is None:
            raise ValueError(
                f"No random labels are known for {type(criterion).__name__}: pass "
                "public_labels='real' with labelled public data, or public_loss=, a function "
                "(model, inputs) → one loss per sample."
            )
        return _DrawnLabels(self, draw, data.count)


def labels_of(value: str | Labels) -> Labels:
    """The labels that are meant: "random", "redrawn", "real", or labels as they are."""
    named: dict[str, Labels] = {
        "random": RandomLabels(),
        "redrawn": RandomLabels(redraw=True),
        "real": RealLabels(),
    }
    if isinstance(value, str) and value in named:
        return named[value]
    if not isinstance(value, Labels):
        raise ValueError(
            "Expected public_labels to be 'random', 'redrawn', 'real', RandomLabels(redraw=…, "
            f"seed=…) or RealLabels(), got {shown(value)}."
        )
    return value


Draw = Callable[[np.random.Generator, int, Tensor], Tensor]


def _classes(generator: np.random.Generator, count: int, outputs: Tensor) -> Tensor:
    shape = tuple(outputs.shape)
    expect(len(shape) > 1, "the model to give class scores (samples, classes, …)", f"shape {shape}")
    return torch.from_numpy(generator.integers(shape[1], size=(count, *shape[2:])))


def _coin_flips(generator: np.random.Generator, count: int, outputs: Tensor) -> Tensor:
    flips = generator.integers(2, size=(count, *outputs.shape[1:]))
    return torch.from_numpy(flips).to(outputs.dtype)


def _standard_normal(generator: np.random.Generator, count: int, outputs: Tensor) -> Tensor:
    values = generator.standard_normal((count, *outputs.shape[1:]))
    return torch.from_numpy(values).to(outputs.dtype)


_DRAWS: dict[type, Draw] = {
    nn.CrossEntropyLoss: _classes,
    nn.NLLLoss: _classes,
    nn.BCEWithLogitsLoss: _coin_flips,
    nn.BCELoss: _coin_flips,
    nn.MSELoss: _standard_normal,
    nn.L1Loss: _standard_normal,
    nn.SmoothL1Loss: _standard_normal,
    nn.HuberLoss: _standard_normal,
}


def _draw_for(criterion: nn.Module) -> Draw | None:
    kinds = (kind for kind in type(criterion).__mro__ if kind in _DRAWS)
    return next((_DRAWS[kind] for kind in kinds), None)


class _DrawnLabels:
    """Random labels of all samples, drawn when the shape of the model's outputs is known.

    Drawn for all and then picked, so that a sample's label does not depend on its piece.
    """

    def __init__(self, labels: RandomLabels, draw: Draw, count: int) -> None:
        self._labels, self._draw, self._count = labels, draw, count
        self._drawn: dict[tuple[torch.Size, torch.dtype], Tensor] = {}
        self._refresh = 0  # the one they were drawn for

    def __call__(self, piece: PublicPiece, outputs: Tensor) -> Tensor:
        refresh = piece.refresh if self._labels.redraw else 0
        if refresh != self._refresh:
            self._drawn, self._refresh = {}, refresh
        form = outputs.shape[1:], outputs.dtype
        if form not in self._drawn:
            generator = _generator(self._labels.seed, refresh, _LABELS)
            self._drawn[form] = self._draw(generator, self._count, outputs)
        return self._drawn[form][piece.indices].to(outputs.device, non_blocking=True)


class _GivenLabels:
    """The data's own labels, checked when the model's classes are known."""

    def __init__(self, criterion: nn.Module, data: Samples, otherwise: str) -> None:
        self._criterion, self._otherwise = criterion, otherwise
        self._unchecked = data if takes_classes(criterion) else None

    def __call__(self, piece: PublicPiece, outputs: Tensor) -> Any:
        if self._unchecked is not None:
            check_classes(self._unchecked, outputs, self._criterion, otherwise=self._otherwise)
            self._unchecked = None
        return piece.labels


# -- losses -------------------------------------------------------------------------------------

Losses = Callable[[nn.Module, PublicPiece], Tensor]


def _user_loss(loss: Callable[..., Tensor]) -> Losses:
    def losses(model: nn.Module, piece: PublicPiece) -> Tensor:
        given = (piece.inputs,) if piece.labels is None else (piece.inputs, piece.labels)
        return loss(model, *given)

    return losses


class _CriterionLoss:
    """One loss per sample by the criterion of the private run."""

    def __init__(self, criterion: nn.Module, labels: Labels, data: Samples) -> None:
        self._criterion = SampleCriterion(criterion, instead="public_loss=")
        self._labels = labels.source(criterion, data)

    def __call__(self, model: nn.Module, piece: PublicPiece) -> Tensor:
        with _explained(f"Public inputs of {shapes(piece.inputs)} do not fit the model"):
            returned = call(model, piece.inputs)
        outputs = self._criterion.outputs(returned, len(piece.indices))
        labels = self._labels(piece, outputs)
        with _explained(
            f"{self._criterion.name} cannot compare the model's outputs, {shapes(outputs)}, with "
            f"public labels, {shapes(labels)}; if they need some preparation, pass public_loss="
        ):
            entries = self._criterion.entries(outputs, labels)
        return self._criterion.means(entries, outputs, labels)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Say what was tried when torch refuses it."""
    try:
        yield
    except (DPSpanError, torch.OutOfMemoryError):
        raise  # they say themselves what to do
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ValueError(f"{what}: {error}") from error


# -- gradients ----------------------------------------------------------------------------------


class PublicGradients:
    """The per-sample gradients of public data at the model's present parameters.

    At most `samples` of them, a fresh random choice at each refresh if the data hold more,
    computed `piece` samples at a time. `loss(model, inputs[, labels])` gives one loss per sample;
    it gets labels where there are any. Without it the loss is the run's `criterion`.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        data: PublicData,
        labels: Labels,
        criterion: nn.Module | None,
        loss: Callable[..., Tensor] | None,
        samples: int,
        piece: int | None,
        seed: int = 0,
    ) -> None:
        if labels.real and not data.labelled:
            raise ValueError(
                f"public_labels are real, but the public data '{data.name}' have no labels: give "
                "(inputs, labels), or pass public_labels='random'."
            )
        self.data = data
        self._losses = losses_by(criterion, loss, labels, data)
        self._model = model
        self._samples = check_count("samples", samples)
        self._piece = None if piece is None else check_count("piece", piece)
        self._seed = _check_seed(seed)
        self._on_device: tuple[torch.device, list[_Samples]] | None = None

    @property
    def count(self) -> int:
        """Samples per refresh."""
        return min(self._samples, self.data.count)

    @property
    def fixed(self) -> bool:
        """Whether the samples are the same at every refresh."""
        return self.count == self.data.count

    def __call__(self, refresh: int, capture: Capture | None = None) -> PerSampleGradients:
        """The gradients for refresh number `refresh`; leaves the model as it was.

        Recorded by `capture` where the model has one already.
        """
        with torch.enable_grad(), _left_as_found(self._model, self._generator(refresh, _MODEL)):
            return PerSampleGradients.concatenate(
                [
                    self._gradients(PublicPiece(refresh, *part), capture)
                    for part in self._parts(refresh)
                ]
            )

    def try_one(self) -> None:
        """Run the loss on one public sample: what does not fit is refused before training."""
        model = self._model
        with torch.no_grad(), _left_as_found(model, self._generator(0, _MODEL)):
            device = next(model.parameters()).device
            indices, inputs, labels = next(self.data.pieces(1))
            piece = PublicPiece(0, indices, move(inputs, device), move(labels, device))
            losses = self._losses(model, piece)
        if losses.shape != (1,):
            raise ValueError(
                "Expected public_loss to return one loss per sample, shape (1,) for one sample, "
                f"got {tuple(losses.shape)}. Use reduction='none' and average over what is left."
            )

    def _parts(self, refresh: int) -> Iterable[_Samples]:
        device = next(self._model.parameters()).device
        if not self.fixed:
            picked = self._generator(refresh, _SUBSET).choice(
                self.data.count, self.count, replace=False
            )
            return self._moved(device, torch.from_numpy(np.sort(picked)))
        if self._on_device is None or self._on_device[0] != device:  # they go there once
            self._on_device = device, list(self._moved(device, None))
        # Handed over as copies: a model or a loss may work in place on what it gets.
        return (tree_map_only(Tensor, torch.clone, part) for part in self._on_device[1])

    def _moved(self, device: torch.device, chosen: Tensor | None) -> Iterator[_Samples]:
        for indices, inputs, labels in self.data.pieces(self._piece, chosen):
            yield indices, move(inputs, device), move(labels, device)

    def _gradients(self, piece: PublicPiece, capture: Capture | None) -> PerSampleGradients:
        with nullcontext(capture) if capture else Capture(self._model) as recording:
            return recorded(recording, lambda: self._losses(self._model, piece), len(piece.indices))

    def _generator(self, refresh: int, stream: int) -> np.random.Generator:
        return _generator(self._seed, refresh, stream)


def losses_by(
    criterion: nn.Module | None,
    loss: Callable[..., Tensor] | None,
    labels: Labels,
    data: Samples,
) -> Losses:
    """One loss per sample of the data: by the function if there is one, else by the criterion."""
    if loss is not None:
        return _user_loss(loss)
    if criterion is None:
        raise ValueError(
            "GEP and PDPSGD need a loss for the public samples: pass criterion= to make_private, "
            "or public_loss=, a function (model, inputs[, labels]) → one loss per sample."
        )
    return _CriterionLoss(criterion, labels, data)


@contextmanager
def _left_as_found(model: nn.Module, generator: np.random.Generator) -> Iterator[None]:
    """Run the model on copies of its buffers, and its dropout on random numbers of its own.

    Copies, rather than contents restored: buffers are watched for changes during a private step.
    """
    found = [(module, dict(module._buffers)) for module in model.modules()]
    copies = {buffer: buffer.clone() for buffer in model.buffers()}  # what is shared stays shared
    seed = int(generator.integers(2**63))
    try:
        for module, buffers in found:
            module._buffers.update({n: b if b is None else copies[b] for n, b in buffers.items()})
        with seeded(model, seed):
            yield
    finally:
        for module, buffers in found:
            module._buffers.clear()
            module._buffers.update(buffers)


def _generator(seed: int, refresh: int, stream: int) -> np.random.Generator:
    return np.random.default_rng([seed, refresh, stream])


def _check_seed(seed: Any) -> int:
    whole = isinstance(seed, int) and not isinstance(seed, bool)
    expect(whole and seed >= 0, "seed to be an integer of at least 0", seed)
    return int(seed)
