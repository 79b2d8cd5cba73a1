"""Features on a common scale, by public numbers only: bounds that you know, or public rows.
Whatever is fitted here sees no private record, and is then applied to each record by itself.
"""

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from scipy import sparse
from sklearn.preprocessing import StandardScaler

from dpspan.convex.cuts import CutPoints
from dpspan.convex.rows import Array, Features, norm_bounds
from dpspan.support.checks import check_number, expect, shown


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """x ↦ (x − shift)/scale, cut to ±limit, beside x > cuts; shortened to `row_norm`; by row."""

    shift: Array | float = 0.0
    scale: Array | float = 1.0
    limit: float = np.inf
    row_norm: float | None = None
    cuts: CutPoints = field(default_factory=CutPoints)

    def apply(self, x: Features) -> Features:
        """The records prepared, in the form they came in."""
        with np.errstate(all="ignore"):  # warnings would be about private records
            above = self.cuts.exceeded(x)
            x = self._scaled_csr(x) if sparse.issparse(x) else self._scaled(x)
            if above.size and sparse.issparse(x):
                x = sparse.hstack((x, above), format="csr")
            elif above.size:
                x = np.hstack((x, above))
            if self.row_norm is not None:
                factors = np.minimum(1.0, self.row_norm / norm_bounds(x))
                by_row = factors[:, None]
                x = x.multiply(by_row).tocsr() if sparse.issparse(x) else x * by_row
            return x

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
