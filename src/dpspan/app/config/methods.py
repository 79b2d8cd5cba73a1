"""The `method` section: a method of dpspan by its name, with its settings.

Methods are imported when they are built: a mistake in a configuration waits for no torch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

import dpspan
from dpspan.app.config.section import Count, Positive, Section

if TYPE_CHECKING:
    from dpspan.mechanisms import Method
    from dpspan.mechanisms.clipping import ClippingRule
    from dpspan.subspaces.solvers import Solver

_CLIPPING: Mapping[str, Callable[[], ClippingRule]] = {
    "flat": lambda: dpspan.FlatClipping(),
    "automatic": lambda: dpspan.AutomaticClipping(),
}
_SOLVERS: Mapping[str, Callable[[], Solver]] = {
    "eigh": lambda: dpspan.Eigh(),
    "lanczos": lambda: dpspan.Lanczos(),
    "power": lambda: dpspan.PowerIteration(),
}


class MethodSection(Section):
    """What all methods have: a clip."""

    clip: Positive = 1.0
    clipping: Literal["flat", "automatic"] = "flat"

    @property
    def needs_public(self) -> bool:
        """Whether the method cannot do without public data."""
        return False

    @abstractmethod
    def build(self, public: dpspan.PublicData | None, *, steps: int) -> Method:
        """The method, for a run of so many steps."""

    def _clips(self) -> dict[str, Any]:
        return {"clip": self.clip, "clipping": _CLIPPING[self.clipping]()}


class DpsgdSection(MethodSection):
    """DP-SGD."""

    name: Literal["dpsgd"] = "dpsgd"

    def build(self, public: dpspan.PublicData | None, *, steps: int) -> Method:
        return dpspan.DPSGD(**self._clips())


class SubspaceSection(MethodSection):
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
    diagnose: Annotated[int, Field(ge=0)] = 0

    @property
    def needs_public(self) -> bool:
        return not self.random_subspace

    def _subspace(self, public: dpspan.PublicData | None) -> dict[str, Any]:
        source: dict[str, Any]
        if self.random_subspace:
            source = {"subspace": dpspan.RandomSubspace(rank=self.rank)}
        else:
            source = {
                "public": public,
                "rank": self.rank,
                "public_labels": self.public_labels,
                "public_samples": self.public_samples,
                "groups": dpspan.by_stage if self.groups == "by_stage" else self.groups,
                "solver": _SOLVERS[self.solver](),
            }
        return {**self._clips(), **source, "refresh": self.refresh, "diagnose": self.diagnose}


class PdpsgdSection(SubspaceSection):
    """PDP-SGD; plain DP-SGD before `start_epoch`."""

    name: Literal["pdpsgd"] = "pdpsgd"
    start_epoch: Annotated[int, Field(ge=0)] = 0

    def build(self, public: dpspan.PublicData | None, *, steps: int) -> Method:
        return dpspan.PDPSGD(**self._subspace(public), start_epoch=self.start_epoch)


class BiasedGepSection(SubspaceSection):
    """GEP without the residual."""

    name: Literal["biased-gep"] = "biased-gep"

    def build(self, public: dpspan.PublicData | None, *, steps: int) -> Method:
        return dpspan.BiasedGEP(**self._subspace(public))


class GepSection(SubspaceSection):
    """GEP."""

    name: Literal["gep"] = "gep"
    residual_clip: Positive | None = None

    def build(self, public: dpspan.PublicData | None, *, steps: int) -> Method:
        return dpspan.GEP(
            **self._subspace(public),
            residual_clip=self.residual_clip,
        )


class RgpSection(MethodSection):
    """RGP."""

    name: Literal["rgp"] = "rgp"
    rank: Count = 1
    carriers: Literal["history", "random"] = "history"
    left_only: bool = False
    full_scale: Positive = 1.0

    def build(self, public: dpspan.PublicData | None, *, steps: int) -> Method:
        return dpspan.RGP(
            **self._clips(),
            rank=self.rank,
            carriers=self.carriers,
            left_only=self.left_only,
            full_scale=self.full_scale,
        )


class MirrorSection(MethodSection):
    """Mirror descent; `private_share` is a constant α, without it α falls as a cosine to 0."""

    name: Literal["mirror"] = "mirror"
    public: str | None = None
    private_share: Annotated[float, Field(ge=0, le=1)] | None = None
    public_samples: Count = 256
    public_clip: Positive | None = None
    diagnose: Annotated[int, Field(ge=0)] = 0

    @property
    def needs_public(self) -> bool:
        return True

    def build(self, public: dpspan.PublicData | None, *, steps: int) -> Method:
        share = self.private_share
        return dpspan.MirrorDescent(
            public=public,
            mixing=dpspan.CosineMixing(steps=steps)
            if share is None
            else dpspan.ConstantMixing(share=share),
            public_samples=self.public_samples,
            public_clip=self.public_clip,
            diagnose=self.diagnose,
            **self._clips(),
        )


AnyMethod = Annotated[
    DpsgdSection | PdpsgdSection | BiasedGepSection | GepSection | RgpSection | MirrorSection,
    Field(discriminator="name"),
]
