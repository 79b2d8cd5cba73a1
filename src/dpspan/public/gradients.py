"""Gradients of public samples: what a subspace is spanned by.

Nothing here sees private data except through the model's released parameters, and everything that
is random (labels, which samples, dropout) comes from public seeds: a run that was resumed computes
the same gradients. Of several processes each computes its share, and all get all of them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dpspan.gradients.capture import Capture
from dpspan.gradients.operator import PerSampleGradients
from dpspan.model.per_sample import (
    SampleCriterion,
    call,
    check_one_each,
    explained,
    recorded,
    shapes,
)
from dpspan.public.data import Piece, PublicData, Samples
from dpspan.support.checks import check_count, check_seed, expect, shown
from dpspan.support.distributed import Processes
from dpspan.support.left_as_found import left_as_found
from dpspan.support.sharded import shards_itself

# One public seed serves several purposes; each draws from a stream of its own.
_LABELS, _SUBSET, _MODEL = range(3)
# Criteria by the labels that they take.
_CLASSES, _YES_OR_NO = (nn.CrossEntropyLoss, nn.NLLLoss), (nn.BCEWithLogitsLoss, nn.BCELoss)
_REGRESSION = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)


def _stream(seed: int, refresh: int, purpose: int) -> np.random.Generator:
    return np.random.default_rng([seed, refresh, purpose])


# Both for samples on the model's device, at the refresh of this number.
LabelSource = Callable[[Piece, Tensor, int], Any]  # by the model's outputs
PieceLosses = Callable[[nn.Module, Piece, int], Tensor]  # one per sample


@dataclass(frozen=True)
class RealLabels:
    """The labels that the public data come with."""

    def source(self, criterion: nn.Module, data: Samples) -> LabelSource:
        check = cache(partial(_check_classes, data, criterion=criterion))

        def labels(piece: Piece, outputs: Tensor, refresh: int) -> Any:
            check(outputs.shape[1:])
            return piece.labels

        return labels


@dataclass(frozen=True)
class RandomLabels:
    """Labels that are drawn once and kept, or drawn anew at every refresh of the subspace.

    The samples need no labels then: GEP's setting. The seed is no secret, as the data are public.
    """

    redraw: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)

    def source(self, criterion: nn.Module, data: Samples) -> LabelSource:
        """Labels as the criterion takes them, once outputs are known; ValueError if none are."""
        if not isinstance(criterion, (*_CLASSES, *_YES_OR_NO, *_REGRESSION)):
            raise ValueError(
                f"No random labels are known for {type(criterion).__name__}: pass "
                "public_labels='real' with labelled public data, or public_loss=, a function "
                "(model, inputs) → one loss per sample."
            )

        @lru_cache(maxsize=1)
        def drawn(refresh: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
            # For all samples, so that a sample's label does not depend on its piece.
            generator, count = _stream(self.seed, refresh, _LABELS), data.count
            if isinstance(criterion, _CLASSES):
                got = f"shape {(count, *shape)}"
                expect(len(shape) > 0, "the model to give class scores (samples, classes, …)", got)
                return torch.from_numpy(generator.integers(shape[0], size=(count, *shape[1:])))
            if isinstance(criterion, _YES_OR_NO):
                return torch.from_numpy(generator.integers(2, size=(count, *shape))).to(dtype)
            return torch.from_numpy(generator.standard_normal((count, *shape))).to(dtype)

        def labels(piece: Piece, outputs: Tensor, refresh: int) -> Tensor:
            every = drawn(refresh if self.redraw else 0, outputs.shape[1:], outputs.dtype)
            return every[piece.indices].to(outputs.device, non_blocking=True)

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


def _check_classes(data: Samples, outputs: Sequence[int], criterion: nn.Module) -> None:
    """Labels must be classes (`outputs`: of one sample): a GPU's own error ends the process."""
    if not isinstance(criterion, _CLASSES) or not outputs:  # no classes; the criterion says so
        return
    classes, ignored = outputs[0], getattr(criterion, "ignore_index", -100)
    for indices, _, labels in data.pieces():
        if not isinstance(labels, Tensor) or labels.is_floating_point():  # class probabilities
            continue
        wrong = ((labels < 0) | (labels >= classes)) & (labels != ignored)
        if bool(wrong.any()):
            got = ""
            if isinstance(data, PublicData):  # of private samples nothing is shown
                sample = int(indices[wrong.nonzero()[0, 0]])
                got = f", got {int(labels[wrong][0])} at sample {sample}"
            raise ValueError(
                f"Expected labels from 0 to {classes - 1}, the model's classes{got} of "
                f"'{data.name}': renumber them as "
                "the private data has them, or leave out samples of other classes (GEP and PDPSGD "
                "can do without labels, by public_labels='random')."
            )


def losses_by(
    criterion: nn.Module | None,
    loss: Callable[..., Tensor] | None,
    labels: Labels,
    data: Samples,
    *,
    instead: str = "public_loss=",
) -> PieceLosses:
    """One loss per sample: by the function (an argument called `instead`), or the criterion."""
    if loss is not None:
        return lambda model, piece, _: loss(model, *piece.batch)
    if criterion is None:
        raise ValueError(
            "Expected a criterion or a loss for the public samples, got neither: pass criterion= "
            f"to make_private, or {instead}, a function (model, inputs[, labels]) → one loss each."
        )
    unreduced = SampleCriterion(criterion, instead=instead)
    source = labels.source(criterion, data)

    def losses(model: nn.Module, piece: Piece, refresh: int) -> Tensor:
        with explained(f"Public inputs of {shapes(piece.inputs)} do not fit the model"):
            returned = call(model, piece.inputs)
        outputs = unreduced.outputs(returned, len(piece.indices))
        return unreduced.losses(outputs, source(piece, outputs, refresh))

    return losses


@dataclass(kw_only=True, eq=False, repr=False)
class PublicGradientSource:
    """The per-sample gradients of public data at the model's present parameters.

    At most `samples` of them, a fresh random choice at each refresh if the data hold more,
    computed `piece` samples at a time. `loss(model, inputs[, labels])` gives one loss per sample;
    it gets labels where there are any. Without it the loss is the run's `criterion`.

    `shared_out`: each process runs its share of the samples, and their gradients travel. A sharded
    model is run by all processes at once, as often as each other: there each runs all samples.
    """

    model: nn.Module
    data: PublicData
    labels: Labels
    criterion: nn.Module | None
    loss: Callable[..., Tensor] | None
    samples: int
    piece: int | None
    seed: int = 0
    processes: Processes = field(default_factory=Processes)

    def __post_init__(self) -> None:
        if isinstance(self.labels, RealLabels) and not self.data.labelled:
            raise ValueError(
                f"Expected labels with the public data '{self.data.name}', got inputs only: give "
                "(inputs, labels). GEP and PDPSGD can do without, by public_labels='random'."
            )
        self._losses = losses_by(self.criterion, self.loss, self.labels, self.data)
        self.count = min(check_count("samples", self.samples), self.data.count)  # per refresh
        self.fixed = self.count == self.data.count  # the same samples at every refresh
        whole = not any(map(shards_itself, self.model.modules()))
        self.shared_out = 1 < self.processes.world <= self.count and whole
        on_device = partial(self.data.pieces, self.piece, self._share(torch.arange(self.count)))
        self._on_device = lru_cache(maxsize=1)(lambda device: list(on_device(device)))

    def __call__(self, refresh: int, capture: Capture | None = None) -> PerSampleGradients:
        """For refresh number `refresh`, by the model's own `capture` if any; leaves it be."""
        found = self._recorded(refresh, capture)
        if self.shared_out:
            mine = [(piece.terms, piece.samples) for piece in found]
            every = self.processes.of_each(mine, self._device)
            found = [found[0].derived(t, samples=n) for each in every for t, n in each]
        return PerSampleGradients.concatenate(found)

    def share(self, refresh: int, capture: Capture | None = None) -> PerSampleGradients:
        """The same, of this process's share of the samples."""
        return PerSampleGradients.concatenate(self._recorded(refresh, capture))

    def _recorded(self, refresh: int, capture: Capture | None) -> list[PerSampleGradients]:
        with (
            self.processes.together(),
            torch.enable_grad(),
            left_as_found(self.model, self._model_seed(refresh)),
            nullcontext(capture) if capture else Capture(self.model) as recording,
        ):
            return [
                recorded(recording, partial(self._losses, self.model, p, refresh), len(p.indices))
                for p in self._pieces(refresh)
            ]

    def try_one(self) -> None:
        """Run the loss on one public sample: what does not fit is refused before training."""
        with torch.no_grad(), left_as_found(self.model, self._model_seed(0)):
            piece = next(self.data.pieces(1, device=self._device))
            losses = self._losses(self.model, piece, 0)
        check_one_each(losses, 1, of="public_loss")

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _pieces(self, refresh: int) -> Iterator[Piece]:
        if self.fixed:  # they go to the device once
            # Handed over as copies: a model or a loss may work in place on what it gets.
            return (tree_map_only(Tensor, torch.clone, p) for p in self._on_device(self._device))
        generator = _stream(self.seed, refresh, _SUBSET)
        picked = np.sort(generator.choice(self.data.count, self.count, replace=False))
        return self.data.pieces(self.piece, self._share(torch.from_numpy(picked)), self._device)

    def _share(self, samples: Tensor) -> Tensor:
        if not self.shared_out:
            return samples
        return samples.tensor_split(self.processes.world)[self.processes.rank]

    def _model_seed(self, refresh: int) -> int:
        return int(_stream(self.seed, refresh, _MODEL).integers(2**63))
