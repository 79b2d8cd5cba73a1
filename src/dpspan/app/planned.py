"""Columns whose bounds or values are yet to be found: in public rows, or among private ones, paid.

What is found is frozen in a `Preprocessing`, with its origin.
"""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal, Protocol, Self

import numpy as np
from pydantic import Field, model_validator

from dpspan.app.preprocessing import (
    GAPS,
    Categorical,
    Column,
    Date,
    Numeric,
    Unused,
    Values,
    days,
    numbers,
)
from dpspan.app.section import Positive, Section, refuse
from dpspan.support.checks import expect

_MIDDLE = (0.025, 0.5, 0.975)  # what is beyond, a wild value may be, is cut
_MOST = 100  # values of a column; beyond, it is no category


class Evidence(Protocol):
    """What may be asked about a column."""

    def public(self, column: str) -> Values:
        """Its values in public rows."""

    def quantiles(
        self, column: str, wanted: tuple[float, ...], bounds: tuple[float, float], epsilon: float
    ) -> tuple[float, ...]:
        """Of private rows, charged before they are drawn."""


class Planned(Section):
    """A column that is not frozen yet."""

    indicator: bool = False

    def frozen(self, column: str, evidence: Evidence) -> Column:
        raise NotImplementedError


class NumericFromPublic(Planned):
    """The bounds of the middle 95 % of public rows; their median for a gap."""

    kind: Literal["numeric-from-public"]

    def frozen(self, column: str, evidence: Evidence) -> Column:
        low, middle, high = _middle(column, numbers(evidence.public(column)))
        found: dict[str, Any] = {"low": low, "high": high, "fill": middle}
        return Numeric(**found, indicator=self.indicator, origin="public rows")


class DateFromPublic(Planned):
    """The days between which the middle 95 % of public rows lie; their median for a gap."""

    kind: Literal["date-from-public"]
    format: str | None = None

    def frozen(self, column: str, evidence: Evidence) -> Column:
        found = _middle(column, days(evidence.public(column), self.format))
        first, fill, last = (datetime.date.fromordinal(round(day)) for day in found)
        form: dict[str, Any] = {"format": self.format, "indicator": self.indicator}
        return Date(first=first, last=last, fill=fill, **form, origin="public rows")


class CategoricalFromPublic(Planned):
    """The values that occur in public rows."""

    kind: Literal["categorical-from-public"]

    def frozen(self, column: str, evidence: Evidence) -> Column:
        found = sorted({str(each).strip() for each in evidence.public(column)} - GAPS)
        what = f"1 to {_MOST} values of '{column}' in public rows, or it to be dropped"
        expect(0 < len(found) <= _MOST, what, len(found))
        return Categorical(values=tuple(found), indicator=self.indicator, origin="public rows")


class NumericByRelease(Planned):
    """Bounds inside of `low` and `high`, and the median for a gap, by private quantiles for ε."""

    kind: Literal["numeric-by-release"]
    low: float
    high: float
    epsilon: Positive

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not self.low < self.high:
            refuse("", "Expected the lower bound to be below the upper one.")
        return self

    def frozen(self, column: str, evidence: Evidence) -> Column:
        bounds = self.low, self.high
        low, middle, high = evidence.quantiles(column, (0.05, 0.5, 0.95), bounds, self.epsilon)
        low, high = (low, high) if low < high else bounds
        found: dict[str, Any] = {"low": low, "high": high, "fill": middle}
        return Numeric(**found, indicator=self.indicator, origin="paid release")


def _middle(column: str, found: np.ndarray[Any, Any]) -> list[float]:
    known = found[np.isfinite(found)]
    bounds: list[float] = np.quantile(known, _MIDDLE).tolist() if len(known) else [0.0]
    if bounds[0] == bounds[-1]:
        cure = "State its bounds, or drop it"
        raise ValueError(f"Expected several values of '{column}' in public rows. {cure}.")
    return bounds


AnyPlan = Annotated[
    Numeric
    | Date
    | Categorical
    | Unused
    | NumericFromPublic
    | DateFromPublic
    | CategoricalFromPublic
    | NumericByRelease,
    Field(discriminator="kind"),
]
