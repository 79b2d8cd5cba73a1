"""The configuration of a run: one YAML file, checked before anything is read or spent.

Everything in it is public: it is copied into the run's folder and quoted by the certificate.
"""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from dpspan.accounting.promises import LARGEST_DELTA
from dpspan.app.config.methods import AnyMethod, ConvexSection, DPSGDSection, RGPSection
from dpspan.app.config.sections import (
    AnyFeatures,
    AnyModel,
    AnyTrainable,
    TrainingSection,
    WarmStartSection,
)
from dpspan.app.data import Classes, HuggingFace, Idx, ImageFolder, Npz, Target
from dpspan.app.preprocessing import AnyColumn, Preprocessing
from dpspan.app.section import ConfigError as ConfigError
from dpspan.app.section import Count, File, Positive, Section, Texts, parse, read_text, refuse
from dpspan.app.tables import Csv, Parquet, Table
from dpspan.support.units import RECORDS_PER_UNIT

AnySource = Annotated[
    Npz | Idx | ImageFolder | Csv | Parquet | HuggingFace, Field(discriminator="format")
]


class DataSection(Section):
    """Where the data are.

    `classes` is their number, or their names in order; where labels are numbers, `target` is their
    range instead. `test_is_public` declares that anybody may see what is computed on the test data;
    without it test results are unprivate. `records` is about how many private records there are, as
    a public number: the sampling rate is batch size / records. Without it the exact number is used,
    and the certificate tells it. `equal_rows_allowed` declares that test records which equal
    private ones, or public ones that are used, are other people's, as in tables of few values.

    `unit` is the column (or array) of the private data with one id a record, if a person may have
    several: then all of them are protected together, and batch_size and `records` count units.
    A step uses at most `records_per_unit` of one unit.

    `preprocessing` says what becomes of each column of a table: of all of private, public and test.
    """

    if_used: ClassVar = (
        "unit", "records_per_unit", "preprocessing", "target", "equal_rows_allowed",
    )  # fmt: skip
    classes: Annotated[int, Field(ge=2)] | Annotated[Texts, Field(min_length=2)] | None = None
    target: Target | None = None
    private: AnySource
    public: dict[str, AnySource] = Field(default_factory=dict)
    test: AnySource | None = None
    test_is_public: bool = False
    equal_rows_allowed: bool = False
    records: Count | None = None
    unit: str | None = None
    records_per_unit: Count = RECORDS_PER_UNIT
    preprocessing: dict[str, AnyColumn] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _labels_are_of_one_kind(self) -> Self:
        if (self.classes is None) == (self.target is None):
            refuse("", "Expected classes, or target where labels are numbers, and not both.")
        if isinstance(self.classes, tuple) and len({*self.classes}) < len(self.classes):
            refuse("classes", "Expected every class once.")
        folder = isinstance(self.private, ImageFolder) and self.private.labelled
        if self.target is not None and folder:
            refuse(
                "target", "Folders of images have classes: give arrays where labels are numbers."
            )
        return self

    @property
    def labels(self) -> Classes | Target:
        """What labels are."""
        found = self.target if self.classes is None else self.classes
        assert found is not None
        return found

    @model_validator(mode="after")
    def _private_data_are_private_only(self) -> Self:
        others = {f"public.{name}": source for name, source in self.public.items()}
        for at, source in (others | {"test": self.test}).items():
            if source is not None and source.records == self.private.records:
                refuse(
                    at,
                    f"These are the records of data.private itself ({source.path}): give data of "
                    "other people here.",
                )
        inputs = getattr(self.private, "inputs", ())
        if self.unit in ([inputs] if isinstance(inputs, str) else inputs):
            refuse("unit", "Expected a column that is not among the inputs: take it out there.")
        if self.unit is None and self.records_per_unit != RECORDS_PER_UNIT:
            cure = "Expected data.unit beside it: the column with one id a record."
            refuse("records_per_unit", cure)
        return self

    @model_validator(mode="after")
    def _columns_are_described_once(self) -> Self:
        used = {*Preprocessing(columns=self.preprocessing).used}
        sources = {"private": self.private, "test": self.test}
        for at, source in (sources | {f"public.{n}": s for n, s in self.public.items()}).items():
            if not isinstance(source, Table):
                if self.preprocessing and source is not None:
                    refuse(at, "Expected a table, as there is data.preprocessing: csv or parquet.")
            elif not self.preprocessing and not source.inputs:
                refuse(at, "Expected `inputs` here, or a description of columns, `preprocessing`.")
            elif self.preprocessing and (source.inputs or source.categories or source.scaled):
                here = "inputs, categories, scale, mean and std"
                refuse(at, f"Leave {here} out here: data.preprocessing says what they would.")
            elif {self.unit, source.label} & used:
                refuse("preprocessing", "Labels and data.unit are no inputs: set `kind: drop`.")
        if self.preprocessing and not used:
            refuse("preprocessing", "Expected at least one column to learn from.")
        if self.releases and self.unit is not None:
            cure = "state bounds, or take them from public rows"
            refuse("unit", f"Released bounds protect one record, not all of a unit: {cure}.")
        return self

    @property
    def releases(self) -> bool:
        """Whether bounds of columns are to be released."""
        return any(each.origin == "paid release" for each in self.preprocessing.values())


class BudgetSection(Section):
    """(ε, δ) for the whole run, or a noise multiplier whose ε at δ is then reported.

    With `secure_mode` noise and batches come from a cryptographic generator.
    """

    if_used: ClassVar = ("secure_mode",)
    epsilon: Positive | None = None
    noise_multiplier: Positive | None = None
    delta: Annotated[float, Field(gt=0, lt=LARGEST_DELTA)]
    accountant: Literal["pld", "rdp"] = "pld"
    secure_mode: bool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            refuse("", "Expected epsilon or noise_multiplier, and not both.")
        return self


class ChooseSection(Section):
    """Choose among data.public by private records; what that costs is part of the budget."""

    epsilon: Annotated[float, Field(gt=0, le=10)] = 0.1
    rank: Count = 16
    samples: Count = 2000
    mechanism: Literal["permute-and-flip", "exponential"] = "permute-and-flip"


class EvaluateSection(Section):
    """How models are judged on data.test.

    The second of two classes is predicted from a probability of `threshold` on, by `dpspan predict`
    too. `by` is a column of the test data, for results of each of its values. Where test data are
    not public, `noise_multiplier` releases one accuracy with that noise, within the budget.
    """

    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5
    by: str | None = None
    noise_multiplier: Positive | None = None


class OutputSection(Section):
    """What is written where.

    `checkpoint_every` counts steps; the end of an epoch always has a checkpoint. With
    `unprivate_metrics`, loss and accuracy on private batches (convex methods have none) are
    written too, under names that say so, and the certificate mentions it: such files are not to be
    published.
    """

    folder: File
    checkpoint_every: Count | None = None
    unprivate_metrics: bool = False
    tensorboard: bool = False


class ReportSection(Section):
    """What the report tells its reader first, in the words of whoever is responsible."""

    title: str = "Privacy report"
    organisation: str | None = None
    purpose: str | None = None
    data: str | None = None
    contact: str | None = None


class Config(Section):
    """A run."""

    if_used: ClassVar = ("evaluate",)
    data: DataSection
    features: AnyFeatures | None = None
    model: AnyModel
    method: AnyMethod
    budget: BudgetSection
    training: TrainingSection
    trainable: AnyTrainable | None = None
    warm_start: WarmStartSection | None = None
    choose: ChooseSection | None = None
    evaluate: EvaluateSection = EvaluateSection()
    output: OutputSection
    report: ReportSection | None = None

    @model_validator(mode="after")
    def _public_data_is_known(self) -> Self:
        users = {"method": self.method, "warm_start": self.warm_start, "features": self.features}
        known = ", ".join(self.data.public) or "none"
        for section, user in users.items():
            name = getattr(user, "public", None)
            if name is not None and name not in self.data.public:
                refuse(
                    f"{section}.public",
                    f"Expected the name of a dataset under data.public ({known}), got '{name}'.",
                )
        method, name = self.method, getattr(self.method, "public", None)
        flat = "logistic" if self.data.target is None else "linear"
        simple = self.model.name == flat and not (self.warm_start or self.trainable)
        if isinstance(method, ConvexSection) and not simple:
            cure = f"set `model: {{name: {flat}}}`, and leave warm_start and trainable out"
            refuse("method", f"The method {method.name} is for {flat} regression: {cure}.")
        if self.data.target is not None:
            self._fits_numbers()
        if not method.needs_public and self.choose is not None:
            refuse("choose", f"The method {method.name} uses no public data: leave `choose` out.")
        if not method.needs_public and name is not None:
            refuse("method.public", "A random subspace uses no public data: leave this out.")
        if self.choose is not None and name is not None:
            refuse("method.public", "Leave this out, or `choose`: only one of them can decide.")
        if self.choose is not None and len(self.data.public) < 2:
            refuse("choose", "Expected at least 2 datasets under data.public to choose from.")
        if method.needs_public and self.choose is None and name is None:
            refuse(
                "method",
                f"The method {method.name} needs public data: set `public` to the name of a "
                "dataset under data.public, or add a `choose` section.",
            )
        return self

    @property
    def used_public(self) -> list[str]:
        """Which of data.public the model learns from, as far as it is known."""
        users = (self.method, self.warm_start, self.features)
        names = {str(getattr(user, "public", None)) for user in users}
        return [name for name in self.data.public if name in names or self.choose is not None]

    @model_validator(mode="after")
    def _can_be_judged_so(self) -> Self:
        data, judge = self.data, self.evaluate
        for name in self.used_public:
            if data.test is not None and data.public[name].records == data.test.records:
                refuse("data.test", f"These are the records of data.public.{name}: give others.")
        if data.test is None and judge != EvaluateSection():
            refuse("evaluate", "Expected data.test, by which models are judged.")
        if judge.noise_multiplier and (data.test_is_public or data.unit):
            refuse("evaluate.noise_multiplier", "This is for private test data, without data.unit.")
        count = data.classes if isinstance(data.classes, int) else len(data.classes or ())
        if count > 2 and judge.threshold != EvaluateSection().threshold:
            refuse("evaluate.threshold", "This is between two classes: leave it out.")
        return self

    def _fits_numbers(self) -> None:
        """What is about classes has no meaning where labels are numbers."""
        if self.choose is not None or not isinstance(
            self.method, ConvexSection | DPSGDSection | RGPSection
        ):
            known = "dpsgd, rgp and, for `model: {name: linear}`, adagrad and its like"
            refuse("method", f"With data.target, methods without public directions: {known}.")
        judge = self.evaluate
        if judge != EvaluateSection(by=judge.by):
            refuse("evaluate", "With data.target, `by` alone has a meaning here.")

    def fixed(self) -> dict[str, Any]:
        """What must not change between parts of a run: all but where it runs and what it logs."""
        where = {"device": True, "physical_batch_size": True, "cuda_graphs": True}
        left_out: Any = {"output": True, "report": True, "training": where}
        return self.model_dump(mode="json", exclude=left_out)


def load_config(path: str | Path) -> Config:
    """Read a configuration file; ConfigError, with lines, if it cannot be used."""
    return parse(read_text(path), Config, name=str(path))


def parse_config(text: str, *, name: str = "config") -> Config:
    """A configuration from a text; errors call it `name`."""
    return parse(text, Config, name=name)
