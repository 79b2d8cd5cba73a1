"""The private mean: its sensitivity by brute force, the law of its noise, its price."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import dp_event, pld
from hypothesis import given
from hypothesis import strategies as st

import dpspan
from dpspan.accounting import questions
from dpspan.accounting.questions import both_sums

shares = st.lists(st.floats(0, 1), min_size=1, max_size=30)


@given(shares, st.floats(0, 1))
def test_a_record_moves_both_sums_together_by_at_most_one(held, another):
    before = both_sums(np.array(held))
    after = both_sums(np.array([*held, another]))
    assert math.dist(before, after) <= 1 + 1e-12
    assert both_sums(np.array(held[::-1])) == before  # in any order


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=30))
def test_whatever_the_scores_are_the_sums_stay_within_bounds(values):
    seen: list[tuple[float, float]] = []

    def spy(found):
        seen.append(both_sums(found))
        return seen[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(questions, "both_sums", spy)
        found = dpspan.private_metric(values, noise_multiplier=2.0, bounds=(-3, 5))
    assert sum(seen[0]) == pytest.approx(len(values))
    assert min(seen[0]) >= 0
    assert -3 <= found.value <= 5


def test_the_noise_is_that_of_the_noise_multiplier():
    right, z, runs = [True] * 8000 + [False] * 2000, 40.0, 3000
    found = [dpspan.private_metric(right, noise_multiplier=z) for _ in range(runs)]
    values = np.array([each.value for each in found])
    expected = z * math.hypot(0.8, 0.2) / 10_000
    assert values.mean() == pytest.approx(0.8, abs=5 * expected / math.sqrt(runs))
    # The standard deviation of a variance of 3,000 normal numbers is 2.6 per cent of it.
    assert values.var() == pytest.approx(expected**2, rel=0.13)
    assert found[0].error == pytest.approx(expected, rel=0.05)
    assert np.var([each.records for each in found]) == pytest.approx(2 * z**2, rel=0.13)


def test_the_price_is_one_gaussian():
    ledger = dpspan.Ledger()
    dpspan.private_metric([1, 0, 1], noise_multiplier=3.0, ledger=ledger)
    oracle = pld.PLDAccountant().compose(dp_event.GaussianDpEvent(3.0))
    assert ledger.epsilon(1e-5) == pytest.approx(oracle.get_epsilon(1e-5), abs=1e-3)


def test_few_records_and_much_noise_still_give_a_mean():
    for _ in range(50):
        found = dpspan.private_metric([], noise_multiplier=9.0, bounds=(-1, 1))
        assert -1 <= found.value <= 1
        assert found.records >= 1


def test_refusals():
    with pytest.raises(ValueError, match="noise_multiplier > 0"):
        dpspan.private_metric([1], noise_multiplier=0)
    with pytest.raises(ValueError, match="scores to be one number for each record"):
        dpspan.private_metric(["right", "wrong"], noise_multiplier=1.0)
