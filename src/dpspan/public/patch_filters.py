"""Filters of public patches and the responses to them: what `PatchFeatures` is made of.

Filters are centres of whitened patches (Coates and Ng 2011). A second layer does the same with
patches of a first one's maps, turned to their principal channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import (
    adaptive_avg_pool2d,
    affine_grid,
    avg_pool2d,
    conv2d,
    grid_sample,
    normalize,
    unfold,
)

from dpspan.support.checks import check_count, expect

_PATCHES = 200_000  # sampled for learning
_ROUNDS = 10  # of k-means
_FLAT = 0.15  # of the pixels' deviation, added to a patch's (squares): flat patches stay small
_WHITENING = 0.1  # added to the variances of patches, which are about 1
_CUT = 64  # images that are cut into patches at a time
# Numbers at a time, each filter having a whole image: what a CPU's cache holds, and a GPU's memory.
_CPU_RESPONSES, _GPU_RESPONSES = 2**21, 2**28

# Of the second layer: the filters that its maps come from, and their size; maps are averaged over
# squares at that distance; channels and patches of them; and their length, as above.
_FIRST, _FIRST_SIZE, _POOLED, _STRIDE = 400, 5, 3, 2
_CHANNELS, _SECOND_SIZE, _SHORT = 128, 3, 0.3
_LEARNT_AT_ONCE = 256  # images


class Bank(nn.Module):
    """Filters of one size, to be applied to patches over their deviation; and their offsets."""

    def __init__(self, filters: Tensor, offset: Tensor) -> None:
        super().__init__()
        self.filters, self.offset = nn.Buffer(filters), nn.Buffer(offset)

    @classmethod
    def learn(
        cls, images: Tensor, size: int, count: int, flat: Tensor, generator: torch.Generator
    ) -> Self:
        """Of images without labels."""
        patches = _sampled(images, size, generator)
        patches -= patches.mean(1, keepdim=True)
        patches /= (patches.var(1, keepdim=True) + flat.square()).sqrt()
        rows, offset = _filters(patches, count, _WHITENING, generator)
        rows -= rows.mean(1, keepdim=True)  # takes the patch's mean away
        return cls(rows.view(-1, images.shape[1], size, size), offset)

    def forward(self, images: Tensor, flat: Tensor) -> Tensor:
        response = conv2d(images, self.filters)
        response /= _deviation(images, self.filters.shape[-1], flat)
        return response.sub_(self.offset[:, None, None])


class SecondLayer(nn.Module):
    """(n, channels, height, width) to (n, 2 · filters · Σ grid²): patches of a first layer's maps.

    Maps are its responses of both signs, averaged over small squares; their roots are turned to the
    principal channels that public images have. Patches of those, of like length, meet filters that
    are found as the first layer's are.
    """

    def __init__(self, first: Bank, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.first = first
        self.mean, self.channels = nn.Buffer(tensors["mean"]), nn.Buffer(tensors["channels"])
        self.filters, self.offset = nn.Buffer(tensors["filters"]), nn.Buffer(tensors["offset"])
        self.short, self.threshold = nn.Buffer(tensors["short"]), nn.Buffer(tensors["threshold"])

    @classmethod
    def learn(
        cls, images: Tensor, count: int, flat: Tensor, threshold: float, generator: torch.Generator
    ) -> Self:
        """Of images without labels."""
        first = Bank.learn(images, _FIRST_SIZE, _FIRST, flat, generator)
        pieces = [_maps(first(x, flat), threshold) for x in images.split(_LEARNT_AT_ONCE)]
        rows = [maps.movedim(1, -1).flatten(0, 2).double() for maps in pieces]
        total = sum(len(part) for part in rows)
        mean = torch.stack([part.sum(0) for part in rows]).sum(0) / total
        gram = torch.stack([(part - mean).T @ (part - mean) for part in rows]).sum(0)
        values, vectors = torch.linalg.eigh(gram / total)
        mean = mean.to(images.dtype)
        channels = (vectors.flip(1)[:, :_CHANNELS] / values[-1].sqrt()).to(images.dtype)
        channels = channels.contiguous()  # as a file has it
        maps = torch.cat([_turned(part, mean, channels) for part in pieces])
        patches = _sampled(maps, _SECOND_SIZE, generator)
        short = _SHORT * patches.norm(dim=1).mean()
        patches /= (patches.square().sum(1, keepdim=True) + short.square()).sqrt()
        filters, offset = _filters(patches, count, float(patches.var(0).mean()), generator)
        responses = patches[:: max(1, len(patches) // 5000)] @ filters.T - offset
        tensors = {
            "mean": mean,
            "channels": channels,
            "filters": filters.view(count, -1, _SECOND_SIZE, _SECOND_SIZE),
            "offset": offset,
            "short": short,
            "threshold": threshold * responses.std(),
        }
        return cls(first, tensors)

    def forward(
        self, images: Tensor, flat: Tensor, threshold: float, grids: Sequence[int]
    ) -> Tensor:
        maps = _turned(_maps(self.first(images, flat), threshold), self.mean, self.channels)
        response = conv2d(maps, self.filters)
        ones = maps.new_ones(1, *self.filters.shape[1:])
        response /= (conv2d(maps.square(), ones) + self.short.square()).sqrt()
        response -= self.offset[:, None, None]
        return _pooled(response, self.threshold, grids)


class PatchResponses(nn.Module):
    """(n, channels, height, width) to (n, 2 · filters · Σ grid²): mean responses of both signs.

    They are means over the parts of each of the `grids`. Only what exceeds a threshold counts.
    Those of a second layer come last.
    """

    banks: Sequence[Bank]

    def __init__(
        self,
        banks: Sequence[Bank],
        flat: Tensor,
        settings: Mapping[str, Any],
        second: SecondLayer | None = None,
    ) -> None:
        super().__init__()
        self.banks = nn.ModuleList(banks)  # type: ignore[assignment]
        self.flat, self.second = nn.Buffer(flat), second
        self.grids, self.mirror = as_counts("grid", settings["grid"]), settings["mirror"]
        self.threshold: float = settings["threshold"]
        self.rotation: float = settings.get("rotation", 0.0)  # which 0.2 did not have

    @classmethod
    def learn(cls, images: Tensor, settings: Mapping[str, Any]) -> Self:
        """By the settings of `PatchFeatures.learn`."""
        generator = torch.Generator().manual_seed(settings["seed"])
        filters, sizes, flat = settings["filters"], settings["size"], _FLAT * images.std()
        banks = []
        for index, size in enumerate(sizes):
            share = filters // len(sizes) + (index < filters % len(sizes))
            banks.append(Bank.learn(images, size, share, flat, generator))
        second = None
        if settings["second"]:
            second = SecondLayer.learn(
                images, settings["second"], flat, settings["threshold"], generator
            )
        return cls(banks, flat, settings, second)

    @classmethod
    def of(cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """From the tensors of its state."""

        def bank(at: str) -> Bank:
            return Bank(tensors[f"{at}.filters"], tensors[f"{at}.offset"])

        banks = [bank(f"banks.{index}") for index in range(len(settings["size"]))]
        second = None
        if settings.get("second"):  # which 0.1 did not have
            start = "second."
            own = {n.removeprefix(start): x for n, x in tensors.items() if n.startswith(start)}
            second = SecondLayer(bank("second.first"), own)
        return cls(banks, tensors["flat"], settings, second)

    @property
    def room(self) -> int:
        """Pixels that an image has at least, either way."""
        return room(
            [bank.filters.shape[-1] for bank in self.banks], self.grids, self.second is not None
        )

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """A piece of the batch at a time: the responses of all filters are large."""
        first = self.banks[0].filters
        fits = images.dim() == 4 and images.shape[1] == first.shape[1]
        if not fits or min(images.shape[2:]) < self.room:
            raise ValueError(
                f"Expected images (n, {first.shape[1]}, height, width) of at least {self.room} × "
                f"{self.room} pixels, like the public ones, got {tuple(images.shape)}."
            )
        images = images.to(first.dtype)
        numbers = _CPU_RESPONSES if images.device.type == "cpu" else _GPU_RESPONSES
        largest = max(len(bank.filters) for bank in self.banks)
        if self.second is not None:  # whose maps have a quarter of the places
            largest = max(largest, len(self.second.first.filters), len(self.second.filters) // 4)
        piece = max(1, numbers // (largest * images.shape[2:].numel()))
        return torch.cat([self._of(part) for part in images.split(piece)])

    def _of(self, images: Tensor) -> Tensor:
        """The mean over their views: constants, the same for every image."""
        angles = [self.rotation, -self.rotation] if self.rotation else []
        views = [images, *(_rotated(images, angle) for angle in angles)]
        if self.mirror:
            views += [view.flip(3) for view in views]
        found = self._one_way(views[0])
        for view in views[1:]:
            found += self._one_way(view)
        return found.div_(len(views))

    def _one_way(self, images: Tensor) -> Tensor:
        found = [_pooled(of(images, self.flat), self.threshold, self.grids) for of in self.banks]
        if self.second is not None:
            found.append(self.second(images, self.flat, self.threshold, self.grids))
        return torch.cat(found, 1)


def room(sizes: Sequence[int], grids: Sequence[int], second: bool) -> int:
    """Pixels that an image needs, so that every part of a grid has a patch."""
    needed = max(sizes) + max(grids) - 1
    if not second:
        return needed
    maps = _SECOND_SIZE + max(grids) - 1
    return max(needed, _FIRST_SIZE - 1 + _POOLED + _STRIDE * (maps - 1))


def _rotated(images: Tensor, degrees: float) -> Tensor:
    """About their middle; what comes in from outside is the image's reflection."""
    height, width = images.shape[2:]
    angle = math.radians(degrees)
    across, along = math.cos(angle), math.sin(angle)
    # `affine_grid` counts in halves of each side, which are of other lengths.
    turn = [[across, -along * height / width, 0], [along * width / height, across, 0]]
    one = affine_grid(images.new_tensor([turn]), [1, 1, height, width], align_corners=False)
    grid = one.expand(len(images), -1, -1, -1)  # of images there may be none
    return grid_sample(images, grid, padding_mode="reflection", align_corners=False)


def _deviation(images: Tensor, size: int, flat: Tensor) -> Tensor:
    """(n, 1, …): of each patch, and never 0."""
    count = images.shape[1] * size**2
    ones = images.new_full((1, images.shape[1], size, size), 1 / count)
    # About the image's own mean: squares of values far from 0 would cancel.
    images = images - images.mean((1, 2, 3), keepdim=True)
    mean, square = conv2d(images, ones), conv2d(images.square(), ones)
    variance = (square - mean.square()).clamp_min(0) * (count / (count - 1))
    return (variance + flat.square()).sqrt()


def _maps(response: Tensor, threshold: float) -> Tensor:
    """(n, 2 · filters, …): roots of what exceeds the threshold, averaged over small squares."""
    parts = _both_signs(response, threshold)
    pooled = torch.cat([avg_pool2d(part, _POOLED, _STRIDE) for part in parts], 1)
    return (pooled - threshold).clamp_min_(0).sqrt_()


def _turned(maps: Tensor, mean: Tensor, channels: Tensor) -> Tensor:
    """Maps in other channels."""
    return torch.einsum("nchw,cd->ndhw", maps - mean[:, None, None], channels)


def _both_signs(response: Tensor, threshold: float | Tensor) -> tuple[Tensor, Tensor]:
    """Clamped to the threshold from below, and so its negative; `response` is lost."""
    return response.clamp_min(threshold), response.clamp_max_(-threshold).neg_()


def _pooled(response: Tensor, threshold: float | Tensor, grids: Sequence[int]) -> Tensor:
    """(n, 2 · filters · Σ grid²): means over parts of what exceeds the threshold."""
    parts = _both_signs(response, threshold)
    found = [adaptive_avg_pool2d(part, grid).flatten(1) for grid in grids for part in parts]
    return (torch.cat(found, 1) - threshold).clamp_min_(0)  # 0 but for rounding


def _filters(
    patches: Tensor, count: int, whitening: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(count, …) to be applied to such patches, and their offsets: centres of whitened patches."""
    mean = patches.mean(0)
    values, vectors = torch.linalg.eigh(torch.cov(patches.T).double())
    whiten = (vectors * (values.clamp_min(0) + whitening).rsqrt()) @ vectors.T
    whiten = whiten.to(patches.dtype)
    rows = _centres((patches - mean) @ whiten, count, generator) @ whiten
    return rows, rows @ mean


def _sampled(images: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """(patches, channels · size²) from anywhere."""
    each = max(1, _PATCHES // len(images))
    found = []
    for part in images.split(_CUT):
        cut = unfold(part, size).transpose(1, 2)
        places = torch.rand(cut.shape[:2], generator=generator).argsort(1)[:, :each].to(cut.device)
        found.append(cut.gather(1, places[..., None].expand(-1, -1, cut.shape[2])).flatten(0, 1))
    return torch.cat(found)


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


def as_counts(name: str, value: int | Sequence[int]) -> list[int]:
    """One or several, checked."""
    counts = [check_count(name, n) for n in (value if isinstance(value, Iterable) else [value])]
    expect(bool(counts), f"at least one {name}", value)
    return counts
