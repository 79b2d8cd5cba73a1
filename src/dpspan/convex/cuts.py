"""Thermometer features: whether a number exceeds cut points, so that a linear model can bend.

Cut points are quantiles of public rows, or of the private ones by releases of their own, which the
ledger is charged for before the fit (`dpspan.private_quantiles`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import numpy as np
from dp_accounting import DpEvent
from numpy.typing import NDArray
from scipy import sparse

from dpspan.accounting.events import pure_event
from dpspan.accounting.ledger import Ledger
from dpspan.accounting.questions import private_quantiles
from dpspan.convex.rows import Array, Features
from dpspan.support.checks import check_count, check_positive, expect

Releases = tuple[tuple[DpEvent, int], ...]


@dataclass(frozen=True)
class CutPoints:
    """Which column is compared with which number, one pair for each feature that this makes."""

    columns: NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, dtype=np.intp))
    points: Array = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def of(cls, by_column: Mapping[int, Any]) -> "CutPoints":
        """From the points of each column; equal ones count once."""
        points = [np.unique(found) for found in by_column.values()]
        columns = np.repeat(list(by_column), [len(found) for found in points])
        return cls(columns.astype(np.intp), np.concatenate([np.zeros(0), *points]))

    def exceeded(self, x: Features) -> Array:
        """1 where a record's number is above a cut point, else 0: (n, number of points)."""
        return np.asarray(_dense(x[:, self.columns]) > self.points, dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class PublicCuts:
    """Quantiles of the public rows, `count` a column; none of one that has two values or fewer."""

    releases: ClassVar[Releases] = ()
    count: int = 8

    def __post_init__(self) -> None:
        check_count("cuts", self.count)

    def find(self, private: Features, public: Features | None, ledger: Ledger) -> CutPoints:
        if public is None:
            raise ValueError(
                "Cut points are quantiles of public rows: pass public=X_pub to fit, or pay for "
                "those of the private records by cuts=PrivateCuts(epsilon=..., bounds=...)."
            )
        found = {}
        for column, values in enumerate(_dense(public).T):
            points = np.quantile(values, _shares(self.count), method="lower")
            if len(np.unique(values)) > 2:
                found[column] = points[points < values.max()]
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
        check_count("cuts", self.count)
        check_positive("epsilon", self.epsilon)
        expect(bool(self.bounds), "bounds of at least one column", self.bounds)

    @property
    def releases(self) -> Releases:
        """One a cut point, each for the same share of ε."""
        draws = self.count * len(self.bounds)
        return ((pure_event(self.epsilon / len(self.bounds) / self.count), draws),)

    def find(self, private: Features, public: Features | None, ledger: Ledger) -> CutPoints:
        each, shares = self.epsilon / len(self.bounds), _shares(self.count)

        def paid(column: int, bounds: tuple[float, float]) -> tuple[float, ...]:
            values = _dense(private[:, [column]])[:, 0]
            return private_quantiles(values, shares, bounds=bounds, epsilon=each, ledger=ledger)

        return CutPoints.of({column: paid(column, ends) for column, ends in self.bounds.items()})


Cuts: TypeAlias = PublicCuts | PrivateCuts


def cuts_of(given: Any, *, units: bool, features: int, epsilon: float) -> Cuts | None:
    """The cut points meant by None, a number a column of public rows, or an object."""
    if isinstance(given, PrivateCuts):
        paid = f"epsilon of cuts below {epsilon:g}, the fit's"
        expect(given.epsilon < epsilon, paid, given.epsilon)
        strange = [column for column in given.bounds if column not in range(features)]
        expect(not strange, f"bounds of columns 0 to {features - 1}", strange[:1])
        cure = "cuts of public rows with groups=, as those of the private ones are of records"
        expect(not units, cure, given)
    elif isinstance(given, int) and not isinstance(given, bool):
        return PublicCuts(count=given)
    known = isinstance(given, PublicCuts | PrivateCuts | None)
    expect(known, "cuts to be None, a number, PublicCuts(...) or PrivateCuts(...)", given)
    return given  # type: ignore[no-any-return]


def _dense(x: Features) -> Any:
    return x.toarray() if sparse.issparse(x) else x


def _shares(count: int) -> list[float]:
    return [(place + 1) / (count + 1) for place in range(count)]
