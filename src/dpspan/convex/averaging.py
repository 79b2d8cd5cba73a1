"""The average of the iterates: what convex optimisation with noise releases in the end."""

from __future__ import annotations

import math

import numpy as np

from dpspan.checks import check_number, expect
from dpspan.convex.arrays import Array


def check_average(share: float) -> None:
    """Refuse a share that is none."""
    expect(0 <= check_number("average", share) <= 1, "0 <= average <= 1", share)


class Average:
    """The mean of the last `share` of the iterates (1: all, as in the papers; 0: the last one)."""

    def __init__(self, steps: int, share: float) -> None:
        self._first = steps - max(math.ceil(share * steps), 1)
        self._seen = self._kept = 0
        self._mean: Array | None = None

    def add(self, iterate: Array) -> None:
        """Take in the next iterate."""
        self._seen += 1
        if self._seen > self._first:
            self._kept += 1
            before = 0.0 if self._mean is None else self._mean
            self._mean = np.asarray(before + (iterate - before) / self._kept)

    @property
    def value(self) -> Array:
        """The mean of what was kept."""
        if self._mean is None:
            raise ValueError("Expected at least one iterate, got none.")
        return self._mean
