"""What becomes of the columns of a table: one public description for private, public and test data.

Bounds, lists of values and dates have an origin: they are stated, found in public rows or released
for a price. Once all of them are there nothing is fitted any more: each row is taken by itself.
What cannot be read is a gap, and a value that is not listed is 'other': no error shows it.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, ValidationError, model_validator

from dpspan.app.section import Positive, Section, Texts, refuse
from dpspan.support.checks import expect, spelt_otherwise

if TYPE_CHECKING:
    from dpspan.accounting.ledger import Ledger

Array = np.ndarray[Any, Any]
Values = Sequence[Any] | Array  # texts, numbers or dates; None, NaN or an empty text for a gap
Origin = Literal["configuration", "data dictionary", "public rows", "paid release"]
Rows = Callable[[str], Values]  # the values of a column
Day = Annotated[datetime.date, Field(strict=False)]
_GAPS = {"", "?", "NA", "N/A", "<NA>", "NULL", "null", "NaN", "nan", "None"}
_MIDDLE = (0.025, 0.5, 0.975)  # of public rows: what is beyond, wild values may be, is cut
_RELEASED = (0.05, 0.5, 0.95)  # of private ones, which tell less about their ends
_MOST = 100  # values of a column; beyond, it is no category


class Column(Section):
    """One column; `origin` is where its bounds or values come from, never private values unpaid."""

    origin: Origin = "configuration"
    indicator: bool = False  # whether a further feature is 1 where there is a gap

    def names(self, column: str) -> list[str]:
        """What its features are called."""
        return []

    def encoded(self, values: Values) -> tuple[Array, int]:
        """Its features (n, width), and how many values were none of those that are described."""
        raise NotImplementedError

    def frozen(self, column: str, public: Rows, private: Rows, ledger: Ledger) -> Self:
        return self

    def _with(self, **found: Any) -> Self:
        return type(self).model_validate({**dict(self), **found})


class Scaled(Column):
    """A number between two bounds, put between −1 and 1; what is beyond a bound counts as it.

    A gap becomes `fill`, by default the middle. Without bounds those of the middle 95 % of public
    rows are found, and the median for gaps; a release finds such inside of the bounds, for ε.
    """

    low: Any = None
    high: Any = None
    fill: Any = None
    epsilon: Positive | None = None

    def read(self, values: Values) -> Array:
        return numbers(values)

    def placed(self, found: Array) -> list[Any]:
        """The lower bound, what fills gaps and the upper bound, as they are written."""
        return [*map(float, found)]

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        low, high, fill = self._numbers()
        stated = 2 - np.isnan([low, high]).sum()
        if stated == 1 or (stated == 0 and self.origin != "public rows"):
            refuse("", "Expected `low` and `high`, or neither with `origin: public rows`.")
        if low >= high or fill < low or fill > high:
            refuse("", "Expected the lower bound below the upper one, and `fill` between them.")
        if (self.origin == "paid release") != (self.epsilon is not None):
            refuse("", "Expected `epsilon` with `origin: paid release`, and nowhere else.")
        return self

    def _numbers(self) -> list[float]:
        return [float(n) for n in self.read([self.low, self.high, self.fill])]

    def frozen(self, column: str, public: Rows, private: Rows, ledger: Ledger) -> Self:
        if self.low is not None and self.epsilon is None:
            return self
        if self.epsilon is not None:
            from dpspan.accounting.questions import private_quantiles

            bounds = low, high = self._numbers()[0], self._numbers()[1]
            paid: Any = {"bounds": bounds, "epsilon": self.epsilon, "ledger": ledger}
            found = private_quantiles(self.read(private(column)), _RELEASED, **paid)
            placed = self.placed(np.array(found))
            low, fill, high = placed if placed[0] < placed[2] else (self.low, placed[1], self.high)
        else:
            known = self.read(public(column))
            known = known[np.isfinite(known)]
            low, fill, high = self.placed(np.quantile(known if len(known) else [1.0], _MIDDLE))
            expect(low < high, f"several values of '{column}' in public rows, or its bounds", None)
        return self._with(low=low, high=high, fill=fill)

    def names(self, column: str) -> list[str]:
        return [column, f"{column} missing"] if self.indicator else [column]

    def encoded(self, values: Values) -> tuple[Array, int]:
        low, high, fill = self._numbers()
        middle, half = low / 2 + high / 2, high / 2 - low / 2
        found = self.read(values)
        gaps = np.isnan(found)
        known = np.where(gaps, middle if np.isnan(fill) else fill, np.clip(found, low, high))
        features = np.stack([(known - middle) / half, gaps], axis=1)
        return features[:, : 1 + self.indicator], int(gaps.sum())


class Numeric(Scaled):
    """A number."""

    kind: Literal["numeric"] = "numeric"
    low: float | None = None
    high: float | None = None
    fill: float | None = None


class Date(Scaled):
    """A day; texts are in ISO's form, or in a `format` of strptime."""

    kind: Literal["date"] = "date"
    low: Day | None = None
    high: Day | None = None
    fill: Day | None = None
    format: str | None = None

    def read(self, values: Values) -> Array:
        return np.array([_day(each, self.format) for each in values], dtype=np.float64)

    def placed(self, found: Array) -> list[Any]:
        whole = np.concatenate([np.floor(found[:2]), np.ceil(found[2:])])
        return [datetime.date.fromordinal(int(day)) for day in whole]


class Categorical(Column):
    """One feature (0 or 1) for each of `values`, and one for all others, gaps among them.

    Without `values` those that occur in public rows are found.
    """

    kind: Literal["categorical"] = "categorical"
    values: Texts = ()

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        if len({*self.values}) < len(self.values):
            refuse("values", "Expected every value once.")
        if not self.values and self.origin != "public rows":
            refuse("", "Expected `values`, or `origin: public rows`.")
        return self

    def frozen(self, column: str, public: Rows, private: Rows, ledger: Ledger) -> Self:
        if self.values:
            return self
        found = sorted({spelt(each) for each in public(column)} - _GAPS)
        what = f"1 to {_MOST} values of '{column}' in public rows, or it to be dropped"
        expect(0 < len(found) <= _MOST, what, len(found))
        return self._with(values=tuple(found))

    def names(self, column: str) -> list[str]:
        named = [f"{column}={value}" for value in self.values]
        return [*named, f"{column} other", *([f"{column} missing"] if self.indicator else [])]

    def encoded(self, values: Values) -> tuple[Array, int]:
        codes, other = {text: code for code, text in enumerate(self.values)}, len(self.values)
        codes |= dict.fromkeys(_GAPS - {*codes}, other + self.indicator)
        texts = ((str(each).strip(), spelt(each)) for each in values)
        found = np.array([codes.get(a, codes.get(b, other)) for a, b in texts], dtype=np.intp)
        return np.eye(other + 1 + self.indicator)[found], int((found >= other).sum())


class Unused(Column):
    """No feature. An `id` says whose a record is, and may be the unit of privacy."""

    kind: Literal["drop", "id"]


AnyColumn = Annotated[Numeric | Date | Categorical | Unused, Field(discriminator="kind")]


class Preprocessing(Section):
    """The columns of a table by name, in order; frozen, public, and a part of the model."""

    format: Literal["dpspan.preprocessing"] = "dpspan.preprocessing"
    version: Literal[1] = 1
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
        rows = np.concatenate([features for features, _ in parts.values()], axis=1)
        return rows.astype(np.float32), {name: strange for name, (_, strange) in parts.items()}

    def check_names(self, found: Collection[str], where: str = "the table") -> None:
        """ValueError that names all columns that are not there."""
        missing = [
            f"'{name}'{spelt_otherwise(name, found)}" for name in self.used if name not in found
        ]
        if missing:
            raise ValueError(f"Expected columns that {where} does not have: {', '.join(missing)}.")

    def document(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    @classmethod
    def of_document(cls, document: Any) -> Self:
        """What `document` gave; ValueError, which shows nothing of it, if it is something else."""
        with contextlib.suppress(ValidationError):
            return cls.model_validate(document)
        raise ValueError("Expected a description of columns (dpspan.preprocessing, version 1).")

    @property
    def digest(self) -> str:
        from dpspan.accounting.certificate import sha256_of  # a configuration does not wait for it

        return sha256_of(self.document())

    def summary(self) -> dict[str, Any]:
        """For the certificate: the digest, and which columns have bounds or values from where."""
        found: dict[str, list[str]] = {}
        for name in self.used:
            found.setdefault(self.columns[name].origin, []).append(name)
        return {"sha256": self.digest, "features": len(self.feature_names), "origins": found}


def numbers(values: Values) -> Array:
    """As float64; NaN for whatever is no number."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "buif":
        return values.astype(np.float64)
    return np.array([_number(each) for each in values], dtype=np.float64)


def spelt(value: Any) -> str:
    """A value as text: 2.0 is 2, as gaps beside whole numbers make fractions of them."""
    whole = isinstance(value, float | np.floating) and float(value).is_integer()
    return str(int(value)) if whole else str(value).strip()


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return np.nan


def _day(value: Any, form: str | None) -> float:
    """Days since the year 1."""
    try:
        if isinstance(value, datetime.date):
            return value.toordinal()
        text, day = str(value).strip(), datetime.datetime
        return (day.strptime(text, form) if form else day.fromisoformat(text)).toordinal()
    except ValueError:
        return np.nan
