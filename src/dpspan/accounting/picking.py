"""Two ways to pick the best of several candidates with ε-DP, drawn exactly.

q_j is the score of candidate j, q* the largest. A candidate that comes up is taken with probability
exp(ε(q_j − q*)). The exponential mechanism lets candidates come up with replacement, so that each
is taken with probability proportional to exp(ε·q_j). Permute-and-flip (McKenna and Sheldon) does
without, which is the law of the largest q_j + Exponential(1/ε) noise and errs no more often.

Both are ε-DP if adding a record raises each q_j by something between 0 and 1:

- exponential: no weight grows by more than exp(ε), none shrinks, so neither does their sum, and
  the ratio of the two lies between exp(−ε) and exp(ε);
- permute-and-flip: fix the noise of all but j. Candidate j wins if its own noise passes some r, and
  with the record added or removed if it passes r + 1 at the most. P(noise ≥ r + 1) ≥
  exp(−ε)·P(noise ≥ r).

No floating-point number takes part in a draw: scores are whole numbers of a small unit, ε is a
fraction, and a coin of probability exp(−γ) is made of fair draws from the operating system
(Canonne, Kamath and Steinke). So the low bits of a float cannot give anything away; how long a
draw takes could.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

Below = Callable[[int], int]  # a uniform whole number from 0 to below its argument


MECHANISMS = _PERMUTE, _EXPONENTIAL = "permute-and-flip", "exponential"


def pick(mechanism: str, scores: Sequence[int], epsilon: Fraction, below: Below) -> int:
    """The index of a large score; ε is per unit of the scores."""
    left, best = list(range(len(scores))), max(scores)
    while True:
        place = below(len(left))
        index = left.pop(place) if mechanism == _PERMUTE else left[place]
        if coin(epsilon * (best - scores[index]), below):
            return index


def probability_of_best(mechanism: str, candidates: int, gap: float) -> float:
    """The probability of the best if all others are `gap` = ε(q* − q_j) behind."""
    if mechanism == _EXPONENTIAL:
        return 1 / (1 + (candidates - 1) * math.exp(-gap))
    # The best comes up after i others, each i as likely, and they must all be passed over.
    passed = -math.expm1(-gap)
    return sum(passed**i for i in range(candidates)) / candidates


def coin(gamma: Fraction, below: Below) -> bool:
    """True with probability exp(−γ), exactly, for a γ of at least 0."""
    while gamma > 1:
        if not coin(Fraction(1), below):
            return False
        gamma -= 1
    # 1 − γ + γ²/2 − …: coins of probability γ/1, γ/2, … are thrown until one fails.
    throws = 1
    while below(throws * gamma.denominator) < gamma.numerator:
        throws += 1
    return throws % 2 == 1
