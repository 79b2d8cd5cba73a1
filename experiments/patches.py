"""A model of an experiment: a frozen layer of public patches, then a small network."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import nn

from dpspan import PatchFeatures
from dpspan.config.models import AnyModel
from dpspan.models import MLP
from dpspan.section import Count, Counts, Section
from experiments.data import Data


class PatchesModel(Section):
    """`PatchFeatures` of the public data of that name, and fully connected layers on top."""

    name: Literal["patches"] = "patches"
    public: str
    filters: Count = 1000
    size: Count = 6
    grid: Count = 2
    threshold: float = 0.25
    directions: Count = 1000
    whitening: float = 0.6
    hidden: Counts = ()

    def build(self, data: Data, *, seed: int) -> nn.Module:
        """Filters, directions and weights of that seed."""
        features = PatchFeatures.learn(
            data.public[self.public],
            **self.model_dump(exclude={"name", "public", "hidden"}),
            seed=seed,
            device="cuda" if torch.cuda.is_available() else "cpu",
        ).cpu()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            head = MLP(features.basis.shape[1], self.hidden, data.classes)
        return nn.Sequential(features, head)


AnyExperimentModel = Annotated[AnyModel | PatchesModel, Field(discriminator="name")]
