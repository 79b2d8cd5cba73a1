"""Records as the rows of a matrix, with sums of clipped gradients that never build one gradient.

    x̄_i = (x_i, 1)   a record with its constant column, which counts in the clip
    D_i ⊗ x̄_i        its gradient, of norm ‖D_i‖·‖x̄_i‖
    Σ_i f_i D_i ⊗ x̄_i  the clipped sum, f_i = min(1, C/‖D_i ⊗ x̄_i‖): one product Dᵀdiag(f) X̄

Formal guarantee: f_i uses a bound of the norm that rounding cannot undercut, so adding or removing
a record moves the sum by at most C, up to the rounding of the summation itself.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from dpspan.convex.arrays import Array, Features, is_sparse

_UNIT = 2.0**-53
_TINY = 2.0**-1022


class Rows:
    """The records of a table, dense or CSR, with or without a constant column."""

    def __init__(self, x: Features, *, intercept: bool) -> None:
        self.x, self.intercept = x, intercept

    def __len__(self) -> int:
        return int(self.x.shape[0])

    @property
    def width(self) -> int:
        """How many weights an output has."""
        return int(self.x.shape[1]) + self.intercept

    def margins(self, weights: Array) -> Array:
        """X̄ Wᵀ, (n, c), for weights (c, width)."""
        features = self.x.shape[1]
        with np.errstate(all="ignore"):  # what overflows counts as zero, without a word
            margins: Array = np.asarray(self.x @ weights[:, :features].T)
            return margins + weights[:, features] if self.intercept else margins

    def combine(self, weights: Array) -> Array:
        """weightsᵀ X̄, (c, width)."""
        sums = np.asarray((self.x.T @ weights).T if is_sparse(self.x) else weights.T @ self.x)
        return np.hstack([sums, weights.sum(0)[:, None]]) if self.intercept else sums

    @cached_property
    def norm_bounds(self) -> Array:
        """At least ‖x̄_i‖, (n,)."""
        with np.errstate(over="ignore"):
            squares = (
                self.x.multiply(self.x).sum(1)
                if is_sparse(self.x)
                else np.einsum("ij,ij->i", self.x, self.x)  # no copy of the table
            )
            total = np.asarray(squares).ravel() + (1.0 if self.intercept else 0.0)
            return _rounded_up(total, self.width)

    def clipped_weights(self, derivatives: Array, clip: float) -> Array:
        """f_i D_i, (n, c); zero for a record whose gradient is not finite."""
        with np.errstate(all="ignore"):
            own = _rounded_up((derivatives**2).sum(1), derivatives.shape[1])
            norms = own * self.norm_bounds * (1 + 8 * _UNIT)
            factors = np.minimum(1.0, clip / norms)
            usable = np.isfinite(norms) & np.isfinite(factors)
            return np.where(usable[:, None], derivatives * factors[:, None], 0.0)


def norm_bounds(x: Features) -> Array:
    """At least the norm of each row, (n,)."""
    return Rows(x, intercept=False).norm_bounds


def _rounded_up(squares: Array, terms: int) -> Array:
    """Roots of computed sums of `terms` squares, made bounds: see dpspan.numerics."""
    bounds: Array = np.sqrt(squares + terms * _TINY) * (1 + (terms + 8) * _UNIT)
    return bounds
