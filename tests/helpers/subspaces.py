"""Gradients and mechanisms from plain matrices, for the tests of methods in a subspace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpspan.gradients.layers.linear import Outer
from dpspan.gradients.layers.terms import Rows
from dpspan.gradients.operator import PerSampleGradients
from dpspan.mechanisms import GEP, PDPSGD, BiasedGEP, Setting
from dpspan.mechanisms.base import EMBEDDING
from dpspan.mechanisms.noise import Noise
from dpspan.subspaces.solvers import Eigh, Solver
from dpspan.subspaces.sources import GroupedSubspace, Groups, grouped, ranks
from dpspan.subspaces.subspace import Subspace

SETTING = Setting(model=nn.Linear(1, 1))


def rows(matrix: Tensor, *, cut: int | None = None) -> PerSampleGradients:
    """The rows of a matrix as gradients of two parameters, 'a' and 'b'."""
    cut = matrix.shape[1] // 2 if cut is None else cut
    parts = {"a": matrix[:, :cut], "b": matrix[:, cut:]}
    return PerSampleGradients(
        {name: part.shape[1:] for name, part in parts.items()},
        {name: [Rows(part)] for name, part in parts.items()},
        len(matrix),
        like=matrix,
    )


def outers(a: Tensor, b: Tensor) -> PerSampleGradients:
    """Gradients of one linear layer: a (n, T, d_in), b (n, T, d_out)."""
    shape = torch.Size((b.shape[2], a.shape[2]))
    return PerSampleGradients({"w": shape}, {"w": [Outer(a, b)]}, len(a), like=a)


class GivenSpan:
    """Subspaces of given gradients, as a mechanism would get them from public data."""

    public = ()

    def __init__(self, h: PerSampleGradients, rank: int, groups: Groups, solver: Solver) -> None:
        self.h, self.rank, self.groups, self.solver = h, rank, groups, solver
        self.made: list[GroupedSubspace] = []

    def span(self, refresh: int, *, products: float, capture: Any = None) -> GroupedSubspace:
        groups = grouped(self.h.shapes, self.groups)
        sizes = ranks(self.h.shapes, groups, self.rank)
        parts = {
            names: Subspace.from_gradients(self.h.select(names), rank, solver=self.solver)
            for names, rank in zip(groups, sizes, strict=True)
        }
        self.made.append(GroupedSubspace(parts))
        return self.made[-1]


def given(base: type, h: PerSampleGradients, rank: int, groups: Groups = 1, **fields: Any) -> Any:
    """A mechanism of one of the methods, with the subspace of the gradients `h`."""
    source = GivenSpan(h, rank, groups, fields.pop("solver", Eigh()))

    @dataclass(frozen=True, kw_only=True)
    class Given(base):  # type: ignore[misc, valid-type]
        def source(self, setting: Setting) -> GivenSpan:
            return source

    mechanism = Given(public=object(), rank=rank, groups=groups, **fields).bind(SETTING)
    mechanism.source = source
    return mechanism


def flat(sums: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in sums.values()])


def summed(mechanism: Any, gradients: PerSampleGradients) -> dict[str, Tensor]:
    """What the first half of a step gives: the public pass, and the clipped sums."""
    mechanism.prepare()
    return mechanism.clipped_sum(gradients)


def stepped(mechanism: Any, total: dict[str, Tensor], noise: Noise, z: float) -> dict[str, Tensor]:
    """What the second half of a step gives: the gradient that the optimizer gets."""
    mechanism.prepare()
    return mechanism.gradient(mechanism.release(total, noise, z))


def un_noised(mechanism: Any, gradients: PerSampleGradients) -> tuple[Tensor, Tensor]:
    """What a step sums before noise: embeddings (k,), and residuals in parameter space (p,)."""
    sums = dict(summed(mechanism, gradients))
    embedding = sums.pop(EMBEDDING)
    return embedding, flat(sums).double() if sums else embedding.new_zeros(0)


METHODS = {"PDPSGD": PDPSGD, "BiasedGEP": BiasedGEP, "GEP": GEP}
