"""Noisy AdaGrad with a subspace oracle (Kairouz et al. 2021, Algorithm 1).

    V_t        subspace from public knowledge
    ∇̃_t        V_t(V_tᵀm(θ_t) + b_t),  b_t ~ N(0, (z_b·C_t/n)² I_k)
    H_t        preconditioner in the subspace (see preconditioners.py), noise multiplier z_B
    y_{t+1}    θ_t − η H_t⁺ ∇̃_t
    θ_{t+1}    the point of the ball ‖θ‖ ≤ R nearest to y_{t+1} in the norm of H_t
    release:   the average of the θ_t

Formal guarantee: gradient and preconditioner of a step are one release of the same records, a
Gaussian mechanism with 1/z² = 1/z_b² + 1/z_B²; the rest is post-processing. Everything happens in
k × k and in the factored history of the gradients (t × p); nothing is p × p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from dpspan.checks import expect
from dpspan.convex.arrays import Array
from dpspan.convex.averaging import Average
from dpspan.convex.fitting import Fit
from dpspan.convex.gradient_descent import check_settings
from dpspan.convex.metric import project_onto_ball
from dpspan.convex.oracles import Everything, SubspaceOracle
from dpspan.convex.preconditioners import (
    FromNoisyGradients,
    Preconditioner,
    Released,
    ReleasedSecondMoment,
    Step,
)


@dataclass(frozen=True, kw_only=True)
class NoisyAdaGrad:
    """Noisy AdaGrad; `preconditioner` says where H_t comes from."""

    steps: int = 30
    learning_rate: float = 1.0
    radius: float | None = None
    subspace: SubspaceOracle = field(default_factory=Everything)
    preconditioner: Preconditioner = field(default_factory=FromNoisyGradients)
    average: float = 0.5

    def __post_init__(self) -> None:
        check_settings(self.steps, self.learning_rate, self.radius, self.average)
        # It sees gradients without noise, so it has to be one whose noise is accounted for.
        known = isinstance(
            self.preconditioner, Released | ReleasedSecondMoment | FromNoisyGradients
        )
        expect(known, "preconditioner to be one of dpspan.convex", self.preconditioner)

    def minimise(self, fit: Fit) -> Array:
        """The parameters released by a fit, (P,)."""
        subspace_at = fit.subspaces(self.subspace)
        preconditioner = self.preconditioner.begin(fit)
        z_b = fit.noise_multiplier / math.sqrt(1 - self.preconditioner.share)
        average, theta = Average(self.steps, self.average), fit.start
        for t in fit.steps(self.steps):
            subspace, clip = subspace_at(theta), fit.clip.at(t)
            fit.charge()
            m = fit.records.unprivate_mean(theta, clip)
            std = z_b * clip / fit.records.divisor
            noisy = subspace.embed(m) + fit.noise.normal(subspace.size, std)
            step = Step(
                subspace=subspace,
                clip=clip,
                parameters=theta,
                unprivate_mean=m,
                released=noisy,
                released_std=std,
            )
            metric = preconditioner.update(step)
            y = theta - self.learning_rate * subspace.lift(metric.solve(noisy))
            theta = project_onto_ball(y, self.radius, subspace, metric)
            average.add(theta)
        return average.value

    def describe(self) -> dict[str, Any]:
        """Name and configuration, for the certificate."""
        return {
            "name": "NoisyAdaGrad",
            "steps": self.steps,
            "learning_rate": self.learning_rate,
            "radius": self.radius,
            "subspace": self.subspace.describe(),
            "preconditioner": self.preconditioner.describe(),
            "average": self.average,
        }
