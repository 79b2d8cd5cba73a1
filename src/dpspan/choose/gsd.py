"""Gradient subspace distance (GSD): how far apart the gradients of two datasets point.

G_priv, G_pub per-sample gradients with random labels at the initial weights, V their top k right
singular vectors, θ the principal angles between the two spans:

    GSD = √(k − Σ cos²θ) / √k    (the paper's Definition 3 lacks the √k that its numbers have)

Not private: the number depends on the private batch, and nothing here adds noise.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpspan.choose.subspaces import (
    PIECE,
    Loss,
    evaluated,
    principal_subspace,
    sample_gradients,
)
from dpspan.gradients.layers.terms import Rows
from dpspan.gradients.numerics import plain_arithmetic
from dpspan.gradients.operator import PerSampleGradients
from dpspan.public.data import PublicData
from dpspan.public.gradients import Labels
from dpspan.subspaces.subspace import Subspace


def gsd(
    model: nn.Module,
    loss_fn: Loss,
    private_batch: object,
    public_batch: object,
    rank: int = 16,
    *,
    labels: str | Labels = "random",
    seed: int = 0,
    piece: int = PIECE,
) -> float:
    """The distance of two batches, 0 (same subspace) to 1 (orthogonal ones). NOT private.

    Args:
        model: at the weights that training starts from, or a `ProbeNetwork`; run in
            evaluation mode, on a copy.
        loss_fn: a criterion, for which both sides get random labels of the model's classes, or a
            function (model, inputs[, labels]) → one loss per sample.
        private_batch: inputs, (inputs,), (inputs, labels), a mapping, a Dataset or a DataLoader.
        public_batch: the same.
        rank: k; ValueError if one side's gradients span fewer directions.
        labels: "random", as in the paper, or "real".
        seed: of the random labels, the same for both sides.
        piece: samples run through the model at a time.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> import dpspan
        >>> model, batch = nn.Linear(8, 3), torch.randn(50, 8)
        >>> distance = dpspan.gsd(model, nn.CrossEntropyLoss(), batch, batch, rank=4)
        >>> round(distance, 3)  # the same data, the same directions
        0.0
    """
    model = evaluated(model)
    sides = []
    for name, batch in (("private", private_batch), ("public", public_batch)):
        data = PublicData.of(batch, name=name)
        # One side at a time: its gradients are gone before those of the other are computed.
        gradients = sample_gradients(model, loss_fn, data, labels=labels, seed=seed, piece=piece)
        sides.append(full_subspace(gradients, rank, of=name))
        del gradients
    return subspace_distance(*sides)


def full_subspace(gradients: PerSampleGradients, rank: int, *, of: str) -> Subspace:
    """The top `rank` directions; ValueError if there are not that many."""
    subspace = principal_subspace(gradients, rank, of=of)
    if subspace.rank < rank:
        precision = str(gradients.like.dtype).removeprefix("torch.")
        raise ValueError(
            f"Expected rank of at most {subspace.rank}, as many directions as the gradients of "
            f"the {gradients.samples} samples of '{of}' span in {precision}, got {rank}. Lower "
            "rank, or give more samples."
        )
    return subspace


@plain_arithmetic()
def subspace_distance(first: Subspace, second: Subspace) -> float:
    """√(1 − Σ cos²θ / k) of two subspaces of the same rank k with their bases written out.

    In float64 from here on: 1 − cos² of a small angle would be lost in float32. The bases are
    taken as they are, not as orthonormal as they should be.
    """
    if first.dimensions != second.dimensions:
        raise ValueError(
            f"Expected two subspaces of the same rank, got {first.dimensions} and "
            f"{second.dimensions}."
        )
    k = first.dimensions
    both = PerSampleGradients.concatenate([_doubled(first), _doubled(second)])
    gram = both.gram(both)
    lower, _ = torch.linalg.cholesky_ex(gram[:k, :k])
    other, _ = torch.linalg.cholesky_ex(gram[k:, k:])
    half: Tensor = torch.linalg.solve_triangular(lower, gram[:k, k:], upper=False)
    cosines: Tensor = torch.linalg.solve_triangular(other, half.T, upper=False)
    return float((1 - cosines.square().sum() / k).clamp(0, 1).sqrt())


def _doubled(subspace: Subspace) -> PerSampleGradients:
    basis = subspace.gradients
    rows = {name: [Rows(basis.term(name).rows(0, basis.samples).double())] for name in basis.terms}
    like = basis.like.double()
    return PerSampleGradients(basis.shapes, rows, basis.samples, like=like, scale=basis.scale)
