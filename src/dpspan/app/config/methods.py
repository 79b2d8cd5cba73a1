"""The `method` section: a method of dpspan by its name, with its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

import dpspan
from dpspan.app.section import BuiltSection, Count, Positive

if TYPE_CHECKING:
    from dpspan.mechanisms import Method

_Every = Annotated[int, Field(ge=0)]  # so many steps; 0 is never
_RULES = {
    "flat": "FlatClipping",
    "automatic": "AutomaticClipping",
    "eigh": "Eigh",
    "lanczos": "Lanczos",
    "power": "PowerIteration",
}


class MethodSection(BuiltSection):
    """What all methods have: a clip."""

    clip: Positive = 1.0
    clipping: Literal["flat", "automatic"] = "flat"

    @property
    def needs_public(self) -> bool:
        """Whether the method cannot do without public data."""
        return "public" in type(self).model_fields

    def arguments(self) -> dict[str, Any]:
        """The keys, with rules in place of their names."""
        found = super().arguments()
        rules = {key: _RULES[found[key]] for key in ("clipping", "solver") if key in found}
        return found | {key: getattr(dpspan, rule)() for key, rule in rules.items()}

    def build(self, public: dpspan.PublicData | None, *, steps: int) -> Method:
        """The method, for a run of so many steps."""
        method: Method = self.built(**({"public": public} if self.needs_public else {}))
        return method


class DPSGDSection(MethodSection):
    """DP-SGD."""

    name: Literal["dpsgd"] = "dpsgd"


class SubspaceMethodSection(MethodSection):
    """Methods in a subspace of public gradients, or (`random_subspace`) of random ones.

    `public` is a name under data.public; with a `choose` section it is left out.
    """

    public: str | None = None
    random_subspace: bool = False
    rank: Count
    public_labels: Literal["random", "redrawn", "real"] = "random"
    public_samples: Count = 2000
    groups: Count | Literal["by_stage"] = 1
    refresh: Count = 1
    solver: Literal["eigh", "lanczos", "power"] = "eigh"
    diagnose: _Every = 0

    @property
    def needs_public(self) -> bool:
        return not self.random_subspace

    def arguments(self) -> dict[str, Any]:
        found = super().arguments()
        if found.pop("random_subspace"):
            of_public = ("public", "rank", "public_labels", "public_samples", "groups", "solver")
            kept = {key: value for key, value in found.items() if key not in of_public}
            return {**kept, "subspace": dpspan.RandomSubspace(rank=self.rank)}
        return found | ({"groups": dpspan.by_stage} if self.groups == "by_stage" else {})


class PDPSGDSection(SubspaceMethodSection):
    """PDP-SGD; plain DP-SGD before `start_epoch`."""

    name: Literal["pdpsgd"] = "pdpsgd"
    start_epoch: _Every = 0


class BiasedGEPSection(SubspaceMethodSection):
    """GEP without the residual."""

    name: Literal["biased-gep"] = "biased-gep"


class GEPSection(SubspaceMethodSection):
    """GEP."""

    name: Literal["gep"] = "gep"
    residual_clip: Positive | None = None


class RGPSection(MethodSection):
    """RGP."""

    name: Literal["rgp"] = "rgp"
    rank: Count = 1
    carriers: Literal["history", "random"] = "history"
    left_only: bool = False


class MirrorDescentSection(MethodSection):
    """Mirror descent; `private_share` is a constant α, without it α falls as a cosine to 0."""

    name: Literal["mirror"] = "mirror"
    public: str | None = None
    private_share: Annotated[float, Field(ge=0, le=1)] | None = None
    public_samples: Count = 256
    public_clip: Positive | None = None
    diagnose: _Every = 0

    def arguments(self) -> dict[str, Any]:
        found = super().arguments()
        share = found.pop("private_share")
        return found if share is None else {**found, "mixing": dpspan.ConstantMixing(share=share)}

    def build(self, public: dpspan.PublicData | None, *, steps: int) -> Method:
        mixing = {"mixing": dpspan.CosineMixing(steps=steps)} if self.private_share is None else {}
        method: Method = self.built(public=public, **mixing)
        return method


AnyMethod = Annotated[
    DPSGDSection
    | PDPSGDSection
    | BiasedGEPSection
    | GEPSection
    | RGPSection
    | MirrorDescentSection,
    Field(discriminator="name"),
]
