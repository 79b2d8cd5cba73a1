"""Preconditioners: what one record can move, the noise that covers it, and what is made of both."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from experiments.second_moment import ReleasedSecondMoment

from dpspan.accounting.ledger import Ledger
from dpspan.convex.fitting import ConstantClip, Fit, GaussianNoise, PrivateRecords
from dpspan.convex.losses import Logistic, SmoothedHinge, one_hot
from dpspan.convex.preconditioners import (
    COMFORTABLE_MATRIX,
    LARGEST_MATRIX,
    FromNoisyGradients,
    GradientHistory,
    Metric,
    Released,
    Step,
)
from dpspan.convex.rows import Rows
from dpspan.convex.subspaces import Span, Subspace, Whole
from helpers.convex_oracle import ScriptedNoise, gradients, root

RNG = np.random.default_rng
C, N, T, P = 1.0, 200, 3, 3


def matrix(metric: Metric) -> np.ndarray:
    if metric.vectors is None:
        return np.diag(metric.values)
    return (metric.vectors * metric.values) @ metric.vectors.T


def fit_of(
    size: int, noise: GaussianNoise, *, divisor: int = N, z: float = 1.0, records=None
) -> Fit:
    nothing = PrivateRecords(
        rows=Rows(np.zeros((1, size)), intercept=False),
        targets=np.ones((1, 1)),
        loss=Logistic(),
        divisor=divisor,
    )
    return Fit(
        records=records or nothing,
        public=None,
        clip=ConstantClip(clip=C),
        noise_multiplier=z,
        ledger=Ledger(),
        noise=noise,
        start=np.zeros(size),
    )


def step(
    mean: np.ndarray, subspace: Subspace | None = None, *, clip: float = C, std: float = 0.1
) -> Step:
    subspace = subspace or Whole(len(mean))
    return Step(
        subspace=subspace,
        clip=clip,
        theta=np.zeros(len(mean)),
        unprivate_mean=mean,
        released=subspace.embed(mean),
        std=std,
    )


def begun(kind, fit: Fit, subspace: Subspace | None = None, *, turns: bool = False):
    """The state of a preconditioner at the start of a fit."""
    return kind.begin(fit, subspace or Whole(len(fit.start)), turns=turns)


# -- sensitivity ----------------------------------------------------------------------------------


def climb(
    ratio: Callable[[np.ndarray], float], shape: tuple[int, ...], seed: int, tries: int = 1200
) -> float:
    """The largest ratio found by hill climbing from many starts."""
    rng = RNG(seed)
    at = max((rng.standard_normal(shape) for _ in range(30)), key=ratio)
    best, width = ratio(at), 1.0
    for _ in range(tries):
        trial = at + width * rng.standard_normal(shape)
        value = ratio(trial)
        if value > best:
            at, best, width = trial, value, width * 1.3
        else:
            width = max(width * 0.97, 1e-4)
    return best


def short(rows: np.ndarray, length: float) -> np.ndarray:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows * np.minimum(1.0, length / np.maximum(norms, 1e-300))


def test_the_root_of_the_mean_form_moves_by_at_most_its_bound_and_reaches_it() -> None:
    bound = math.sqrt(2) * math.sqrt(T) * C / N

    def ratio(x: np.ndarray) -> float:
        others, newcomer = short(x[0], C * (N - 1) / N), short(x[1], C / N)
        before, after = GradientHistory(P), GradientHistory(P)
        for mean, new in zip(others, newcomer, strict=True):
            before.add(mean)
            after.add(mean + new)
        whole = Whole(P)
        return float(np.linalg.norm(after.root_in(whole) - before.root_in(whole))) / bound

    found = [climb(ratio, (2, T, P), seed) for seed in range(2)]
    assert max(found) >= 0.99
    assert max(found) <= 1 + 1e-9


class Scripted(PrivateRecords):
    """Records of any gradient at any step: x = 1, so that the weights f_i D_i are the gradients."""

    def weights(self, parameters: np.ndarray, clip: float) -> np.ndarray:
        own = GRADIENTS[int(parameters[0])][: len(self.targets)]
        return short(own, clip)


GRADIENTS: dict[int, np.ndarray] = {}


def moved(kind, gradients: np.ndarray, clips: np.ndarray, spans: list[Subspace]) -> float:
    """How far the last record moves what is released at the last step, in units of its Δ.

    Gradients are (T, n, P), one step after the other; the noise is silent, and z_B = √2.
    """
    steps, n, size = gradients.shape
    GRADIENTS.update(enumerate(gradients))
    released = []
    for count in (n, n - 1):
        noise = ScriptedNoise(0, silent=True)
        records = Scripted(
            rows=Rows(np.ones((count, 1)), intercept=False),
            targets=np.zeros((count, size)),
            loss=Logistic(),
            divisor=n,
        )
        state = begun(kind, fit_of(size, noise, divisor=n, records=records), spans[0], turns=True)
        for t in range(steps):
            at, clip = np.full(size, float(t)), float(clips[t])
            own = step(records.unprivate_mean(at, clip), spans[t], clip=clip)
            metric = state(replace(own, theta=at))
        released.append(matrix(metric))
    delta = math.sqrt(2) * noise.scales[-1] / math.sqrt(2)
    return float(np.linalg.norm(released[0] - released[1])) / delta


PLACES: dict[str, list[Subspace]] = {
    "whole": [Whole(P)] * T,
    "turning": [Span(RNG(t).standard_normal((P, 2))) for t in range(T)],
}


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(
    ("kind", "n"), [(Released(floor=0.0), 2), (ReleasedSecondMoment(floor=0.0), 3)]
)
def test_a_record_moves_what_is_released_by_at_most_what_its_noise_is_made_for(
    kind, n: int, where: str
) -> None:
    """By hill climbing over the gradients of all records, which finds most of Δ and never more."""
    clips = np.array([1.0, 0.3, 0.6])

    def ratio(x: np.ndarray) -> float:
        return moved(kind, x * 10.0 ** x[0, 0, 0], clips, PLACES[where])

    found = climb(ratio, (T, n, P), seed=1, tries=800)
    assert 0.8 <= found <= 1 + 1e-7


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_noise_covers_the_sensitivity(share: float) -> None:
    """σ_B·√2 = z_B·Δ for every t, with clips that change, and 1/z² is the sum of both parts."""
    z, clips = 3.0, (2.0, 1.0, 0.5, 4.0)
    noise = ScriptedNoise(0, silent=True)
    fit = fit_of(4, noise, z=z, divisor=50)
    mean_state = begun(Released(share=share), fit)
    for t, clip in enumerate(clips, start=1):
        mean_state(step(np.ones(4) / 100, clip=clip))
        delta = math.sqrt(2) * math.sqrt(sum(c**2 for c in clips[:t])) / 50
        z_B = math.sqrt(2) * noise.scales[-1] / delta
        z_b = z / math.sqrt(1 - share)
        assert 1 / z_B**2 + 1 / z_b**2 == pytest.approx(1 / z**2)
    noise.scales.clear()
    moment_state = begun(ReleasedSecondMoment(share=share), fit)
    for t, clip in enumerate(clips, start=1):
        moment_state(step(np.ones(4) / 100, clip=clip))
        delta = math.sqrt(sum(c**2 for c in clips[:t])) / math.sqrt(50)  # of the root over √n
        z_B = math.sqrt(2) * noise.scales[-1] / delta
        assert 1 / z_B**2 + (1 - share) / z**2 == pytest.approx(1 / z**2)


# -- the law of the noise -------------------------------------------------------------------------


def symmetric_basis(k: int) -> np.ndarray:
    """An orthonormal basis of symmetric matrices, (k(k+1)/2, k, k)."""
    basis = []
    for i in range(k):
        for j in range(i, k):
            e = np.zeros((k, k))
            e[i, j] = e[j, i] = 1.0 if i == j else 1 / math.sqrt(2)
            basis.append(e)
    return np.stack(basis)


@pytest.mark.parametrize("projected", [False, True])
def test_goe_is_isotropic_and_its_projection_is_goe(projected: bool) -> None:
    draws, scale, k = 4000, 0.7, 4
    noise, v = GaussianNoise(3), np.linalg.qr(RNG(0).standard_normal((9, k)))[0]
    samples = [noise.goe(9 if projected else k, scale) for _ in range(draws)]
    if projected:
        samples = [v.T @ sample @ v for sample in samples]
    basis = symmetric_basis(k)
    coordinates = np.einsum("dij,bij->db", np.stack(samples), basis)
    variance = 2 * scale**2
    covariance = coordinates.T @ coordinates / draws
    spread = variance * np.where(np.eye(len(basis)) > 0, math.sqrt(2 / draws), 1 / draws**0.5)
    assert (np.abs(covariance - variance * np.eye(len(basis))) <= 5 * spread).all()
    entries = np.stack(samples)
    assert np.array_equal(entries, entries.transpose(0, 2, 1)) or projected
    off, diagonal = entries[:, 0, 1].var(), entries[:, 0, 0].var()
    assert diagonal / off == pytest.approx(2, rel=5 * 2 / math.sqrt(draws))


def test_noise_is_fresh_unless_a_seed_is_given() -> None:
    assert not np.array_equal(GaussianNoise().normal(5, 1.0), GaussianNoise().normal(5, 1.0))
    np.testing.assert_array_equal(GaussianNoise(1).normal(5, 2.0), GaussianNoise(1).normal(5, 2.0))


# -- the matrices ---------------------------------------------------------------------------------


def test_the_history_is_the_root_of_the_sum() -> None:
    rng = RNG(0)
    means = rng.standard_normal((7, 12)) * 10.0 ** rng.integers(-6, 1, size=(7, 1))
    means[3] = means[1] + means[2]  # within the span of what came before
    means[5] = 0.0
    span = Span(rng.standard_normal((12, 4)))
    history = GradientHistory(12)
    for t, mean in enumerate(means, start=1):
        history.add(mean)
        g = root(means[:t].T @ means[:t])
        scale = np.linalg.norm(means[:t])
        np.testing.assert_allclose(history.root_in(Whole(12)), g, atol=1e-7 * scale)
        expected = span.basis.T @ g @ span.basis
        np.testing.assert_allclose(history.root_in(span), expected, atol=1e-7 * scale)


def test_the_history_keeps_all_digits() -> None:
    """Nearly parallel gradients: by way of M Mᵀ half of the digits would be lost."""
    e1, e2 = np.eye(5)[:2]
    history = GradientHistory(5)
    history.add(e1)
    history.add(e1 + 1e-10 * e2)
    g = history.root_in(Whole(5))
    # M = [[1, 0], [1, η]]: singular values √2 and η/√2, so tr G − √2 is η/√2.
    assert np.trace(g) - math.sqrt(2) == pytest.approx(1e-10 / math.sqrt(2), rel=1e-4)


@pytest.mark.parametrize("size", [1e-320, 1e-200, 1.5e-162, 1e-100, 1.0, 1e100])
def test_directions_are_unit_vectors_however_short_the_gradient(size: float) -> None:
    """Squares of such numbers underflow; a direction of another length would lengthen the rest."""
    first = np.full(1000, size)
    first[0] *= 1.6
    ordinary = np.full(1000, 0.5 / math.sqrt(1000))
    history = GradientHistory(1000)
    for mean in (first, np.zeros(1000), ordinary):
        history.add(mean)
    alone = GradientHistory(1000)
    alone.add(ordinary)
    whole = Whole(1000)
    moved = np.linalg.norm(history.root_in(whole) - alone.root_in(whole))
    assert moved <= math.sqrt(2) * np.linalg.norm(first / size) * size * (1 + 1e-9) + 1e-15
    if size <= 1.0:
        expected = root(np.outer(first, first) + np.outer(ordinary, ordinary))
        scale = max(size, 1.0) * math.sqrt(1000)
        np.testing.assert_allclose(history.root_in(whole), expected, atol=1e-7 * scale)


def test_more_steps_than_dimensions() -> None:
    rng, history = RNG(0), GradientHistory(3)
    means = rng.standard_normal((10, 3))
    for mean in means:
        history.add(mean)
    np.testing.assert_allclose(history.root_in(Whole(3)), root(means.T @ means), atol=1e-12)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("where", ["whole", "features", "joint"])
def test_the_second_moment_is_that_of_single_gradients(classes: int, where: str) -> None:
    rng = RNG(0)
    targets = one_hot(rng.integers(classes, size=15), classes, low=0.0)
    rows = Rows(rng.standard_normal((15, 4)), intercept=True)
    records = PrivateRecords(rows=rows, targets=targets, loss=Logistic(), divisor=15)
    outputs = targets.shape[1]
    size = 5 * outputs
    subspace: Subspace = {
        "whole": lambda: Whole(size),
        "features": lambda: Span(rng.standard_normal((5, 2)), copies=outputs),
        "joint": lambda: Span(rng.standard_normal((size, 3))),
    }[where]()
    theta = rng.standard_normal(size)
    noise = ScriptedNoise(0, silent=True)
    state = begun(ReleasedSecondMoment(floor=0.0), fit_of(size, noise, records=records))
    own = Step(
        subspace=subspace,
        clip=0.5,
        theta=theta,
        unprivate_mean=np.zeros(size),
        released=np.zeros(subspace.size),
        std=0.0,
    )
    embedded = subspace.embed(short(gradients(records, theta), 0.5).T).T
    expected = root(embedded.T @ embedded) / math.sqrt(15)
    np.testing.assert_allclose(matrix(state(own)), expected, atol=1e-7)


def test_noisy_gradients_are_debiased_on_average() -> None:
    """On no signal at all their sum is zero, up to its own spread."""
    draws, k, std = 400, 4, 0.3
    noise = GaussianNoise(0)
    state = begun(FromNoisyGradients(floor=0.0), fit_of(k, noise))
    for _ in range(draws):
        u = noise.normal(k, std)
        own = Step(
            subspace=WHOLE,
            clip=C,
            theta=u,
            unprivate_mean=u,
            released=u,
            std=std,
        )
        metric = state(own)
    spread = draws * std**2 * math.sqrt(2 / draws)
    assert (metric.values**2 <= 6 * spread).all()


WHOLE = Whole(4)


@pytest.mark.parametrize("diagonal", [False, True])
def test_noisy_gradients_make_the_matrix_they_say(diagonal: bool) -> None:
    us = RNG(0).standard_normal((5, 4))
    kind = FromNoisyGradients(diagonal=diagonal, floor=0.5)
    state = begun(kind, fit_of(4, GaussianNoise(0)))
    for u in us:
        metric = state(step(u, WHOLE, std=0.6))
    bias = 5 * 0.36
    total = us.T @ us - bias * np.eye(4)
    if diagonal:
        total = np.diag(np.diag(total))
    values, vectors = np.linalg.eigh(total)
    expected = (vectors * np.sqrt(np.maximum(values, 0.5 * bias))) @ vectors.T
    np.testing.assert_allclose(matrix(metric), expected, atol=1e-12)


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("size", [COMFORTABLE_MATRIX, COMFORTABLE_MATRIX + 1])
def test_by_default_a_large_matrix_is_a_diagonal_if_it_can_be(size: int, turns: bool) -> None:
    state = begun(FromNoisyGradients(), fit_of(size, GaussianNoise(0)), turns=turns)
    metric = state(step(np.ones(size)))
    assert (metric.vectors is None) == (size > COMFORTABLE_MATRIX and not turns)


def test_a_turning_subspace_takes_the_sum_along() -> None:
    rng = RNG(0)
    spans = [Span(rng.standard_normal((8, 3))) for _ in range(3)]
    us = rng.standard_normal((3, 3))
    state = begun(FromNoisyGradients(floor=0.0), fit_of(8, GaussianNoise(0)), spans[0], turns=True)
    total, bias, before = np.zeros((8, 8)), np.zeros((8, 8)), np.eye(8)
    for span, u in zip(spans, us, strict=True):
        own = Step(
            subspace=span,
            clip=C,
            theta=np.zeros(8),
            unprivate_mean=np.zeros(8),
            released=u,
            std=0.2,
        )
        metric = state(own)
        before = span.basis @ span.basis.T
        total = before @ total @ before + np.outer(span.lift(u), span.lift(u))
        bias = before @ bias @ before + 0.04 * before
    expected = span.basis.T @ (total - bias) @ span.basis
    values, vectors = np.linalg.eigh(expected)
    expected = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    np.testing.assert_allclose(matrix(metric), expected, atol=1e-9)


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_turning_subspace_takes_the_second_moment_along(outputs: int) -> None:
    """In p × p: what came before is projected onto the new subspace, single gradients added."""
    rng = RNG(0)
    size = 8 * outputs
    records = PrivateRecords(
        rows=Rows(rng.standard_normal((20, 7)), intercept=True),
        targets=rng.integers(2, size=(20, outputs)).astype(float),
        loss=SmoothedHinge(),
        divisor=20,
    )
    spans = [Span(rng.standard_normal((size, 3))) for _ in range(4)]
    fit = fit_of(size, ScriptedNoise(0, silent=True), records=records, divisor=20)
    state = begun(ReleasedSecondMoment(floor=0.0), fit, spans[0], turns=True)
    total = np.zeros((size, size))
    for span, clip in zip(spans, (1.0, 0.4, 2.0, 0.7), strict=True):
        theta = rng.standard_normal(size)
        own = replace(step(np.zeros(size), span, clip=clip), theta=theta)
        metric = state(own)
        g, onto = short(gradients(records, theta), clip), span.basis @ span.basis.T
        total = onto @ (total + g.T @ g) @ onto
    expected = root(span.basis.T @ total @ span.basis) / math.sqrt(20)
    np.testing.assert_allclose(matrix(metric), expected, atol=1e-7)


def test_negative_eigenvalues_are_raised_to_the_edge_of_the_noise() -> None:
    noise = ScriptedNoise(0)
    state = begun(Released(floor=1.0), fit_of(30, noise))
    metric = state(step(np.full(30, 1e-9)))
    edge = 2 * noise.scales[-1] * math.sqrt(30)
    assert metric.values.min() == pytest.approx(edge)
    assert np.linalg.eigvalsh(noise.matrices[-1]).min() < 0


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"Expected 0 < share < 1, got 1\."):
        Released(share=1)
    with pytest.raises(ValueError, match=r"Expected floor >= 0, got -1\."):
        ReleasedSecondMoment(floor=-1)
    with pytest.raises(ValueError, match=r"Expected floor >= 0, got -1\."):
        FromNoisyGradients(floor=-1)
    large = LARGEST_MATRIX + 1
    for kind in (Released(), ReleasedSecondMoment(), FromNoisyGradients(diagonal=False)):
        with pytest.raises(ValueError, match=r"give a subspace .* or preconditioner="):
            begun(kind, fit_of(large, GaussianNoise(0)))
    diagonal = FromNoisyGradients(diagonal=True)
    begun(diagonal, fit_of(large, GaussianNoise(0)))
    with pytest.raises(ValueError, match="the subspace changes between steps"):
        begun(diagonal, fit_of(5, GaussianNoise(0)), turns=True)
