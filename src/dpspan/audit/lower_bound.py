"""ε ≥ x from one run with canaries: a confidence bound that holds for every mechanism.

Each of n canaries was put into the data if its own fair coin said so, and got a score that depends
on what was released, and not otherwise on the coins. The scores decide which coins are guessed
(those of the most extreme scores: heads above the median, tails below) and how much each guess
counts; a table fixed before any score is seen says how much by rank.

docs/audit.md proves what follows. **Any mechanism**: if it is (ε, δ)-DP, the weight W of all right
guesses is at most V = Σ w_i B_i, B_i independent Bernoulli(e^ε/(1 + e^ε)), plus that of N guesses
which only δ made right, E N ≤ nδ/(1 + e^ε), at worst where V is nearly large enough.
**Gaussian noise**: R_i and H_i, the shares of right and wrong guesses where at least i are right,
obey R_{i+1} ≤ 1 - f(H_i), f the trade-off curve (Mahloujifar, Melis and Chaudhuri, 2024).

A bound is the end of what was refuted from 0 upwards, cell by cell. A cell has its own weights (or
number of guesses), fixed in advance: no choice is made on the data, so none has to be paid for.
"""

import bisect
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from dp_accounting import get_epsilon_gaussian
from scipy.optimize import brentq
from scipy.special import expit, ndtr, ndtri

from dpspan.public.fingerprints import Array
from dpspan.support.checks import check_number, expect

FEWEST = 10  # canaries
_LEVELS = 24  # of weights, which are whole numbers: sums of them have an exact law
_CELLS, _CELLS_OF_SHIFTS = (0.05, 0.25), (0.04, 0.08)  # a third of its start wide, within these
_PRECISE = 4e-3  # of a bound; it is rounded down
_ROUNDING = 1e-10  # of probabilities by Fourier transform, generously
_SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)  # of the coins that may be guessed


def epsilon_lower_bound(
    scores: Any, included: Any, *, delta: float, confidence: float = 0.95, gaussian: bool = False
) -> float:
    """x such that ε ≥ x at this δ, with this confidence; 0 if the scores prove nothing.

    Args:
        scores: one for each canary, from what was released; the higher, the more it looks included.
        included: the canary's coin, true if it was in the data. Coins are fair and independent, and
            nothing else of the run depends on them.
        delta: of the claim, from 0 to 1.
        confidence: that the bound is not above ε, over the coins and the mechanism, whatever it is.
        gaussian: the mechanism is known to be Gaussian: then μ is bounded, and translated to ε at
            δ. Much sharper, and wrong for a mechanism that is not Gaussian.
    """
    values, coins = np.asarray(scores, dtype=float), np.asarray(included)
    both = "scores and included to be two lists of one length"
    expect(values.ndim == 1 and values.shape == coins.shape, both, (values.shape, coins.shape))
    expect(len(values) >= FEWEST, f"at least {FEWEST} canaries", len(values))
    expect(bool(np.isin(coins, (0, 1)).all()), "included to hold true and false", included)
    missing = int(np.isnan(values).sum())
    expect(missing == 0, "scores without NaN: give those canaries the score -inf", missing)
    expect(0 <= check_number("delta", delta) < 1, "0 <= delta < 1", delta)
    expect(0.5 <= check_number("confidence", confidence) < 1, "0.5 <= confidence < 1", confidence)
    right = _right_guesses(values, coins.astype(bool))
    if gaussian:
        return epsilon_of_shift(_shift_bound(right, 1 - confidence), delta)
    return _bound(right, float(delta), 1 - confidence)


def _right_guesses(scores: Array, coins: Array) -> Array:
    """Whether each guess is right, from the most extreme score to the median.

    Canaries of the same score are ranked by lot (the same at every call): by their place they would
    be ranked by their coins if those that were included come first.
    """
    n = len(scores)
    ranked = np.lexsort((np.random.default_rng(0).permutation(n), scores))
    outwards = 2 * np.arange(n) - (n - 1)  # 0 at the median
    right: Array = (outwards > 0) == coins[ranked]
    return right[np.argsort(-np.abs(outwards), kind="stable")]


def _cells(least: float, most: float) -> Iterator[tuple[float, float]]:
    """Start and end of the cells that values to be refuted lie in."""
    start = 0.0
    while True:
        end = start + min(max(start / 3, least), most)
        yield start, end
        start = end


@functools.lru_cache(maxsize=64)
def _log_odds(n: int, shift: float) -> Array:
    """Of guesses by rank being right, expected if scores are N(μ, 1) with and N(0, 1) without."""
    grid = np.linspace(0, shift / 2 + 6, 4096)  # distance from the middle
    below = ndtr(grid - shift / 2) - ndtr(-grid - shift / 2)
    return shift * np.interp(1 - (np.arange(n) + 0.5) / n, below, grid)


# -- any mechanism --------------------------------------------------------------------------------


def _bound(right: Array, delta: float, tail: float) -> float:
    n = len(right)
    for start, end in _cells(*_CELLS):
        reached = int(_weights(n, start, tail) @ right)
        critical = functools.partial(_critical, n, start, delta=delta, tail=tail)
        if reached < critical(end):
            return _last(lambda epsilon: reached >= critical(epsilon), start, end)  # noqa: B023
    raise AssertionError("the cells never end")


@functools.lru_cache(maxsize=1 << 14)
def _critical(n: int, start: float, epsilon: float, delta: float, tail: float) -> int:
    """The least weight of right guesses that refutes ε, of a cell that begins at `start`."""
    weights = _weights(n, start, tail)
    law = _law(weights, epsilon)

    def unlikely(reached: int) -> bool:
        return _p_value(weights, reached, law, start=start, delta=delta) <= tail

    return _first(unlikely, int(weights.sum()))


def _p_value(weights: Array, reached: int, law: Array, *, start: float, delta: float) -> float:
    """A bound of P(W ≥ reached) under (ε, δ)-DP, from the law of V; it rises with ε in a cell."""
    budget = len(weights) * delta * expit(-start)  # E N; at the cell's start it is largest
    missing = law[:reached][::-1]  # P(V = reached - 1), P(V = reached - 2), …
    most = np.cumsum(weights)  # that so many guesses add: they fall
    needed = np.searchsorted(most, np.arange(1, reached + 1)) + 1
    spent = np.cumsum(missing * needed)
    whole = int(np.searchsorted(spent, budget))
    bought = float(missing[:whole].sum())
    if whole < reached:
        bought += (budget - (float(spent[whole - 1]) if whole else 0.0)) / float(needed[whole])
    return float(law[reached:].sum()) + bought + _ROUNDING


def _law(weights: Array, epsilon: float) -> Array:
    """P(V = 0), P(V = 1), …, by the product of characteristic functions."""
    p, total = float(expit(epsilon)), int(weights.sum())
    size = 1 << total.bit_length()
    frequencies, product = np.arange(size // 2 + 1), np.ones(size // 2 + 1, dtype=complex)
    for weight, count in zip(*np.unique(weights[weights > 0], return_counts=True), strict=True):
        turns = (weight * frequencies) % size  # whole numbers: no angle grows inexact
        product *= (1 - p + p * np.exp(-2j * math.pi * turns / size)) ** count
    return np.fft.irfft(product, size)[: total + 1].clip(min=0.0)


@functools.lru_cache(maxsize=1024)
def _weights(n: int, epsilon: float, tail: float) -> Array:
    """Weights by rank that refute ε best if included scores are N(μ, 1) and the others N(0, 1).

    With the log odds l of each guess they are max(l - ε, 0), at the least μ that can be told by the
    normal approximation.
    """
    p, quantile = float(expit(epsilon)), -float(ndtri(tail))

    def surplus(shift: float) -> float:
        odds = _log_odds(n, shift)
        w = np.maximum(odds - epsilon, 0.0)
        spread = math.sqrt(float(w @ w) * p * (1 - p))
        return float(w @ (expit(odds) - p)) / spread - quantile if spread > 0 else -quantile

    shift = 1.0
    while surplus(shift) < 0 and shift < 64:
        shift *= 1.5
    if shift >= 64:  # so large an ε that not even right guesses alone refute it
        return np.ones(n, dtype=int)
    odds = _log_odds(n, brentq(surplus, 1e-9, shift, xtol=1e-4))
    w: Array = np.maximum(odds - epsilon, 0.0)
    return np.ceil(w / w.max() * _LEVELS).astype(int)  # type: ignore[no-any-return]


# -- Gaussian mechanisms --------------------------------------------------------------------------


def epsilon_of_shift(shift: float, delta: float) -> float:
    """ε at δ of the Gaussian mechanism that N(0, 1) and N(μ, 1) are."""
    return float(get_epsilon_gaussian(1 / shift, delta)) if shift > 0 else 0.0


def _shift_bound(right: Array, tail: float) -> float:
    n, counts = len(right), np.cumsum(right)
    for start, end in _cells(*_CELLS_OF_SHIFTS):
        guesses, critical = _guesses(n, end, tail)
        found = int(counts[guesses - 1])
        if found < critical:
            return _last(lambda shift: _refuted(n, guesses, found, shift, tail), start, end)  # noqa: B023
    raise AssertionError("the cells never end")


@functools.lru_cache(maxsize=1024)
def _guesses(n: int, shift: float, tail: float) -> tuple[int, int]:
    """How many guesses refute μ best, that is from the least true one on; and how many right."""
    best = (math.inf, n, n + 1)
    for guesses in sorted({max(FEWEST, int(share * n)) for share in _SHARES}):
        found = _first(lambda found: _refuted(n, guesses, found, shift, tail), guesses)  # noqa: B023

        def surplus(true: float) -> float:
            share = float(expit(_log_odds(n, true)[:guesses]).mean())  # noqa: B023
            spread = math.sqrt(share * (1 - share) / guesses)  # noqa: B023
            return share - spread - (found - 0.5) / guesses  # noqa: B023

        least = brentq(surplus, 1e-9, 64, xtol=1e-3) if surplus(64) > 0 else math.inf
        best = min(best, (least, guesses, found))
    return best[1:]


def _refuted(n: int, guesses: int, found: int, shift: float, tail: float) -> bool:
    """Whether so many right guesses have a probability of at most `tail` if μ is `shift`."""
    room = guesses / n
    right, wrong = tail * found / n, tail * (guesses - found) / n  # R_i and H_i at i = found
    for i in range(found - 1, -1, -1):
        least = max(wrong, float(ndtr(ndtri(right) - shift)))
        right, wrong = right + i / (guesses - i) * (least - wrong), least
        if right + wrong > room:
            return True
    return False


def _last(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Where what holds at first ends, rounded down; `low` if it never holds."""
    if not holds(low):
        return low
    while high - low > _PRECISE:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _first(holds: Callable[[int], bool], most: int) -> int:
    """The least whole number up to `most` for which that holds; one more if there is none."""
    return bisect.bisect_left(range(most + 1), True, key=holds)
