"""Features on a common scale, and thermometers of them: whether a number exceeds cut points.

By public numbers only: known ones, public rows, or what was paid for on the same ledger
(`dpspan.private_quantiles`). Whatever is fitted here sees no private record, and is then applied to
each record by itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from scipy import sparse
from sklearn.preprocessing import StandardScaler

from dpspan.convex.rows import Array, Features, norm_bounds
from dpspan.support.checks import check_count, check_number, expect, shown

Cuts: TypeAlias = int | Mapping[int, Sequence[float]] | None


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """x ↦ (x − shift)/scale, cut to ±limit, beside x > cuts; shortened to `row_norm`; by row."""

    shift: Array | float = 0.0
    scale: Array | float = 1.0
    limit: float = np.inf
    row_norm: float | None = None
    cuts: tuple[tuple[int, Array], ...] = ()  # points of a column, one feature each

    def apply(self, x: Features) -> Features:
        """The records prepared, in the form they came in."""
        is_sparse = sparse.issparse(x)
        with np.errstate(all="ignore"):  # warnings would be about private records
            prepared: Features = self._scaled_csr(x) if is_sparse else self._scaled(x)
            if self.cuts:
                compared = x[:, [column for column, points in self.cuts for _ in points]]
                dense = compared.toarray() if is_sparse else compared
                above = dense > np.concatenate([points for _, points in self.cuts])
                both = (prepared, above.astype(np.float64))
                prepared = sparse.hstack(both, format="csr") if is_sparse else np.hstack(both)
            if self.row_norm is not None:
                by_row = np.minimum(1.0, self.row_norm / norm_bounds(prepared))[:, None]
                prepared = prepared.multiply(by_row).tocsr() if is_sparse else prepared * by_row
            return prepared

    def _scaled(self, x: Array) -> Array:
        if np.any(self.shift) or np.any(np.not_equal(self.scale, 1.0)):  # else spare a copy
            x = (x - self.shift) / self.scale
        return x if self.limit == np.inf else np.clip(x, -self.limit, self.limit)

    def _scaled_csr(self, x: Features) -> Features:
        if np.any(self.shift):
            raise ValueError(
                "Scaling with center=True would fill a sparse matrix: give center=False, or a "
                "dense array."
            )
        x = _merged(x)
        scaled = x.data / np.broadcast_to(self.scale, x.shape[1])[x.indices]
        x.data = np.clip(scaled, -self.limit, self.limit)
        return x


def _merged(x: Features) -> Features:
    """A copy of a CSR matrix, with one number an entry."""
    x = x.copy()
    x.sum_duplicates()
    return x


@dataclass(frozen=True, kw_only=True)
class FeatureBounds:
    """Bounds of each feature (or of all), known in advance: values end up between −1 and 1.

    Values beyond the bounds are cut. With `center=False` zero stays zero, for sparse features.
    """

    low: Any
    high: Any
    center: bool = True

    def prepare(self, public: Features | None) -> Preparation:
        low, high = np.asarray(self.low, dtype=float), np.asarray(self.high, dtype=float)
        finite = np.isfinite(low).all() and np.isfinite(high).all()
        expect(bool(finite and (low < high).all()), "finite bounds with low < high", self)
        shift = (low + high) / 2 if self.center else 0.0
        scale = (high - low) / 2 if self.center else np.maximum(np.abs(low), np.abs(high))
        return Preparation(shift=shift, scale=scale, limit=1.0)


@dataclass(frozen=True, kw_only=True)
class PublicScaling:
    """Mean and standard deviation of the public rows; values beyond ±limit of them are cut.

    The cut keeps what is rare among the public rows, a category seen once, from growing large. A
    feature that never varies there is only centred and cut.
    """

    center: bool = True
    limit: float = 3.0

    def __post_init__(self) -> None:
        expect(check_number("limit", self.limit) > 0, "limit > 0", self.limit)

    def prepare(self, public: Features | None) -> Preparation:
        if public is None:
            raise ValueError(
                "PublicScaling needs public rows: pass public=X_pub to fit, or give "
                "scaling=FeatureBounds(low=..., high=...)."
            )
        rows = _merged(public) if sparse.issparse(public) else public
        found = StandardScaler(with_mean=False).fit(rows)  # a mean it computes all the same
        shift = found.mean_ if self.center else 0.0
        return Preparation(shift=shift, scale=found.scale_, limit=self.limit)


Scaling: TypeAlias = FeatureBounds | PublicScaling


def scaling_of(given: str | Scaling | None) -> Scaling | None:
    """The scaling meant by None (features as they are), "public" or an object."""
    if isinstance(given, str) and given == "public":
        return PublicScaling()
    if not isinstance(given, FeatureBounds | PublicScaling | None):
        raise ValueError(
            f"Expected scaling to be None, 'public' or FeatureBounds(low=..., high=...), got "
            f"{shown(given)}. Scaling by the mean, range or norm of private records would release "
            "them without noise."
        )
    return given


def cut_points(given: Cuts, features: int, public: Features | None) -> tuple[Any, ...]:
    """For `Preparation`: those in {column: points}, or so many quantiles of each public column.

    A public column of two values or fewer has none.
    """
    if isinstance(given, Mapping):
        known = all(column in range(features) for column in given)
        expect(known, f"cuts of columns 0 to {features - 1}", sorted(given)[-1:])
        found = {column: np.unique(np.asarray(given[column], dtype=float)) for column in given}
        finite = all(np.isfinite(points).all() for points in found.values())
        expect(finite, "cuts at finite numbers", given)
    elif given is None:
        return ()
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
    return tuple((column, points) for column, points in found.items() if len(points))
