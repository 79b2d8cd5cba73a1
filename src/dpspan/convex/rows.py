"""Records as the rows of a matrix, with sums of clipped gradients that never build one gradient.

    x̄_i = (x_i, 1)   a record with its constant column, which counts in the clip
    D_i ⊗ x̄_i        its gradient, of norm ‖D_i‖·‖x̄_i‖
    Σ_i f_i D_i ⊗ x̄_i  the clipped sum, f_i = min(1, C/‖D_i ⊗ x̄_i‖): one product Dᵀdiag(f) X̄

Formal guarantee: f_i uses a bound of the norm that rounding cannot undercut, so adding or removing
a record moves the sum by at most C, up to the rounding of the summation itself. A record whose
length or gradient is not finite counts as zero everywhere, and so does one whose f_i is subnormal:
it would have too few digits.

Where records belong to units, one f_u clips the mean gradient of a unit's records, and all of this
holds with units in place of records.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from dpspan.support.units import Units

Array: TypeAlias = NDArray[np.float64]
Features: TypeAlias = Any  # an Array, or a CSR matrix of float64 (scipy is untyped)
_UNIT = 2.0**-53
_TINY = 2.0**-1022
_MOST_CANCELLED = 2.0**10


class Rows:
    """The records of a table, dense or CSR, with or without a constant column."""

    def __init__(self, x: Features, *, intercept: bool, units: Units | None = None) -> None:
        bounds = norm_bounds(x, intercept=intercept)
        finite = np.isfinite(bounds)
        # A weight of zero is not enough: 0·Inf is NaN, and everybody would see that.
        self.x = x if finite.all() else _emptied(x, ~finite)
        self.intercept = intercept
        self.norm_bounds: Array = np.where(finite, bounds, np.inf)  # at least ‖x̄_i‖, (n,)
        self.units = units
        if units is not None:
            ones, place = np.ones(len(self)), np.arange(len(self))
            self._sums = sparse.csr_array((ones, (units.owners, place)))  # (units, n)

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
        sums: Array = np.asarray((self.x.T @ weights).T)
        return np.hstack([sums, weights.sum(0)[:, None]]) if self.intercept else sums

    def clipped_weights(self, derivatives: Array, clip: float) -> Array:
        """f_i D_i, (n, c); zero for a record whose gradient is not finite."""
        with np.errstate(all="ignore"):
            if self.units is not None:  # of their mean, to which a record adds D_i/n_u
                derivatives = derivatives / self._sums.sum(1)[self.units.owners, None]
            own = _rounded_up((derivatives**2).sum(1), derivatives.shape[1])
            norms = own * self.norm_bounds * (1 + 8 * _UNIT)
            if self.units is not None:
                norms = self._unit_norms(derivatives, norms)[self.units.owners]
            factors = np.minimum(1.0, clip / norms)
            usable = np.isfinite(norms) & (factors >= _TINY)
            return np.where(usable[:, None], derivatives * factors[:, None], 0.0)

    def _unit_norms(self, derivatives: Array, norms: Array) -> Array:
        """At least ‖Σ_i D_i ⊗ x̄_i‖ of each unit: as computed, or the sum of norms if that is less.

        An entry is a sum over a unit's records, which rounding moves by so many units in the last
        place of the sum of norms. Records that all but cancel would be huge beside all others once
        their sum is short enough: the bound is never so small that they exceed the clip by far.
        """
        most = self._sums.sum(1)  # records of it: other units have no influence
        together = (self._sums @ norms) * (1 + (most + 8) * _UNIT)
        squares = np.zeros(len(together))
        for column in derivatives.T:
            squares += _row_squares(self._sums.multiply(column).tocsr() @ self.x)
            squares += self.intercept * (self._sums @ column) ** 2
        computed = _rounded_up(squares, self.width * derivatives.shape[1])
        computed += (2 * most + 32) * _UNIT * together
        return np.asarray(np.fmin(np.fmax(computed, together / _MOST_CANCELLED), together))


def norm_bounds(x: Features, *, intercept: bool = False) -> Array:
    """At least the norm of each row, (n,), with or without a constant column."""
    with np.errstate(all="ignore"):
        return _rounded_up(_row_squares(x) + intercept, x.shape[1] + intercept)


def _row_squares(x: Features) -> Array:
    if sparse.issparse(x):
        return np.asarray(x.multiply(x).sum(1)).ravel()
    return np.asarray(np.einsum("ij,ij->i", x, x))  # no copy of the table


def _emptied(x: Features, where: NDArray[np.bool_]) -> Features:
    """The rows with zeros in place of some."""
    if not sparse.issparse(x):
        return np.where(where[:, None], 0.0, x)
    x = x.copy()
    x.data[np.repeat(where, np.diff(x.indptr))] = 0.0
    return x


def _rounded_up(squares: Array, terms: int) -> Array:
    """Roots of computed sums of `terms` squares, made bounds: see dpspan.gradients.numerics."""
    return np.asarray(np.sqrt(squares + terms * _TINY) * (1 + (terms + 8) * _UNIT))


@contextmanager
def no_echo() -> Iterator[None]:
    """Keeps the data out of messages: numpy's quote a text, scikit-learn's show arrays."""
    try:
        yield
    except ValueError as error:
        first, *others = str(error).split("\n")
        if first.startswith(("Expected 2D array", "Complex data")):
            advice = [line for line in others if line.startswith("Reshape your data")]
            raise ValueError(" ".join([first, *advice])) from None
        if "convert" not in str(error):
            raise
        raise ValueError(
            "Expected numbers only, got text among them: encode categories by a list of them that "
            "is known in advance, and fill gaps with constants."
        ) from None
