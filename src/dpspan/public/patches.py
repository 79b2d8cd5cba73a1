"""Features of images by patches of public ones: a frozen first layer that needs no labels.

Private training of few weights on good features often beats that of many from scratch
(Tramèr and Boneh 2021). Filters are centres of whitened patches (Coates and Ng 2011). Responses to
them are turned to the principal directions that public images have and nearly whitened there: noise
is the same in every direction, so should features be. Images are seen alone, by public constants.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.data import DataLoader, Dataset, default_collate

from dpspan.public.augmentation import RandomAffine
from dpspan.public.data import Collate, PublicData, check_map_style
from dpspan.public.fingerprints import fingerprints
from dpspan.public.overlap import Encoded, refuse_copies
from dpspan.public.patch_filters import PatchResponses, as_counts, room
from dpspan.support.checks import check_count, check_number, check_seed, expect
from dpspan.support.files import replacing
from dpspan.support.progress import watched
from dpspan.support.randomness import seeded

_AT_ONCE = 256  # images that are learnt from at a time
_ENCODED_AT_ONCE = 512
_COLUMNS = 4096  # of a Gram matrix's factor, multiplied at a time
_FORMAT = "dpspan.PatchFeatures"
_AUGMENT = RandomAffine(degrees=10, shift=0.1, scale=0.15, shear=0.1)  # of further views
_SMALLEST = 0.1  # share of the mean deviation that is added to a feature's


class PatchFeatures(nn.Module):
    """(n, channels, height, width) to (n, directions) of length 1; made by `PatchFeatures.learn`.

    It has no parameters. Put it before a linear layer, and train that one privately;
    `make_private` keeps the public images apart from private ones.
    """

    def __init__(
        self,
        public: PublicData | None,
        responses: nn.Module,
        mean: Tensor,
        basis: Tensor,
        settings: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self._public, self.settings = public, dict(settings)  # those of `learn`
        self.responses, self.mean, self.basis = responses, nn.Buffer(mean), nn.Buffer(basis)

    @property
    def public(self) -> PublicData:
        """What it was learnt from; ValueError if it was loaded without."""
        if self._public is None:
            raise ValueError(
                "This PatchFeatures was loaded without its public data, from which private records "
                "have to be kept apart: give them, load(path, public=…)."
            )
        return self._public

    @property
    def digest(self) -> str:
        """sha256 of its numbers: a layer that differs in one bit has another one."""
        found = hashlib.sha256()
        for name, tensor in sorted(self.state_dict().items()):
            found.update(f"{name};{tuple(tensor.shape)};".encode())
            found.update(tensor.cpu().contiguous().numpy().tobytes())
        return found.hexdigest()

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
        rotation: float = 0.0,
        power: float = 0.6,
        directions: int = 1000,
        whitening: float = 0.75,
        views: int = 3,
        second: int = 0,
        seed: int = 0,
        device: torch.device | str = "cpu",
        progress: bool = True,
    ) -> Self:
        """Learn from public images; their labels are not used.

        Args:
            public: a Dataset, DataLoader, tensors or `PublicData`; images as the model gets them.
            filters: how many; the features are 2 · filters · grid², summed over grids.
            size: of a patch, in pixels; of several sizes there are as many filters each.
            grid: responses are averaged over grid × grid parts of an image; of several, over the
                parts of each.
            threshold: what a response must exceed, in either direction, to count.
            mirror: give an image and its mirror image the same features, the mean of both. Not
                for letters or digits.
            rotation: degrees; an image's features are the mean over it as it is and rotated by so
                many to either side, which takes three times as long. 0 for none.
            power: of a mean response; below 1, many weak responses count more than few strong ones.
            directions: most principal directions of the features that are kept.
            whitening: 0 leaves the directions' lengths as they are, 1 makes them equal.
            views: how often each public image counts where directions are found: as it is, and
                otherwise turned, moved and scaled a little, at random. More directions need more.
            second: filters of a second layer, whose patches are of maps of a first one; 0 for none.
                Thousands of them want a GPU.
            seed: for the sampled patches, the start of k-means, and the views.
            device: where to compute, and where the result is.
            progress: show a bar, in a terminal.
        """
        sizes, grids = as_counts("size", size), as_counts("grid", grid)
        settings = {
            "filters": check_count("filters", filters),
            "size": sizes,
            "grid": grids if isinstance(grid, Iterable) else grids[0],
            "threshold": check_number("threshold", threshold),
            "mirror": mirror,
            "rotation": check_number("rotation", rotation),
            "power": check_number("power", power),
            "directions": check_count("directions", directions),
            "whitening": check_number("whitening", whitening),
            "views": check_count("views", views),
            "second": second if second == 0 else check_count("second", second),
            "seed": check_seed(seed),
        }
        expect(filters >= len(sizes), "filters of each size", filters)
        expect(0 <= threshold < 100, "0 <= threshold < 100", threshold)
        expect(0 <= rotation <= 180, "0 <= rotation <= 180", rotation)
        expect(0 < power <= 1, "0 < power <= 1", power)
        expect(0 <= whitening <= 1, "0 <= whitening <= 1", whitening)
        expect(isinstance(mirror, bool), "mirror to be True or False", mirror)
        data = PublicData.of(public)
        images = _images(data, min(sizes), room(sizes, grids, second > 0)).to(device)
        responses = PatchResponses.learn(images, settings)
        pieces = [(piece, view) for view in range(views) for piece in images.split(_AT_ONCE)]
        shown = watched(pieces, "learning features", shown=progress)
        with seeded(seed):  # the views' draws leave the caller's alone
            # Drawn on the CPU, so that the views are the same on every device.
            means = torch.cat(
                [responses(_AUGMENT(x.cpu()).to(x.device) if view else x) for x, view in shown]
            )
        mean, basis = _directions(means.pow_(power), directions, whitening)
        return cls(data, responses, mean, basis, settings)

    def forward(self, images: Tensor) -> Tensor:
        if images.requires_grad:
            raise ValueError(
                "Expected images that nothing trainable has changed: PatchFeatures passes no "
                "gradient on. Put it first, or freeze what comes before it."
            )
        features = self.responses(images).pow_(self.settings.get("power", 1.0))
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
                # Copied to where torch's own tensors begin: a product may round by that, too.
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
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
        responses = cls._network(settings, tensors)
        return cls(data, responses, tensors["mean"], tensors["basis"], settings)

    @classmethod
    def _network(cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> nn.Module:
        """What comes before the directions, from its tensors in a file."""
        start = "responses."
        own = {name.removeprefix(start): x for name, x in tensors.items() if name.startswith(start)}
        return PatchResponses.of(settings, own)

    def extra_repr(self) -> str:
        about = "".join(f"{name}={value!r}, " for name, value in self.settings.items())
        return f"{about}{self.basis.shape[1]} directions"


def encode(
    layer: PatchFeatures,
    dataset: Dataset[Any],
    *,
    collate_fn: Collate = default_collate,
    progress: bool = True,
) -> Encoded:
    """The private dataset as the layer sees it: train only what follows the layer on it.

    Each record's place holds what the layer makes of this record alone (but for rounding, which
    may depend on its place in a batch), so private training on it has the guarantee of private
    training on the records. Copies of the layer's public samples are refused here, and
    `make_private` puts those samples on the certificate: give it a loader of what this returns, of
    a Subset of it, or of several in a ConcatDataset. A wrapper of your own hides them from the
    certificate: declare them by `engine.ledger.declare_public`.

    `dataset` holds pairs of an image and a label, not augmented at random; `collate_fn` makes
    batches of them. The layer computes on its device, and the result is on the CPU.
    """
    check_map_style(dataset, "The dataset to encode")
    public = layer.public
    loader = DataLoader(dataset, batch_size=_ENCODED_AT_ONCE, collate_fn=collate_fn)
    inputs, labels, raw = [], [], []
    for batch in watched(loader, "encoding", shown=progress):
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise ValueError("Expected pairs of an image and a label in the dataset to encode.")
        raw += fingerprints(batch[0])
        inputs.append(_seen(layer, batch[0]))
        labels.append(torch.as_tensor(batch[1]).cpu())
    if not inputs:
        raise ValueError("The dataset to encode is empty: give at least one record.")
    refuse_copies(public, raw)
    return Encoded(
        torch.cat(inputs), torch.cat(labels), public=public, layer=type(layer).__name__, raw=raw
    )


def encode_public(layer: PatchFeatures, public: object) -> PublicData:
    """Public data as the layer sees them, for a method or a warm start behind `encode`.

    They keep name, digest and fingerprints of the samples, for certificate and search for copies.
    """
    data = PublicData.of(public)
    pieces = data.pieces(_ENCODED_AT_ONCE)
    seen = [(_seen(layer, piece.inputs), *piece.batch[1:]) for piece in pieces]
    tensors = tuple(torch.cat(column) for column in zip(*seen, strict=True))
    held = PublicData.of(tensors, name=data.name)
    return replace(held, digest=data.digest, raw=tuple(data.sieve.prints.tolist()))


@torch.no_grad()
def _seen(layer: PatchFeatures, inputs: Tensor) -> Tensor:
    """What the layer makes of them, on the CPU.

    Batches are padded to one size: by rounding features could tell how many records there are.
    """
    filled = torch.cat(
        [inputs, inputs.new_zeros(_ENCODED_AT_ONCE - len(inputs), *inputs.shape[1:])]
    )
    seen: Tensor = layer(filled.to(next(layer.buffers()).device))
    return seen[: len(inputs)].cpu()


def _images(data: PublicData, smallest: int, side: int) -> Tensor:
    """All of them, checked: patches of `smallest` pixels and more, images of `side` and more."""
    inputs = data.batches[0][0]
    if len(data.batches) > 1 or not isinstance(inputs, Tensor) or inputs.dim() != 4:
        raise ValueError(
            f"Expected the public data '{data.name}' to be images of one shape, (n, channels, "
            "height, width). Patches are cut out of those."
        )
    if inputs.shape[1] * smallest**2 < 2:
        raise ValueError("Expected patches of more than one number: give a larger size.")
    if min(inputs.shape[2:]) < side or len(inputs) < 2:
        raise ValueError(
            f"Expected at least two images of {side} × {side} pixels or more in '{data.name}', so "
            "that there is a patch in every part of the grid, got "
            f"{len(inputs)} of {tuple(inputs.shape[2:])}."
        )
    images = inputs.float()
    if not images.std() > 0:
        raise ValueError(f"All pixels of the public data '{data.name}' are alike: give images.")
    if bool((images == images[:1]).all()):
        raise ValueError(f"All images of the public data '{data.name}' are alike: give others.")
    return images


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
    values, vectors = torch.linalg.eigh(gram)
    lengths = values.clamp_min(0).sqrt().flip(0)  # singular values, without those of rounding
    kept = min(count, int((lengths > 1e-4 * lengths[0]).sum()))
    lengths, basis = lengths[:kept], vectors.flip(1)[:, :kept]
    if few:
        weights = basis / lengths
        basis = torch.cat([p.double().T @ weights for p in scaled.split(_COLUMNS, dim=1)])
    basis = basis / (lengths / lengths[0]) ** whitening
    # Row by row, as a file has it: a product rounds by its factors' layout.
    return mean, (basis.to(scale.dtype) / scale[:, None]).contiguous()
