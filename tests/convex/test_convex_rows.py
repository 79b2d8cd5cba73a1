"""Sums of clipped gradients: against one gradient a record, and their sensitivity."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from dpspan.convex.fitting import PrivateRecords
from dpspan.convex.losses import Logistic, SmoothedHinge, Squared, one_hot
from dpspan.convex.rows import Rows, norm_bounds
from dpspan.support.units import Units
from helpers.convex_oracle import clipped_mean, dense, gradients

FORMS = {"dense": np.asarray, "csr matrix": sparse.csr_matrix, "csr array": sparse.csr_array}


def records(form: str, *, intercept: bool, classes: int, seed: int = 0) -> PrivateRecords:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((30, 7)) * (rng.random((30, 7)) < 0.6) * 10.0 ** rng.integers(-2, 3)
    targets = one_hot(rng.integers(classes, size=30), classes, low=0.0)
    rows = Rows(FORMS[form](x), intercept=intercept)
    return PrivateRecords(rows=rows, targets=targets, loss=Logistic(), divisor=30)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("classes", [2, 4])
def test_the_clipped_mean_is_that_of_single_gradients(
    form: str, intercept: bool, classes: int
) -> None:
    private = records(form, intercept=intercept, classes=classes)
    size = private.rows.width * private.targets.shape[1]
    theta = np.random.default_rng(1).standard_normal(size)
    for clip in (1e-3, 0.5, 1e6):
        mean = private.unprivate_mean(theta, clip)
        np.testing.assert_allclose(mean, clipped_mean(private, theta, clip), atol=1e-12 * clip)
    norms = np.linalg.norm(gradients(private, theta), axis=1)
    bounds = private.rows.norm_bounds
    d = private.loss.derivative(
        private.rows.margins(theta.reshape(private.targets.shape[1], -1)), private.targets
    )
    np.testing.assert_allclose(bounds * np.linalg.norm(d, axis=1), norms, rtol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_norms_are_never_underestimated(form: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 300)) * 10.0 ** rng.integers(-160, 150, size=(50, 1))
    bounds = norm_bounds(FORMS[form](x))
    for row, bound in zip(x, bounds, strict=True):
        exact = math.hypot(*row)  # correctly rounded to an ulp or so, and free of underflow
        assert bound >= exact * (1 - 2**-52)
        assert bound <= exact * (1 + 1e-12) + 1e-150


scales = st.sampled_from([0.0, 1e-310, 1e-160, 1e-20, 1.0, 1e4, 1e100, 1e160, 1e300])
wild = st.sampled_from([0.0, 1e-200, 1e-3, 1.0, 1e6, 1e200, math.inf, math.nan])


@settings(max_examples=150, deadline=None)
@given(
    others=st.lists(st.tuples(scales, wild), min_size=0, max_size=5),
    newcomer=st.tuples(scales, wild),
    seed=st.integers(0, 2**16),
    intercept=st.booleans(),
    form=st.sampled_from(sorted(FORMS)),
    clip=st.sampled_from([1e-6, 1.0, 1e5]),
)
def test_a_record_moves_the_sum_by_at_most_the_clip(
    others: list[tuple[float, float]],
    newcomer: tuple[float, float],
    seed: int,
    intercept: bool,
    form: str,
    clip: float,
) -> None:
    rng = np.random.default_rng(seed)
    pairs = np.array([*others, newcomer])
    x = rng.standard_normal((len(pairs), 5)) * pairs[:, :1]
    d = rng.standard_normal((len(pairs), 3)) * pairs[:, 1:]

    def total(count: int) -> np.ndarray:
        rows = Rows(FORMS[form](x[:count]), intercept=intercept)
        return rows.combine(rows.clipped_weights(d[:count], clip))

    difference = total(len(x)) - total(len(x) - 1)
    assert np.isfinite(difference).all()
    rounding = 8 * len(x) * clip * 2**-52
    assert np.linalg.norm(difference / clip) <= 1 + rounding / clip


@pytest.mark.parametrize("loss", [Logistic(), Squared(), SmoothedHinge()])
def test_what_is_not_finite_contributes_nothing(loss) -> None:
    x = np.array([[1.0, 2.0], [1e308, 1e308], [3.0, -1.0]])
    targets = np.array([[1.0], [1.0], [0.0]])
    theta = np.array([10.0, -20.0])  # the margin of the second record overflows
    both = PrivateRecords(
        rows=Rows(x, intercept=False), targets=targets, loss=loss, divisor=3
    ).unprivate_mean(theta, 1.0)
    kept = PrivateRecords(
        rows=Rows(x[[0, 2]], intercept=False), targets=targets[[0, 2]], loss=loss, divisor=3
    ).unprivate_mean(theta, 1.0)
    # Sums of two numbers of at most 1, and a third that is 0: a few roundings apart.
    np.testing.assert_allclose(both, kept, rtol=0, atol=8 * 2**-53)


@pytest.mark.parametrize("clip", [1.0, 1e-6, 1e-13, 1e-100])
def test_a_clip_factor_too_small_to_be_exact_is_none(clip: float) -> None:
    """Below 2^-1022 numbers have few digits: such a factor may be half too large."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        x, d = 10 ** rng.uniform(140, 154, (2, 1, 1))
        rows = Rows(x, intercept=False)
        weight = rows.clipped_weights(d, clip)
        summed = Fraction(float(weight[0, 0])) * Fraction(float(x[0, 0]))
        assert summed <= Fraction(clip)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [1.7e308, 1e200, math.inf, math.nan])
def test_a_row_without_a_finite_length_counts_as_zero(form: str, bad: float) -> None:
    """Not even its product with a weight of zero may be seen, which would be NaN."""
    x = np.array([[1.0, 2.0], [bad, -bad], [3.0, -1.0]])
    rows = Rows(FORMS[form](x), intercept=True)
    kept = Rows(FORMS[form](x[[0, 2]]), intercept=True)
    d, w = np.ones((3, 1)), np.array([[5.0, 7.0, 1.0]])
    weights = rows.clipped_weights(d, 0.5)
    np.testing.assert_array_equal(weights[1], 0)
    np.testing.assert_allclose(weights[[0, 2]], kept.clipped_weights(d[:2], 0.5), rtol=1e-14)
    summed = rows.combine(weights)  # of entries below 1: a few roundings apart
    np.testing.assert_allclose(summed, kept.combine(weights[[0, 2]]), rtol=0, atol=8 * 2**-53)
    assert np.isfinite(rows.margins(w)).all()
    np.testing.assert_array_equal(dense(rows.x)[[0, 2]], x[[0, 2]])


def test_no_records_at_all() -> None:
    none = PrivateRecords(
        rows=Rows(np.empty((0, 3)), intercept=True),
        targets=np.empty((0, 1)),
        loss=Logistic(),
        divisor=10,
    )
    np.testing.assert_array_equal(none.unprivate_mean(np.zeros(4), 1.0), np.zeros(4))


# -- units ----------------------------------------------------------------------------------------


def unit_gradients(records: PrivateRecords, theta: np.ndarray, ids: list[int]) -> np.ndarray:
    """The mean gradient of each unit's records, one at a time."""
    own = gradients(records, theta)
    return np.stack([own[np.asarray(ids) == unit].mean(0) for unit in dict.fromkeys(ids)])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("classes", [2, 4])
def test_the_clipped_mean_of_units_is_that_of_their_means(
    form: str, intercept: bool, classes: int
) -> None:
    plain = records(form, intercept=intercept, classes=classes)
    ids = [*range(5), *[7] * 12, *[8, 9, 8, 9], *[10] * 9]
    rows = Rows(plain.rows.x, intercept=intercept, units=Units.of(ids, 30, records=30))
    private = dataclasses.replace(plain, rows=rows, divisor=8)
    theta = np.random.default_rng(1).standard_normal(rows.width * plain.targets.shape[1])
    means = unit_gradients(plain, theta, ids)
    for clip in (1e-3, 0.5, 1e6):
        lengths = np.linalg.norm(means, axis=1, keepdims=True)
        expected = (means * np.minimum(1, clip / lengths)).sum(0) / 8
        np.testing.assert_allclose(
            private.unprivate_mean(theta, clip), expected, atol=1e-11 * min(clip, 1e3)
        )


@settings(max_examples=150, deadline=None)
@given(
    others=st.lists(st.tuples(scales, wild), min_size=0, max_size=4),
    newcomer=st.lists(st.tuples(scales, wild), min_size=1, max_size=5),
    alike=st.sampled_from(["random", "alike", "opposite"]),
    seed=st.integers(0, 2**16),
    intercept=st.booleans(),
    form=st.sampled_from(sorted(FORMS)),
    clip=st.sampled_from([1e-6, 1.0, 1e5]),
)
def test_a_whole_unit_moves_the_sum_by_at_most_the_clip(
    others: list[tuple[float, float]],
    newcomer: list[tuple[float, float]],
    alike: str,
    seed: int,
    intercept: bool,
    form: str,
    clip: float,
) -> None:
    rng = np.random.default_rng(seed)
    pairs, kept = np.array([*others, *newcomer]), len(others)
    x = rng.standard_normal((len(pairs), 5)) * pairs[:, :1]
    d = rng.standard_normal((len(pairs), 3)) * pairs[:, 1:]
    if alike != "random":  # all of them add up, or nearly cancel
        x[kept:] = x[kept]
        d[kept:] = d[kept] * (-1) ** np.arange(len(newcomer))[:, None] ** (alike == "opposite")
    ids = [*range(kept), *[99] * len(newcomer)]

    def total(count: int) -> np.ndarray:
        if not count:
            return np.zeros((3, 5 + intercept))
        units = Units.of(ids[:count], 99, records=count)
        rows = Rows(FORMS[form](x[:count]), intercept=intercept, units=units)
        return rows.combine(rows.clipped_weights(d[:count], clip))

    difference = total(len(x)) - total(kept)
    assert np.isfinite(difference).all()
    rounding = 8 * len(x) * 2**10 * 2**-52  # records of a unit may cancel that much
    assert np.linalg.norm(difference / clip) <= 1 + rounding


def test_a_large_unit_shortens_nobody_else_s_gradient() -> None:
    rng = np.random.default_rng(0)
    x, d = rng.standard_normal((3004, 5)), rng.standard_normal((3004, 2))
    ids = [0, 0, 1, 2, *[3] * 3000]

    def weights(count: int) -> np.ndarray:
        units = Units.of(ids[:count], count, records=count)
        return Rows(x[:count], intercept=True, units=units).clipped_weights(d[:count], 0.1)[:4]

    np.testing.assert_array_equal(weights(3004), weights(4))


def test_by_records_a_unit_moves_the_sum_by_as_many_clips() -> None:
    x, d = np.ones((7, 5)), np.full((7, 3), 1e3)
    by_record = Rows(x, intercept=True)
    total = by_record.combine(by_record.clipped_weights(d, 1.0))
    assert np.linalg.norm(total) == pytest.approx(7.0)
    by_unit = Rows(x, intercept=True, units=Units.of([3] * 7, 7, records=7))
    total = by_unit.combine(by_unit.clipped_weights(d, 1.0))
    assert np.linalg.norm(total) == pytest.approx(1.0)
