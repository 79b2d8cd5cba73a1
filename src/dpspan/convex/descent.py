"""Noisy descent: DP gradient descent, or noisy AdaGrad with a preconditioner.

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
from typing import Protocol

import numpy as np

from dpspan.convex.arrays import Array
from dpspan.convex.fitting import Fit
from dpspan.convex.metric import project_onto_ball
from dpspan.convex.oracles import SubspaceOracle
from dpspan.convex.preconditioners import Preconditioner, Step


class Descent(Protocol):
    """What a method of steps is configured by."""

    @property
    def steps(self) -> int:
        """How many Gaussian mechanisms a fit is."""

    @property
    def learning_rate(self) -> float:
        """η."""

    @property
    def radius(self) -> float | None:
        """R, or None for no ball."""

    @property
    def subspace(self) -> SubspaceOracle:
        """Where noise is drawn."""

    @property
    def average(self) -> float:
        """The share of the iterates, the last ones, whose mean is released."""


def descend(method: Descent, fit: Fit, preconditioner: Preconditioner | None = None) -> Array:
    """The parameters released by a fit, (P,); what is wrong is refused before the first charge."""
    theta, clips = fit.start, fit.clips(method.steps)
    subspace_at = fit.subspaces(method.subspace)
    subspace = subspace_at(theta)
    share, state = 0.0, None
    if preconditioner is not None:
        turns = method.subspace.turns_within(method.steps)
        share, state = preconditioner.share, preconditioner.begin(fit, subspace, turns=turns)
    z_b = fit.noise_multiplier / math.sqrt(1 - share)
    average = Average(method.steps, method.average)
    for t in fit.steps(method.steps):
        clip = clips[t - 1]
        if t > 1:
            subspace = subspace_at(theta)
        fit.charge()
        m = fit.records.unprivate_mean(theta, clip)
        std = z_b * clip / fit.records.divisor
        noisy = subspace.embed(m) + fit.noise.normal(subspace.size, std)
        metric = None
        if state is not None:
            step = Step(
                subspace=subspace,
                clip=clip,
                parameters=theta,
                unprivate_mean=m,
                released=noisy,
                released_std=std,
            )
            metric = state.update(step)
        direction = noisy if metric is None else metric.solve(noisy)
        y = theta - method.learning_rate * subspace.lift(direction)
        theta = project_onto_ball(y, method.radius, subspace, metric)
        average.add(theta)
    return average.value


class Average:
    """The mean of the last `share` of the iterates (1: all, as in the papers; 0: the last one)."""

    def __init__(self, steps: int, share: float) -> None:
        self._first = steps - max(math.ceil(share * steps), 1)
        self._seen = self._kept = 0
        self._mean: Array | None = None

    def add(self, iterate: Array) -> None:
        """Take in the next iterate."""
        self._seen += 1
        if self._seen > self._first:
            self._kept += 1
            before = 0.0 if self._mean is None else self._mean
            self._mean = np.asarray(before + (iterate - before) / self._kept)

    @property
    def value(self) -> Array:
        """The mean of what was kept."""
        if self._mean is None:
            raise ValueError("Expected at least one iterate, got none.")
        return self._mean
