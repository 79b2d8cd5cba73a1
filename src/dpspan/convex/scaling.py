"""Features on a common scale, by public numbers only: bounds that you know, or public rows.

Whatever is fitted here sees no private record, and is then applied to each record by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dpspan.checks import check_number, expect
from dpspan.convex.arrays import Array, Features, is_sparse, scale_rows
from dpspan.convex.rows import norm_bounds


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """x ↦ (x − shift)/scale, cut to ±limit, then shortened to norm `row_norm`; row by row."""

    shift: Array | float = 0.0
    scale: Array | float = 1.0
    limit: float = np.inf
    row_norm: float | None = None

    def apply(self, x: Features) -> Features:
        """The records prepared, in the form they came in."""
        if is_sparse(x):
            if np.any(self.shift):
                raise ValueError(
                    "Scaling with center=True would fill a sparse matrix: give center=False, or a "
                    "dense array."
                )
            x = x.copy()
            x.sum_duplicates()
            x.data = _cut(x.data / np.broadcast_to(self.scale, x.shape[1])[x.indices], self.limit)
        else:
            if np.any(self.shift) or np.any(np.not_equal(self.scale, 1.0)):  # else spare a copy
                x = (x - self.shift) / self.scale
            x = _cut(x, self.limit)
        if self.row_norm is not None:
            with np.errstate(divide="ignore"):
                x = scale_rows(x, np.minimum(1.0, self.row_norm / norm_bounds(x)))
        return x


def _cut(values: Array, limit: float) -> Array:
    return values if limit == np.inf else np.clip(values, -limit, limit)


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
        mean = np.asarray(public.mean(0)).ravel()
        squares = public.multiply(public) if is_sparse(public) else public**2
        variance = np.asarray(squares.mean(0)).ravel() - mean**2
        # Below rounding a variance is zero; its root would blow the column up.
        known = variance > 1e-12 * np.maximum(mean**2, 1e-300)
        scale = np.where(known, np.sqrt(np.where(known, variance, 1.0)), 1.0)
        return Preparation(shift=mean if self.center else 0.0, scale=scale, limit=self.limit)

    def describe(self) -> dict[str, Any]:
        return {"name": "PublicScaling", "center": self.center, "limit": self.limit}


SCALINGS: Mapping[str, Scaling] = {"none": NoScaling(), "public": PublicScaling()}


def scaling_of(given: str | Scaling | None) -> Scaling:
    """The scaling meant by a name, an object or None."""
    if given is None:
        return NoScaling()
    if not isinstance(given, str):
        return given
    if given not in SCALINGS:
        raise ValueError(
            f"Expected scaling to be None, 'public' or FeatureBounds(low=..., high=...), got "
            f"{given!r}. Scaling by the mean, range or norm of private records would release them "
            "without noise."
        )
    return SCALINGS[given]
