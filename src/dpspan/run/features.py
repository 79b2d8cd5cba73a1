"""The data of a run as its frozen layer sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from dpspan.config.features import PatchesSection
from dpspan.data import Loaded
from dpspan.encoded import Encoded
from dpspan.patches import PatchFeatures
from dpspan.public import PublicData

_AT_ONCE = 512


def layer_of(
    section: PatchesSection,
    public: Mapping[str, PublicData],
    *,
    seed: int,
    device: torch.device,
    kept: Path | None,
) -> PatchFeatures:
    """The layer that is kept in a file, or one that is learnt now.

    Learnt again on another machine it would be another one, if only in its last digits and signs.
    """
    data = public[section.public]
    if kept is not None and kept.exists():
        return PatchFeatures.load(kept, data).to(device)
    return section.learn(data, seed=seed, device=device)


def records_seen_by(layer: PatchFeatures, loaded: Loaded) -> Loaded:
    """Private records or test samples; copies of public samples are still told by `raw`."""
    inputs, *labels = loaded.tensors
    seen = _seen(layer, inputs)
    name = type(layer).__name__
    dataset = Encoded(seen, labels[0], layer.public, name) if labels else TensorDataset(seen)
    return replace(loaded, dataset=dataset, shape=tuple(seen.shape[1:]))


def public_seen_by(layer: PatchFeatures, data: PublicData) -> PublicData:
    """Public data, for a method or a warm start."""
    parts = list(data.pieces(_AT_ONCE))
    inputs = torch.cat([_seen(layer, inputs) for _, inputs, _ in parts])
    labels = [labels for _, _, labels in parts if labels is not None]
    seen = PublicData.of((inputs, *([torch.cat(labels)] if labels else [])), name=data.name)
    return replace(seen, digest=data.digest)  # the certificate names what anybody can look at


@torch.no_grad()
def _seen(layer: PatchFeatures, inputs: Tensor) -> Tensor:
    device = layer.basis.device
    return torch.cat([layer(part.to(device)).cpu() for part in inputs.split(_AT_ONCE)])
