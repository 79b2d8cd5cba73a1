"""What becomes of the columns of a table: one public description for private, public and test data.

Nothing is fitted here. Bounds, lists of values and dates are stated, each with its origin, and are
applied to every row by itself. What a column cannot be read as is a gap, and a value that is not
listed is 'other': no error shows it.
"""

from __future__ import annotations

import datetime
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, ValidationError, model_validator

from dpspan.accounting.certificate import sha256_of
from dpspan.app.section import Section, Texts, refuse
from dpspan.support.checks import near

FORMAT, VERSION = "dpspan.preprocessing", 1
Array = np.ndarray[Any, Any]
Values = Sequence[Any] | Array  # texts, numbers or dates; None, NaN or an empty text for a gap
Origin = Literal["configuration", "data dictionary", "public rows", "paid release"]
Day = Annotated[datetime.date, Field(strict=False)]
GAPS = {"", "?", "NA", "N/A", "<NA>", "NULL", "null", "NaN", "nan", "None"}


class Column(Section):
    """One column; `origin` is where its bounds or values come from, never private values unpaid."""

    origin: Origin = "configuration"

    @abstractmethod
    def names(self, column: str) -> list[str]:
        """What its features are called."""

    @abstractmethod
    def encoded(self, values: Values) -> tuple[Array, int]:
        """Its features (n, width), and how many values were none of those that are described."""


class Scaled(Column):
    """A number between two bounds, put between −1 and 1; what is beyond a bound counts as it.

    With `indicator` a further feature is 1 where there was a gap.
    """

    indicator: bool = False

    @abstractmethod
    def read(self, values: Values) -> Array:
        """As float64; NaN for a gap."""

    @abstractmethod
    def range(self) -> tuple[float, float, float | None]:
        """The bounds, and what stands for a gap: None for the middle."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        low, high, fill = self.range()
        if not low < high:
            refuse("", "Expected the lower bound to be below the upper one.")
        if fill is not None and not low <= fill <= high:
            refuse("fill", "Expected a number between the bounds.")
        return self

    def names(self, column: str) -> list[str]:
        return [column, f"{column} missing"] if self.indicator else [column]

    def encoded(self, values: Values) -> tuple[Array, int]:
        low, high, fill = self.range()
        middle, half = low / 2 + high / 2, high / 2 - low / 2
        found = self.read(values)
        gaps = np.isnan(found)
        known = np.where(gaps, middle if fill is None else fill, np.clip(found, low, high))
        features = [(known - middle) / half, gaps] if self.indicator else [(known - middle) / half]
        return np.stack(features, axis=1), int(gaps.sum())


class Numeric(Scaled):
    """A number between `low` and `high`; a gap becomes `fill`, by default the middle."""

    kind: Literal["numeric"] = "numeric"
    low: float
    high: float
    fill: float | None = None

    def read(self, values: Values) -> Array:
        return numbers(values)

    def range(self) -> tuple[float, float, float | None]:
        return self.low, self.high, self.fill


class Date(Scaled):
    """A day between `first` and `last`; texts are in ISO's form, or in a `format` of strptime."""

    kind: Literal["date"] = "date"
    first: Day
    last: Day
    format: str | None = None
    fill: Day | None = None

    def read(self, values: Values) -> Array:
        return days(values, self.format)

    def range(self) -> tuple[float, float, float | None]:
        fill = None if self.fill is None else self.fill.toordinal()
        return self.first.toordinal(), self.last.toordinal(), fill


class Categorical(Column):
    """One feature (0 or 1) for each of `values`, and one for all others.

    Gaps are among the others, unless they have an `indicator` of their own.
    """

    kind: Literal["categorical"] = "categorical"
    values: Annotated[Texts, Field(min_length=1)]
    indicator: bool = False

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        if len({*self.values}) < len(self.values):
            refuse("values", "Expected every value once.")
        return self

    def names(self, column: str) -> list[str]:
        named = [f"{column}={value}" for value in self.values]
        return [*named, f"{column} other", *([f"{column} missing"] if self.indicator else [])]

    def encoded(self, values: Values) -> tuple[Array, int]:
        codes = {text: code for code, text in enumerate(self.values)}
        other = len(self.values)
        codes |= dict.fromkeys(GAPS - {*codes}, other + self.indicator)
        found = np.array([codes.get(str(each).strip(), other) for each in values], dtype=np.intp)
        width = other + 1 + self.indicator
        return np.eye(width)[found], int((found >= other).sum())


class Unused(Column):
    """No feature. An `id` says whose a record is, and may be the unit of privacy."""

    kind: Literal["drop", "id"]

    def names(self, column: str) -> list[str]:
        return []

    def encoded(self, values: Values) -> tuple[Array, int]:
        return np.empty((len(values), 0)), 0


AnyColumn = Annotated[Numeric | Date | Categorical | Unused, Field(discriminator="kind")]


class Preprocessing(Section):
    """The columns of a table by name, in order; frozen, public, and a part of the model."""

    columns: dict[str, AnyColumn]
    planned: str | None = None  # SHA-256 of the section of a configuration that it was made of

    @property
    def used(self) -> list[str]:
        """The columns that features are made of: all that a table has to have."""
        return [name for name, column in self.columns.items() if column.names(name)]

    @property
    def feature_names(self) -> list[str]:
        return [each for name, column in self.columns.items() for each in column.names(name)]

    def transform(self, table: Mapping[str, Values]) -> Array:
        """The rows of a table (a mapping by column, or a pandas frame) as float32 (n, features)."""
        return self.encoded(table)[0]

    def encoded(self, table: Mapping[str, Values]) -> tuple[Array, dict[str, int]]:
        """The rows, and of each column how many values were none of those that are described."""
        self.check_names(list(table))
        parts = {name: self.columns[name].encoded(table[name]) for name in self.used}
        if len({len(features) for features, _ in parts.values()}) > 1:
            raise ValueError("Expected columns of one length.")
        rows = np.concatenate([features for features, _ in parts.values()], axis=1)
        return rows.astype(np.float32), {name: strange for name, (_, strange) in parts.items()}

    def check_names(self, found: Collection[str], where: str = "the table") -> None:
        """ValueError that names all columns that are not there."""
        missing = [f"'{name}'{near(name, found)}" for name in self.used if name not in found]
        if missing:
            raise ValueError(f"Expected columns that {where} does not have: {', '.join(missing)}.")

    def document(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"format": FORMAT, "version": VERSION, **self.model_dump(mode="json")}

    @classmethod
    def of_document(cls, document: Any) -> Self:
        """What `document` gave; ValueError, which shows nothing of it, if it is something else."""
        known = isinstance(document, Mapping) and document.get("format") == FORMAT
        try:
            if not known or document["version"] != VERSION:
                raise ValueError
            return cls.model_validate({key: document[key] for key in cls.model_fields})
        except (LookupError, ValidationError, ValueError):
            what = f"a description of columns ({FORMAT}, version {VERSION})"
            raise ValueError(f"Expected {what}, got something else.") from None

    @property
    def digest(self) -> str:
        """SHA-256 of the document."""
        return sha256_of(self.document())

    def summary(self) -> dict[str, Any]:
        """For the certificate: the digest, and where bounds and values come from."""
        origins: dict[str, list[str]] = {}
        for name in self.used:
            origins.setdefault(self.columns[name].origin, []).append(name)
        return {"sha256": self.digest, "features": len(self.feature_names), "origins": origins}


def numbers(values: Values) -> Array:
    """As float64; NaN for whatever is no number."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "buif":
        return values.astype(np.float64)
    try:
        return np.array([*map(float, values)], dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return np.array([_number(each) for each in values], dtype=np.float64)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return np.nan


def days(values: Values, format: str | None = None) -> Array:
    """Days since the year 1, as float64; NaN for whatever is no day."""
    return np.array([_day(each, format) for each in values], dtype=np.float64)


def _day(value: Any, format: str | None) -> float:
    try:
        if isinstance(value, datetime.date):
            return value.toordinal()
        text = str(value).strip()
        parsed = datetime.datetime
        day = parsed.fromisoformat(text) if format is None else parsed.strptime(text, format)
        return day.toordinal()
    except ValueError:
        return np.nan
