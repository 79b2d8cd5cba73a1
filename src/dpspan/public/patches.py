"""Features of images by patches of public ones: a frozen first layer that needs no labels.

Private training of few weights on good features often beats that of many from scratch
(Tramèr and Boneh 2021). Responses to filters of public patches are turned to the principal
directions that public images have and nearly whitened there: noise is the same in every direction,
hence so should be the features. Each image is treated by itself, by constants of public data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import normalize

from dpspan.public.augmentation import RandomAffine
from dpspan.public.data import PublicData
from dpspan.public.patch_filters import PatchResponses
from dpspan.support.checks import check_count, check_number, expect
from dpspan.support.files import replacing
from dpspan.support.progress import watched
from dpspan.support.randomness import seeded

_AT_ONCE = 256  # images
_COLUMNS = 4096  # of a Gram matrix's factor, multiplied at a time
_FORMAT = "dpspan.PatchFeatures"
_AUGMENT = RandomAffine(degrees=10, shift=0.1, scale=0.15, shear=0.1)  # of further views
_SMALLEST = 0.1  # share of the mean deviation that is added to a feature's


class PublicLayer(nn.Module):
    """A frozen layer made from public data, which `make_private` keeps apart from private ones."""

    def __init__(self, public: PublicData | None) -> None:
        super().__init__()
        self._public = public

    @property
    def public(self) -> PublicData:
        """What it was learnt from; ValueError if that was left behind."""
        if self._public is None:
            raise ValueError(
                f"This {type(self).__name__} was loaded without its public data, from which "
                "private records have to be kept apart: give them, load(path, public=…)."
            )
        return self._public

    @property
    def digest(self) -> str:
        """sha256 of its numbers: another layer, be it by a last bit, has another one."""
        found = hashlib.sha256()
        for name, tensor in sorted(self.state_dict().items()):
            found.update(f"{name};{tuple(tensor.shape)};".encode())
            found.update(tensor.cpu().contiguous().numpy().tobytes())
        return found.hexdigest()


class PatchFeatures(PublicLayer):
    """(n, channels, height, width) to (n, directions) of length 1; made by `PatchFeatures.learn`.

    It has no parameters. Put it before a linear layer, and train that one privately:

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

    mean: Tensor
    basis: Tensor

    def __init__(
        self,
        public: PublicData | None,
        responses: PatchResponses,
        mean: Tensor,
        basis: Tensor,
        *,
        settings: Mapping[str, Any],
    ) -> None:
        super().__init__(public)
        self.responses, self.settings = responses, dict(settings)  # those of `learn`
        self.register_buffer("mean", mean)
        self.register_buffer("basis", basis)

    @classmethod
    def learn(
        cls,
        public: object,
        *,
        filters: int = 1200,
        size: int | Sequence[int] = (4, 6, 9),
        grid: int | Sequence[int] = 2,
        threshold: float = 0.25,
        mirror: bool = True,
        power: float = 0.6,
        directions: int = 1000,
        whitening: float = 0.75,
        views: int = 3,
        seed: int = 0,
        device: torch.device | str = "cpu",
        progress: bool = True,
    ) -> Self:
        """Learn from public images, whose labels are not looked at.

        Args:
            public: a Dataset, DataLoader, tensors or `PublicData`; images as the model gets them.
            filters: how many; the features are 2 · filters · grid², summed over grids.
            size: of a patch, in pixels; of several sizes there are as many filters each.
            grid: responses are averaged over grid × grid parts of an image; of several, over the
                parts of each.
            threshold: what a response must exceed, in either direction, to count.
            mirror: give an image and its mirror image the same features, the mean of both. Not
                for letters or digits.
            power: of a mean response; below 1, many weak responses count more than few strong ones.
            directions: most principal directions of the features that are kept.
            whitening: 0 leaves the directions' lengths as they are, 1 makes them equal.
            views: how often each public image counts where directions are found: as it is, and
                otherwise turned, moved and scaled a little, at random. More directions need more.
            seed: for the patches that are looked at, where k-means starts, and the views.
            device: where to compute, and where the result is.
            progress: show a bar, in a terminal.
        """
        check_count("directions", directions)
        expect(0 <= check_number("whitening", whitening) <= 1, "0 <= whitening <= 1", whitening)
        expect(0 < check_number("power", power) <= 1, "0 < power <= 1", power)
        check_count("views", views)
        data = PublicData.of(public)
        sizes, grids = _several(size), _several(grid)
        images, responses = _learnt(data, filters, sizes, grids, threshold, mirror, seed, device)
        pieces = [(piece, view) for view in range(views) for piece in images.split(_AT_ONCE)]
        shown = watched(pieces, "learning features", shown=progress)
        with seeded(seed):  # the views' draws leave the caller's alone
            means = torch.cat([responses(_changed(x) if view else x) for x, view in shown])
        found = _directions(means.pow_(power), directions, whitening)
        settings = {
            "filters": filters,
            "size": list(sizes),
            "grid": grid if isinstance(grid, int) else list(grids),
            "threshold": threshold,
            "mirror": mirror,
            "power": power,
            "directions": directions,
            "whitening": whitening,
            "views": views,
            "seed": seed,
        }
        return cls(data, responses, *found, settings=settings)

    def forward(self, images: Tensor) -> Tensor:
        """(n, directions), each of length 1 (or 0)."""
        if images.requires_grad:
            raise ValueError(
                "Expected images that nothing trainable has changed: PatchFeatures passes no "
                "gradient on. Put it first, or freeze what comes before it."
            )
        features = self.responses(images).pow_(self.settings["power"])
        return normalize((features - self.mean) @ self.basis)

    def save(self, path: str | Path) -> None:
        """Write it to a safetensors file, without the public images."""
        public = self.public
        about = {
            "settings": self.settings,
            "public": {"name": public.name, "sha256": public.digest, "count": public.count},
        }
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self.state_dict().items()}
        with replacing(Path(path), what="the features") as temporary:
            save_file(tensors, temporary, metadata={_FORMAT: json.dumps(about)})

    @classmethod
    def load(cls, path: str | Path, public: object | None = None) -> Self:
        """Read it again; with the same public data also for private training, else for use only."""
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})[_FORMAT])
                names = file.keys()
                # Copied to where torch's own tensors begin: a product may round by that, too.
                tensors = {name: file.get_tensor(name).clone() for name in names}
        except (KeyError, SafetensorError) as error:
            raise ValueError(f"{path} holds no {cls.__name__}, or a damaged one.") from error
        data = None if public is None else PublicData.of(public)
        settings, learnt_from = about["settings"], about["public"]
        if data is not None and data.digest != learnt_from["sha256"]:
            raise ValueError(
                f"Expected the public data that {path} was learnt from, {learnt_from['count']} "
                f"samples called '{learnt_from['name']}', got others (with or without labels "
                "counts, too)."
            )
        grid, threshold, mirror = (settings[name] for name in ("grid", "threshold", "mirror"))
        responses = PatchResponses.of(
            tensors,
            prefix="responses.",
            grids=_several(grid),
            threshold=threshold,
            mirror=mirror,
        )
        return cls(data, responses, tensors["mean"], tensors["basis"], settings=settings)

    def extra_repr(self) -> str:
        """For the model's printout."""
        return f"power={self.settings['power']}, {self.basis.shape[1]} directions"


def _several(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _learnt(
    data: PublicData,
    filters: int,
    sizes: tuple[int, ...],
    grids: tuple[int, ...],
    threshold: float,
    mirror: bool,
    seed: int,
    device: torch.device | str,
) -> tuple[Tensor, PatchResponses]:
    """The public images, and the filters that they give."""
    for name, several in (("size", sizes), ("grid", grids)):
        expect(bool(several), f"at least one {name}", several)
        for each in several:
            check_count(name, each)
    expect(check_count("filters", filters) >= len(sizes), "filters of each size", filters)
    expect(0 <= check_number("threshold", threshold) < 100, "0 <= threshold < 100", threshold)
    expect(isinstance(mirror, bool), "mirror to be True or False", mirror)
    expect(isinstance(seed, int) and 0 <= seed < 2**63, "seed a whole number >= 0", seed)
    images = _images(data, min(sizes), max(sizes), max(grids)).to(device)
    if not images.std() > 0:
        raise ValueError(f"All pixels of the public data '{data.name}' are alike: give images.")
    if bool((images == images[:1]).all()):
        raise ValueError(f"All images of the public data '{data.name}' are alike: give others.")
    responses = PatchResponses.learn(
        images,
        filters=filters,
        sizes=sizes,
        grids=grids,
        threshold=threshold,
        mirror=mirror,
        generator=torch.Generator().manual_seed(seed),
    )
    return images, responses


def _images(data: PublicData, smallest: int, size: int, grid: int) -> Tensor:
    """All of them, checked."""
    inputs = data.batches[0][0]
    if len(data.batches) > 1 or not isinstance(inputs, Tensor) or inputs.dim() != 4:
        raise ValueError(
            f"Expected the public data '{data.name}' to be images of one shape, (n, channels, "
            "height, width). Patches are cut out of those."
        )
    if inputs.shape[1] * smallest**2 < 2:
        raise ValueError("Expected patches of more than one number: give a larger size.")
    side = min(inputs.shape[2:])
    if side - size + 1 < grid or len(inputs) < 2:
        raise ValueError(
            f"Expected at least two images with room for {grid} × {grid} patches of {size} × "
            f"{size} pixels in '{data.name}', got {len(inputs)} of {tuple(inputs.shape[2:])}."
        )
    return inputs.float()


def _changed(images: Tensor) -> Tensor:
    """Each in its own way, which is the same on every device."""
    return _AUGMENT(images.cpu()).to(images.device)


def _directions(features: Tensor, count: int, whitening: float) -> tuple[Tensor, Tensor]:
    """The mean, and the principal directions of scaled features, divided by σ^whitening.

    What `features` held is lost: of thousands of filters they are gigabytes.
    """
    mean, deviation = features.mean(0), features.std(0)
    if not deviation.max() > 1e-6 * features.abs().max():
        raise ValueError("The features of the public images are all alike: lower the threshold.")
    scale = deviation + _SMALLEST * deviation.mean()
    scaled = features.sub_(mean).div_(scale)
    # By the smaller of the two Gram matrices, a piece at a time.
    few = len(scaled) < scaled.shape[1]
    shorter = scaled if few else scaled.T
    gram = scaled.new_zeros(len(shorter), len(shorter), dtype=torch.float64)
    for part in shorter.split(_COLUMNS, dim=1):
        gram.addmm_(part.double(), part.double().T)
    lengths, vectors = _spectrum(gram)
    kept = min(count, len(lengths))
    lengths, basis = lengths[:kept], vectors[:, :kept]
    if few:
        weights = basis / lengths
        basis = torch.cat([p.double().T @ weights for p in scaled.split(_COLUMNS, dim=1)])
    basis = basis / (lengths / lengths[0]) ** whitening
    # Row by row, as a file has it: a product rounds by its factors' layout.
    return mean, (basis.to(scale.dtype) / scale[:, None]).contiguous()


def _spectrum(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Singular values, largest first, and their vectors; without those that are rounding."""
    values, vectors = torch.linalg.eigh(gram)
    lengths = values.clamp_min(0).sqrt().flip(0)
    kept = int((lengths > 1e-4 * lengths[0]).sum())
    return lengths[:kept], vectors.flip(1)[:, :kept]
