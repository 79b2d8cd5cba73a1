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

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from dpspan.convex.fitting import Fit
from dpspan.convex.metric import project_onto_ball
from dpspan.convex.preconditioners import FromNoisyGradients, Preconditioner, Released, Step
from dpspan.convex.rows import Array
from dpspan.convex.subspaces import (
    PublicFeatures,
    Span,
    Subspace,
    SubspaceOracle,
    Whole,
    WholeSpace,
)
from dpspan.support.checks import check_count, check_number, expect, shown


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
        """The parameters released by a fit, (P,)."""
        return _descend(self, fit)


@dataclass(frozen=True, kw_only=True)
class GradientDescent(_Descent):
    """DP-GD; constrained with a `radius`, projected (the convex PDP-SGD) with a `subspace`.

    Examples:
        >>> from dpspan.convex import GradientDescent, PrivateLogisticRegression
        >>> model = PrivateLogisticRegression(epsilon=1.0, method=GradientDescent(radius=5.0))
    """

    learning_rate: float = 3.0


@dataclass(frozen=True, kw_only=True)
class NoisyAdaGrad(_Descent):
    """Noisy AdaGrad; `preconditioner` says where H_t comes from.

    Examples:
        >>> from dpspan.convex import NoisyAdaGrad, PrivateLogisticRegression, PublicFeatures
        >>> method = NoisyAdaGrad(steps=50, subspace=PublicFeatures(rank=20))
        >>> model = PrivateLogisticRegression(epsilon=1.0, method=method)
    """

    learning_rate: float = 1.0
    preconditioner: Preconditioner = field(default_factory=FromNoisyGradients)

    def __post_init__(self) -> None:
        super().__post_init__()
        # It sees gradients without noise, so it has to be one whose noise is accounted for.
        known = isinstance(self.preconditioner, Released | FromNoisyGradients)
        expect(known, "preconditioner to be one of dpspan.convex", self.preconditioner)

    def minimise(self, fit: Fit) -> Array:
        """The parameters released by a fit, (P,)."""
        return _descend(self, fit, self.preconditioner)


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
    if not isinstance(given, str) or given not in METHODS:
        names = ", ".join(repr(name) for name in METHODS)
        raise ValueError(
            f"Expected method to be one of {names}, a GradientDescent(...) or a "
            f"NoisyAdaGrad(...), got {shown(given)}."
        )
    return METHODS[given]


def _descend(method: _Descent, fit: Fit, preconditioner: Preconditioner | None = None) -> Array:
    """What is wrong is refused before the first charge."""
    theta, clips, n = fit.start, fit.clips(method.steps), fit.records.divisor
    subspace_at = method.subspace.start(fit.public)
    subspace = _checked(subspace_at(theta))
    share, update = 0.0, None
    if preconditioner is not None:
        turns = method.subspace.turns_within(method.steps)
        share, update = preconditioner.share, preconditioner.begin(fit, subspace, turns=turns)
    z_b = fit.noise_multiplier / math.sqrt(1 - share)
    skipped = method.steps - max(math.ceil(method.average * method.steps), 1)
    average = np.zeros_like(theta)
    for t in fit.watch(range(1, method.steps + 1)):
        clip = clips[t - 1]
        if t > 1:
            subspace = _checked(subspace_at(theta))
        fit.charge()
        m = fit.records.unprivate_mean(theta, clip)
        std = z_b * clip / n
        noisy = subspace.embed(m) + fit.noise.normal(subspace.size, std)
        direction, metric = noisy, None
        if update is not None:
            metric = update(
                Step(
                    subspace=subspace,
                    clip=clip,
                    parameters=theta,
                    unprivate_mean=m,
                    released=noisy,
                    released_std=std,
                )
            )
            direction = metric.solve(noisy)
        y = theta - method.learning_rate * subspace.lift(direction)
        theta = project_onto_ball(y, method.radius, subspace, metric)
        if t > skipped:
            average = average + (theta - average) / (t - skipped)
    return average


def _checked(subspace: Subspace) -> Subspace:
    if type(subspace) not in (Span, Whole):
        raise TypeError(
            f"Expected a subspace oracle to give a Span or Whole, got {subspace!r}: the noise is "
            "made for coordinates that are no longer than what they stand for."
        )
    return subspace
