"""The subspace of one step over all parameters: one `Subspace` per group of parameters.

GEP divides the parameters into groups, each with an orthonormal basis of its own. The embedding is
the groups' embeddings side by side, and so is the residual: each is clipped as one vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from dpspan.gradients.numerics import ieee
from dpspan.gradients.operator import PerSampleGradients
from dpspan.subspaces.residual import Residual
from dpspan.subspaces.subspace import Subspace

Groups = int | Callable[[str], Hashable]


class Span:
    """Subspaces of disjoint groups of parameters, as one."""

    def __init__(self, parts: Mapping[tuple[str, ...], Subspace]) -> None:
        self.parts = parts
        self._sizes = [part.dimensions for part in parts.values()]
        self._anchors = [part.gradients.samples for part in parts.values()]

    @property
    def dimensions(self) -> int:
        """Length of an embedding."""
        return sum(self._sizes)

    def embed(self, gradients: PerSampleGradients) -> Tensor:
        """Each gradient's coordinates in the subspaces, (n, k) float64."""
        embeddings = [part.embed(gradients.select(names)) for names, part in self.parts.items()]
        return torch.cat(embeddings, dim=1)

    def split(self, gradients: PerSampleGradients) -> tuple[Tensor, GroupResidual]:
        """Each gradient's coordinates in the subspaces, and what lies outside of them."""
        splits = [part.split(gradients.select(names)) for names, part in self.parts.items()]
        embedding = torch.cat([embedding for embedding, _ in splits], dim=1)
        return embedding, GroupResidual([residual for _, residual in splits])

    def weights(self, z: Tensor) -> Tensor:
        """A vector of the subspaces as weights of the gradients they are made of."""
        parts = zip(self.parts.values(), z.split(self._sizes), strict=True)
        return torch.cat([part.weights(own) for part, own in parts])

    def combine(self, weights: Tensor) -> dict[str, Tensor]:
        """The gradients that the subspaces are made of, weighted and summed, by parameter."""
        parts = zip(self.parts.values(), weights.split(self._anchors), strict=True)
        # Public gradients that are not finite are an error of their own (see `anchors`).
        sums = []
        for part, own in parts:
            with ieee(part.gradients.like):
                sums.append(part.gradients.combine(own, finite=True))
        return _merged(sums)

    def lift(self, z: Tensor) -> dict[str, Tensor]:
        """A vector of the subspaces by parameter."""
        return self.combine(self.weights(z))

    def embed_vector(self, vector: Mapping[str, Tensor]) -> Tensor:
        """The coordinates of one vector in parameter space."""
        return torch.cat(
            [
                part.embed_vector({name: vector[name] for name in names})
                for names, part in self.parts.items()
            ]
        )


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
    if not 1 <= count <= len(shapes):
        raise ValueError(
            f"Expected groups between 1 and {len(shapes)}, the number of parameters, got {count}."
        )
    total = sum(shape.numel() for shape in shapes.values())
    names = list(shapes)
    result, start, passed = [], 0, 0
    for group in range(count):
        stop = start
        left_behind = count - group - 1  # every later group needs a parameter too
        while stop < len(names) - left_behind:
            size = shapes[names[stop]].numel()
            # A parameter belongs to the group in which its middle lies.
            if stop > start and passed + size / 2 > total * (group + 1) / count and left_behind:
                break
            passed += size
            stop += 1
        result.append(tuple(names[start:stop]))
        start = stop
    return result
