"""Captured energy: how much of each private gradient lies in a candidate's subspace.

s_ij = ‖V_jᵀ g_i‖² / ‖g_i‖², V_j the top k directions of candidate j, g_i the gradient of record i.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dpspan.choose.subspaces import (
    PIECE,
    Loss,
    evaluated,
    principal_subspace,
    sample_gradients,
)
from dpspan.gradients.numerics import plain_arithmetic
from dpspan.gradients.operator import PerSampleGradients
from dpspan.public.data import PublicData
from dpspan.subspaces.subspace import Subspace


def unprivate_captured_energy(
    model: nn.Module,
    loss_fn: Loss,
    private_batch: object,
    public_batch: object,
    rank: int = 16,
    *,
    seed: int = 0,
    piece: int = PIECE,
) -> Tensor:
    """The share of each private gradient's energy in the public subspace, (n,). NOT private.

    By a criterion, private gradients have the labels they come with, as in training (random ones
    if there are none), and public ones random labels; a function gets the labels that there are.
    The arguments are those of `gsd`.
    """
    model = evaluated(model)
    public = PublicData.of(public_batch, name="public")
    gradients = sample_gradients(model, loss_fn, public, seed=seed, piece=piece)
    subspace = principal_subspace(gradients, rank, of="public")
    del gradients
    private = PublicData.of(private_batch, name="private")
    own = own_gradients(model, loss_fn, private, seed=seed, piece=piece)
    return energies(own, [subspace])[:, 0]


def own_gradients(
    model: nn.Module, loss_fn: Loss, private: PublicData, *, seed: int, piece: int
) -> PerSampleGradients:
    """Gradients with the data's own labels, or random ones if there are none."""
    labels = "real" if private.labelled else "random"
    return sample_gradients(model, loss_fn, private, labels=labels, seed=seed, piece=piece)


@plain_arithmetic()
def energies(gradients: PerSampleGradients, subspaces: Sequence[Subspace]) -> Tensor:
    """s_ij of each gradient in each subspace (bases written out), (n, subspaces) float64.

    Always between 0 and 1, whatever the bases are; 0 for a gradient of zero or that is not finite.
    """
    bases = PerSampleGradients.concatenate([subspace.gradients for subspace in subspaces])
    products = gradients.gram(bases).square()  # all candidates at once: rows are made only once
    parts = products.split([subspace.dimensions for subspace in subspaces], dim=1)
    inside = torch.stack([part.sum(1) for part in parts], dim=1)
    norms = gradients.norms().square().unsqueeze(1)
    return (inside / norms).nan_to_num(0.0, 0.0, 0.0).clamp(0.0, 1.0)
