"""Thermometer features: whether a number exceeds cut points, so that a linear model can bend.

Cut points are public: quantiles of public rows, or of the private ones by releases of their own,
which the ledger is charged for before the fit (`dpspan.private_quantiles`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from dp_accounting import DpEvent
from numpy.typing import NDArray
from scipy import sparse

from dpspan.accounting.events import pure_event
from dpspan.accounting.ledger import Ledger
from dpspan.accounting.questions import private_quantiles
from dpspan.convex.rows import Array, Features
from dpspan.support.checks import check_count, check_positive, expect, shown


@dataclass(frozen=True)
class CutPoints:
    """Which column is compared with which number, one pair for each feature that this makes."""

    columns: NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, dtype=np.intp))
    points: Array = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def of(cls, by_column: Mapping[int, Any]) -> "CutPoints":
        """From the points of each column; equal ones count once."""
        points = {column: np.unique(found) for column, found in by_column.items()}
        columns = np.repeat(list(points), [len(found) for found in points.values()])
        return cls(columns.astype(np.intp), np.concatenate([np.zeros(0), *points.values()]))

    def __len__(self) -> int:
        return len(self.points)

    def exceeded(self, x: Features) -> Array:
        """1 where a record's number is above a cut point, else 0: (n, number of points)."""
        chosen = x[:, self.columns]
        dense = chosen.toarray() if sparse.issparse(chosen) else chosen
        return np.asarray(dense > self.points, dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class PublicCuts:
    """Quantiles of the public rows, `count` a column; none of one that has two values or fewer.

    Examples:
        >>> from dpspan.convex import PrivateLogisticRegression, PublicCuts
        >>> model = PrivateLogisticRegression(epsilon=1.0, scaling="public", cuts=PublicCuts())
    """

    count: int = 8

    def __post_init__(self) -> None:
        check_count("cuts", self.count)

    def events(self) -> tuple[tuple[DpEvent, int], ...]:
        """Nothing private is looked at."""
        return ()

    def find(self, private: Features, public: Features | None, ledger: Ledger) -> CutPoints:
        if public is None:
            raise ValueError(
                "Cut points are quantiles of public rows: pass public=X_pub to fit, or pay for "
                "those of the private records by cuts=PrivateCuts(epsilon=..., bounds=...)."
            )
        rows = public.toarray() if sparse.issparse(public) else public
        found = {}
        for column, values in enumerate(rows.T):
            known = np.unique(values)
            if len(known) > 2:
                points = np.quantile(values, _shares(self.count), method="lower")
                found[column] = points[points < known[-1]]
        return CutPoints.of(found)


@dataclass(frozen=True, kw_only=True)
class PrivateCuts:
    """Quantiles of the private records, of the columns in `bounds` = {column: (low, high)}.

    They cost a pure `epsilon` for all of them together, out of the fit's; bounds are public.

    Examples:
        >>> from dpspan.convex import PrivateCuts, PrivateLogisticRegression
        >>> cuts = PrivateCuts(epsilon=0.1, bounds={0: (0, 120)})  # the first column: years
        >>> model = PrivateLogisticRegression(epsilon=1.0, cuts=cuts)
    """

    epsilon: float
    bounds: Mapping[int, tuple[float, float]]
    count: int = 8

    def __post_init__(self) -> None:
        check_count("count", self.count)
        check_positive("epsilon", self.epsilon)
        expect(bool(self.bounds), "bounds of at least one column", self.bounds)

    def events(self) -> tuple[tuple[DpEvent, int], ...]:
        """One draw a cut point."""
        draws = self.count * len(self.bounds)
        return ((pure_event(self.epsilon / len(self.bounds) / self.count), draws),)

    def find(self, private: Features, public: Features | None, ledger: Ledger) -> CutPoints:
        found = {}
        for column, bounds in self.bounds.items():
            values = private[:, [column]]
            values = values.toarray() if sparse.issparse(values) else values
            found[column] = private_quantiles(
                values[:, 0],
                _shares(self.count),
                bounds=bounds,
                epsilon=self.epsilon / len(self.bounds),
                ledger=ledger,
            )
        return CutPoints.of(found)


Cuts: TypeAlias = PublicCuts | PrivateCuts


def cuts_of(given: int | Cuts | None, *, units: bool, features: int, epsilon: float) -> Cuts | None:
    """The cut points meant by None, a number a column of public rows, or an object."""
    if given is None or isinstance(given, PublicCuts):
        return given
    if not isinstance(given, PrivateCuts):
        known = isinstance(given, int) and not isinstance(given, bool)
        expect(known, "cuts to be None, a number, PublicCuts(...) or PrivateCuts(...)", given)
        return PublicCuts(count=given)
    expect(given.epsilon < epsilon, f"epsilon of cuts below {epsilon:g}, the fit's", given.epsilon)
    strange = [column for column in given.bounds if column not in range(features)]
    if strange:
        raise ValueError(
            f"Expected bounds of columns 0 to {features - 1}, got {shown(strange[0])}."
        )
    if units:
        raise ValueError(
            "PrivateCuts are quantiles of records, and with groups= a person has several: take "
            "cut points from public rows, cuts=PublicCuts()."
        )
    return given


def _shares(count: int) -> list[float]:
    return [(place + 1) / (count + 1) for place in range(count)]
