"""The sections that say how to train: optimizer, schedule, what is trained, the warm start."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

import dpspan
from dpspan.app.config.section import Count, Positive, Section, Share, Texts

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from dpspan.model.trainable import Trainable

NotNegative = Annotated[float, Field(ge=0)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class OptimizerSection(Section):
    """What all optimizers have."""

    learning_rate: Positive
    weight_decay: NotNegative = 0.0

    @abstractmethod
    def build(self, parameters: Iterable[nn.Parameter], lr: float | None = None) -> Optimizer:
        """The optimizer, with another learning rate if one is given."""


class SgdSection(OptimizerSection):
    """SGD."""

    name: Literal["sgd"] = "sgd"
    momentum: BelowOne = 0.0

    def build(self, parameters: Iterable[nn.Parameter], lr: float | None = None) -> Optimizer:
        from torch.optim import SGD

        return SGD(
            parameters,
            lr=self.learning_rate if lr is None else lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )


class AdamSection(OptimizerSection):
    """Adam, with decoupled weight decay as in AdamW."""

    name: Literal["adam"] = "adam"
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.999

    def build(self, parameters: Iterable[nn.Parameter], lr: float | None = None) -> Optimizer:
        from torch.optim import AdamW

        return AdamW(
            parameters,
            lr=self.learning_rate if lr is None else lr,
            betas=(self.beta1, self.beta2),
            weight_decay=self.weight_decay,
        )


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
        passed = sum(step >= share * steps for share in self.at)
        return float(self.divide_by**-passed)


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
    seed: Seed = 0


class LastLayersSection(Section):
    """The last `count` layers."""

    name: Literal["last-layers"] = "last-layers"
    count: Count = 1

    def build(self) -> Trainable:
        return dpspan.LastLayers(self.count)


class FirstAndLastSection(Section):
    """The first layer and the last."""

    name: Literal["first-and-last"] = "first-and-last"

    def build(self) -> Trainable:
        return dpspan.FirstAndLast()


class NamedSection(Section):
    """Modules and parameters by their paths."""

    name: Literal["named"] = "named"
    paths: Texts = Field(min_length=1)

    def build(self) -> Trainable:
        return dpspan.Named(self.paths)


class BiasSection(Section):
    """Every bias, and the modules in `also`."""

    name: Literal["bias"] = "bias"
    also: Texts = ()

    def build(self) -> Trainable:
        return dpspan.BiasOnly(also=self.also)


class LoraSection(Section):
    """Low-rank adapters (the extra `lora`)."""

    name: Literal["lora"] = "lora"
    rank: Count = 8
    alpha: Count | None = None
    targets: Texts | None = None
    also: Texts = ()

    def build(self) -> Trainable:
        return dpspan.LoRA(rank=self.rank, alpha=self.alpha, targets=self.targets, also=self.also)


AnyTrainable = Annotated[
    LastLayersSection | FirstAndLastSection | NamedSection | BiasSection | LoraSection,
    Field(discriminator="name"),
]


class AffineSection(Section):
    """Random rotation, shift, scale, shear and mirroring of images."""

    name: Literal["affine"] = "affine"
    degrees: NotNegative = 12.0
    shift: NotNegative = 0.1
    scale: BelowOne = 0.1
    shear: NotNegative = 0.1
    mirror: bool = False

    def build(self) -> dpspan.RandomAffine:
        return dpspan.RandomAffine(**self.model_dump(exclude={"name"}))


class WarmStartSection(Section):
    """Training on labelled public data first; with a `trainable` section, a second phase."""

    public: str
    max_epochs: Count = 200
    batch_size: Count = 50
    learning_rate: Positive = 1e-3
    weight_decay: NotNegative = 0.0
    validation: BelowOne = 0.2
    patience: Count = 20
    augment: AffineSection | None = None

    def build(
        self, data: dpspan.PublicData, trainable: Trainable | None, *, seed: int
    ) -> dpspan.WarmStart:
        """The warm start on these data."""
        settings: dict[str, Any] = self.model_dump(exclude={"public", "augment"})
        settings |= {"seed": seed, "augment": self.augment.build() if self.augment else None}
        if trainable is None:
            return dpspan.WarmStart(data=data, **settings)
        return dpspan.SecondPhase(data=data, trainable=trainable, **settings)
