"""Private numbers as they come: one for each record, and what is known of them beforehand."""

import math
from typing import Any

import numpy as np

from dpspan.support.checks import check_number, expect

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]


def one_number_each(name: str, values: Any) -> Floats:
    """The values as float64; ValueError, which shows none of them, if they are not such numbers."""
    what = f"{name} to be one number for each record"
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"Expected {what}, got something else.") from None
    expect(array.ndim == 1, what, f"{array.ndim} dimensions")
    return array


def bounded_by(bounds: tuple[float, float]) -> tuple[float, float]:
    """The bounds, checked: they are public, and must not be taken from the records."""
    low, high = (float(check_number("a bound", bound)) for bound in bounds)
    wide = -math.inf < low < high < math.inf and math.isfinite(high - low)
    expect(wide, "bounds to be two finite numbers, the lower one first", f"{low:g} and {high:g}")
    return low, high
