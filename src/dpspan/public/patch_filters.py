"""Filters learnt from patches of public images, and how strongly an image answers to them.

Filters are centres of whitened patches (Coates and Ng 2011): no labels, no training by gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, conv2d, normalize, unfold

from dpspan.support.checks import expect

_PATCHES = 200_000  # looked at while learning
_ROUNDS = 10  # of k-means
_FLAT = 0.15  # of the pixels' deviation, added to a patch's (squares): flat patches stay small
_WHITENING = 0.1  # added to the variances of patches, which are about 1
_CUT = 64  # images that are cut into patches at a time
_CPU_RESPONSES, _GPU_RESPONSES = 2**24, 2**28  # numbers at a time: each filter has a whole image


class _Bank(nn.Module):
    """Filters of one size, to be applied to patches over their deviation; and their offsets."""

    filters: Tensor
    offset: Tensor

    def __init__(self, filters: Tensor, offset: Tensor) -> None:
        super().__init__()
        self.register_buffer("filters", filters)
        self.register_buffer("offset", offset)

    def extra_repr(self) -> str:
        count, _, size, _ = self.filters.shape
        return f"{count} filters of {size} × {size}"


class PatchResponses(nn.Module):
    """(n, channels, height, width) to (n, 2 · filters · Σ grid²): mean responses of both signs.

    They are means over the parts of each of the `grids`. Only what exceeds a threshold counts. With
    `mirror`, an image and its mirror image have the same responses: the mean of both.
    """

    flat: Tensor

    def __init__(
        self,
        banks: Sequence[_Bank],
        flat: Tensor,
        *,
        grids: Sequence[int],
        threshold: float,
        mirror: bool,
    ) -> None:
        super().__init__()
        self.banks = nn.ModuleList(banks)
        self.register_buffer("flat", flat)
        self.grids, self.threshold, self.mirror = tuple(grids), threshold, mirror

    @classmethod
    def learn(
        cls,
        images: Tensor,
        *,
        filters: int,
        sizes: Sequence[int],
        grids: Sequence[int],
        threshold: float,
        mirror: bool,
        generator: torch.Generator,
    ) -> Self:
        """Filters of public images, as many of each size as of the others."""
        flat = _FLAT * images.std()
        banks = []
        for index, size in enumerate(sizes):
            patches = _patches(images, size, flat, generator)
            share = filters // len(sizes) + (index < filters % len(sizes))
            rows, offset = _filters(patches, share, generator)
            banks.append(_Bank(rows.view(-1, images.shape[1], size, size), offset))
        return cls(banks, flat, grids=grids, threshold=threshold, mirror=mirror)

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Tensor],
        *,
        prefix: str,
        grids: Sequence[int],
        threshold: float,
        mirror: bool,
    ) -> Self:
        """From a state_dict, whose names begin with `prefix`."""
        banks: list[_Bank] = []
        while (start := f"{prefix}banks.{len(banks)}.") + "filters" in tensors:
            banks.append(_Bank(tensors[f"{start}filters"], tensors[f"{start}offset"]))
        return cls(banks, tensors[f"{prefix}flat"], grids=grids, threshold=threshold, mirror=mirror)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """A piece of the batch at a time: the responses of all filters are large."""
        first = self._each()[0].filters
        largest_size = max(bank.filters.shape[-1] for bank in self._each())
        room = largest_size + max(self.grids) - 1
        fits = images.dim() == 4 and images.shape[1] == first.shape[1]
        if not fits or min(images.shape[2:]) < room:
            raise ValueError(
                f"Expected images (n, {first.shape[1]}, height, width) of at least {room} × {room} "
                f"pixels, like the public ones, got {tuple(images.shape)}."
            )
        images = images.to(first.dtype)
        numbers = _CPU_RESPONSES if images.device.type == "cpu" else _GPU_RESPONSES
        largest = max(len(bank.filters) for bank in self._each())
        piece = max(1, numbers // (largest * images.shape[2:].numel()))
        return torch.cat([self._of(part) for part in images.split(piece)])

    def _of(self, images: Tensor) -> Tensor:
        found = self._one_way(images)
        return (found + self._one_way(images.flip(3))) / 2 if self.mirror else found

    def _one_way(self, images: Tensor) -> Tensor:
        maps = []
        for bank in self._each():
            response = conv2d(images, bank.filters)
            response /= _deviation(images, bank.filters.shape[-1], self.flat)
            response -= bank.offset[:, None, None]
            above, below = response.clamp_min(self.threshold), response.clamp_max_(-self.threshold)
            for grid in self.grids:
                pooled = adaptive_avg_pool2d(above, grid), -adaptive_avg_pool2d(below, grid)
                maps += [part.flatten(1) for part in pooled]
        return (torch.cat(maps, 1) - self.threshold).clamp_min_(0)  # 0 but for rounding

    def _each(self) -> list[_Bank]:
        return [bank for bank in self.banks if isinstance(bank, _Bank)]

    def extra_repr(self) -> str:
        """For the model's printout."""
        return f"grids={self.grids}, threshold={self.threshold}, mirror={self.mirror}"


def _deviation(images: Tensor, size: int, flat: Tensor) -> Tensor:
    """(n, 1, …): of each patch, and never 0."""
    count = images.shape[1] * size**2
    ones = images.new_full((1, images.shape[1], size, size), 1 / count)
    # About the image's own mean: squares of values far from 0 would cancel.
    images = images - images.mean((1, 2, 3), keepdim=True)
    mean, square = conv2d(images, ones), conv2d(images.square(), ones)
    variance = (square - mean.square()).clamp_min(0) * (count / (count - 1))
    return (variance + flat.square()).sqrt()


def _filters(patches: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(count, channels · size²), to be applied to a patch over its deviation; and their offsets."""
    mean = patches.mean(0)
    values, vectors = torch.linalg.eigh(torch.cov(patches.T).double())
    whiten = (vectors * (values.clamp_min(0) + _WHITENING).rsqrt()) @ vectors.T
    whiten = whiten.to(patches.dtype)
    rows = _centres((patches - mean) @ whiten, count, generator) @ whiten
    offset = rows @ mean
    return rows - rows.mean(1, keepdim=True), offset  # takes the patch's mean away


def _patches(images: Tensor, size: int, flat: Tensor, generator: torch.Generator) -> Tensor:
    """(patches, channels · size²) from anywhere, without their mean and of like contrast."""
    each = max(1, _PATCHES // len(images))
    found = []
    for part in images.split(_CUT):
        cut = unfold(part, size).transpose(1, 2)
        places = torch.rand(cut.shape[:2], generator=generator).argsort(1)[:, :each].to(cut.device)
        found.append(cut.gather(1, places[..., None].expand(-1, -1, cut.shape[2])).flatten(0, 1))
    patches = torch.cat(found)
    patches -= patches.mean(1, keepdim=True)
    return patches / (patches.var(1, keepdim=True) + flat.square()).sqrt()


def _centres(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """(count, …) of length 1: k-means of directions, a row and its negative being the same."""
    expect(count <= len(rows), f"filters to be at most {len(rows)}, the patches there are", count)
    start = torch.randperm(len(rows), generator=generator)[:count]
    centres = normalize(rows[start.to(rows.device)])
    for _ in range(_ROUNDS):
        sums = torch.zeros_like(centres)
        for part in rows.split(10_000):
            likeness = part @ centres.T
            nearest = likeness.abs().argmax(1)
            weight = likeness.gather(1, nearest[:, None])
            sums.index_add_(0, nearest, weight * part)
        empty = sums.norm(dim=1) == 0
        centres = torch.where(empty[:, None], centres, normalize(sums))
    return centres
