"""The gradients of samples at a model's weights, the subspace they span, and what lies in it.

A subspace has its basis written out: k × p numbers, whatever the number of samples. It is what a
dataset is compared by once its gradients have been let go.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import Dataset, Subset

from dpspan.gradients.capture import captures_on
from dpspan.gradients.numerics import plain_arithmetic
from dpspan.gradients.operator import PerSampleGradients
from dpspan.model.per_sample import SampleCriterion, call, per_sample_gradients
from dpspan.model.validation import validate
from dpspan.public.data import Piece, PublicData, Samples, move
from dpspan.public.gradients import RandomLabels, RealLabels, losses_by
from dpspan.subspaces.subspace import Subspace
from dpspan.support.checks import check_count, check_seed
from dpspan.support.errors import UnsupportedModule
from dpspan.support.randomness import seeded

PIECE = 256  # samples run through the model at a time
Loss = Callable[..., Tensor]  # a criterion, or (model, inputs[, labels]) → one loss per sample
_S = TypeVar("_S", bound=Samples)


def drawn(source: object, samples: int, *, seed: int, name: str, kind: type[_S]) -> _S:
    """At most `samples` of a dataset, by a seed that is no secret; of a large one only those."""
    check_count("samples", samples)

    def chosen(count: int) -> Tensor:
        picked = np.random.default_rng([seed, count]).choice(count, samples, replace=False)
        return torch.from_numpy(np.sort(picked))

    if isinstance(source, Dataset) and hasattr(source, "__len__") and len(source) > samples:
        source = Subset(source, chosen(len(source)).tolist())
    data = replace(kind.of(source, name=name), name=name)
    return data if data.count <= samples else data.take(chosen(data.count))


@dataclass(frozen=True, kw_only=True, eq=False)
class Probe:
    """A model and a loss, by whose gradients samples are compared.

    Whatever is computed starts from the model and the loss as they are here, on copies, so that
    nothing that some samples leave in them reaches others.
    """

    model: nn.Module
    loss_fn: Loss
    seed: int = 0  # of random labels
    piece: int = PIECE

    @classmethod
    def of(cls, model: nn.Module, loss_fn: Loss, *, seed: int, piece: int) -> Self:
        """With a copy in evaluation mode, as dropout would tie a sample's gradient to its place.

        Refuses a model whose samples have no gradients of their own.
        """
        validate(model)
        if captures_on(model):
            raise ValueError(
                "The model belongs to a private run: choose public data before make_private, or "
                "call detach() on its engine first."
            )
        seed, piece = check_seed(seed), check_count("piece", piece)
        return cls(model=copy.deepcopy(model).eval(), loss_fn=loss_fn, seed=seed, piece=piece)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def gradients(self, data: Samples, *, own_labels: bool = False) -> PerSampleGradients:
        """One gradient per sample.

        With a criterion as `loss_fn` the labels are drawn for the model's classes, or are the
        data's own if they are wanted and there are some. A function `loss_fn(model, inputs[,
        labels])` gets what the data hold.
        """
        criterion = self.loss_fn if isinstance(self.loss_fn, nn.Module) else None
        if criterion is None:
            _check_arguments(self.loss_fn, data)
        labels = RealLabels() if own_labels and data.labelled else RandomLabels(seed=self.seed)
        losses = losses_by(criterion, self.loss_fn if criterion is None else None, labels, data)
        model = copy.deepcopy(self.model)

        def gradients(part: Piece) -> PerSampleGradients:
            return per_sample_gradients(
                model, lambda model, _: losses(model, part, 0), part.inputs, check=False
            )

        with torch.enable_grad(), seeded(self.seed):
            return PerSampleGradients.concatenate(
                [gradients(part) for part in data.pieces(self.piece, device=self.device)]
            )

    def scores(
        self, subspaces: Sequence[Subspace], inputs: Any, labels: Any | None, *, seed: int = 0
    ) -> Tensor:
        """The energies s_ij of a batch of records: (n, subspaces) float64, between 0 and 1.

        Batches of fewer than `piece` records are filled up with repetitions, since the last bits
        of a result depend on the size of the batch.
        """
        batch = move((inputs,) if labels is None else (inputs, labels), self.device)
        count = len(tree_leaves(batch)[0])
        rows = torch.arange(max(count, self.piece), device=self.device) % count
        model, loss = copy.deepcopy((self.model, self.loss_fn))
        if isinstance(loss, nn.Module):
            loss = SampleCriterion(loss, instead="loss_fn=")
        with torch.enable_grad(), seeded(seed):
            filled = tree_map_only(Tensor, lambda leaf: leaf[rows], batch)
            gradients = per_sample_gradients(model, loss, *filled, check=False)
        return energies(gradients, subspaces)[:count].cpu()


def _check_arguments(loss: Loss, data: Samples) -> None:
    """A function gets the labels that samples come with: nobody could draw them for it."""
    try:
        signature = inspect.signature(loss)
    except ValueError:  # some that are not written in Python have none
        return
    try:
        signature.bind(*range(3 if data.labelled else 2))
    except TypeError:
        given, advice = (
            ("labels", "leave them out, or let it take them")
            if data.labelled
            else ("no labels", "add them, or pass a criterion, which gets random ones")
        )
        raise ValueError(
            f"Expected loss_fn to take a model and what '{data.name}' holds, inputs and {given}, "
            f"got {getattr(loss, '__name__', type(loss).__name__)}{signature}: {advice}."
        ) from None


def principal_subspace(
    gradients: PerSampleGradients, rank: int, *, of: str, fewer: bool = True
) -> Subspace:
    """The top `rank` directions, or as many as there are; ValueError if none, or without `fewer`.

    ValueError too if the gradients are not finite.
    """
    subspace = Subspace.from_gradients(gradients, rank)
    if not bool(torch.isfinite(subspace.coefficients).all()):
        raise ValueError(
            f"The gradients of '{of}' are not finite, so they span no subspace. Look for NaN, Inf "
            "or huge values in its inputs, and in the weights of the model."
        )
    if subspace.rank == 0:
        raise ValueError(
            f"The gradients of '{of}' are all zero, so they span no subspace. Give a model at its "
            "initial weights, and samples that it can still learn from."
        )
    if subspace.rank < rank and not fewer:
        precision = str(gradients.like.dtype).removeprefix("torch.")
        raise ValueError(
            f"Expected rank of at most {subspace.rank}, as many directions as the gradients of "
            f"the {gradients.samples} samples of '{of}' span in {precision}, got {rank}. Lower "
            "rank, or give more samples."
        )
    return subspace.explicit()


@plain_arithmetic()
def energies(gradients: PerSampleGradients, subspaces: Sequence[Subspace]) -> Tensor:
    """Captured energy: s_ij = ‖V_jᵀ g_i‖² / ‖g_i‖² of gradient i in subspace j, float64.

    Always between 0 and 1, whatever the bases are; 0 for a gradient of zero or that is not finite.
    """
    bases = PerSampleGradients.concatenate([subspace.gradients for subspace in subspaces])
    products = gradients.gram(bases).square()  # all candidates at once: rows are made only once
    parts = products.split([subspace.dimensions for subspace in subspaces], dim=1)
    inside = torch.stack([part.sum(1) for part in parts], dim=1)
    norms = gradients.norms().square().unsqueeze(1)
    return (inside / norms).nan_to_num(0.0, 0.0, 0.0).clamp(0.0, 1.0)


class ProbeNetwork(nn.Module):
    """The GSD paper's probe network, for models too large to compare datasets with.

    Logits of images (n, channels, height, width) of any size; the same weights for a seed. By its
    Table 5b: 64 filters of 8 × 8, stride 5; pool 2; 16 filters of 4 × 4, stride 3; pool 2; 144
    units into the classes. 144 = 16 × 3 × 3 is what images of 224 × 224 give, so others are
    resized to that. 30,782 parameters for 3 channels and 14 classes.
    """

    def __init__(self, *, channels: int, classes: int, seed: int = 0) -> None:
        super().__init__()
        with seeded(seed):
            self.layers = nn.Sequential(
                nn.Conv2d(channels, 64, 8, stride=5),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(64, 16, 4, stride=3),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(16 * 3 * 3, classes),
            )

    def forward(self, images: Tensor) -> Tensor:
        """Logits, for a softmax or (several labels per image) a sigmoid in the loss."""
        if images.shape[-2:] != (224, 224):
            images = interpolate(images, (224, 224), mode="bilinear", antialias=True)
        logits: Tensor = self.layers(images)
        return logits


# -- does a record's score depend on the records beside it? ---------------------------------------
#
# Public samples are scored, and again in another order, with other random numbers, and with half of
# them replaced by the worst neighbours there are: the scores of the other half must not change.
# Private data are not read, so a refusal may be published.

# Rounding, at the most. 60,000 records that each move by this, either way as often, move their sum
# by 5e-4: an eighth of what `selection` keeps for it.
_TOLERANCE = 2e-6
_SAMPLES = 64  # of each candidate, at the most


def _times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda values: values * factor if values.is_floating_point() else values


# What one half of the samples is replaced by, then the other half, and so on: NaN, outliers, and
# copies of one sample, which show in any maximum, mean or count. Those are last, where they also
# show what a loss remembers of the batches before.
_NEIGHBOURS: tuple[Callable[[Tensor], Tensor], ...] = (
    _times(torch.nan),
    _times(1e4),
    lambda values: values[:1].expand_as(values),
    lambda values: values[:1].expand_as(values),
)


def check_independence(probe: Probe, subspaces: Sequence[Subspace], data: PublicData) -> None:
    """`UnsupportedModule` if the scores of a probe are not those of single samples."""
    probe = replace(probe, piece=min(probe.piece, _SAMPLES))
    batch = _samples(probe, data)
    alone = probe.scores(subspaces, *batch)
    generator = torch.Generator().manual_seed(probe.seed)
    same, beside = torch.randperm(len(alone), generator=generator).tensor_split(2)
    for number, replaced in enumerate(_NEIGHBOURS, start=1):
        same, beside = beside, same
        order = torch.randperm(len(alone), generator=generator)
        changed = _beside(batch, replaced, beside, order)
        again = probe.scores(subspaces, *changed, seed=number)[order.argsort()]
        if bool(((again - alone)[same].abs() > _TOLERANCE).any()):
            raise UnsupportedModule(
                "A sample's gradient depends on the other samples of its batch or on random "
                "numbers, even in evaluation mode, so no record's influence on the choice would be "
                f"bounded (seen with the public samples of '{data.name}'). Replace layers and "
                "losses that mix samples, or use a ProbeNetwork; if it is rounding, compute in "
                "float32 or float64."
            )


def _beside(
    batch: tuple[Any, Any], replaced: Callable[[Tensor], Tensor], beside: Tensor, order: Tensor
) -> tuple[Any, Any]:
    def one(leaf: Tensor) -> Tensor:
        rows = beside.to(leaf.device)
        return leaf.index_copy(0, rows, replaced(leaf[rows]))[order.to(leaf.device)]

    changed: tuple[Any, Any] = tree_map_only(Tensor, one, batch)
    return changed


def _samples(probe: Probe, data: PublicData) -> tuple[Any, Any]:
    """Inputs and labels of at most a piece, each sample once (a single one stands beside itself).

    Labels are random for a criterion, and the data's own for a function, as for gradients.
    """
    indices, inputs, labels = next(data.pieces(probe.piece, device=probe.device))
    outputs = _outputs(probe, inputs, labels)
    if isinstance(probe.loss_fn, nn.Module):
        scores = SampleCriterion(probe.loss_fn, instead="loss_fn=").outputs(outputs, len(indices))
        source = RandomLabels(seed=probe.seed).source(probe.loss_fn, data)
        labels = source(Piece(indices, inputs, None), scores, 0)
    rows = torch.arange(max(len(indices), min(probe.piece, 2))) % len(indices)
    batch: tuple[Any, Any] = tree_map_only(Tensor, lambda x: x[rows.to(x.device)], (inputs, labels))
    return batch


def _outputs(probe: Probe, inputs: Any, labels: Any) -> Any:
    """What a copy of the model (or a function of it) returns.

    Its buffers may change (a counter, a cache of positions), but not with the samples.
    """
    runs = []
    for given in (inputs, tree_map_only(Tensor, torch.zeros_like, inputs)):
        copied = copy.deepcopy(probe.model)
        with torch.no_grad(), seeded(probe.seed):
            if isinstance(probe.loss_fn, nn.Module):
                returned = call(copied, given)
            else:
                returned = probe.loss_fn(copied, given, *(() if labels is None else (labels,)))
        runs.append((returned, dict(copied.named_buffers())))
    (outputs, state), (_, blank) = runs
    for name, buffer in state.items():
        if name not in blank or not torch.equal(buffer, blank[name]):
            raise UnsupportedModule(
                f"'{name}' changes with the samples that the model sees, even in evaluation mode: "
                "a record would change the scores of others. Turn the running statistics of its "
                "module off, or use a ProbeNetwork."
            )
    return outputs
