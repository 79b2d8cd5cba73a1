"""What a run may promise: a budget, and which (ε, δ) is hardly a promise, and which is none.

What decides is public: thresholds, and the number of records only where that is public too.
"""

import warnings
from dataclasses import dataclass
from typing import Any

from dpspan.support.checks import check_fraction, check_positive, expect

# Publishing each record with probability δ, as it is, keeps the promise (0, δ). From a tenth on no
# number of records makes that a promise, so it is refused. Above a thousandth it is one only for
# data so small that nothing could be learnt from them, so it is said.
LARGEST_DELTA, LARGE_DELTA = 0.1, 1e-3
LARGE_EPSILON = 10.0  # above, guesses who took part may be right 99.995 % of the time


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The (ε, δ) that a run may spend."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        check_positive("target_epsilon", self.epsilon)
        check_promised_delta("target_delta", self.delta)


def check_promised_delta(name: str, value: Any) -> float:
    """The value as the δ of a promise: of a budget or a certificate."""
    delta = check_fraction(name, value)
    expect(
        delta < LARGEST_DELTA,
        f"{name} below {LARGEST_DELTA:g} (with a δ that large, publishing that share of all "
        "records as they are would keep the promise; take one well below 1 / number of records)",
        value,
    )
    return delta


def weaknesses(
    epsilon: float | None, delta: float, records: int | None = None, *, unit: str = "record"
) -> list[str]:
    """What a reader should know of such a promise; `records`, or units, only where it is public."""
    said = []
    if epsilon is not None and epsilon > LARGE_EPSILON:
        said.append(f"an ε above {LARGE_EPSILON:g} promises next to nothing: people use 1 to 8")
    if delta > LARGE_DELTA or delta * (records or 0) >= 1:
        said.append(
            f"δ = {delta:g} is large: publishing every {unit} with that probability would keep the "
            f"promise. Choose one well below 1 / number of {unit}s"
        )
    return said


def warn_of_weaknesses(
    epsilon: float | None, delta: float, records: int | None = None, *, unit: str = "record"
) -> None:
    """To whoever is about to make the promise."""
    for sentence in weaknesses(epsilon, delta, records, unit=unit):
        warnings.warn(f"dpspan: {sentence}.", stacklevel=3)
