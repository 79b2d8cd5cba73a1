"""Models of an experiment on frozen features of public patches: a small head is trained."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import nn

from dpspan.app.config.sections import AnyModel, PatchesSection
from dpspan.app.run.models import draw_model
from dpspan.app.section import Counts
from dpspan.model.networks import MLP
from dpspan.public.patches import PatchFeatures
from experiments.images import Images


class PatchesModel(PatchesSection):
    """`PatchFeatures` of the public data of that name, and fully connected layers on top."""

    hidden: Counts = ()

    @property
    def settings(self) -> dict[str, Any]:
        """What the layer is learnt with; `hidden` is of those on top."""
        return {key: value for key, value in super().settings.items() if key != "hidden"}

    def head(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """What is trained."""
        return MLP(shape[0], self.hidden, classes)


AnyExperimentModel = Annotated[AnyModel | PatchesModel, Field(discriminator="name")]


def drawn(section: AnyModel, data: Any, seed: int) -> nn.Module:
    """The same network for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return draw_model(section, data)


@torch.no_grad()
def seen_by(layer: PatchFeatures, images: Images) -> Images:
    """What the layer makes of each image; images without any stay as they are."""
    parts = [layer(part) for part in images.x.split(512)]
    return Images(torch.cat(parts), images.y) if len(images) else images
