"""Single questions about private records, each answered with its price: a mean, and quantiles.

No torch is needed for either.

**A mean of bounded scores**, an accuracy for one. With scores s between 0 and 1 two sums are
released, A = Σ s and B = Σ (1 − s), each with noise z·N(0, 1). The mean is A / (A + B), and the
number of records A + B. Formal guarantee: a record adds (s, 1 − s), of length at most 1, so both
sums together are one Gaussian mechanism of noise multiplier z. What follows from them is
post-processing.

**Quantiles**, by permute-and-flip over a public grid. Each record falls on the nearest of the
grid's points; what is outside the bounds falls on the end. At a point x let l records lie below and
r at or below. For the quantile q of n records the score of x is how far q·n lies outside of [l, r],
with a minus: 0 where x is such a quantile, ties or not. Formal guarantee: another record moves q·n
by q, and l and r by 1, or r by 1, or neither; so q·n − l and q·n − r move by q or by q − 1, and a
score by at most Δ = max(q, 1 − q), up or down. `picking` sees differences of scores only, so that
is as if all rose by 0 to 2Δ: ε-DP at ε/2Δ for each unit. m quantiles are m such draws at ε/m each,
from all records, and are put in order afterwards.
"""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from dp_accounting import DpEvent

from dpspan.accounting.events import gaussian_event, pure_event
from dpspan.accounting.ledger import Ledger
from dpspan.accounting.picking import MECHANISMS, Below, pick
from dpspan.support.checks import check_count, check_number, check_positive, expect
from dpspan.support.processes import refuse_several_processes
from dpspan.support.secure import SecureGenerator

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, kw_only=True)
class PrivateMetric:
    """A mean that was released; `error` is the standard error that its noise alone makes."""

    value: float
    error: float
    records: float  # their number, with noise of its own


def private_metric(
    scores: Any,
    *,
    noise_multiplier: float,
    bounds: tuple[float, float] = (0.0, 1.0),
    ledger: Ledger | None = None,
) -> PrivateMetric:
    """The mean of a score of each record: one Gaussian release, of add-or-remove sensitivity 1.

    Args:
        scores: one for each private record: whether a prediction is right, a bounded loss. What is
            out of bounds counts as the bound, a NaN as the lower one.
        noise_multiplier: z. Of n records with a mean p of scores from 0 to 1 the error is about
            z·√(p² + (1 − p)²)/n.
        bounds: of a score; from public knowledge.
        ledger: is charged before anything is drawn; in one process only.
    """
    low, high = _bounded_by(bounds)
    z = check_positive("noise_multiplier", noise_multiplier)
    known = np.nan_to_num(_one_number_each("scores", scores), nan=low, posinf=high, neginf=low)
    _charge(ledger, gaussian_event(z))
    sums = np.array(both_sums((np.clip(known, low, high) - low) / (high - low)))
    noisy = np.maximum(sums + z * SecureGenerator().standard_normal(2), 0.0)
    records = max(float(noisy.sum()), 1.0)
    share = float(noisy[0]) / records
    error = z * math.hypot(share, 1 - share) / records
    width = high - low
    return PrivateMetric(value=low + width * share, error=width * error, records=records)


def both_sums(shares: Any) -> tuple[float, float]:
    """Σ s and Σ (1 − s), rounded once: not by the order of the records."""
    return math.fsum(shares), math.fsum(1 - shares)


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
        ledger: is charged before anything is drawn; in one process only.
    """
    low, high = _bounded_by(bounds)
    points, epsilon = check_count("points", points, least=2), check_positive("epsilon", epsilon)
    wanted = [Fraction(str(float(check_number("a quantile", q)))) for q in quantiles]
    expect(bool(wanted), "at least one quantile", quantiles)
    for quantile in wanted:
        expect(0 <= quantile <= 1, "quantiles between 0 and 1", float(quantile))
    records = _one_number_each("values", values)
    each = epsilon / len(wanted)
    _charge(ledger, pure_event(each), len(wanted))
    counts = on_grid(records, low, high, points)
    drawn = sorted(draw(counts, q, Fraction(each), secrets.randbelow) for q in wanted)
    found = np.empty(len(wanted))
    found[np.argsort([float(q) for q in wanted])] = np.linspace(low, high, points)[drawn]
    return tuple(found.tolist())


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


def _charge(ledger: Ledger | None, event: DpEvent, count: int = 1) -> None:
    if ledger is not None:
        refuse_several_processes()  # each would draw an answer of its own
        ledger.protect("record")
        ledger.charge(event, count)


def _one_number_each(name: str, values: Any) -> Floats:
    """The values as float64; ValueError, which shows none of them, if they are not such numbers."""
    what = f"{name} to be one number for each record"
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"Expected {what}, got something else.") from None
    expect(array.ndim == 1, what, f"{array.ndim} dimensions")
    return array


def _bounded_by(bounds: tuple[float, float]) -> tuple[float, float]:
    """The bounds, checked: they are public, and must not be taken from the records."""
    low, high = (float(check_number("a bound", bound)) for bound in bounds)
    wide = -math.inf < low < high < math.inf and math.isfinite(high - low)
    expect(wide, "bounds to be two finite numbers, the lower one first", f"{low:g} and {high:g}")
    return low, high
