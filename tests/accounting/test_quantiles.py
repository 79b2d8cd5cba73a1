"""Private quantiles: every ratio of probabilities on small cases, their price, and odd values."""

from __future__ import annotations

import itertools
import math
import secrets
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dpspan
from dpspan.accounting.events import pure_event
from dpspan.accounting.questions import draw, on_grid, scores


def law(counts: list[int], quantile: Fraction, epsilon: float) -> list[float]:
    """The probability of each point under permute-and-flip, over all orders of the points."""
    reached = scores(counts, quantile)
    unit = epsilon / (2 * max(quantile.numerator, quantile.denominator - quantile.numerator))
    flips = [math.exp(unit * (score - max(reached))) for score in reached]
    found = [0.0] * len(counts)
    orders = list(itertools.permutations(range(len(counts))))
    for order in orders:
        left = 1.0
        for place in order:
            found[place] += left * flips[place] / len(orders)
            left *= 1 - flips[place]
    return found


QUANTILES = [Fraction(q) for q in ("0", "1/10", "1/2", "3/4", "1")]


@pytest.mark.parametrize("quantile", QUANTILES)
def test_one_record_changes_no_probability_by_more_than_e_to_the_epsilon(quantile):
    epsilon, worst = 1.3, 0.0
    for counts in itertools.product(range(4), repeat=4):
        before = law(list(counts), quantile, epsilon)
        for place in range(4):
            more = [*counts]
            more[place] += 1
            after = law(more, quantile, epsilon)
            ratios = [abs(math.log(a / b)) for a, b in zip(after, before, strict=True)]
            worst = max(worst, *ratios)
    assert 0.4 * epsilon < worst <= epsilon * (1 + 1e-12)  # the bound is no empty one


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 50), min_size=2, max_size=9),
    st.integers(0, 8),
    st.fractions(0, 1, max_denominator=100),
)
def test_a_record_moves_scores_by_no_more_than_declared(counts, place, quantile):
    place %= len(counts)
    before = scores(counts, quantile)
    after = scores([c + (i == place) for i, c in enumerate(counts)], quantile)
    most = max(quantile.numerator, quantile.denominator - quantile.numerator)
    assert max(abs(a - b) for a, b in zip(after, before, strict=True)) <= most


def test_draws_follow_the_law():
    counts, quantile, epsilon, n = [2, 0, 3, 1], Fraction(1, 2), Fraction(1), 4000
    drawn = np.bincount(
        [draw(counts, quantile, epsilon, secrets.randbelow) for _ in range(n)], minlength=4
    )
    expected = np.array(law(counts, quantile, 1.0))
    assert expected.sum() == pytest.approx(1)
    spread = np.sqrt(expected * (1 - expected) / n)
    assert (abs(drawn / n - expected) < 5 * spread).all()  # a false alarm in 400,000 runs


def test_a_point_with_ties_is_every_quantile_it_covers():
    assert scores([1, 8, 1], Fraction(1, 2)) == [-8, 0, -8]
    assert scores([1, 8, 1], Fraction(1, 5))[1] == scores([1, 8, 1], Fraction(4, 5))[1] == 0
    assert scores([0, 0, 0], Fraction(1, 2)) == [0, 0, 0]


def test_close_to_the_quantiles_of_many_records():
    values = np.random.default_rng(0).normal(size=20_000)
    wanted = [0.9, 0.1, 0.5]
    found = dpspan.private_quantiles(values, wanted, bounds=(-5, 5), epsilon=3.0)
    # Off by 0.1 are at least 350 records, of a score worth 1/1.8 each: e^-190 for each of 1,001.
    assert found == pytest.approx(np.quantile(values, wanted), abs=0.1)
    assert found[1] < found[2] < found[0]


def test_values_that_are_no_numbers_or_out_of_bounds():
    odd = np.array([np.nan, -np.inf, -7.0, 0.5, 9.0, np.inf, np.nan])
    assert on_grid(odd, 0.0, 1.0, 3) == [2, 1, 2]
    assert on_grid(np.array([]), 0.0, 1.0, 3) == [0, 0, 0]
    (nobody,) = dpspan.private_quantiles([], [0.5], bounds=(0, 1), epsilon=1.0)
    assert 0 <= nobody <= 1


def test_the_price_is_on_the_ledger_before_the_draw():
    ledger = dpspan.Ledger()
    dpspan.private_quantiles([1, 2, 3], [0.2, 0.8], bounds=(0, 4), epsilon=0.5, ledger=ledger)
    assert ledger.events == ((pure_event(0.25), 2),)
    assert ledger.epsilon(1e-9) <= 0.5 + 1e-6
    ledger.budget = dpspan.Budget(epsilon=0.6, delta=1e-9)
    with pytest.raises(dpspan.BudgetExceeded):
        dpspan.private_quantiles([1, 2, 3], [0.5], bounds=(0, 4), epsilon=0.5, ledger=ledger)
    assert ledger.steps == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantiles": []}, "at least one quantile"),
        ({"quantiles": [1.2]}, "quantiles between 0 and 1, got 1.2"),
        ({"bounds": (1, 1)}, "the lower one first, got '1 and 1'"),
        ({"bounds": (0, math.inf)}, "two finite numbers"),
        ({"epsilon": 0}, "epsilon > 0"),
        ({"points": 1}, "points to be an integer of at least 2"),
        ({"values": [["Ann", "Bob"]]}, "one number for each record, got something else"),
        ({"values": [[1, 2]]}, "one number for each record, got '2 dimensions'"),
    ],
)
def test_refusals(change, message):
    arguments = {"values": [1.0], "quantiles": [0.5], "bounds": (0, 1), "epsilon": 1.0} | change
    with pytest.raises(ValueError, match=message):
        dpspan.private_quantiles(**arguments)


def test_a_ledger_of_units_takes_no_answers_about_records():
    ledger = dpspan.Ledger()
    ledger.protect("unit")
    ledger.charge(pure_event(0.1))
    with pytest.raises(ValueError, match="about each unit"):
        dpspan.private_quantiles([1.0], [0.5], bounds=(0, 1), epsilon=1.0, ledger=ledger)
    with pytest.raises(ValueError, match="about each unit"):
        dpspan.private_metric([1.0], noise_multiplier=1.0, ledger=ledger)
    assert ledger.steps == 1
