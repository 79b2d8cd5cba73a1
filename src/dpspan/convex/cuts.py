"""Thermometer features: whether a number exceeds cut points, so that a linear model can bend.

Cut points are quantiles of public rows, or numbers that are known, or paid for on the same ledger
(`dpspan.private_quantiles`). No private record is looked at here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from dpspan.convex.rows import Array, Features
from dpspan.support.checks import check_count, expect

Cuts: TypeAlias = int | Mapping[int, Sequence[float]] | None


@dataclass(frozen=True)
class CutPoints:
    """Which column is compared with which number, one pair for each feature that this makes."""

    columns: NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, dtype=np.intp))
    points: Array = field(default_factory=lambda: np.zeros(0))

    def exceeded(self, x: Features) -> Array:
        """1 where a record's number is above a cut point, else 0: (n, number of points)."""
        compared = x[:, self.columns].toarray() if sparse.issparse(x) else x[:, self.columns]
        return np.asarray(compared > self.points, dtype=np.float64)


def cut_points(given: Cuts, features: int, public: Features | None) -> CutPoints:
    """Those of each column in {column: points}, or so many quantiles of each public column.

    A public column of two values or fewer has none.
    """
    if isinstance(given, Mapping):
        known = all(column in range(features) for column in given)
        expect(known, f"cuts of columns 0 to {features - 1}", sorted(given)[-1:])
        found = {column: np.unique(np.asarray(given[column], dtype=float)) for column in given}
        finite = all(np.isfinite(points).all() for points in found.values())
        expect(finite, "cuts at finite numbers", given)
    elif given is None:
        return CutPoints()
    elif public is None:
        raise ValueError(
            "Cut points are quantiles of public rows: pass public=X_pub to fit, or give cuts="
            "{column: points}, known or paid for by dpspan.private_quantiles(..., ledger=...)."
        )
    else:
        shares, found = np.arange(1, check_count("cuts", given) + 1) / (given + 1), {}
        rows = public.toarray() if sparse.issparse(public) else public
        for column, values in enumerate(rows.T):
            points = np.unique(np.quantile(values, shares, method="lower"))
            if len(np.unique(values)) > 2:
                found[column] = points[points < values.max()]
    columns = np.repeat(list(found), [len(points) for points in found.values()])
    return CutPoints(columns.astype(np.intp), np.concatenate([np.zeros(0), *found.values()]))
