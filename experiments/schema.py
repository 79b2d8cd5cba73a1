"""What a training experiment's YAML file says: the data, the model, and the rows of a table."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from dpspan.app.config.methods import AnyMethod, MethodSection
from dpspan.app.config.sections import (
    AdamSection,
    AnyModel,
    AnySchedule,
    AnyTrainable,
    ConstantSection,
    SgdSection,
    WarmStartSection,
)
from dpspan.app.section import Count, Numbers, Positive, Section, Share, Texts
from experiments.anchors import Anchor
from experiments.data import AnyData
from experiments.linear import ConvexSection
from experiments.patches import AnyExperimentModel, PatchesModel
from experiments.pretraining import Pretraining
from experiments.public_gradients import AnyPublicGradientMethod
from experiments.trajectory import AnyTrajectoryMethod

NON_PRIVATE, PUBLIC_ONLY = "non-private", "public only"

AnyExperimentMethod = Annotated[
    AnyMethod | AnyPublicGradientMethod | AnyTrajectoryMethod, Field(discriminator="name")
]


class Sgd(SgdSection):
    """SGD at each of a row's learning rates."""

    learning_rate: Positive = 1.0


class Adam(AdamSection):
    """Adam at each of a row's learning rates."""

    learning_rate: Positive = 1.0


class Training(Section):
    """How a row is trained. The learning rate falls by epoch; `epochs` may differ by target.

    `views` are randomly shifted and mirrored copies of an image, whose gradients are averaged
    before the clip. `average_weights` and `low_pass` are what private rows do after the noise: with
    an average of the weights, that is what is tested.
    """

    epochs: Count | dict[float, Count]
    batch_size: Count
    optimizer: Annotated[Sgd | Adam, Field(discriminator="name")]
    schedule: AnySchedule = ConstantSection()
    views: Count = 1
    average_weights: Share | None = None
    low_pass: Share | None = None

    def epochs_at(self, target: float | None) -> int:
        """How many."""
        return self.epochs if isinstance(self.epochs, int) else self.epochs[target or 0.0]


class Search(Section):
    """How a learning rate is found on training samples that are held out.

    As `dpspan.Search` says, from the rates of a row on, all of which are tried however few `tries`.
    By default there are no more, in full.
    """

    tries: Count = 1
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    finalists: Count = 1
    seeds: Count = 3


class Row(Section):
    """One row of a table.

    `rates` are the learning rates to search among, or the row whose rate is taken. `paper` has the
    paper's numbers by target, in per cent. `targets` are those it is run at, by default all.
    What is left out is the experiment's.
    """

    method: AnyExperimentMethod | ConvexSection | Literal["non-private", "public only"]
    rates: Annotated[Numbers, Field(min_length=1)] | str = (1.0,)
    search: Search | None = None
    model: AnyExperimentModel | None = None
    training: Training | None = None
    trainable: AnyTrainable | None = None
    pretraining: Pretraining | None = None
    warm_start: WarmStartSection | None = None
    paper: dict[float, float] = Field(default_factory=dict)
    targets: Numbers = ()

    @property
    def private(self) -> bool:
        """Whether it has a price."""
        return not isinstance(self.method, str)

    @property
    def trains(self) -> bool:
        """Whether a warm start has an effect."""
        return isinstance(self.method, MethodSection) or self.method == PUBLIC_ONLY

    @property
    def public(self) -> set[str]:
        """The names of the public data that it uses."""
        users = (self.method, self.model, self.warm_start)
        names = [getattr(user, "public", None) for user in users]
        return {name for name in names if name}


class Targets(Section):
    """What each private row is run at: some ε, or some noise multipliers."""

    epsilon: Numbers = ()
    noise_multiplier: Numbers = ()
    delta: Share = 1e-5

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if bool(self.epsilon) == bool(self.noise_multiplier):
            raise PydanticCustomError("one_of", "Expected epsilon or noise_multiplier.")
        return self

    @property
    def values(self) -> tuple[float, ...]:
        """Of whichever is given."""
        return self.epsilon or self.noise_multiplier

    @property
    def symbol(self) -> str:
        """For headings."""
        return "ε" if self.epsilon else "σ"


class TrainingExperiment(Section):
    """A table: every row at every target, with several seeds; a plot of `plotted`, or of all rows.

    With `attack`, training samples are always held out, as the non-members of a membership attack.
    """

    kind: Literal["training", "choosing"] = "training"
    title: str
    paper: str
    about: str
    notes: Texts = ()
    data: AnyData
    model: AnyModel  # one that needs no public data: those belong to rows
    training: Training
    targets: Targets
    seeds: Count = 3
    search: Search = Search()
    metric: Literal["accuracy", "balanced_accuracy", "auc"] = "accuracy"
    attack: bool = False
    plotted: Texts = ()
    others: Annotated[tuple[Anchor, ...], Field(strict=False)] = ()
    rows: dict[str, Row] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        for name in self.plotted:
            if name not in self.rows:
                self._refuse(name, "Expected the name of a row under plotted.")
        for name, row in self.rows.items():
            missing = row.public - set(self.data.public)
            if missing:
                self._refuse(name, f"Expected public data under data.public, got {missing}.")
            needs = isinstance(row.method, MethodSection) and row.method.needs_public
            if needs and not getattr(row.method, "public", None):
                self._refuse(name, "Expected method.public.")
            if isinstance(row.method, ConvexSection) and not self.targets.epsilon:
                self._refuse(name, "Expected targets.epsilon: a convex fit is made for an ε.")
            others = set(row.targets) - set(self.targets.values)
            if others or (row.targets and not row.private):
                self._refuse(name, f"Expected targets among {list(self.targets.values)}.")
            training = row.training or self.training
            smoothed = training.average_weights or training.low_pass
            if row.training and smoothed and not isinstance(row.method, MethodSection):
                self._refuse(name, "Expected no average_weights or low_pass: it has no noise.")
            if isinstance(training.epochs, dict):
                wanted = {target or 0.0 for target in self.targets_of(name)}
                if wanted - set(training.epochs):
                    self._refuse(name, f"Expected epochs at {sorted(wanted)} (0: no target).")
            if row.warm_start is not None and not row.trains:
                self._refuse(name, "Expected no warm_start: nothing here would use it.")
            if isinstance(row.model, PatchesModel) and (row.pretraining or row.trainable):
                self._refuse(name, "Expected no pretraining or trainable behind a frozen layer.")
            if row.method == PUBLIC_ONLY and row.warm_start is None:
                self._refuse(name, "Expected a warm_start: that is how public data are used.")
            if isinstance(row.rates, str) and row.rates not in self.rows:
                self._refuse(name, f"Expected rates or another row's name, got '{row.rates}'.")
        return self

    def _refuse(self, row: str, message: str) -> None:
        raise PydanticCustomError("refused", "{message}", {"message": f"rows.{row}: {message}"})

    def targets_of(self, name: str) -> tuple[float | None, ...]:
        """What a row is run at; None where there is no privacy to pay for."""
        row = self.rows[name]
        return (row.targets or self.targets.values) if row.private else (None,)

    def settings(self, name: str) -> dict[str, Any]:
        """What a row's results depend on, besides target, rate and seed."""
        row = self.rows[name]
        data = stated(self.data) | {
            "public": {key: stated(self.data.public[key]) for key in sorted(row.public)},
            # Other rows' public data leave the private and the test samples of this one too.
            "taken": self.data.taken,
            "tested_from": self.data.tested_from,
        }
        return {
            "data": data,
            "model": stated(row.model or self.model),
            "training": stated(row.training or self.training),
            "row": {
                key: value
                for key, value in stated(row).items()
                if key not in ("rates", "search", "model", "training", "paper", "targets")
            },
            "targets": self.targets.symbol,
            "delta": self.targets.delta,
            "attack": self.attack,
        }

    def digest(self, name: str) -> str:
        """Of the settings: results of other settings are not taken for this row's."""
        return digest_of(self.settings(name))

    def searched(self, name: str) -> tuple[str, tuple[float, ...]]:
        """The row whose search settles the learning rate, and its grid."""
        rates = self.rows[name].rates
        return self.searched(rates) if isinstance(rates, str) else (name, rates)

    def search_of(self, name: str) -> Search:
        """How that search is made."""
        source, _ = self.searched(name)
        return self.rows[source].search or self.search


def stated(section: Section) -> dict[str, Any]:
    """A section's names and what differs from its defaults.

    Results thus stay valid when a section gets another key, whose default changes nothing.
    """
    found = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if name in ("name", "source") or value != field.get_default(call_default_factory=True):
            found[name] = stated(value) if isinstance(value, Section) else value
    return found


def digest_of(settings: dict[str, Any]) -> str:
    """A short name for settings."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
