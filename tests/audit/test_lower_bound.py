"""The bound of an audit: never too high more often than it says, and as high as the published."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import expit, ndtr
from scipy.stats import binom

from dpspan.audit import epsilon_lower_bound
from dpspan.audit.lower_bound import (
    _CELLS,
    _cells,
    _critical,
    _guesses,
    _law,
    _log_odds,
    _p_value,
    _refuted,
    _weights,
    epsilon_of_shift,
)
from helpers.published_bounds import (
    mahloujifar,
    of_approximate,
    of_gaussian,
    right_of,
    steinke,
)

DELTA = 1e-5


def coins_of(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.random(n) < 0.5


def shifted(rng: np.random.Generator, coins: np.ndarray, shift: float) -> np.ndarray:
    return rng.normal(size=len(coins)) + shift * coins


@pytest.mark.parametrize("gaussian", [False, True])
@pytest.mark.parametrize("n", [20, 200, 1000])
def test_scores_of_nothing_prove_nothing(n: int, gaussian: bool) -> None:
    """At ε = 0 more than 0 comes out in at most 62 of 1,000: 50, and 1.7 standard deviations."""
    rng, above = np.random.default_rng(n), 0
    for _ in range(1000):
        coins = coins_of(rng, n)
        above += epsilon_lower_bound(rng.normal(size=n), coins, delta=DELTA, gaussian=gaussian) > 0
    assert above <= 62


@pytest.mark.parametrize(
    "draw",
    [
        lambda rng, n: np.zeros(n),
        lambda rng, n: rng.integers(2, size=n),
        lambda rng, n: rng.standard_cauchy(n),
        lambda rng, n: np.where(rng.random(n) < 0.01, np.inf, -np.inf),
        lambda rng, n: np.abs(rng.normal(size=n)).cumsum(),  # one canary has to do with the next
    ],
    ids=["constant", "two values", "Cauchy", "infinite", "rising"],
)
@pytest.mark.parametrize("in_order", [False, True])
def test_awkward_scores_of_nothing_prove_nothing(draw: object, in_order: bool) -> None:
    """Also if the canaries that were included come first, and ties could be broken by that."""
    rng, above = np.random.default_rng(5), 0
    for _ in range(500):
        coins, scores = coins_of(rng, 100), draw(rng, 100)
        if in_order:
            coins = np.sort(coins)[::-1]
            scores = rng.permutation(scores)
        above += epsilon_lower_bound(scores, coins, delta=0) > 0
    assert above <= binom(500, 0.05).isf(1e-3)


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("delta", [0.0, 0.01])
def test_it_covers_the_worst_mechanism(epsilon: float, delta: float) -> None:
    """Randomized response is right with e^ε/(1+e^ε), and with probability δ it tells the coin."""
    rng, above = np.random.default_rng(7), 0
    for _ in range(1000):
        coins = coins_of(rng, 100)
        told = np.where(rng.random(100) < expit(epsilon), coins, ~coins)
        certain = rng.random(100) < delta
        scores = np.where(certain, np.where(coins, 2.0, -1.0), told)
        above += epsilon_lower_bound(scores, coins, delta=delta) > epsilon
    assert above <= 62


def test_it_covers_a_mechanism_that_tells_all_coins_at_once() -> None:
    """δ may strike in one run for all canaries: then almost every one is certain."""
    rng, above, delta = np.random.default_rng(8), 0, 0.02
    for _ in range(1000):
        coins = coins_of(rng, 50)
        scores = coins if rng.random() < delta else rng.normal(size=50)
        above += epsilon_lower_bound(scores, coins, delta=delta) > 0
    assert above <= 62


@pytest.mark.parametrize("epsilon", [1.0, 3.0])
def test_it_covers_gaussian_noise(epsilon: float) -> None:
    low, high = 0.0, 5.0
    while high - low > 1e-6:  # μ of this ε at δ
        middle = (low + high) / 2
        low, high = (middle, high) if epsilon_of_shift(middle, DELTA) < epsilon else (low, middle)
    rng, above = np.random.default_rng(9), [0, 0]
    for _ in range(300):
        coins = coins_of(rng, 500)
        scores = shifted(rng, coins, low)
        for way in (False, True):
            above[way] += epsilon_lower_bound(scores, coins, delta=DELTA, gaussian=way) > epsilon
    assert max(above) <= binom(300, 0.05).isf(1e-3)


def test_a_bound_for_gaussian_noise_is_none_for_another_mechanism() -> None:
    """As docs/audit.md says, of randomized response with ε = 1."""
    rng, above = np.random.default_rng(1), 0
    for _ in range(20):
        coins = coins_of(rng, 1000)
        told = np.where(rng.random(1000) < expit(1.0), coins, ~coins)
        above += epsilon_lower_bound(told, coins, delta=DELTA, gaussian=True) > 1
    assert above > 10


def test_the_law_of_weighted_guesses_is_exact() -> None:
    """Against convolution, one guess at a time."""
    weights, epsilon = np.array([7, 7, 5, 3, 2, 1, 1, 1, 0, 0]), 0.7
    p, law = expit(epsilon), np.ones(1)
    for weight in weights:
        step = np.zeros(weight + 1)
        step[0] += 1 - p
        step[-1] += p
        law = np.convolve(law, step)
    np.testing.assert_allclose(_law(weights, epsilon), law, atol=1e-14)
    equal = np.ones(400, dtype=int)
    exact = binom(400, p).pmf(np.arange(401))
    np.testing.assert_allclose(_law(equal, epsilon), exact, atol=1e-14)


def test_what_delta_buys_is_the_best_that_it_can_buy() -> None:
    """Against a linear program: with which probability is how much added at each sum?"""
    from scipy.optimize import linprog

    weights, epsilon, delta, reached = np.array([4, 3, 3, 2, 1, 1]), 0.5, 0.03, 11
    law, most = _law(weights, epsilon), np.cumsum(weights)
    below = np.arange(reached)
    needed = np.array([int(np.argmax(most >= reached - v)) + 1 for v in below])
    budget = len(weights) * delta * expit(-0.5)
    best = linprog(
        -np.ones(reached), A_ub=[needed], b_ub=[budget], bounds=[(0, q) for q in law[:reached]]
    )
    expected = law[reached:].sum() - best.fun
    value = _p_value(weights, reached, law, start=0.5, delta=delta)
    assert value == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("n", [50, 1000])
@pytest.mark.parametrize("delta", [0.0, 1e-4])
def test_each_cell_refutes_with_its_probability(n: int, delta: float) -> None:
    """The critical weight is the least of those that chance alone seldom reaches."""
    for (start, end), _ in zip(_cells(*_CELLS), range(12), strict=False):
        weights, critical = _weights(n, start, 0.05), _critical(n, start, end, delta, 0.05)
        law = _law(weights, end)
        assert law[critical:].sum() <= 0.05
        assert (np.diff(weights) <= 0).all()
        if delta == 0 and critical <= weights.sum():
            assert law[critical - 1 :].sum() > 0.05 - 1e-9


def test_the_recursion_is_the_published_one() -> None:
    for guesses, right in ((100, 70), (200, 190), (40, 40), (100, 50)):
        published = mahloujifar(200, guesses, right, of_gaussian)
        assert not _refuted(200, guesses, right, published + 2e-3, 0.05)
        assert published == 0 or _refuted(200, guesses, right, published - 1e-3, 0.05)


def test_the_planned_guesses_can_be_right_so_often() -> None:
    guesses, found = _guesses(1000, 0.5, 0.05)
    assert 10 <= found <= guesses <= 1000
    assert not _refuted(1000, guesses, found - 1, 0.5, 0.05)


def test_odds_by_rank_are_those_of_shifted_scores() -> None:
    rng = np.random.default_rng(11)
    coins = coins_of(rng, 400_000)
    away = shifted(rng, coins, 1.5) - 0.75
    order = np.argsort(-np.abs(away))
    right = ((away > 0) == coins)[order]
    for part in (slice(0, 40_000), slice(180_000, 220_000), slice(360_000, 400_000)):
        expected = expit(_log_odds(400_000, 1.5)[part]).mean()
        assert right[part].mean() == pytest.approx(expected, abs=0.01)


PUBLISHED_SHARES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)


def means(n: int, shift: float, simulations: int) -> tuple[float, list[float], list[float]]:
    rng = np.random.default_rng(round(10 * shift))
    ours, theirs, others = [], [], []
    for _ in range(simulations):
        coins = coins_of(rng, n)
        scores = shifted(rng, coins, shift)
        ours.append(epsilon_lower_bound(scores, coins, delta=DELTA))
        found = [(r, right_of(scores, coins, r)) for r in (int(s * n) for s in PUBLISHED_SHARES)]
        theirs.append([steinke(n, *each, DELTA) for each in found])
        if n <= 1000 and len(others) < 4:  # the oracle takes its time
            others.append([mahloujifar(n, *e, of_approximate(DELTA)) for e in found[:4]])
    return np.mean(ours), list(np.mean(theirs, axis=0)), list(np.mean(others or [[0]], axis=0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "shift"), [(1000, 0.3), (1000, 1.0), (1000, 2.0), (1000, 4.0), (5000, 1.0)]
)
def test_no_number_of_guesses_makes_the_published_bound_higher(n: int, shift: float) -> None:
    """On the same scores, in the mean of 200: even with the number that is best in hindsight."""
    ours, steinkes, mahloujifars = means(n, shift, simulations=200)
    assert ours >= max(steinkes)
    assert ours >= max(mahloujifars) - 0.3  # of four simulations only


def test_the_published_bounds_rank_as_expected() -> None:
    """For small δ the f-DP bound of an (ε, δ) curve is a little below the binomial one."""
    for right in (60, 75, 90):
        binomial = steinke(1000, 100, right, DELTA)
        recursion = mahloujifar(1000, 100, right, of_approximate(DELTA))
        assert binomial - 0.05 <= recursion <= binomial + 1e-3


def test_clear_scores_give_the_most_that_so_many_canaries_can_prove() -> None:
    coins = coins_of(np.random.default_rng(3), 1000)
    bound = epsilon_lower_bound(coins, coins, delta=0)
    assert 0.95 * np.log(0.05 ** (1 / 1000) / (1 - 0.05 ** (1 / 1000))) < bound < 5.81
    assert epsilon_lower_bound(-1.0 * coins, coins, delta=0) == 0  # the wrong way round


def test_gaussian_profile() -> None:
    shift, epsilon = 1.3, epsilon_of_shift(1.3, 1e-3)
    profile = ndtr(shift / 2 - epsilon / shift) - np.exp(epsilon) * ndtr(
        -shift / 2 - epsilon / shift
    )
    assert profile == pytest.approx(1e-3, rel=0.01)
    assert epsilon_of_shift(0.0, 1e-3) == epsilon_of_shift(1e-9, 1e-3) == 0
    assert epsilon_of_shift(1.0, 0.0) == np.inf


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0] * 20, [True] * 19), "two lists of one length"),
        (([1.0] * 5, [True] * 5), "at least 10 canaries, got 5"),
        (([np.nan] * 20, [True] * 20), "without NaN: give those canaries the score -inf, got 20"),
        (([1.0] * 20, [0.5] * 20), "included to hold true and false"),
        (([1.0] * 20, [1] * 20, 1.0), "0 <= delta < 1"),
        (([1.0] * 20, [1] * 20, 0.1, 0.4), "0.5 <= confidence < 1"),
    ],
)
def test_refusals(arguments: tuple, message: str) -> None:
    scores, included, *rest = arguments
    named = dict(zip(("delta", "confidence"), rest, strict=False))
    with pytest.raises(ValueError, match=message):
        epsilon_lower_bound(scores, included, **{"delta": DELTA, **named})


def test_the_benchmark_has_the_published_bounds() -> None:
    from benchmarks import audit

    right = np.array([5, 60, 75, 90, 100])
    for guesses, n in ((100, 200), (100, 1000)):
        expected = [steinke(n, guesses, int(v), DELTA) for v in right]
        np.testing.assert_allclose(audit.steinke(n, guesses, right), expected, atol=0.01)
        for theirs, oracle in (
            (audit.of_approximate, of_approximate(DELTA)),
            (audit.of_gaussian, of_gaussian),
        ):
            expected = [mahloujifar(n, guesses, int(v), oracle) for v in right]
            found = audit.mahloujifar(n, guesses, right, theirs)
            np.testing.assert_allclose(found, expected, atol=5e-3)


def test_the_tables_of_the_benchmark() -> None:
    from benchmarks import audit

    row = audit.calibration(simulations=4)[0]
    assert row["simulations"] == 4
    assert audit.table([{"a": 1, "b": 0.5}]) == "| a | b |\n|---|---|\n| 1 | 0.50 |"
