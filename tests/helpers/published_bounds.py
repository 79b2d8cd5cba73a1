"""The one-run bounds as their papers state them, for a number of guesses given in advance."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.special import ndtr, ndtri
from scipy.stats import binom


def right_of(scores: np.ndarray, coins: np.ndarray, guesses: int) -> int:
    """The highest half of the guesses are called in, the lowest half out."""
    order = np.argsort(scores)
    low, high = order[: guesses - guesses // 2], order[len(order) - guesses // 2 :]
    return int((~coins[low]).sum() + coins[high].sum())


def largest(refuted: Callable[[float], bool], most: float = 12.0) -> float:
    """The end of what is refuted, to a thousandth."""
    if not refuted(1e-9):
        return 0.0
    low, high = 1e-9, most
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def steinke(canaries: int, guesses: int, right: int, delta: float, tail: float = 0.05) -> float:
    """Steinke, Nasr, Jagielski 2023: P(W ≥ v) ≤ P(B ≥ v) + 2mδ·max_i P(v > B ≥ v - i)/i."""

    def refuted(epsilon: float) -> bool:
        law = binom(guesses, 1 / (1 + math.exp(-epsilon)))
        short = np.cumsum(law.pmf(np.arange(right - 1, -1, -1)))
        alpha = float((short / np.arange(1, right + 1)).max()) if right else 0.0
        return float(law.sf(right - 1)) + 2 * canaries * delta * alpha <= tail

    return largest(refuted)


def mahloujifar(
    canaries: int,
    guesses: int,
    right: int,
    inverse: Callable[[float, float], float],  # of 1 - f, at a value of the parameter
    tail: float = 0.05,
) -> float:
    """Mahloujifar, Melis, Chaudhuri 2024: can so many right guesses have the probability `tail`?"""

    def refuted(parameter: float) -> bool:
        p = {right: tail}  # the least that is needed for fewer right guesses, from the top down
        for i in range(right - 1, -1, -1):
            above = sum(p[j] * j for j in p) / canaries
            held = sum(p[j] * (guesses - j) for j in p) / canaries
            missing = inverse(above, parameter) - held
            p[i] = max(0.0, missing) * canaries / (guesses - i)
            if sum(p.values()) > 1:
                return True
        return False

    return largest(refuted)


def of_approximate(delta: float) -> Callable[[float, float], float]:
    """1 - f of (ε, δ)-DP is min(e^ε x + δ, 1 - e^-ε (1 - δ - x)); where it reaches y."""
    return lambda y, eps: max(
        0.0, (y - delta) * math.exp(-eps), 1 - delta - (1 - y) * math.exp(eps)
    )


def of_gaussian(y: float, shift: float) -> float:
    return float(ndtr(ndtri(y) - shift))
