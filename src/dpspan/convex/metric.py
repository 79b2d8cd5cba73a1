"""The geometry of an AdaGrad step: H in the coordinates of a subspace, its inverse, its balls."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import optimize

from dpspan.convex.rows import Array
from dpspan.convex.subspaces import Subspace


@dataclass(frozen=True)
class Metric:
    """H = Q diag(λ) Qᵀ with λ ≥ 0; without vectors Q is the identity."""

    values: Array
    vectors: Array | None = None

    def solve(self, u: Array) -> Array:
        """H⁺u: the pseudo-inverse, zero where λ is."""
        inverse = np.divide(1.0, self.values, out=np.zeros_like(self.values), where=self._positive)
        return self._from_axes(inverse * self._to_axes(u))

    def closest_in_ball(self, u: Array, radius: float) -> Array:
        """argmin ‖a − u‖_H over ‖a‖ ≤ radius.

        The optimum is (H + μI)⁻¹H u for the μ ≥ 0 that brings it into the ball; its norm falls
        with μ. Where λ is zero the seminorm does not care, and the optimum is zero there.
        """
        if np.linalg.norm(u) <= radius:
            return u
        positive = self._positive
        values, b = self.values[positive], self._to_axes(u)
        inside = b[positive]
        beyond = float(np.linalg.norm(inside)) / radius - 1
        if beyond > 0:
            # If all λ were the smallest, or the largest, this would be μ.
            low, high = float(values.min()) * beyond / 2, float(values.max()) * beyond * 2

            def excess(mu: float) -> float:
                return float(np.linalg.norm(values / (values + mu) * inside)) - radius

            # Next to the ball rounding may put an end of the bracket on the other side of the root.
            if excess(low) <= 0:
                mu = low
            elif excess(high) >= 0:
                mu = high
            else:
                mu = optimize.brentq(excess, low, high, xtol=1e-15 * low, rtol=1e-14, maxiter=1000)
            inside = values / (values + mu) * inside
            inside *= min(1.0, radius / float(np.linalg.norm(inside)))
        b = np.zeros_like(b)
        b[positive] = inside
        return self._from_axes(b)

    @property
    def _positive(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return np.asarray(self.values > 1e-14 * self.values.max(initial=0.0))

    def _to_axes(self, u: Array) -> Array:
        return u if self.vectors is None else self.vectors.T @ u

    def _from_axes(self, u: Array) -> Array:
        return u if self.vectors is None else self.vectors @ u


def project_onto_ball(
    y: Array, radius: float | None, subspace: Subspace, metric: Metric | None = None
) -> Array:
    """The point of the ball ‖θ‖ ≤ radius that is closest to y in the metric of a subspace.

    What lies outside of the subspace does not count in that (semi-)norm: it stays, shortened if
    the ball has no room for it. Without a metric it is the ordinary projection.
    """
    length = float(np.linalg.norm(y))
    if radius is None or length <= radius:
        return y
    if metric is None:
        return y * (radius / length)
    inside = subspace.embed(y)
    outside = y - subspace.lift(inside)
    nearest = metric.closest_in_ball(inside, radius)
    room = np.sqrt(max(radius**2 - float(nearest @ nearest), 0.0))
    rest = float(np.linalg.norm(outside))
    return np.asarray(subspace.lift(nearest) + outside * min(1.0, room / max(rest, 1e-300)))
