"""The sections that say what is trained and how: model, features, method, optimizer and so on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

import dpspan
from dpspan.app.section import (
    BelowOne,
    BuiltSection,
    Count,
    Counts,
    File,
    NotNegative,
    Positive,
    Section,
    Share,
    Texts,
    refuse,
)
from dpspan.support.moved import without_retired_options

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from dpspan.app.run.full_batch import FullBatch
    from dpspan.mechanisms import Method

_Every = Annotated[int, Field(ge=0)]  # so many steps; 0 is never
_RULES = {
    "flat": "FlatClipping",
    "automatic": "AutomaticClipping",
    "adaptive": "AdaptiveClipping",
    "eigh": "Eigh",
    "lanczos": "Lanczos",
    "power": "PowerIteration",
}


class ModelSection(Section):
    """What all have; `fix` replaces layers that mix samples, `standardised` all convolutions."""

    if_used: ClassVar = ("standardised",)
    fix: bool = False
    standardised: bool = False


class NetworkSection(ModelSection):
    """Logistic regression, the papers' small CNN, ResNet-20 with GroupNorm, or GSD's probe."""

    name: Literal["logistic", "cnn", "resnet20", "probe"]


class MlpSection(ModelSection):
    """Fully connected network."""

    name: Literal["mlp"] = "mlp"
    hidden: Counts = (128,)


class WideResNetSection(ModelSection):
    """Wide ResNet with GroupNorm; WRN-28-4 by default."""

    name: Literal["wide-resnet"] = "wide-resnet"
    depth: Count = 28
    widen: Count = 4


class OwnSection(ModelSection):
    """A function or class of the user's, `package.module:name`, called with `arguments`."""

    factory: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class FactorySection(OwnSection):
    """With the weights that the factory gives it."""

    name: Literal["factory"] = "factory"


class CheckpointSection(OwnSection):
    """With weights from a file: safetensors, or a state_dict that torch saved.

    They must not come from training on the private data: nothing would account for that.
    """

    name: Literal["checkpoint"] = "checkpoint"
    weights: File


AnyModel = Annotated[
    NetworkSection | MlpSection | WideResNetSection | FactorySection | CheckpointSection,
    Field(discriminator="name"),
]


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
        keys = set(PatchesSection.model_fields) - {"name", "public"}
        return self.model_dump(mode="json", include=keys)


class PretrainedSection(Section):
    """`PretrainedFeatures`: the network of that name or folder, scaled by the public data."""

    name: Literal["pretrained"] = "pretrained"
    public: str
    model: str
    side: Count | None = None

    @property
    def settings(self) -> dict[str, Any]:
        return {"model": self.model, "side": self.side}


AnyFeatures = Annotated[PatchesSection | PretrainedSection, Field(discriminator="name")]


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
        for key in {"clipping", "solver"} & found.keys():
            rule = found[key]
            found[key] = (
                rule.built() if isinstance(rule, BuiltSection) else getattr(dpspan, _RULES[rule])()
            )
        return found

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

    @property
    def needs_public(self) -> bool:
        return not self.random_subspace

    def arguments(self) -> dict[str, Any]:
        found = super().arguments()
        if self.random_subspace:
            for key in ("rank", "public_labels", "public_samples", "groups", "solver"):
                del found[key]
            return {**found, "subspace": dpspan.RandomSubspace(rank=self.rank)}
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


class OptimizerSection(Section):
    """What all optimizers have; `build` takes another learning rate if one is given."""

    learning_rate: Positive
    weight_decay: NotNegative = 0.0


class SgdSection(OptimizerSection):
    """SGD."""

    name: Literal["sgd"] = "sgd"
    momentum: BelowOne = 0.0

    def build(self, parameters: Iterable[nn.Parameter], lr: float | None = None) -> Optimizer:
        from torch.optim import SGD

        lr = lr or self.learning_rate
        return SGD(parameters, lr=lr, momentum=self.momentum, weight_decay=self.weight_decay)


class AdamSection(OptimizerSection):
    """Adam, with decoupled weight decay as in AdamW."""

    name: Literal["adam"] = "adam"
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.999

    def build(self, parameters: Iterable[nn.Parameter], lr: float | None = None) -> Optimizer:
        from torch.optim import AdamW

        lr, betas = lr or self.learning_rate, (self.beta1, self.beta2)
        return AdamW(parameters, lr=lr, betas=betas, weight_decay=self.weight_decay)


# `factor` of a schedule is what the learning rate is multiplied by at a step of so many.
class ConstantSection(Section):
    """The same learning rate throughout."""

    name: Literal["constant"] = "constant"

    def factor(self, step: int, steps: int) -> float:
        return 1.0


class LinearSection(Section):
    """From the learning rate down to 0 in a straight line."""

    name: Literal["linear"] = "linear"

    def factor(self, step: int, steps: int) -> float:
        return 1 - step / steps


class CosineSection(Section):
    """From the learning rate down to 0, after a linear rise over `warmup` of the steps."""

    name: Literal["cosine"] = "cosine"
    warmup: BelowOne = 0.0

    def factor(self, step: int, steps: int) -> float:
        rising = self.warmup * steps
        if step < rising:
            return (step + 1) / (rising + 1)
        return (1 + math.cos(math.pi * (step - rising) / max(steps - rising, 1))) / 2


class StepsSection(Section):
    """Divided by `divide_by` at each of these shares of the run, GEP's schedule by default."""

    name: Literal["steps"] = "steps"
    at: Annotated[tuple[Share, ...], Field(strict=False)] = (0.5, 0.75)
    divide_by: Positive = 10.0

    def factor(self, step: int, steps: int) -> float:
        return float(self.divide_by ** -sum(step >= share * steps for share in self.at))


AnySchedule = Annotated[
    ConstantSection | LinearSection | CosineSection | StepsSection, Field(discriminator="name")
]


class RandomAffineSection(BuiltSection):
    """Random rotation, shift, scale, shear and mirroring of images."""

    name: Literal["affine"] = "affine"
    degrees: NotNegative = 12.0
    shift: NotNegative = 0.1
    scale: BelowOne = 0.1
    shear: NotNegative = 0.1
    mirror: bool = False


class TrainingSection(Section):
    """How long, in which batches and by which optimizer.

    `batch_size` is the expected one: batches are Poisson samples. `physical_batch_size` is the
    most samples to process at once. With `cuda_graphs` a GPU waits for no launches, and every batch
    is filled up to one size. `seed` is of the model's first weights, never of the noise.
    `augment` changes images at random; of `views` such copies the mean gradient counts. `low_pass`
    filters what steps release, and `average_weights` is of the model that is kept.
    """

    if_used: ClassVar = ("augment", "views", "low_pass", "average_weights")
    epochs: Count
    batch_size: Count
    optimizer: Annotated[SgdSection | AdamSection, Field(discriminator="name")]
    schedule: AnySchedule = ConstantSection()
    physical_batch_size: Count | None = None
    cuda_graphs: bool = False
    device: str = "auto"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    augment: RandomAffineSection | None = None
    views: Count = 1
    low_pass: Share | None = None
    average_weights: Share | None = None

    @model_validator(mode="after")
    def _views_differ(self) -> Self:
        if self.views > 1 and self.augment is None:
            refuse("views", "Expected `augment` beside it: without it all views are the same.")
        return self


class LastLayersSection(BuiltSection):
    """The last `count` layers."""

    name: Literal["last-layers"] = "last-layers"
    count: Count = 1


class FirstAndLastSection(BuiltSection):
    """The first layer and the last."""

    name: Literal["first-and-last"] = "first-and-last"


class NamedSection(BuiltSection):
    """Modules and parameters by their paths."""

    name: Literal["named"] = "named"
    paths: Texts = Field(min_length=1)


class BiasOnlySection(BuiltSection):
    """Every bias, and the modules in `also`."""

    name: Literal["bias"] = "bias"
    also: Texts = ()


class LoRASection(BuiltSection):
    """Low-rank adapters (the extra `lora`)."""

    name: Literal["lora"] = "lora"
    rank: Count = 8
    alpha: Count | None = None
    targets: Texts | None = None
    also: Texts = ()


AnyTrainable = Annotated[
    LastLayersSection | FirstAndLastSection | NamedSection | BiasOnlySection | LoRASection,
    Field(discriminator="name"),
]


class WarmStartSection(BuiltSection):
    """Training on labelled public data first; with a `trainable` section, a second phase."""

    public: str
    max_epochs: Count = 200
    batch_size: Count = 50
    learning_rate: Positive = 1e-3
    weight_decay: NotNegative = 0.0
    validation: BelowOne = 0.2
    patience: Count = 20
    augment: RandomAffineSection | None = None

    def build(
        self, data: dpspan.PublicData, trainable: AnyTrainable | None, *, seed: int
    ) -> dpspan.WarmStart:
        settings = {**self.arguments(), "data": data, "seed": seed}
        settings["augment"] = self.augment.built() if self.augment else None
        if trainable is None:
            return dpspan.WarmStart(**settings)
        return dpspan.SecondPhase(**settings, trainable=trainable.built())
