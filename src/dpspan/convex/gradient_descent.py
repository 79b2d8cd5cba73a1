"""DP gradient descent (Kairouz et al. 2021, Algorithm 3), in the whole space or in a subspace.

    ∇̃_t = m(θ_t) + b_t,  b_t ~ N(0, (z·C_t/n)² I)
    θ_{t+1} = P(θ_t − η ∇̃_t),  P the projection onto the ball ‖θ‖ ≤ R, or nothing
    release: the average of the θ_t

With a subspace V it is projected DP-GD, the convex case of PDP-SGD: V Vᵀ∇̃_t has the law of
V(Vᵀm + N(0, I_k)), so only k numbers are drawn and only they leave the private side.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dpspan.checks import check_count, check_number, expect
from dpspan.convex.arrays import Array
from dpspan.convex.averaging import Average, check_average
from dpspan.convex.fitting import Fit
from dpspan.convex.metric import project_onto_ball
from dpspan.convex.oracles import Everything, SubspaceOracle


@dataclass(frozen=True, kw_only=True)
class GradientDescent:
    """DP-GD; constrained with a `radius`, projected with a `subspace`."""

    steps: int = 30
    learning_rate: float = 3.0
    radius: float | None = None
    subspace: SubspaceOracle = field(default_factory=Everything)
    average: float = 0.5

    def __post_init__(self) -> None:
        check_settings(self.steps, self.learning_rate, self.radius, self.average)

    def minimise(self, fit: Fit) -> Array:
        """The parameters released by a fit, (P,)."""
        subspace_at = fit.subspaces(self.subspace)
        average, theta = Average(self.steps, self.average), fit.start
        for t in fit.steps(self.steps):
            subspace, clip = subspace_at(theta), fit.clip.at(t)
            fit.charge()
            m = fit.records.unprivate_mean(theta, clip)
            b = fit.noise.normal(subspace.size, fit.noise_multiplier * clip / fit.records.divisor)
            noisy = subspace.embed(m) + b
            y = theta - self.learning_rate * subspace.lift(noisy)
            theta = project_onto_ball(y, self.radius, subspace)
            average.add(theta)
        return average.value

    def describe(self) -> dict[str, Any]:
        """Name and configuration, for the certificate."""
        return {
            "name": "GradientDescent",
            "steps": self.steps,
            "learning_rate": self.learning_rate,
            "radius": self.radius,
            "subspace": self.subspace.describe(),
            "average": self.average,
        }


def check_settings(steps: int, learning_rate: float, radius: float | None, average: float) -> None:
    """What every method of steps needs."""
    check_count("steps", steps)
    expect(check_number("learning_rate", learning_rate) > 0, "learning_rate > 0", learning_rate)
    positive = radius is None or 0 < check_number("radius", radius) < float("inf")
    expect(positive, "radius to be None, or > 0 and finite", radius)
    check_average(average)
