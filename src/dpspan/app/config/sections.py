"""The sections that say what is trained and how: model, features, optimizer and so on."""

from __future__ import annotations

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

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


class ModelSection(Section):
    """What all have; `fix` replaces layers that mix samples, `standardised` all convolutions."""

    if_used: ClassVar = ("standardised",)
    fix: bool = False
    standardised: bool = False


class NetworkSection(ModelSection):
    """Logistic or linear regression, the papers' CNN, ResNet-20 with GroupNorm, GSD's probe."""

    name: Literal["logistic", "linear", "cnn", "resnet20", "probe"]


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


class FeaturesSection(Section):
    """What all have: a name under data.public."""

    public: str

    @property
    def settings(self) -> dict[str, Any]:
        """What the layer is learnt with."""
        return self.model_dump(mode="json", exclude={"name", "public"})


class PatchesSection(FeaturesSection):
    """`PatchFeatures` of the public data of that name, whose labels are not used."""

    name: Literal["patches"] = "patches"
    filters: Count = 1200
    size: Annotated[Counts, Field(min_length=1)] = (4, 6, 9)
    grid: Count | Annotated[Counts, Field(min_length=1)] = 2
    threshold: Annotated[float, Field(ge=0, lt=100)] = 0.25
    mirror: bool = True
    rotation: Annotated[float, Field(ge=0, le=180)] = 0.0
    power: Annotated[float, Field(gt=0, le=1)] = 0.6
    directions: Count = 1000
    whitening: Annotated[float, Field(ge=0, le=1)] = 0.75
    views: Count = 3
    second: Annotated[int, Field(ge=0)] = 0


class PretrainedSection(FeaturesSection):
    """`PretrainedFeatures`: the network of that name or folder, scaled by the public data."""

    name: Literal["pretrained"] = "pretrained"
    model: str
    side: Count | None = None


class ThermometerSection(FeaturesSection):
    """`ThermometerFeatures` of a table by the public data of that name: cut points a column."""

    name: Literal["thermometer"] = "thermometer"
    cuts: Count = 4
    limit: Annotated[float, Field(ge=1)] = 3.0


AnyFeatures = Annotated[
    PatchesSection | PretrainedSection | ThermometerSection, Field(discriminator="name")
]


class OptimizerSection(Section):
    """What all optimizers have; `build` takes the learning rate that it is called with."""

    learning_rate: Positive
    weight_decay: NotNegative = 0.0


class SgdSection(OptimizerSection):
    """SGD."""

    name: Literal["sgd"] = "sgd"
    momentum: BelowOne = 0.0

    def build(self, parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
        from torch.optim import SGD

        return SGD(parameters, lr=lr, momentum=self.momentum, weight_decay=self.weight_decay)


class AdamSection(OptimizerSection):
    """Adam, with decoupled weight decay as in AdamW."""

    name: Literal["adam"] = "adam"
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.999

    def build(self, parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
        from torch.optim import AdamW

        betas = (self.beta1, self.beta2)
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
        if trainable is None:
            return dpspan.WarmStart(**settings)
        return dpspan.SecondPhase(**settings, trainable=trainable.built())
