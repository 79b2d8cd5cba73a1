"""Noisy descent: DP gradient descent and noisy AdaGrad; docs/tables.md compares them.

(Kairouz et al. 2021, Algorithms 3 and 1.)

    V_t        subspace from public knowledge, or the whole space
    ∇̃_t        V_t(V_tᵀm(θ_t) + b_t),  b_t ~ N(0, (z_b·C_t/n)² I_k)
    H_t        preconditioner in the subspace (see preconditioners.py), noise multiplier z_B; or I
    y_{t+1}    θ_t − η H_t⁺ ∇̃_t
    θ_{t+1}    the point of the ball ‖θ‖ ≤ R nearest to y_{t+1} in the norm of H_t
    release:   the average of the θ_t

Formal guarantee: gradient and preconditioner of a step are one release of the same records, a
Gaussian mechanism with 1/z² = 1/z_b² + 1/z_B²; the rest is post-processing. V Vᵀ∇̃ has the law of
V(Vᵀm + N(0, I_k)), so only k numbers are drawn and only they leave the private side. Everything
happens in k × k and in the factored history of the gradients (t × p); nothing is p × p.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from dp_accounting import GaussianDpEvent

from dpspan.convex.fitting import Fit
from dpspan.convex.preconditioners import (
    FromNoisyGradients,
    Preconditioner,
    Released,
    Step,
    Update,
    project_onto_ball,
)
from dpspan.convex.rows import Array
from dpspan.convex.subspaces import (
    PublicFeatures,
    Span,
    Subspace,
    SubspaceOracle,
    Whole,
    WholeSpace,
)
from dpspan.support.checks import check_count, check_number, expect


@dataclass(frozen=True, kw_only=True)
class _Descent:
    """What both methods are configured by; `average` is the share of the last iterates released."""

    steps: int = 30
    learning_rate: float
    radius: float | None = None
    subspace: SubspaceOracle = field(default_factory=WholeSpace)
    average: float = 0.5

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        rate, radius, share = self.learning_rate, self.radius, self.average
        expect(check_number("learning_rate", rate) > 0, "learning_rate > 0", rate)
        bounded = radius is None or 0 < check_number("radius", radius) < math.inf
        expect(bounded, "radius to be None, or > 0 and finite", radius)
        expect(0 <= check_number("average", share) <= 1, "0 <= average <= 1", share)

    def minimise(self, fit: Fit) -> Array:
        """The parameters released by a fit, (P,); what is wrong is refused before it is charged."""
        theta, clips, n = fit.start, fit.clips(self.steps), fit.records.divisor
        subspace = self._subspace_at(fit, theta)
        share, update = self._preconditioned(fit, subspace)
        z_b = fit.noise_multiplier / math.sqrt(1 - share)
        skipped = self.steps - max(math.ceil(self.average * self.steps), 1)
        average, event = np.zeros_like(theta), GaussianDpEvent(fit.noise_multiplier)
        for t in range(1, self.steps + 1):
            clip = clips[t - 1]
            if t > 1 and self.subspace.turns:
                subspace = self._subspace_at(fit, theta)
            fit.ledger.charge(event)  # nothing of a step is computed before that
            m = fit.records.unprivate_mean(theta, clip)
            std = z_b * clip / n
            noisy = subspace.embed(m) + fit.noise.normal(subspace.size, std)
            step = Step(
                subspace=subspace, clip=clip, theta=theta, unprivate_mean=m, released=noisy, std=std
            )
            metric = None if update is None else update(step)
            direction = noisy if metric is None else metric.solve(noisy)
            y = theta - self.learning_rate * subspace.lift(direction)
            theta = project_onto_ball(y, self.radius, subspace, metric)
            if t > skipped:
                average = average + (theta - average) / (t - skipped)
        return average

    def _preconditioned(self, fit: Fit, subspace: Subspace) -> tuple[float, Update | None]:
        """The share of 1/z² that a preconditioner takes, and its updates, if there is one."""
        return 0.0, None

    def _subspace_at(self, fit: Fit, theta: Array) -> Subspace:
        subspace = self.subspace.find(fit.public, theta)
        if type(subspace) not in (Span, Whole):
            raise TypeError(
                f"Expected a subspace oracle to give a Span or Whole, got {subspace!r}: the noise "
                "is made for coordinates that are no longer than what they stand for."
            )
        return subspace


@dataclass(frozen=True, kw_only=True)
class GradientDescent(_Descent):
    """DP-GD; constrained with a `radius`, projected (the convex PDP-SGD) with a `subspace`."""

    learning_rate: float = 3.0


@dataclass(frozen=True, kw_only=True)
class NoisyAdaGrad(_Descent):
    """Noisy AdaGrad; `preconditioner` says where H_t comes from."""

    learning_rate: float = 1.0
    preconditioner: Preconditioner = field(default_factory=FromNoisyGradients)

    def __post_init__(self) -> None:
        super().__post_init__()
        # It sees gradients without noise, so it has to be one whose noise is accounted for.
        known = isinstance(self.preconditioner, Released | FromNoisyGradients)
        expect(known, "preconditioner to be one of dpspan.convex", self.preconditioner)

    def _preconditioned(self, fit: Fit, subspace: Subspace) -> tuple[float, Update | None]:
        updates = self.preconditioner.begin(fit, subspace, turns=self.subspace.turns)
        return self.preconditioner.share, updates


Method: TypeAlias = GradientDescent | NoisyAdaGrad
METHODS: Mapping[str, Method] = {
    "gd": GradientDescent(),
    "constrained": GradientDescent(radius=5.0),
    "projected": GradientDescent(subspace=PublicFeatures()),
    "adagrad": NoisyAdaGrad(),
    "adagrad-diagonal": NoisyAdaGrad(preconditioner=FromNoisyGradients(diagonal=True)),
    "adagrad-released": NoisyAdaGrad(preconditioner=Released()),
    "projected-adagrad": NoisyAdaGrad(subspace=PublicFeatures()),
    "projected-adagrad-released": NoisyAdaGrad(
        subspace=PublicFeatures(), preconditioner=Released()
    ),
}


def method_of(given: str | Method) -> Method:
    """The method meant by a name or an object; others would see records and answer for nothing."""
    if isinstance(given, GradientDescent | NoisyAdaGrad):
        return given
    known, names = isinstance(given, str) and given in METHODS, ", ".join(map(repr, METHODS))
    expect(known, f"method to be one of {names}, GradientDescent(...) or NoisyAdaGrad(...)", given)
    return METHODS[given]
