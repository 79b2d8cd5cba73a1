"""Apply a frozen public layer once, instead of in every epoch."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from dpspan.public.data import Collate, PublicData
from dpspan.public.overlap import Encoded, fingerprints, refuse_copies
from dpspan.public.patches import PublicLayer
from dpspan.support.progress import watched

_AT_ONCE = 512  # images


def encode(
    layer: PublicLayer,
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

    Args:
        layer: a `PatchFeatures`, on the device on which to compute. The result is on the CPU.
        dataset: pairs of an image and a label, not augmented at random.
        collate_fn: makes a batch of several pairs.
        progress: show a bar, in a terminal.

    Examples:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> import dpspan
        >>> features = dpspan.PatchFeatures.learn(torch.rand(50, 3, 16, 16), filters=9)
        >>> private = TensorDataset(torch.rand(20, 3, 16, 16), torch.arange(20))
        >>> len(dpspan.encode(features, private, progress=False))
        20
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ValueError("Expected a map-style dataset to encode, one that has a length.")
    public = layer.public
    loader = DataLoader(dataset, batch_size=_AT_ONCE, collate_fn=collate_fn)
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


def encode_public(layer: PublicLayer, public: object) -> PublicData:
    """Public data as the layer sees them, for a method or a warm start behind `encode`.

    They keep the name, digest and fingerprints of the samples themselves, for the certificate and
    the search for copies.

    Examples:
        >>> import torch
        >>> import dpspan
        >>> images = torch.rand(50, 3, 16, 16)
        >>> features = dpspan.PatchFeatures.learn(images, filters=9, directions=20)
        >>> method = dpspan.GEP(public=dpspan.encode_public(features, images), rank=10)
    """
    data = PublicData.of(public)
    seen, raw = [], []
    for _, inputs, labels in data.pieces(_AT_ONCE):
        raw += fingerprints(inputs)
        seen.append((_seen(layer, inputs), *(() if labels is None else (labels,))))
    tensors = tuple(torch.cat(column) for column in zip(*seen, strict=True))
    held = PublicData.of(tensors, name=data.name)
    return replace(held, digest=data.digest, raw=tuple(raw))


@torch.no_grad()
def _seen(layer: PublicLayer, inputs: Tensor) -> Tensor:
    """What the layer makes of them, on the CPU.

    Every batch is padded to the same size: rounding depends on it, and a record's features must
    not reveal how many records there are.
    """
    filled = torch.cat([inputs, inputs.new_zeros(_AT_ONCE - len(inputs), *inputs.shape[1:])])
    seen: Tensor = layer(filled.to(next(layer.buffers()).device))
    return seen[: len(inputs)].cpu()
