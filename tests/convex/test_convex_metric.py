"""Pseudo-inverse and projection in the norm of a preconditioner."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from dpspan.convex.preconditioners import Metric, project_onto_ball
from dpspan.convex.subspaces import Span, Whole
from helpers.convex_oracle import in_ball


def metric(k: int, seed: int, *, spread: float = 3.0, zeros: int = 0) -> tuple[Metric, np.ndarray]:
    rng = np.random.default_rng(seed)
    vectors = np.linalg.qr(rng.standard_normal((k, k)))[0]
    values = 10.0 ** rng.uniform(-spread, spread, k)
    values[:zeros] = 0.0
    return Metric(values, vectors), (vectors * values) @ vectors.T


def test_solve_is_the_pseudo_inverse() -> None:
    for zeros in (0, 2):
        own, h = metric(6, 0, zeros=zeros)
        u = np.random.default_rng(1).standard_normal(6)
        expected = np.linalg.pinv(h, rcond=1e-12, hermitian=True) @ u
        np.testing.assert_allclose(own.solve(u), expected, rtol=1e-6)
    diagonal = Metric(np.array([2.0, 0.0, 4.0]))
    np.testing.assert_allclose(diagonal.solve(np.ones(3)), [0.5, 0, 0.25])
    np.testing.assert_array_equal(Metric(np.zeros(3)).solve(np.ones(3)), np.zeros(3))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    k=st.integers(1, 8),
    shrink=st.floats(0.01, 0.99),
    spread=st.floats(0, 6),
)
def test_the_closest_point_by_bisection(seed: int, k: int, shrink: float, spread: float) -> None:
    own, h = metric(k, seed, spread=spread)
    y = np.random.default_rng(seed).standard_normal(k)
    radius = shrink * float(np.linalg.norm(y))
    found = own.closest_in_ball(y, radius)
    assert np.linalg.norm(found) <= radius * (1 + 1e-12)
    best = in_ball(y, h / np.abs(h).max(), radius)

    def distance(a: np.ndarray) -> float:
        return float((a - y) @ h @ (a - y))

    assert distance(found) <= distance(best) * (1 + 1e-6) + 1e-9 * float(y @ h @ y)


def test_a_point_that_is_outside_by_rounding_alone() -> None:
    rng = np.random.default_rng(0)
    for trial in range(3000):
        k = int(rng.integers(1, 8))
        own, _ = metric(k, trial, spread=rng.uniform(0, 6))
        u = rng.standard_normal(k)
        radius = float(np.linalg.norm(u)) * (1 - 10.0 ** rng.uniform(-16.5, -10))
        found = own.closest_in_ball(u, radius)
        assert np.linalg.norm(found) <= radius * (1 + 1e-12)
        np.testing.assert_allclose(found, u, atol=1e-3 * radius)


def test_the_closest_point_by_a_general_optimiser() -> None:
    own, h = metric(4, 3, spread=0.5)
    y = np.array([2.0, -1.0, 1.5, 0.5])
    best = optimize.minimize(
        lambda a: (a - y) @ h @ (a - y),
        np.zeros(4),
        constraints={"type": "ineq", "fun": lambda a: 1 - a @ a},
        tol=1e-14,
    ).x
    np.testing.assert_allclose(own.closest_in_ball(y, 1.0), best, atol=1e-5)


def test_directions_of_no_weight_give_way() -> None:
    own = Metric(np.array([1.0, 0.0]))
    np.testing.assert_allclose(own.closest_in_ball(np.array([0.5, 9.0]), 1.0), [0.5, 0.0])
    np.testing.assert_allclose(own.closest_in_ball(np.array([4.0, 9.0]), 1.0), [1.0, 0.0])
    np.testing.assert_array_equal(
        Metric(np.zeros(2)).closest_in_ball(np.array([4.0, 9.0]), 1.0), [0.0, 0.0]
    )


@pytest.mark.parametrize("radius", [0.1, 1.0, 3.0])
def test_the_ball_holds_whatever_lies_outside_of_the_subspace(radius: float) -> None:
    rng = np.random.default_rng(0)
    span, own = Span(rng.standard_normal((9, 3))), metric(3, 1)[0]
    y = 2 * rng.standard_normal(9)
    found = project_onto_ball(y, radius, span, own)
    assert np.linalg.norm(found) <= radius * (1 + 1e-12)
    outside = y - span.lift(span.embed(y))
    rest = found - span.lift(span.embed(found))
    cosine = outside @ rest / max(np.linalg.norm(outside) * np.linalg.norm(rest), 1e-300)
    assert np.linalg.norm(rest) < 1e-9 or cosine == pytest.approx(1)


def test_without_a_metric_it_is_the_ordinary_projection() -> None:
    y = np.array([3.0, 4.0])
    np.testing.assert_allclose(project_onto_ball(y, 1.0, Whole(2)), [0.6, 0.8])
    assert project_onto_ball(y, None, Whole(2)) is y
    assert project_onto_ball(y, 5.0, Whole(2)) is y
