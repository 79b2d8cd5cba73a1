"""The mean of a bounded score over private records, with Gaussian noise: an accuracy, for one.

With scores s between 0 and 1 two sums are released, A = Σ s and B = Σ (1 − s), each with noise
z·N(0, 1). The mean is A / (A + B), and the number of records A + B.

Formal guarantee: a record adds (s, 1 − s), of length at most 1, so both sums together are one
Gaussian mechanism of noise multiplier z. What follows from them is post-processing.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpspan.accounting.events import gaussian_event
from dpspan.accounting.ledger import Ledger
from dpspan.statistics.records import bounded_by, one_number_each
from dpspan.support.checks import check_positive


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
        ledger: is charged before anything is drawn.

    Examples:
        >>> import dpspan
        >>> ledger = dpspan.Ledger()
        >>> right = [True] * 900 + [False] * 100
        >>> accuracy = dpspan.private_metric(right, noise_multiplier=5.0, ledger=ledger)
        >>> abs(accuracy.value - 0.9) < 0.1
        True
        >>> ledger.events
        ((GaussianDpEvent(noise_multiplier=5.0), 1),)
    """
    low, high = bounded_by(bounds)
    z = check_positive("noise_multiplier", noise_multiplier)
    known = np.nan_to_num(one_number_each("scores", scores), nan=low, posinf=high, neginf=low)
    if ledger is not None:
        ledger.protect("record")
        ledger.charge(gaussian_event(z))
    sums = np.array(both_sums((np.clip(known, low, high) - low) / (high - low)))
    noisy = np.maximum(sums + z * np.random.default_rng().standard_normal(2), 0.0)
    records = max(float(noisy.sum()), 1.0)
    share = float(noisy[0]) / records
    error = z * math.hypot(share, 1 - share) / records
    width = high - low
    return PrivateMetric(value=low + width * share, error=width * error, records=records)


def both_sums(shares: Any) -> tuple[float, float]:
    """Σ s and Σ (1 − s), rounded once: not by the order of the records."""
    return math.fsum(shares), math.fsum(1 - shares)
