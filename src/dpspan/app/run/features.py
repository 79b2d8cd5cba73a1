"""The frozen layer of a run, learnt or kept, and the data as it sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from dpspan.app.config.models import PatchesSection
from dpspan.app.data import Loaded
from dpspan.public.data import PublicData
from dpspan.public.encoding import encode
from dpspan.public.patches import PatchFeatures


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
    if kept is None:
        return section.learn(data, seed=seed, device=device)
    layer = PatchFeatures.load(kept, data)
    if layer.settings != {**section.settings, "seed": seed}:
        raise ValueError(
            f"{kept} was learnt with other settings than the section `features`, or another seed. "
            "Go back to those, or choose another output folder."
        )
    return layer.to(device)


def seen_by(layer: PatchFeatures, loaded: Loaded) -> Loaded:
    """Private records or test samples."""
    encoded = encode(layer, loaded.dataset)
    return replace(loaded, dataset=encoded, shape=tuple(encoded.tensors[0].shape[1:]))
