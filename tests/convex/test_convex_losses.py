"""Losses of linear models: derivatives, targets, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

from dpspan.convex.losses import Huber, Logistic, SmoothedHinge, Squared, one_hot

LOSSES = {
    "logistic": (Logistic(), 2, 0.0),
    "softmax": (Logistic(), 4, 0.0),
    "smoothed hinge": (SmoothedHinge(width=0.5), 2, -1.0),
    "one against the rest": (SmoothedHinge(width=0.7), 3, -1.0),
    "hinge": (SmoothedHinge(width=0.0), 3, -1.0),
    "squared": (Squared(), 2, 0.0),
    "huber": (Huber(threshold=0.8), 2, 0.0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_derivative_is_that_of_the_value(name: str) -> None:
    loss, classes, low = LOSSES[name]
    rng = np.random.default_rng(0)
    targets = one_hot(rng.integers(classes, size=50), classes, low=low)
    margins = 2 * rng.standard_normal(targets.shape)
    step = 1e-6
    for column in range(targets.shape[1]):
        shift = np.zeros(targets.shape[1])
        shift[column] = step
        up, down = loss.value(margins + shift, targets), loss.value(margins - shift, targets)
        slope = (up - down) / (2 * step)
        np.testing.assert_allclose(slope, loss.derivative(margins, targets)[:, column], atol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_convex(name: str) -> None:
    loss, classes, low = LOSSES[name]
    rng = np.random.default_rng(1)
    targets = one_hot(rng.integers(classes, size=200), classes, low=low)
    a, b = 3 * rng.standard_normal((2, *targets.shape))
    slopes = ((loss.derivative(a, targets) - loss.derivative(b, targets)) * (a - b)).sum(1)
    assert (slopes >= -1e-12).all()


def test_one_column_for_two_classes_is_softmax_of_zero_and_it() -> None:
    rng = np.random.default_rng(2)
    codes, m = rng.integers(2, size=30), rng.standard_normal((30, 1))
    both = np.hstack([np.zeros_like(m), m])
    wide = np.where(codes[:, None] == [0, 1], 1.0, 0.0)
    np.testing.assert_allclose(
        Logistic().value(m, one_hot(codes, 2, low=0.0)), Logistic().value(both, wide)
    )


def test_targets() -> None:
    np.testing.assert_array_equal(one_hot(np.array([0, 1]), 2, low=-1.0), [[-1], [1]])
    np.testing.assert_array_equal(one_hot(np.array([2, 0]), 3, low=0.0), [[0, 0, 1], [1, 0, 0]])


def test_huge_margins_stay_finite() -> None:
    m = np.array([[1e5], [-1e5]])
    targets = np.array([[0.0], [1.0]])
    np.testing.assert_allclose(Logistic().derivative(m, targets), [[1.0], [-1.0]])
    np.testing.assert_allclose(Logistic().value(m, targets), [1e5, 1e5])


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"Expected threshold > 0, got 0\."):
        Huber(threshold=0)
    with pytest.raises(ValueError, match=r"Expected 0 <= width <= 2, got -1\."):
        SmoothedHinge(width=-1)
