"""Models of an experiment on frozen features of public patches: a small head is trained."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import nn

from dpspan import PatchFeatures, PatchMaps
from dpspan.config.models import AnyModel
from dpspan.models import MLP
from dpspan.patches import PublicLayer
from dpspan.public import PublicData
from dpspan.section import Count, Counts, Section
from experiments.images import Images


class PatchSection(Section):
    """What both layers are learnt with; `public` is the name of public data."""

    public: str
    filters: Count = 1000
    size: Counts = (6,)
    threshold: float = 0.25
    mirror: bool = True
    whitening: float
    grid: Count
    directions: Count


class FeaturesModel(PatchSection):
    """`PatchFeatures`, and fully connected layers on top."""

    name: Literal["patch-features"] = "patch-features"
    grid: Count = 2
    directions: Count = 2000
    whitening: float = 0.6
    hidden: Counts = ()

    def layer(self, public: PublicData, *, seed: int, device: str) -> PublicLayer:
        """The frozen layer."""
        settings = self.model_dump(exclude={"name", "public", "hidden"})
        return PatchFeatures.learn(public, **settings, seed=seed, device=device)

    def head(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """What is trained."""
        return MLP(shape[0], self.hidden, classes)


class MapsModel(PatchSection):
    """`PatchMaps`, a convolution, means over a grid, and a linear layer."""

    name: Literal["patch-maps"] = "patch-maps"
    grid: Count = 6
    directions: Count = 256
    whitening: float = 0.5
    channels: Count = 64
    pooled: Count = 3

    def layer(self, public: PublicData, *, seed: int, device: str) -> PublicLayer:
        """The frozen layer."""
        settings = self.model_dump(exclude={"name", "public", "channels", "pooled"})
        return PatchMaps.learn(public, **settings, seed=seed, device=device)

    def head(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """What is trained."""
        return nn.Sequential(
            nn.Conv2d(shape[0], self.channels, 3, padding=1),
            nn.GroupNorm(8, self.channels),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(self.pooled),
            nn.Flatten(),
            nn.Linear(self.channels * self.pooled**2, classes),
        )


AnyExperimentModel = Annotated[AnyModel | FeaturesModel | MapsModel, Field(discriminator="name")]


@torch.no_grad()
def public_seen_by(layer: PublicLayer, public: PublicData) -> PublicData:
    """The same of public data, as a method that follows the layer wants them."""
    inputs, *labels = public.batches[0]
    parts = [layer(part.to(next(layer.buffers()).device)).cpu() for part in inputs.split(512)]
    return PublicData.of((torch.cat(parts), *labels), name=public.name)


@torch.no_grad()
def seen_by(layer: PublicLayer, images: Images) -> Images:
    """What the layer makes of each image; images without any stay as they are."""
    parts = [layer(part) for part in images.x.split(512)]
    return Images(torch.cat(parts), images.y) if len(images) else images
