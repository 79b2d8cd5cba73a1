"""The `features` section: a frozen layer, learnt from public data, that the model comes after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

import dpspan
from dpspan.app.config.section import Count, Counts, Section

if TYPE_CHECKING:
    import torch


class PatchesSection(Section):
    """`PatchFeatures` of the public data of that name, whose labels are not used."""

    name: Literal["patches"] = "patches"
    public: str
    filters: Count = 1200
    size: Annotated[Counts, Field(min_length=1)] = (4, 6, 9)
    grid: Count | Annotated[Counts, Field(min_length=1)] = 2
    threshold: Annotated[float, Field(ge=0, lt=100)] = 0.25
    mirror: bool = True
    power: Annotated[float, Field(gt=0, le=1)] = 0.6
    directions: Count = 1000
    whitening: Annotated[float, Field(ge=0, le=1)] = 0.75
    views: Count = 3

    @property
    def settings(self) -> dict[str, Any]:
        """What the layer is learnt with."""
        fields = set(PatchesSection.model_fields) - {"name", "public"}
        found: dict[str, Any] = self.model_dump(mode="json", include=fields)
        return found

    def learn(
        self, public: dpspan.PublicData, *, seed: int, device: torch.device | str
    ) -> dpspan.PatchFeatures:
        """The layer."""
        return dpspan.PatchFeatures.learn(public, **self.settings, seed=seed, device=device)
