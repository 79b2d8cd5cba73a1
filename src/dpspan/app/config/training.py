"""The sections that say how to train: optimizer, schedule, what is trained, the warm start."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

import dpspan
from dpspan.app.section import (
    BelowOne,
    BuiltSection,
    Count,
    NotNegative,
    Positive,
    Section,
    Share,
    Texts,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from dpspan.model.trainable import Trainable


class SgdSection(Section):
    """SGD."""

    learning_rate: Positive
    weight_decay: NotNegative = 0.0
    name: Literal["sgd"] = "sgd"
    momentum: BelowOne = 0.0

    def build(self, parameters: Iterable[nn.Parameter], lr: float | None = None) -> Optimizer:
        """The optimizer, with another learning rate if one is given."""
        from torch.optim import SGD

        lr = self.learning_rate if lr is None else lr
        return SGD(parameters, lr=lr, momentum=self.momentum, weight_decay=self.weight_decay)


class AdamSection(Section):
    """Adam, with decoupled weight decay as in AdamW."""

    learning_rate: Positive
    weight_decay: NotNegative = 0.0
    name: Literal["adam"] = "adam"
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.999

    def build(self, parameters: Iterable[nn.Parameter], lr: float | None = None) -> Optimizer:
        """The optimizer, with another learning rate if one is given."""
        from torch.optim import AdamW

        lr, betas = self.learning_rate if lr is None else lr, (self.beta1, self.beta2)
        return AdamW(parameters, lr=lr, betas=betas, weight_decay=self.weight_decay)


class ConstantSection(Section):
    """The same learning rate throughout."""

    name: Literal["constant"] = "constant"

    def factor(self, step: int, steps: int) -> float:
        """What the learning rate is multiplied by at a step of so many."""
        return 1.0


class LinearSection(Section):
    """From the learning rate down to 0 in a straight line."""

    name: Literal["linear"] = "linear"

    def factor(self, step: int, steps: int) -> float:
        """1 − t."""
        return 1 - step / steps


class CosineSection(Section):
    """From the learning rate down to 0, after a linear rise over `warmup` of the steps."""

    name: Literal["cosine"] = "cosine"
    warmup: BelowOne = 0.0

    def factor(self, step: int, steps: int) -> float:
        """(1 + cos πt)/2."""
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
        """divide_by^−(milestones passed)."""
        return float(self.divide_by ** -sum(step >= share * steps for share in self.at))


AnySchedule = Annotated[
    ConstantSection | LinearSection | CosineSection | StepsSection, Field(discriminator="name")
]


class TrainingSection(Section):
    """How long, in which batches and by which optimizer.

    `batch_size` is the expected one: batches are Poisson samples. `physical_batch_size` is the
    most samples to process at once. `seed` is of the model's first weights, never of the noise.
    """

    epochs: Count
    batch_size: Count
    optimizer: Annotated[SgdSection | AdamSection, Field(discriminator="name")]
    schedule: AnySchedule = ConstantSection()
    physical_batch_size: Count | None = None
    device: str = "auto"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0


class TrainableSection(BuiltSection):
    """Which part of the model is trained."""

    def build(self) -> Trainable:
        """The choice of parameters."""
        trainable: Trainable = self.built()
        return trainable


class LastLayersSection(TrainableSection):
    """The last `count` layers."""

    name: Literal["last-layers"] = "last-layers"
    count: Count = 1


class FirstAndLastSection(TrainableSection):
    """The first layer and the last."""

    name: Literal["first-and-last"] = "first-and-last"


class NamedSection(TrainableSection):
    """Modules and parameters by their paths."""

    name: Literal["named"] = "named"
    paths: Texts = Field(min_length=1)


class BiasOnlySection(TrainableSection):
    """Every bias, and the modules in `also`."""

    name: Literal["bias"] = "bias"
    also: Texts = ()


class LoRASection(TrainableSection):
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


class RandomAffineSection(BuiltSection):
    """Random rotation, shift, scale, shear and mirroring of images."""

    name: Literal["affine"] = "affine"
    degrees: NotNegative = 12.0
    shift: NotNegative = 0.1
    scale: BelowOne = 0.1
    shear: NotNegative = 0.1
    mirror: bool = False


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
        self, data: dpspan.PublicData, trainable: Trainable | None, *, seed: int
    ) -> dpspan.WarmStart:
        """The warm start on these data."""
        settings: dict[str, Any] = self.arguments() | {"data": data, "seed": seed}
        del settings["public"]
        settings["augment"] = self.augment.built() if self.augment else None
        if trainable is None:
            return dpspan.WarmStart(**settings)
        return dpspan.SecondPhase(**settings, trainable=trainable)
