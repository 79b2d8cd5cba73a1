"""Private records as a frozen public layer sees them, computed once instead of in every epoch."""

from __future__ import annotations

from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from dpspan.checks import check_count
from dpspan.patches import PublicLayer
from dpspan.public import Collate, PublicData, refuse_overlap


class Encoded(TensorDataset):
    """What a layer made of (input, label) pairs. `public` is what the layer was learnt from."""

    def __init__(self, inputs: Tensor, labels: Tensor, public: PublicData, layer: str) -> None:
        super().__init__(inputs, labels)
        self.public, self.layer = public, layer


@torch.no_grad()
def encode(
    layer: PublicLayer,
    dataset: Dataset[Any],
    *,
    collate_fn: Collate = default_collate,
    batch_size: int = 512,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> Encoded:
    """The dataset as the layer sees it: train only what follows the layer on it.

    Each record's place holds what the layer makes of this record alone, so private training on it
    has the guarantee of private training on the records. Copies of the layer's public samples are
    refused here, and `make_private` puts those samples on the certificate.

    Args:
        layer: a `PatchFeatures`.
        dataset: pairs of an image and a label, not augmented at random.
        collate_fn: makes a batch of several pairs.
        batch_size: images at a time.
        device: where to compute; where the layer is, if left out. The result is on the CPU.
        progress: show a bar.

    Examples:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> import dpspan
        >>> features = dpspan.PatchFeatures.learn(torch.rand(50, 3, 16, 16), filters=8)
        >>> private = TensorDataset(torch.rand(20, 3, 16, 16), torch.arange(20))
        >>> len(dpspan.encode(features, private, progress=False))
        20
    """
    refuse_overlap(layer.public, dataset, collate_fn)
    place = next(layer.buffers()).device if device is None else torch.device(device)
    size = check_count("batch_size", batch_size)
    batches = DataLoader(dataset, batch_size=size, collate_fn=collate_fn)
    layer = layer.to(place)
    inputs, labels = [], []
    for batch in track(batches, "encoding", disable=not progress, transient=True):
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise ValueError("Expected pairs of an image and a label in the dataset to encode.")
        inputs.append(layer(batch[0].to(place)).cpu())
        labels.append(torch.as_tensor(batch[1]).cpu())
    if not inputs:
        raise ValueError("The dataset to encode is empty: give at least one record.")
    return Encoded(torch.cat(inputs), torch.cat(labels), layer.public, type(layer).__name__)


def encoded_by(dataset: Any) -> Encoded | None:
    """The encoded dataset that this one is, or has as its `dataset`, as a torch Subset does."""
    while not isinstance(dataset, Encoded):
        dataset = getattr(dataset, "dataset", None)
        if dataset is None:
            return None
    return dataset
