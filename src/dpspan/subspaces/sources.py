"""Where the subspace of a step comes from: public gradients at the present weights, or chance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from dpspan.gradients.layers.terms import Rows
from dpspan.gradients.numerics import full_precision
from dpspan.gradients.operator import PerSampleGradients
from dpspan.public.data import PublicData
from dpspan.public.gradients import PublicGradientSource
from dpspan.subspaces.groups import GroupedSubspace, Groups, grouped, ranks
from dpspan.subspaces.solvers import Eigh, Solver
from dpspan.subspaces.subspace import Subspace
from dpspan.support.checks import check_count, expect
from dpspan.support.device_facts import Health

# A basis written out may take this much memory; beyond it coefficients have to do.
_CPU_BASIS_BYTES = 256 * 2**20
_GPU_BASIS_BYTES = 4096 * 2**20


class SpanSource(Protocol):
    """Makes the subspaces of a run. It sees public data and released weights, nothing else."""

    @property
    def public(self) -> tuple[PublicData, ...]:
        """The public data that it uses."""

    def span(self, refresh: int, *, products: float) -> GroupedSubspace:
        """The subspace number `refresh`.

        How many products with gradients it will be used for decides how it is best written.
        """


class PublicSpan:
    """The principal directions of the gradients of public samples."""

    def __init__(
        self,
        gradients: PublicGradientSource,
        *,
        rank: int,
        groups: Groups,
        solver: Solver,
        warn: Callable[[str], None],
    ) -> None:
        self._gradients = gradients
        self._rank, self._groups, self._solver, self._warn = rank, groups, solver, warn
        self._last: dict[tuple[str, ...], Tensor] = {}  # coefficients of the last subspace
        self._health = Health()
        self._warned = False  # of a reduced rank, which may change from step to step

    @property
    def public(self) -> tuple[PublicData, ...]:
        return (self._gradients.data,)

    def span(self, refresh: int, *, products: float) -> GroupedSubspace:
        gradients = self._gradients(refresh)
        groups = grouped(gradients.shapes, self._groups)
        sizes = ranks(gradients.shapes, groups, self._rank)
        parts = {
            names: Subspace.from_gradients(
                gradients.select(names), rank, solver=self._solver, previous=self._last.get(names)
            )
            for names, rank in zip(groups, sizes, strict=True)
        }
        self._check(list(parts.values()))
        if self._gradients.fixed:  # they go with the samples, and are no start for other ones
            self._last = {names: part.coefficients for names, part in parts.items()}
        for names, part in parts.items():
            parts[names] = part.explicit() if _explicit_pays(part, products) else part
        return GroupedSubspace(parts)

    def _check(self, parts: Sequence[Subspace]) -> None:
        finite = torch.stack([torch.isfinite(p.coefficients).all() for p in parts]).all()
        live = torch.stack([part.live for part in parts]).sum()
        facts = self._health.known(torch.stack([finite.to(live), live]))
        if facts is None:
            return
        rank = int(facts[1])
        if not facts[0]:
            raise ValueError(
                "The gradients of the public samples are not finite, so they span no subspace. If "
                "training has diverged, lower the learning rate; otherwise look for NaN, Inf or "
                "huge values in the public data."
            )
        if rank == 0:
            raise ValueError(
                "The gradients of the public samples are all zero, so they span no subspace. Give "
                "public samples on which the model still has something to learn (random labels "
                "always do), or use DPSGD."
            )
        if rank < self._rank and not self._warned:
            self._warned = True
            self._warn(
                f"the public gradients span {rank} directions, fewer than rank={self._rank}: the "
                "rank is reduced to what they span; more public samples would give more"
            )


class RandomSpan:
    """Random directions, the same for a whole run or drawn anew at every refresh."""

    def __init__(self, model: nn.Module, *, rank: int, redraw: bool, seed: int) -> None:
        self._shapes = {n: p.shape for n, p in model.named_parameters() if p.requires_grad}
        self._like = full_precision(next(p for p in model.parameters() if p.requires_grad))
        size = sum(shape.numel() for shape in self._shapes.values())
        expect(rank <= size, f"rank of at most {size}, the parameters", rank)
        needed, limit = rank * size * self._like.element_size(), _limit(self._like, 4)
        if needed > limit:
            raise ValueError(
                f"{rank} random directions for {size:,} parameters would take {needed / 2**30:.1f} "
                f"GiB (limit {limit / 2**30:.1f}). Lower the rank, train fewer parameters, or use "
                "directions of public gradients, which are never written out."
            )
        self._rank, self._redraw, self._seed = rank, redraw, seed
        self._fixed: GroupedSubspace | None = None

    @property
    def public(self) -> tuple[PublicData, ...]:
        return ()

    def span(self, refresh: int, *, products: float) -> GroupedSubspace:
        if self._redraw:
            return self._draw(refresh)
        if self._fixed is None:
            self._fixed = self._draw(0)  # whenever it is asked for: a resumed run finds the same
        return self._fixed

    def _draw(self, refresh: int) -> GroupedSubspace:
        # Drawn on the CPU, so that every process and device has the same directions.
        (word,) = np.random.SeedSequence([self._seed, refresh]).generate_state(1)
        generator = torch.Generator().manual_seed(int(word))
        rows: dict[str, list[Any]] = {
            name: [Rows(torch.randn(self._rank, *shape, generator=generator).to(self._like))]
            for name, shape in self._shapes.items()
        }
        gradients = PerSampleGradients(self._shapes, rows, self._rank, like=self._like)
        subspace = Subspace.from_gradients(gradients, self._rank, solver=Eigh())
        return GroupedSubspace({tuple(self._shapes): subspace.explicit()})


@dataclass(frozen=True, kw_only=True)
class RandomSubspace:
    """A random subspace instead of a public one (RPDP-SGD; GEP's appendix C): no public data.

    The papers' control experiment: random directions hold little of the gradients. `redraw` takes
    new ones at every refresh of the method.

    Examples:
        >>> import dpspan
        >>> dpspan.PDPSGD(subspace=dpspan.RandomSubspace(rank=800), clip=1.0).describe()["rank"]
        800
    """

    rank: int
    redraw: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("rank", self.rank)


def _explicit_pays(part: Subspace, products: float) -> bool:
    """Whether k × p numbers are cheaper to have than to do without."""
    gradients, k, m = part.gradients, part.dimensions, part.gradients.samples
    sizes = {names: pack.shape.numel() for names, pack in gradients.packs.items()}
    total = sum(sizes.values())
    if k * total * gradients.like.element_size() > _limit(gradients.like, 1):
        return False
    # Layers whose inner products come from their factors cost next to nothing as they are.
    by_rows = sum(size for names, size in sizes.items() if names not in part.kernels)
    return total * k * (m + products) < 0.8 * by_rows * m * products


def _limit(like: Tensor, times: int) -> int:
    return times * (_CPU_BASIS_BYTES if like.device.type == "cpu" else _GPU_BASIS_BYTES)
