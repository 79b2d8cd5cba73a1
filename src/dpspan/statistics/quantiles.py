"""Quantiles of private numbers, by permute-and-flip over a public grid.

Each record falls on the nearest of the grid's points; what is outside the bounds falls on the end.
At a point x let l records lie below and r at or below. For the quantile q of n records the score of
x is how far q·n lies outside of [l, r], with a minus: 0 where x is such a quantile, ties or not.

Formal guarantee: another record moves q·n by q, and l and r by 1, or r by 1, or neither; so q·n − l
and q·n − r move by q or by q − 1, and a score by at most Δ = max(q, 1 − q), up or down. `picking`
sees differences of scores only, so that is as if all rose by 0 to 2Δ: ε-DP at ε/2Δ for each unit.
m quantiles are m such draws at ε/m each, from all records, and are put in order afterwards.
"""

import secrets
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from dpspan.accounting.events import pure_event
from dpspan.accounting.ledger import Ledger
from dpspan.statistics.picking import MECHANISMS, Below, pick
from dpspan.statistics.records import Floats, bounded_by, one_number_each
from dpspan.support.checks import check_count, check_number, check_positive, expect


def private_quantiles(
    values: Any,
    quantiles: Sequence[float],
    *,
    bounds: tuple[float, float],
    epsilon: float,
    points: int = 1001,
    ledger: Ledger | None = None,
) -> tuple[float, ...]:
    """Quantiles of numbers, one number a record, with ε-DP for adding or removing a record.

    Args:
        values: the private numbers. Infinite ones, and what else is out of bounds, count as the
            bound; a NaN counts as no record at all.
        quantiles: which ones, each between 0 and 1; they share ε.
        bounds: between which numbers to look; from public knowledge.
        epsilon: ε of all of them together, with δ = 0.
        points: of the grid between the bounds, on which the answers lie.
        ledger: is charged before anything is drawn.

    Examples:
        >>> import dpspan
        >>> ages, ledger = [31, 42, 42, 57, 68] * 200, dpspan.Ledger()
        >>> (median,) = dpspan.private_quantiles(
        ...     ages, [0.5], bounds=(0, 100), epsilon=0.5, points=101, ledger=ledger
        ... )
        >>> 40 < median < 50
        True
        >>> ledger.epsilon(delta=1e-5) <= 0.5
        True
    """
    low, high = bounded_by(bounds)
    points, epsilon = check_count("points", points, least=2), check_positive("epsilon", epsilon)
    wanted = [Fraction(str(float(check_number("a quantile", q)))) for q in quantiles]
    expect(bool(wanted), "at least one quantile", quantiles)
    for quantile in wanted:
        expect(0 <= quantile <= 1, "quantiles between 0 and 1", float(quantile))
    records = one_number_each("values", values)
    each = epsilon / len(wanted)
    if ledger is not None:
        ledger.protect("record")
        ledger.charge(pure_event(each), len(wanted))
    counts = on_grid(records, low, high, points)
    drawn = sorted(draw(counts, q, Fraction(each), secrets.randbelow) for q in wanted)
    grid = np.linspace(low, high, points)
    ranks = sorted(range(len(wanted)), key=lambda place: wanted[place])
    found = dict(zip(ranks, drawn, strict=True))
    return tuple(float(grid[found[place]]) for place in range(len(wanted)))


def on_grid(values: Floats, low: float, high: float, points: int) -> list[int]:
    """How many records fall on each point."""
    known = np.clip(values[~np.isnan(values)], low, high)
    places = np.rint((known - low) / (high - low) * (points - 1)).astype(np.int64)
    counts: list[int] = np.bincount(places, minlength=points).tolist()
    return counts


def scores(counts: Sequence[int], quantile: Fraction) -> list[int]:
    """Of each point, in units of 1/d for a quantile of denominator d: whole numbers."""
    d = quantile.denominator
    target, below, found = quantile.numerator * sum(counts), 0, []
    for here in counts:
        found.append(-max(0, d * below - target, target - d * (below + here)))
        below += here
    return found


def draw(counts: Sequence[int], quantile: Fraction, epsilon: Fraction, below: Below) -> int:
    """The point that is taken for the quantile, ε-DP."""
    moves = max(quantile.numerator, quantile.denominator - quantile.numerator)
    return pick(MECHANISMS[0], scores(counts, quantile), epsilon / (2 * moves), below)
