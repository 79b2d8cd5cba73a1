"""Checks of arguments: a refusal says what was expected and what came."""

import math
from numbers import Integral, Real
from typing import Any


def expect(holds: bool, what: str, value: Any) -> None:
    """ValueError naming `what` was expected, unless it holds."""
    if not holds:
        raise ValueError(f"Expected {what}, got {value!r}.")


def check_number(name: str, value: Any) -> float | int:
    """The value as a plain number; neither a truth value nor NaN is one."""
    a_number = not isinstance(value, bool) and isinstance(value, Real) and not math.isnan(value)
    expect(a_number, f"{name} to be a number", value)
    return int(value) if isinstance(value, Integral) else float(value)


def check_count(name: str, value: Any) -> int:
    """The value as a plain int of at least 1."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    expect(whole and value >= 1, f"{name} to be a whole number of at least 1", value)
    return int(value)


def check_delta(name: str, value: Any) -> float:
    """The value as a δ, strictly between 0 and 1."""
    expect(0 < check_number(name, value) < 1, f"0 < {name} < 1", value)
    return float(value)
