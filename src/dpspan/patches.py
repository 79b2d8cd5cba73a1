"""Features of images by patches of public ones: a frozen first layer that needs no labels.

Private training of few weights on good features often beats that of many from scratch
(Tramèr and Boneh 2021). The features are those of Coates and Ng (2011), learnt from public images
alone: filters are centres of their whitened patches. Noise is the same in every direction, hence
so should be the features: they are turned to the principal directions of public features and
nearly whitened there.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, conv2d, normalize, relu, unfold

from dpspan.checks import check_count, check_number, expect
from dpspan.public import PublicData

_PATCHES = 200_000  # looked at while learning
_ROUNDS = 10  # of k-means
_FLAT = 0.15  # of the pixels' deviation, added to a patch's (squares): flat patches stay small
_WHITENING = 0.1  # added to the variances of patches, which are about 1
_PIECE = 64  # images at a time: the responses of all filters are large
_SMALLEST = 0.1  # share of the mean deviation that is added to a feature's


class PatchFeatures(nn.Module):
    """(n, channels, height, width) to (n, directions) of length 1; made by `PatchFeatures.learn`.

    It has no parameters. Put it before a small network, and train that one privately:

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> import dpspan
        >>> public = torch.rand(50, 3, 16, 16)
        >>> features = dpspan.PatchFeatures.learn(public, filters=8, directions=20)
        >>> model = nn.Sequential(features, nn.Linear(20, 10))
        >>> model(torch.rand(4, 3, 16, 16)).shape
        torch.Size([4, 10])
    """

    filters: Tensor
    offset: Tensor
    flat: Tensor
    mean: Tensor
    basis: Tensor

    def __init__(
        self,
        public: PublicData,
        filters: Tensor,
        offset: Tensor,
        flat: Tensor,
        *,
        grid: int,
        threshold: float,
    ) -> None:
        super().__init__()
        # Who made it: `make_private` keeps these samples apart from the private ones.
        self.public, self.grid, self.threshold = public, grid, threshold
        count = 2 * len(filters) * grid**2
        self.register_buffer("filters", filters)
        self.register_buffer("offset", offset)
        self.register_buffer("flat", flat)
        self.register_buffer("mean", filters.new_zeros(count))
        self.register_buffer("basis", filters.new_zeros(count, 0))

    @classmethod
    def learn(
        cls,
        public: object,
        *,
        filters: int = 1000,
        size: int = 6,
        grid: int = 2,
        threshold: float = 0.25,
        directions: int = 1000,
        whitening: float = 0.6,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Learn from public images, whose labels are not looked at.

        Args:
            public: a Dataset, DataLoader, tensors or `PublicData`; images as the model gets them.
            filters: how many; the features are 2 · filters · grid².
            size: of a patch, in pixels.
            grid: responses are averaged over grid × grid parts of an image.
            threshold: what a response must exceed, in either direction, to count.
            directions: most principal directions of the features that are kept.
            whitening: 0 leaves the directions' lengths as they are, 1 makes them equal.
            seed: for the patches that are looked at and where k-means starts.
            device: where to compute, and where the result is.
        """
        for name, value in (("filters", filters), ("size", size), ("grid", grid)):
            check_count(name, value)
        check_count("directions", directions)
        expect(0 <= check_number("threshold", threshold) < 100, "0 <= threshold < 100", threshold)
        expect(0 <= check_number("whitening", whitening) <= 1, "0 <= whitening <= 1", whitening)
        expect(isinstance(seed, int) and 0 <= seed < 2**63, "seed a whole number >= 0", seed)
        data = PublicData.of(public)
        images = _images(data, size, grid).to(device)
        generator = torch.Generator().manual_seed(seed)
        flat = _FLAT * images.std()
        if not flat > 0:
            raise ValueError(f"All pixels of the public data '{data.name}' are alike: give images.")
        patches = _patches(images, size, flat, generator)
        kernel, offset = _filters(patches, filters, generator)
        kernel = kernel.view(-1, images.shape[1], size, size)
        made = cls(data, kernel, offset, flat, grid=grid, threshold=threshold)
        made.mean, made.basis = _directions(made.pooled(images), directions, whitening)
        return made

    def forward(self, images: Tensor) -> Tensor:
        """(n, directions), each of length 1 (or 0)."""
        if images.requires_grad:
            raise ValueError(
                "Expected images that nothing trainable has changed: PatchFeatures passes no "
                "gradient on. Put it first, or freeze what comes before it."
            )
        return normalize((self.pooled(images) - self.mean) @ self.basis)

    @torch.no_grad()
    def pooled(self, images: Tensor) -> Tensor:
        """(n, 2 · filters · grid²): mean responses of both signs, by part of the image."""
        return torch.cat([self._pooled(part) for part in images.split(_PIECE)])

    def _pooled(self, images: Tensor) -> Tensor:
        deviation = _deviation(images, self.filters.shape[-1], self.flat)
        response = conv2d(images, self.filters) / deviation - self.offset[:, None, None]
        signs = (relu(sign * response - self.threshold) for sign in (1, -1))
        return torch.cat([adaptive_avg_pool2d(s, self.grid).flatten(1) for s in signs], 1)

    def extra_repr(self) -> str:
        """For the model's printout."""
        count, _, size, _ = self.filters.shape
        return (
            f"{count} filters of {size} × {size}, grid={self.grid}, "
            f"{self.basis.shape[1]} directions, from '{self.public.name}'"
        )


def _images(data: PublicData, size: int, grid: int) -> Tensor:
    """All of them, checked."""
    inputs = data.batches[0][0]
    if len(data.batches) > 1 or not isinstance(inputs, Tensor) or inputs.dim() != 4:
        raise ValueError(
            f"Expected the public data '{data.name}' to be images of one shape, (n, channels, "
            "height, width). Patches are cut out of those."
        )
    side = min(inputs.shape[2:])
    if side - size + 1 < grid or len(inputs) < 2:
        raise ValueError(
            f"Expected at least two images with room for {grid} × {grid} patches of {size} × "
            f"{size} pixels in '{data.name}', got {len(inputs)} of {tuple(inputs.shape[2:])}."
        )
    return inputs.float()


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
    for part in images.split(_PIECE):
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


def _directions(features: Tensor, count: int, whitening: float) -> tuple[Tensor, Tensor]:
    """The mean, and the principal directions of scaled features, divided by σ^whitening."""
    mean, deviation = features.mean(0), features.std(0)
    if not deviation.max() > 1e-6 * features.abs().max():
        raise ValueError("Expected public images that differ: their features are all alike.")
    scale = deviation + _SMALLEST * deviation.mean()
    scaled = ((features - mean) / scale).double()
    # By the samples' Gram matrix: there are fewer samples than features.
    values, vectors = torch.linalg.eigh(scaled @ scaled.T)
    lengths = values.clamp_min(0).sqrt().flip(0)
    kept = min(count, int((lengths > 1e-4 * lengths[0]).sum()))
    lengths, vectors = lengths[:kept], vectors.flip(1)[:, :kept]
    basis = scaled.T @ (vectors / lengths) / (lengths / lengths[0]) ** whitening
    return mean, (basis.to(scale.dtype) / scale[:, None])
