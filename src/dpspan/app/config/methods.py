"""The sections of methods: what of a method stands in a configuration."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

import dpspan
from dpspan.app.section import BuiltSection, Count, Positive, Section, Share, refuse
from dpspan.support.moved import without_retired_options

if TYPE_CHECKING:
    from dpspan.app.run.full_batch import FullBatch
    from dpspan.mechanisms import Method

_Every = Annotated[int, Field(ge=0)]  # so many steps; 0 is never
_OF_PUBLIC = ("public_labels", "public_samples", "groups", "solver")  # no random subspace has them
_RULES = {
    "flat": "FlatClipping",
    "automatic": "AutomaticClipping",
    "adaptive": "AdaptiveClipping",
    "eigh": "Eigh",
    "lanczos": "Lanczos",
    "power": "PowerIteration",
}


class AdaptiveClippingSection(BuiltSection):
    """A clip that follows a quantile of the gradients' norms."""

    name: Literal["adaptive"] = "adaptive"
    quantile: Share = 0.5
    rate: Positive = 0.2
    share: Share = 0.01


_AnyClipping = Literal["flat", "automatic", "adaptive"] | AdaptiveClippingSection


class MethodSection(BuiltSection):
    """What all methods have: a clip."""

    clip: Positive = 1.0
    clipping: _AnyClipping = "flat"
    adapts: ClassVar[bool] = False  # whether the clip may move during the run

    @model_validator(mode="after")
    def _only_some_clips_move(self) -> Self:
        moves = self.clipping == "adaptive" or isinstance(self.clipping, AdaptiveClippingSection)
        if moves and not self.adapts:
            refuse("clipping", "An adaptive clip is for dpsgd and mirror: take flat or automatic.")
        return self

    @model_validator(mode="before")
    @classmethod
    def _take_those_of_before(cls, values: Any) -> Any:
        """Runs of 0.1 wrote down every option, also those that are gone."""
        return without_retired_options(values) if isinstance(values, dict) else values

    @property
    def needs_public(self) -> bool:
        return "public" in type(self).model_fields

    def arguments(self) -> dict[str, Any]:
        """The keys, with rules in place of their names."""
        found = super().arguments()
        named = {key: found[key] for key in ("clipping", "solver") if found.get(key) in _RULES}
        return found | {key: getattr(dpspan, _RULES[name])() for key, name in named.items()}

    def build(self, public: dpspan.PublicData | None, *, steps: int) -> Method:
        """The method, for a run of so many steps."""
        method: Method = self.built(**({"public": public} if self.needs_public else {}))
        return method


class DPSGDSection(MethodSection):
    """DP-SGD."""

    adapts: ClassVar[bool] = True
    name: Literal["dpsgd"] = "dpsgd"


class SubspaceMethodSection(MethodSection):
    """Methods in a subspace of public gradients, or (`random_subspace`) of random ones.

    `public` is a name under data.public; with a `choose` section it is left out.
    """

    of_the_file: ClassVar = (*MethodSection.of_the_file, "random_subspace")
    public: str | None = None
    random_subspace: bool = False
    rank: Count
    public_labels: Literal["random", "redrawn", "real"] = "random"
    public_samples: Count = 2000
    groups: Count | Literal["by_stage"] = 1
    refresh: Count = 1
    solver: Literal["eigh", "lanczos", "power"] = "eigh"
    diagnose: _Every = 0

    @model_validator(mode="after")
    def _random_directions_are_of_no_data(self) -> Self:
        for key in _OF_PUBLIC if self.random_subspace else ():
            if getattr(self, key) != type(self).model_fields[key].default:
                refuse(key, "This is for directions of public data: leave it out.")
        return self

    @property
    def needs_public(self) -> bool:
        return not self.random_subspace

    def arguments(self) -> dict[str, Any]:
        found = super().arguments()
        if self.random_subspace:
            kept = {key: found[key] for key in found if key not in ("rank", *_OF_PUBLIC)}
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
    """RGP; `warmup` is of carriers from history: so many steps have those of the weights."""

    of_the_file: ClassVar = (*MethodSection.of_the_file, "warmup")
    name: Literal["rgp"] = "rgp"
    rank: Count = 1
    carriers: Literal["history", "weights", "random"] = "history"
    warmup: Count = 1
    left_only: bool = False
    head_scale: Positive | None = None
    head_rate: Positive | None = None

    @model_validator(mode="after")
    def _options_that_go_together(self) -> Self:
        if self.warmup > 1 and self.carriers != "history":
            refuse("warmup", "Expected carriers: history, which a warm-up is for.")
        if self.head_rate is not None and self.head_scale is None:
            refuse("head_rate", "Expected head_scale beside head_rate.")
        return self

    def arguments(self) -> dict[str, Any]:
        found = super().arguments()
        if self.warmup == 1:
            return found
        from dpspan.mechanisms.carriers import History

        return {**found, "carriers": History(warmup=self.warmup)}


class MirrorDescentSection(MethodSection):
    """Mirror descent; `private_share` is a constant α, without it α falls as a cosine to 0."""

    of_the_file: ClassVar = (*MethodSection.of_the_file, "private_share")
    adapts: ClassVar[bool] = True
    name: Literal["mirror"] = "mirror"
    public: str | None = None
    private_share: Annotated[float, Field(ge=0, le=1)] | None = None
    public_samples: Count = 256
    public_clip: Positive | None = None
    diagnose: _Every = 0

    def build(self, public: dpspan.PublicData | None, *, steps: int) -> Method:
        share, falling = self.private_share, dpspan.CosineMixing(steps=steps)
        mixing = falling if share is None else dpspan.ConstantMixing(share=share)
        method: Method = self.built(public=public, mixing=mixing)
        return method


class ConvexSection(Section):
    """Logistic regression by a method of `dpspan.convex`, for tables: `model: {name: logistic}`.

    Each of `steps` uses all records, so epochs, batch size, optimizer and schedule have no meaning.
    The projected ones need `public`, as those in a subspace do.
    """

    name: Literal[
        "gd", "constrained", "projected", "adagrad", "adagrad-diagonal", "adagrad-released",
        "projected-adagrad", "projected-adagrad-released",
    ]  # fmt: skip
    clip: Positive = 1.0
    steps: Count = 30
    learning_rate: Positive | None = None
    public: str | None = None

    @property
    def needs_public(self) -> bool:
        return self.name.startswith("projected")

    def build(self, public: dpspan.PublicData | None, *, steps: int) -> FullBatch:
        from dpspan.app.run.full_batch import FullBatch
        from dpspan.convex.methods import METHODS

        rate = self.learning_rate or METHODS[self.name].learning_rate
        method = dataclasses.replace(METHODS[self.name], steps=self.steps, learning_rate=rate)
        return FullBatch(method=method, clip=self.clip, public=public)


AnyMethod = Annotated[
    DPSGDSection
    | PDPSGDSection
    | BiasedGEPSection
    | GEPSection
    | RGPSection
    | MirrorDescentSection
    | ConvexSection,
    Field(discriminator="name"),
]
