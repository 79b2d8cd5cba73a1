"""The subspaces of a run: one per group of parameters, from public gradients or at random.

GEP divides the parameters into groups, each with an orthonormal basis of its own. The embedding is
the groups' embeddings side by side, and so is the residual: each is clipped as one vector.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpspan.gradients.capture import Capture
from dpspan.gradients.layers.terms import Rows
from dpspan.gradients.numerics import full_precision
from dpspan.gradients.operator import Names, PerSampleGradients
from dpspan.public.data import PublicData
from dpspan.public.gradients import PublicGradientSource
from dpspan.subspaces.residual import Residual
from dpspan.subspaces.solvers import Solver
from dpspan.subspaces.subspace import Subspace
from dpspan.support.checks import check_count, check_seed, expect
from dpspan.support.device_facts import Health
from dpspan.support.distributed import Processes
from dpspan.support.sharded import Shards, local

# A basis written out may take this much memory; beyond it coefficients have to do.
_CPU_BASIS_BYTES = 256 * 2**20
_GPU_BASIS_BYTES = 4096 * 2**20

Groups = int | Callable[[str], Hashable]


@dataclass(frozen=True, eq=False, repr=False)
class GroupResidual:
    """What lies outside of the subspaces of all groups, as one vector per sample; a `Residual`."""

    parts: Sequence[Residual]

    def norm_bounds(self) -> Tensor:
        return torch.stack([part.norm_bounds() for part in self.parts]).square().sum(0).sqrt()

    def combine(self, weights: Tensor) -> dict[str, Tensor]:
        return _merged([part.combine(weights) for part in self.parts])


class GroupedSubspace:
    """Subspaces of disjoint groups of parameters, as one `Subspace`."""

    def __init__(self, parts: Mapping[Names, Subspace]) -> None:
        self.parts = parts
        self._sizes = [part.dimensions for part in parts.values()]
        self.dimensions = sum(self._sizes)  # length of an embedding

    def embed(self, gradients: PerSampleGradients) -> Tensor:
        embeddings = [part.embed(gradients.select(names)) for names, part in self.parts.items()]
        return torch.cat(embeddings, dim=1)

    def split(self, gradients: PerSampleGradients) -> tuple[Tensor, GroupResidual]:
        splits = [part.split(gradients.select(names)) for names, part in self.parts.items()]
        embeddings, residuals = zip(*splits, strict=True)
        return torch.cat(embeddings, dim=1), GroupResidual(residuals)

    def lift(self, z: Tensor) -> dict[str, Tensor]:
        parts = zip(self.parts.values(), z.split(self._sizes), strict=True)
        # Public gradients that are not finite are an error of their own.
        return _merged([part.lift(own, finite=True) for part, own in parts])


def _merged(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: value for part in parts for name, value in part.items()}


@dataclass(eq=False)
class PublicSpan:
    """The principal directions of the gradients of public samples, renewed in the course of a run.

    It sees public data and released weights, nothing else.
    """

    gradients: PublicGradientSource
    rank: int
    groups: Groups
    solver: Solver
    warn: Callable[[str], None]
    processes: Processes = field(default_factory=Processes)
    _last: dict[Names, Tensor] = field(default_factory=dict)  # coefficients of the last subspace
    _health: Health = field(default_factory=Health)
    _warned: bool = False  # of a reduced rank, which may change from step to step

    @property
    def public(self) -> tuple[PublicData, ...]:
        """The public data that it uses."""
        return (self.gradients.data,)

    def span(
        self, refresh: int, *, products: float, capture: Capture | None = None
    ) -> GroupedSubspace:
        """Subspace number `refresh`, in the form that suits so many `products` with it."""
        gradients = self.gradients(refresh, capture)
        with self.processes.together():
            parts = self._parts(gradients)
        # Signs, and the order of equally long directions, must be the same in all processes.
        self.processes.make_same(part.coefficients for part in parts.values())
        with self.processes.together():  # a GPU tells late, and not all at the same step
            self._check(list(parts.values()))
        if self.gradients.fixed:  # they go with the samples, and are no start for other ones
            self._last = {names: part.coefficients for names, part in parts.items()}
        for names, part in parts.items():
            parts[names] = part.explicit() if _explicit_pays(part, products) else part
        return GroupedSubspace(parts)

    def _parts(self, gradients: PerSampleGradients) -> dict[Names, Subspace]:
        groups = grouped(gradients.shapes, self.groups)
        return {
            names: Subspace.from_gradients(
                gradients.select(names), rank, solver=self.solver, previous=self._last.get(names)
            )
            for names, rank in zip(groups, ranks(gradients.shapes, groups, self.rank), strict=True)
        }

    def _check(self, parts: Sequence[Subspace]) -> None:
        finite = torch.stack([torch.isfinite(part.coefficients).all() for part in parts]).all()
        live = torch.stack([part.live for part in parts]).sum()
        facts = self._health.known(torch.stack([finite.to(live), live]))
        if facts is None:
            return
        if not facts[0]:
            raise ValueError(
                "The gradients of the public samples are not finite, so they span no subspace. If "
                "training diverged, lower the learning rate; if not, look for huge public values."
            )
        rank = int(facts[1])
        if rank == 0:
            raise ValueError(
                "The gradients of the public samples are all zero, so they span no subspace. Give "
                "samples on which the model can still learn (or random labels), or use DPSGD."
            )
        if rank < self.rank and not self._warned:
            self._warned = True
            self.warn(
                f"the public gradients span {rank} directions, fewer than rank={self.rank}: the "
                "rank is reduced to what they span; more public samples would give more"
            )


@dataclass(frozen=True, kw_only=True)
class RandomSubspace:
    """A random subspace instead of a public one (RPDP-SGD; GEP's appendix C): no public data.

    The papers' control: it holds little of the gradients. `redraw`: anew at every refresh.
    """

    rank: int
    redraw: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("rank", self.rank)
        check_seed(self.seed)


class RandomSpan:
    """Random directions, the same for a whole run or drawn anew at every refresh."""

    public: tuple[PublicData, ...] = ()

    def __init__(
        self, model: nn.Module, subspace: RandomSubspace, processes: Processes | None = None
    ) -> None:
        self._shapes = {n: p.shape for n, p in model.named_parameters() if p.requires_grad}
        self._like = full_precision(local(next(p for p in model.parameters() if p.requires_grad)))
        self._placement = Shards(model).of_same
        size = sum(shape.numel() for shape in self._shapes.values())
        rank = subspace.rank
        expect(rank <= size, f"rank of at most {size}, the parameters", rank)
        needed, limit = rank * size * self._like.element_size(), 4 * _basis_bytes(self._like)
        if needed > limit:
            raise ValueError(
                f"{rank} random directions for {size:,} parameters would take {needed / 2**30:.1f} "
                f"GiB (limit {limit / 2**30:.1f}). Lower the rank, train fewer parameters, or use "
                "directions of public gradients, which are never written out."
            )
        self._subspace, self._processes = subspace, processes or Processes()
        self._fixed: GroupedSubspace | None = None

    def span(
        self, refresh: int, *, products: float, capture: Capture | None = None
    ) -> GroupedSubspace:
        if self._subspace.redraw:
            return self._draw(refresh)
        if self._fixed is None:
            self._fixed = self._draw(0)  # whenever it is asked for: a resumed run finds the same
        return self._fixed

    def _draw(self, refresh: int) -> GroupedSubspace:
        # Drawn on the CPU, so that every process and device has the same directions.
        rank = self._subspace.rank
        (word,) = np.random.SeedSequence([self._subspace.seed, refresh]).generate_state(1)
        generator = torch.Generator().manual_seed(int(word))
        rows: dict[str, list[Any]] = {
            name: [Rows(torch.randn(rank, *shape, generator=generator).to(self._like))]
            for name, shape in self._shapes.items()
        }
        gradients = PerSampleGradients(
            self._shapes, rows, rank, like=self._like, placement=self._placement
        )
        subspace = Subspace.from_gradients(gradients, rank)
        self._processes.make_same([subspace.coefficients])  # as for `PublicSpan`
        return GroupedSubspace({tuple(self._shapes): subspace.explicit()})


SpanSource = PublicSpan | RandomSpan


def _explicit_pays(part: Subspace, products: float) -> bool:
    """Whether k × p numbers are cheaper to have than to do without."""
    gradients, k, m = part.gradients, part.dimensions, part.gradients.samples
    sizes = {names: pack.shape.numel() for names, pack in gradients.packs.items()}
    total = sum(sizes.values())
    if k * total * gradients.like.element_size() > _basis_bytes(gradients.like):
        return False
    # Layers whose inner products come from their factors cost next to nothing as they are.
    by_rows = sum(size for names, size in sizes.items() if names not in part.kernels)
    return total * k * (m + products) < 0.8 * by_rows * m * products


def _basis_bytes(like: Tensor) -> int:
    return _CPU_BASIS_BYTES if like.device.type == "cpu" else _GPU_BASIS_BYTES


def by_stage(name: str) -> str:
    """Groups by the model's top-level modules: `GEP(groups=dpspan.by_stage)`."""
    return name.split(".")[0]


def grouped(shapes: Mapping[str, torch.Size], groups: Groups) -> list[Names]:
    """The parameters in `groups` of about the same size, or by a function of their name."""
    if isinstance(groups, int):
        return _contiguous(shapes, groups)
    collected: dict[Hashable, list[str]] = {}
    for name in shapes:
        collected.setdefault(groups(name), []).append(name)
    return [tuple(names) for names in collected.values()]


def _contiguous(shapes: Mapping[str, torch.Size], count: int) -> list[Names]:
    most = f"groups between 1 and {len(shapes)}, the number of parameters"
    expect(1 <= count <= len(shapes), most, count)
    total = sum(shape.numel() for shape in shapes.values())
    groups: list[Names] = [()]
    passed = 0
    for index, (name, shape) in enumerate(shapes.items()):
        later = count - len(groups)  # every later group needs a parameter too
        # A parameter belongs to the group in which its middle lies.
        beyond = passed + shape.numel() / 2 > total * len(groups) / count
        if groups[-1] and later and (beyond or len(shapes) - index <= later):
            groups.append(())
        groups[-1] += (name,)
        passed += shape.numel()
    return groups


def ranks(shapes: Mapping[str, torch.Size], groups: Sequence[Names], rank: int) -> list[int]:
    """How many directions each group gets: in proportion to the root of its size, `rank` in all."""
    expect(len(groups) <= rank, f"rank of at least {len(groups)}, the groups", rank)
    roots = [math.sqrt(sum(shapes[name].numel() for name in names)) for names in groups]
    shares = [rank * root / sum(roots) for root in roots]
    whole = [max(1, int(share)) for share in shares]
    order = sorted(range(len(groups)), key=lambda i: whole[i] - shares[i])  # most wanting first
    for i in order[: max(0, rank - sum(whole))]:
        whole[i] += 1
    while sum(whole) > rank:  # tiny groups have more than their share
        whole[max(order, key=lambda i: (whole[i] > 1, whole[i] - shares[i]))] -= 1
    return whole
