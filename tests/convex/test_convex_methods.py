"""Noisy AdaGrad and DP gradient descent: the papers' algorithms, their noise and their ledger."""

from __future__ import annotations

import json
import math
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from experiments.second_moment import ReleasedSecondMoment

from dpspan import Budget, BudgetExceeded, Ledger
from dpspan.convex import (
    Envelope,
    FromNoisyGradients,
    GradientDescent,
    NoisyAdaGrad,
    PublicFeatures,
    PublicGradients,
    Released,
)
from dpspan.convex.estimators import configuration
from dpspan.convex.fitting import (
    ConstantClip,
    Fit,
    GaussianNoise,
    PrivateRecords,
)
from dpspan.convex.losses import Logistic, Records, one_hot
from dpspan.convex.methods import METHODS, method_of
from dpspan.convex.rows import Rows
from helpers.convex_oracle import GivenBasis, ScriptedNoise, clipped_mean, noisy_adagrad

Z = 2.0


def fit_of(
    n: int = 200,
    p: int = 39,
    *,
    classes: int = 2,
    noise: GaussianNoise | None = None,
    **changes: Any,
) -> Fit:
    """A problem with p + 1 weights an output, 30 labelled public rows beside n private ones."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((n + 30, p)) * 0.9 ** np.arange(p)
    codes = np.clip((x @ rng.standard_normal(p) + classes / 2).round(), 0, classes - 1).astype(int)
    targets = one_hot(codes, classes, low=0.0)
    rows, public_rows = Rows(x[:n], intercept=True), Rows(x[n:], intercept=True)
    size = targets.shape[1] * (p + 1)
    fit = Fit(
        records=PrivateRecords(rows=rows, targets=targets[:n], loss=Logistic(), divisor=n),
        public=Records(rows=public_rows, targets=targets[n:], loss=Logistic()),
        clip=Envelope(start=0.8, decay=0.3),
        noise_multiplier=Z,
        ledger=Ledger(),
        noise=noise or GaussianNoise(0),
        start=np.zeros(size),
    )
    return replace(fit, **changes)


class Seen:
    """An oracle that remembers the subspaces it gave."""

    def __init__(self, oracle) -> None:
        self.oracle, self.subspaces = oracle, []

    def find(self, public, weights):
        self.subspaces.append(self.oracle.find(public, weights))
        return self.subspaces[-1]

    @property
    def turns(self) -> bool:
        return self.oracle.turns

    def bases(self, steps: int) -> list[np.ndarray]:
        """V of every step."""
        spans = self.subspaces if self.turns else self.subspaces * steps
        assert len(spans) == steps
        return [np.kron(np.eye(s.copies), s.basis) for s in spans]


# -- oracles --------------------------------------------------------------------------------------


@pytest.mark.parametrize("floor", [0.0, 1.0])
@pytest.mark.parametrize(
    ("subspace", "radius"),
    [
        (PublicFeatures(rank=12), None),
        (PublicFeatures(rank=12), 0.02),
        (PublicGradients(rank=8), None),
        (GivenBasis(np.eye(40)), 0.02),
    ],
)
def test_the_papers_algorithm_in_p_by_p(floor: float, subspace, radius: float | None) -> None:
    seen, noise = Seen(subspace), ScriptedNoise(1)
    fit = fit_of(noise=noise)  # p = 40 with the constant column
    method = NoisyAdaGrad(
        steps=8,
        learning_rate=0.01,
        radius=radius,
        subspace=seen,
        preconditioner=Released(share=0.3, floor=floor),
        average=1.0,
    )
    found = method.minimise(fit)
    expected = noisy_adagrad(
        fit,
        seen.bases(8),
        noise,
        steps=8,
        learning_rate=0.01,
        floor=floor,
        z_B=Z / math.sqrt(0.3),
        radius=radius,
    )
    assert len(expected) == 40
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(found, expected, atol=1e-8)
    z_b = Z / math.sqrt(1 - 0.3)
    assert noise.stds == pytest.approx([z_b * fit.clip.at(t) / 200 for t in range(1, 9)])
    if radius is not None:
        assert np.linalg.norm(found) <= radius


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("radius", [None, 0.3])
@pytest.mark.parametrize("projected", [False, True])
def test_gradient_descent_step_by_step(classes: int, radius: float | None, projected: bool) -> None:
    noise = ScriptedNoise(2)
    fit = fit_of(classes=classes, noise=noise)
    seen = Seen(PublicFeatures(rank=10))
    method = GradientDescent(steps=6, learning_rate=0.7, radius=radius, average=1.0)
    if projected:
        method = replace(method, subspace=seen)
    found = method.minimise(fit)
    theta, iterates = fit.start, []
    for t in range(1, 7):
        clip = fit.clip.at(t)
        v = seen.bases(6)[t - 1] if projected else np.eye(len(theta))
        assert noise.stds[t - 1] == pytest.approx(Z * clip / 200)
        m = clipped_mean(fit.records, theta, clip)
        theta = theta - 0.7 * v @ (v.T @ m + noise.vectors[t - 1])
        if radius is not None:
            theta = theta * min(1.0, radius / np.linalg.norm(theta))
        iterates.append(theta)
    np.testing.assert_allclose(found, np.mean(iterates, axis=0), atol=1e-12)
    if radius is not None:
        assert max(np.linalg.norm(i) for i in iterates) == pytest.approx(radius)


@pytest.mark.parametrize(("share", "kept"), [(1.0, 10), (0.5, 5), (0.25, 3), (0.0, 1), (0.01, 1)])
def test_the_average_is_of_the_last_iterates(share: float, kept: int) -> None:
    """The same noise in fits of 1, 2, … steps, whose last iterates are those of the longest."""
    method = GradientDescent(average=0.0)
    iterates = [replace(method, steps=t).minimise(fit_of()) for t in range(1, 11)]
    found = replace(method, steps=10, average=share).minimise(fit_of())
    np.testing.assert_allclose(found, np.mean(iterates[-kept:], axis=0), atol=1e-14)


def test_from_noisy_gradients_step_by_step() -> None:
    noise = ScriptedNoise(3)
    fit = fit_of(noise=noise)
    method = NoisyAdaGrad(
        steps=5,
        learning_rate=0.1,
        preconditioner=FromNoisyGradients(floor=0.0),
        average=0.0,
    )
    found = method.minimise(fit)
    theta, s = fit.start, np.zeros((40, 40))
    for t in range(1, 6):
        u = clipped_mean(fit.records, theta, fit.clip.at(t)) + noise.vectors[t - 1]
        s += np.outer(u, u) - noise.stds[t - 1] ** 2 * np.eye(40)
        theta = theta - 0.1 * np.linalg.pinv(_root(s), rcond=1e-7, hermitian=True) @ u
    np.testing.assert_allclose(found, theta, atol=1e-6)
    assert noise.stds == pytest.approx([Z * fit.clip.at(t) / 200 for t in range(1, 6)])


def _root(s: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(s)
    return (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T


# -- privacy --------------------------------------------------------------------------------------

ALL = {
    **METHODS,
    "second moment": NoisyAdaGrad(
        subspace=PublicFeatures(rank=5), preconditioner=ReleasedSecondMoment()
    ),
    "turning": NoisyAdaGrad(subspace=PublicGradients(rank=5), preconditioner=Released()),
}


@pytest.mark.parametrize("name", ALL)
def test_every_step_is_charged_before_anything_is_computed(name: str) -> None:
    method = replace(ALL[name], steps=3)  # type: ignore[type-var]
    fit = fit_of()
    charged = []

    class Watched(PrivateRecords):
        def weights(self, parameters: np.ndarray, clip: float) -> np.ndarray:
            charged.append(fit.ledger.steps)
            return super().weights(parameters, clip)

    records = Watched(
        rows=fit.records.rows, targets=fit.records.targets, loss=fit.records.loss, divisor=200
    )
    method.minimise(replace(fit, records=records))
    assert sorted(set(charged)) == [1, 2, 3]
    assert charged == sorted(charged)
    assert fit.ledger.events == ((GaussianDpEvent(Z), 3),)


def test_a_step_that_the_budget_cannot_pay_is_not_computed() -> None:
    ledger = Ledger(budget=Budget(epsilon=1.0, delta=1e-6))
    fit = fit_of(ledger=ledger, noise_multiplier=8.0)
    with pytest.raises(BudgetExceeded):
        GradientDescent(steps=50).minimise(fit)
    assert 0 < ledger.steps < 50
    assert ledger.epsilon() <= 1.0


@pytest.mark.parametrize("n", [0, 1, 400])
@pytest.mark.parametrize("rank", [None, 10])
def test_noise_on_no_signal(n: int, rank: int | None) -> None:
    """θ_1 = −η·b: its law in and out of the subspace, the same for any number of records."""
    p, divisor, clip, draws = 40, 50, 0.5, 300
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.standard_normal((p, p)))[0]
    method = GradientDescent(steps=1, learning_rate=1.0, average=1.0)
    if rank is not None:
        method = replace(method, subspace=GivenBasis(basis[:, :rank]))
    noise = GaussianNoise(7)
    records = PrivateRecords(
        rows=Rows(np.zeros((n, p)), intercept=False),
        targets=np.ones((n, 1)),
        loss=Logistic(),
        divisor=divisor,
    )
    fit = Fit(
        records=records,
        public=None,
        clip=ConstantClip(clip=clip),
        noise_multiplier=Z,
        ledger=Ledger(),
        noise=noise,
        start=np.zeros(p),
    )
    samples = np.stack([method.minimise(fit) for _ in range(draws)]) @ basis
    k = rank or p
    std = Z * clip / divisor
    spread = std**2 * math.sqrt(2 / (draws * k))
    assert abs(samples[:, :k].var() - std**2) <= 5 * spread
    assert np.abs(samples[:, k:]).max(initial=0.0) <= 1e-12
    covariance = samples[:, :k].T @ samples[:, :k] / draws
    off = covariance[~np.eye(k, dtype=bool)]
    assert np.abs(off).max() <= 6 * std**2 / math.sqrt(draws)


def test_parts_and_steps_have_independent_noise() -> None:
    """Every coordinate of gradient and matrix against every other, in a step and in the next."""
    noise, fits, steps = ScriptedNoise(11), 60, 40
    method = NoisyAdaGrad(steps=steps, subspace=PublicFeatures(rank=3), preconditioner=Released())
    for _ in range(fits):
        method.minimise(fit_of(n=20, p=8, noise=noise, clip=ConstantClip(clip=1.0)))
    b = np.stack(noise.vectors) / np.array(noise.stds)[:, None]
    big = np.stack(noise.matrices) / np.array(noise.scales)[:, None, None]
    upper = np.triu_indices(3)
    entries = big[:, *upper] / np.where(upper[0] == upper[1], math.sqrt(2), 1.0)
    draws = np.hstack([b, entries])
    assert draws.shape == (fits * steps, 9)
    own = draws.T @ draws / len(draws) - np.eye(9)
    following = draws[1:].T @ draws[:-1] / (len(draws) - 1)
    bound = 4.5 / math.sqrt(len(draws))  # 0.09; a squared entry has twice the variance
    assert np.abs(own - np.diag(np.diag(own))).max() <= bound
    assert np.abs(np.diag(own)).max() <= bound * math.sqrt(2)
    assert np.abs(following).max() <= bound


# -- size -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("preconditioner", [Released(), FromNoisyGradients()])
def test_a_hundred_thousand_dimensions(preconditioner) -> None:
    """p = 100,000, k = 50: a p × p matrix would be 80 GB."""
    p, n = 100_000, 55
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2 * n, 60)) @ rng.standard_normal((60, p)) / 1000
    targets = rng.integers(2, size=(2 * n, 1)).astype(float)
    fit = Fit(
        records=PrivateRecords(
            rows=Rows(x[:n], intercept=False), targets=targets[:n], loss=Logistic(), divisor=n
        ),
        public=Records(rows=Rows(x[n:], intercept=False), loss=Logistic()),
        clip=ConstantClip(clip=1.0),
        noise_multiplier=Z,
        ledger=Ledger(),
        noise=GaussianNoise(0),
        start=np.zeros(p),
    )
    method = NoisyAdaGrad(
        steps=3, subspace=PublicFeatures(rank=50), preconditioner=preconditioner, radius=1.0
    )
    tracemalloc.start()
    found = method.minimise(fit)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.shape == (p,)
    assert np.linalg.norm(found) <= 1.0 + 1e-9
    assert peak < 12 * 8 * p * 50  # a dozen bases


# -- refusals -------------------------------------------------------------------------------------


def test_names_and_refusals() -> None:
    assert method_of("gd") is METHODS["gd"]
    own = GradientDescent(steps=3)
    assert method_of(own) is own
    with pytest.raises(ValueError, match=r"Expected method to be one of 'gd', .* got 'sgd'\."):
        method_of("sgd")
    for kind in (GradientDescent, NoisyAdaGrad):
        with pytest.raises(ValueError, match="steps to be an integer of at least 1, got 0"):
            kind(steps=0)
        with pytest.raises(ValueError, match=r"Expected learning_rate > 0, got -1\."):
            kind(learning_rate=-1)
        with pytest.raises(ValueError, match="radius to be None, or > 0 and finite, got 0"):
            kind(radius=0)
        with pytest.raises(ValueError, match="0 <= average <= 1, got 2"):
            kind(average=2)
    with pytest.raises(ValueError, match="Expected method to be one of"):
        method_of(object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Expected preconditioner to be one of dpspan\.convex"):
        NoisyAdaGrad(preconditioner=object())  # type: ignore[arg-type]


def test_what_the_certificate_says_of_a_method() -> None:
    rate: Any = np.float32(0.5)
    steps: Any = np.int64(3)
    method = NoisyAdaGrad(steps=steps, learning_rate=rate, subspace=PublicFeatures())
    assert json.loads(json.dumps(configuration(method))) == {
        "name": "NoisyAdaGrad",
        "steps": 3,
        "learning_rate": 0.5,
        "radius": None,
        "subspace": {"name": "PublicFeatures", "rank": 50},
        "preconditioner": configuration(FromNoisyGradients()),
        "average": 0.5,
    }
    assert "preconditioner" not in configuration(GradientDescent())


def test_a_subspace_of_another_kind_is_refused() -> None:
    class Foreign:
        """Its coordinates could be longer than what they stand for."""

        def find(self, public, weights):
            return self

    fit = fit_of()
    with pytest.raises(TypeError, match="Expected a subspace oracle to give a Span or Whole"):
        GradientDescent(subspace=Foreign()).minimise(fit)
    assert fit.ledger.steps == 0
