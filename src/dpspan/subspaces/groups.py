"""The subspace of one step over all parameters: one `Subspace` per group of parameters.

GEP divides the parameters into groups, each with an orthonormal basis of its own. The embedding is
the groups' embeddings side by side, and so is the residual: each is clipped as one vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from dpspan.gradients.operator import PerSampleGradients
from dpspan.subspaces.residual import Residual
from dpspan.subspaces.subspace import Subspace
from dpspan.support.checks import expect

Groups = int | Callable[[str], Hashable]


class GroupedSubspace:
    """Subspaces of disjoint groups of parameters, as one."""

    def __init__(self, parts: Mapping[tuple[str, ...], Subspace]) -> None:
        self.parts = parts
        self._sizes = [part.dimensions for part in parts.values()]
        self.dimensions = sum(self._sizes)  # length of an embedding

    def embed(self, gradients: PerSampleGradients) -> Tensor:
        """Each gradient's coordinates in the subspaces, (n, k) float64."""
        embeddings = [part.embed(gradients.select(names)) for names, part in self.parts.items()]
        return torch.cat(embeddings, dim=1)

    def split(self, gradients: PerSampleGradients) -> tuple[Tensor, GroupResidual]:
        """Each gradient's coordinates in the subspaces, and what lies outside of them."""
        splits = [part.split(gradients.select(names)) for names, part in self.parts.items()]
        embedding = torch.cat([embedding for embedding, _ in splits], dim=1)
        return embedding, GroupResidual([residual for _, residual in splits])

    def lift(self, z: Tensor) -> dict[str, Tensor]:
        """A vector of the subspaces by parameter."""
        parts = zip(self.parts.values(), z.split(self._sizes), strict=True)
        # Public gradients that are not finite are an error of their own (see `sources`).
        return _merged([part.lift(own, finite=True) for part, own in parts])

    def embed_vector(self, vector: Mapping[str, Tensor]) -> Tensor:
        """The coordinates of one vector in parameter space."""
        parts = self.parts.items()
        return torch.cat([part.embed_vector({n: vector[n] for n in ns}) for ns, part in parts])


class GroupResidual:
    """What lies outside of the subspaces of all groups, as one vector per sample."""

    def __init__(self, parts: Sequence[Residual]) -> None:
        self._parts = parts

    def norm_bounds(self) -> Tensor:
        """Upper bounds of the norms, (n,) float64."""
        return torch.stack([part.norm_bounds() for part in self._parts]).square().sum(0).sqrt()

    def combine(self, weights: Tensor) -> dict[str, Tensor]:
        """A weighted sum of the residuals, by parameter."""
        return _merged([part.combine(weights) for part in self._parts])


def _merged(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: value for part in parts for name, value in part.items()}


def grouped(shapes: Mapping[str, torch.Size], groups: Groups) -> list[tuple[str, ...]]:
    """The parameters in groups: so many of about the same size, or by a function of their name."""
    if isinstance(groups, int):
        return _contiguous(shapes, groups)
    collected: dict[Hashable, list[str]] = {}
    for name in shapes:
        collected.setdefault(groups(name), []).append(name)
    return [tuple(names) for names in collected.values()]


def by_stage(name: str) -> str:
    """Groups by the model's top-level modules: `GEP(groups=dpspan.by_stage)`.

    Examples:
        >>> import dpspan
        >>> dpspan.by_stage("layer3.0.conv1.weight")
        'layer3'
    """
    return name.split(".")[0]


def ranks(
    shapes: Mapping[str, torch.Size], groups: Sequence[Sequence[str]], rank: int
) -> list[int]:
    """How many directions each group gets: in proportion to the root of its size, `rank` in all."""
    roots = [math.sqrt(sum(shapes[name].numel() for name in names)) for names in groups]
    shares = [rank * root / sum(roots) for root in roots]
    whole = [max(1, int(share)) for share in shares]
    order = sorted(range(len(groups)), key=lambda i: whole[i] - shares[i])  # most wanting first
    for i in order[: max(0, rank - sum(whole))]:
        whole[i] += 1
    return whole


def _contiguous(shapes: Mapping[str, torch.Size], count: int) -> list[tuple[str, ...]]:
    most = f"groups between 1 and {len(shapes)}, the number of parameters"
    expect(1 <= count <= len(shapes), most, count)
    total = sum(shape.numel() for shape in shapes.values())
    groups: list[tuple[str, ...]] = [()]
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
