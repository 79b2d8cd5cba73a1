"""Gradients of public samples: what a subspace is spanned by.

Nothing here sees private data except through the model's released parameters, and everything that
is random (labels, which samples, dropout) comes from public seeds: every process of a run, and a
run that was resumed, computes the same gradients.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dpspan.gradients.capture import Capture
from dpspan.gradients.operator import PerSampleGradients
from dpspan.model.per_sample import recorded
from dpspan.public.data import PublicData, Samples
from dpspan.public.losses import (
    SampleCriterion,
    call,
    check_classes,
    check_one_each,
    explained,
    shapes,
)
from dpspan.support.checks import check_count, check_seed, expect, shown
from dpspan.support.left_as_found import left_as_found

# One public seed serves several purposes; each draws from a stream of its own.
_LABELS, _SUBSET, _MODEL = range(3)


def _stream(seed: int, refresh: int, purpose: int) -> np.random.Generator:
    """The same numbers in every process, and in a run that was resumed."""
    return np.random.default_rng([seed, refresh, purpose])


# -- labels -------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Samples on the model's device, and the refresh that they are used in."""

    refresh: int
    indices: Tensor  # which samples of the data they are, on the CPU
    inputs: Any
    labels: Any | None


LabelSource = Callable[[Piece, Tensor], Any]  # from a piece and the model's outputs for it


@dataclass(frozen=True)
class RealLabels:
    """The labels that the public data come with.

    Examples:
        >>> import torch
        >>> import dpspan
        >>> public = torch.randn(100, 64), torch.randint(10, (100,))
        >>> method = dpspan.GEP(public=public, rank=10, public_labels=dpspan.RealLabels())
    """

    real: ClassVar[bool] = True  # whether they are the data's own

    def source(self, criterion: nn.Module, data: Samples) -> LabelSource:
        """The data's own labels, checked once the model's classes are known."""

        @cache
        def check(outputs: torch.Size) -> None:
            check_classes(data, outputs, criterion)

        def labels(piece: Piece, outputs: Tensor) -> Any:
            check(outputs.shape[1:])
            return piece.labels

        return labels


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
        check_seed(self.seed)

    def source(self, criterion: nn.Module, data: Samples) -> LabelSource:
        """Labels as the criterion takes them, drawn when the outputs' shape is known.

        ValueError if none are known for this criterion.
        """
        draw = next((_DRAWS[kind] for kind in type(criterion).__mro__ if kind in _DRAWS), None)
        if draw is None:
            raise ValueError(
                f"No random labels are known for {type(criterion).__name__}: pass "
                "public_labels='real' with labelled public data, or public_loss=, a function "
                "(model, inputs) → one loss per sample."
            )
        drawn: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}  # of one refresh

        def labels(piece: Piece, outputs: Tensor) -> Tensor:
            form = piece.refresh if self.redraw else 0, outputs.shape[1:], outputs.dtype
            if form not in drawn:
                if any(refresh != form[0] for refresh, _, _ in drawn):
                    drawn.clear()
                # For all samples, so that a sample's label does not depend on its piece.
                drawn[form] = draw(_stream(self.seed, form[0], _LABELS), data.count, outputs)
            return drawn[form][piece.indices].to(outputs.device, non_blocking=True)

        return labels


Labels = RealLabels | RandomLabels
_NAMED: dict[str, Labels] = {
    "random": RandomLabels(),
    "redrawn": RandomLabels(redraw=True),
    "real": RealLabels(),
}


def labels_of(value: str | Labels) -> Labels:
    """The labels that are meant: "random", "redrawn", "real", or labels as they are."""
    if isinstance(value, str) and value in _NAMED:
        return _NAMED[value]
    if not isinstance(value, Labels):
        raise ValueError(
            "Expected public_labels to be 'random', 'redrawn', 'real', RandomLabels(redraw=…, "
            f"seed=…) or RealLabels(), got {shown(value)}."
        )
    return value


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


_DRAWS: dict[type, Callable[[np.random.Generator, int, Tensor], Tensor]] = {
    **dict.fromkeys([nn.CrossEntropyLoss, nn.NLLLoss], _classes),
    **dict.fromkeys([nn.BCEWithLogitsLoss, nn.BCELoss], _coin_flips),
    **dict.fromkeys([nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss], _standard_normal),
}


# -- gradients ----------------------------------------------------------------------------------

_Piece = tuple[Tensor, Any, Any | None]  # indices, inputs, labels


def losses_by(
    criterion: nn.Module | None,
    loss: Callable[..., Tensor] | None,
    labels: Labels,
    data: Samples,
) -> Callable[[nn.Module, Piece], Tensor]:
    """One loss per sample of the data: by the function if there is one, else by the criterion."""
    if loss is not None:
        return lambda model, piece: loss(
            model, piece.inputs, *(() if piece.labels is None else (piece.labels,))
        )
    if criterion is None:
        raise ValueError(
            "GEP and PDPSGD need a loss for the public samples: pass criterion= to make_private, "
            "or public_loss=, a function (model, inputs[, labels]) → one loss per sample."
        )
    unreduced = SampleCriterion(criterion, instead="public_loss=")
    source = labels.source(criterion, data)

    def losses(model: nn.Module, piece: Piece) -> Tensor:
        with explained(f"Public inputs of {shapes(piece.inputs)} do not fit the model"):
            returned = call(model, piece.inputs)
        outputs = unreduced.outputs(returned, len(piece.indices))
        return unreduced.losses(outputs, source(piece, outputs))

    return losses


@dataclass(kw_only=True, eq=False, repr=False)
class PublicGradientSource:
    """The per-sample gradients of public data at the model's present parameters.

    At most `samples` of them, a fresh random choice at each refresh if the data hold more,
    computed `piece` samples at a time. `loss(model, inputs[, labels])` gives one loss per sample;
    it gets labels where there are any. Without it the loss is the run's `criterion`.
    """

    model: nn.Module
    data: PublicData
    labels: Labels
    criterion: nn.Module | None
    loss: Callable[..., Tensor] | None
    samples: int
    piece: int | None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.labels.real and not self.data.labelled:
            raise ValueError(
                f"public_labels are real, but the public data '{self.data.name}' have no labels: "
                "give (inputs, labels), or pass public_labels='random'."
            )
        self._losses = losses_by(self.criterion, self.loss, self.labels, self.data)
        self.count = min(check_count("samples", self.samples), self.data.count)  # per refresh
        self.fixed = self.count == self.data.count  # the same samples at every refresh
        if self.piece is not None:
            check_count("piece", self.piece)
        check_seed(self.seed)
        self._on_device: tuple[torch.device, list[_Piece]] | None = None

    def __call__(self, refresh: int, capture: Capture | None = None) -> PerSampleGradients:
        """The gradients for refresh number `refresh`; leaves the model as it was.

        Recorded by `capture` where the model has one already.
        """
        with torch.enable_grad(), left_as_found(self.model, self._model_seed(refresh)):
            pieces = (Piece(refresh, *piece) for piece in self._pieces(refresh))
            return PerSampleGradients.concatenate([self._gradients(p, capture) for p in pieces])

    def try_one(self) -> None:
        """Run the loss on one public sample: what does not fit is refused before training."""
        with torch.no_grad(), left_as_found(self.model, self._model_seed(0)):
            piece = next(self.data.pieces(1, device=_device(self.model)))
            losses = self._losses(self.model, Piece(0, *piece))
        check_one_each(losses, 1, of="public_loss")

    def _pieces(self, refresh: int) -> Iterable[_Piece]:
        device = _device(self.model)
        if not self.fixed:
            generator = _stream(self.seed, refresh, _SUBSET)
            picked = generator.choice(self.data.count, self.count, replace=False)
            return self.data.pieces(self.piece, torch.from_numpy(np.sort(picked)), device)
        if self._on_device is None or self._on_device[0] != device:  # they go there once
            self._on_device = device, list(self.data.pieces(self.piece, device=device))
        # Handed over as copies: a model or a loss may work in place on what it gets.
        return (tree_map_only(Tensor, torch.clone, piece) for piece in self._on_device[1])

    def _model_seed(self, refresh: int) -> int:
        return int(_stream(self.seed, refresh, _MODEL).integers(2**63))

    def _gradients(self, piece: Piece, capture: Capture | None) -> PerSampleGradients:
        with nullcontext(capture) if capture else Capture(self.model) as recording:
            return recorded(recording, lambda: self._losses(self.model, piece), len(piece.indices))


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
