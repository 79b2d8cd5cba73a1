"""Features on a common scale, by public numbers only: bounds that you know, or public rows.

Whatever is fitted here sees no private record, and is then applied to each record by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from sklearn.utils.sparsefuncs import mean_variance_axis

from dpspan.convex.arrays import Array, Features, is_sparse, scale_rows
from dpspan.convex.rows import norm_bounds
from dpspan.support.checks import check_number, expect, shown


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """x ↦ (x − shift)/scale, cut to ±limit, then shortened to norm `row_norm`; row by row."""

    shift: Array | float = 0.0
    scale: Array | float = 1.0
    limit: float = np.inf
    row_norm: float | None = None

    def apply(self, x: Features) -> Features:
        """The records prepared, in the form they came in."""
        with np.errstate(all="ignore"):  # warnings would be about private records
            return self._applied(x)

    def _applied(self, x: Features) -> Features:
        if is_sparse(x):
            if np.any(self.shift):
                raise ValueError(
                    "Scaling with center=True would fill a sparse matrix: give center=False, or a "
                    "dense array."
                )
            x = _merged(x)
            x.data = _cut(x.data / np.broadcast_to(self.scale, x.shape[1])[x.indices], self.limit)
        else:
            if np.any(self.shift) or np.any(np.not_equal(self.scale, 1.0)):  # else spare a copy
                x = (x - self.shift) / self.scale
            x = _cut(x, self.limit)
        if self.row_norm is not None:
            x = scale_rows(x, np.minimum(1.0, self.row_norm / norm_bounds(x)))
        return x


def _cut(values: Array, limit: float) -> Array:
    return values if limit == np.inf else np.clip(values, -limit, limit)


def _merged(x: Features) -> Features:
    """A copy of a CSR matrix, with one number an entry."""
    x = x.copy()
    x.sum_duplicates()
    return x


@runtime_checkable
class Scaling(Protocol):
    """Public knowledge about the range of the features."""

    def prepare(self, public: Features | None) -> Preparation:
        """The preparation, from configuration and public rows alone."""

    def describe(self) -> dict[str, Any]:
        """The configuration, for the certificate."""


@dataclass(frozen=True, kw_only=True)
class NoScaling:
    """Features as they are."""

    def prepare(self, public: Features | None) -> Preparation:
        return Preparation()

    def describe(self) -> dict[str, Any]:
        return {"name": "NoScaling"}


@dataclass(frozen=True, kw_only=True)
class FeatureBounds:
    """Bounds of each feature (or of all), known in advance: values end up between −1 and 1.

    Values beyond the bounds are cut. With `center=False` zero stays zero, for sparse features.

    Examples:
        >>> from dpspan.convex import FeatureBounds, PrivateLogisticRegression
        >>> bounds = FeatureBounds(low=[0, 40], high=[120, 250])  # age in years, height in cm
        >>> model = PrivateLogisticRegression(epsilon=1.0, scaling=bounds)
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

    def describe(self) -> dict[str, Any]:
        bounds = {name: np.asarray(getattr(self, name)).tolist() for name in ("low", "high")}
        return {"name": "FeatureBounds", **bounds, "center": self.center}


@dataclass(frozen=True, kw_only=True)
class PublicScaling:
    """Mean and standard deviation of the public rows; values beyond ±limit of them are cut.

    The cut keeps what is rare among the public rows, a category seen once, from growing large. A
    feature that never varies there is only centred and cut.

    Examples:
        >>> from dpspan.convex import PrivateLogisticRegression, PublicScaling
        >>> model = PrivateLogisticRegression(epsilon=1.0, scaling=PublicScaling(limit=2.0))
    """

    center: bool = True
    limit: float = 3.0

    def __post_init__(self) -> None:
        expect(check_number("limit", self.limit) > 0, "limit > 0", self.limit)

    def prepare(self, public: Features | None) -> Preparation:
        if public is None:
            raise ValueError(
                "Scaling by public rows needs some: pass public=X_pub to fit, or give "
                "scaling=FeatureBounds(low=..., high=...)."
            )
        if is_sparse(public):
            mean, variance = mean_variance_axis(_merged(public), axis=0)
        else:
            mean, variance = public.mean(0), public.var(0)
        deviation = np.sqrt(variance)
        # Below rounding a deviation is zero; to divide by it would blow the column up.
        scale = np.where(deviation > 1e-12 * np.maximum(np.abs(mean), 1e-150), deviation, 1.0)
        return Preparation(shift=mean if self.center else 0.0, scale=scale, limit=self.limit)

    def describe(self) -> dict[str, Any]:
        return {"name": "PublicScaling", "center": self.center, "limit": self.limit}


def scaling_of(given: str | Scaling | None) -> Scaling:
    """The scaling meant by None, "public" or an object."""
    if given is None:
        return NoScaling()
    if given == "public":
        return PublicScaling()
    if isinstance(given, type) or not isinstance(given, Scaling):
        raise ValueError(
            f"Expected scaling to be None, 'public' or FeatureBounds(low=..., high=...), got "
            f"{shown(given)}. Scaling by the mean, range or norm of private records would release "
            "them without noise."
        )
    return given
