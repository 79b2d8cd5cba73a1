"""What training costs: of ε, noise multiplier and epochs, the third from the other two."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from dpspan.accounting.calibration import calibrate
from dpspan.accounting.epsilon import Budget, account
from dpspan.accounting.events import step_event
from dpspan.support.checks import check_count

_MOST_EPOCHS = 10**6


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting; `solved_for` names what was computed."""

    sample_rate: float
    epochs: int
    steps: int
    noise_multiplier: float
    epsilon: float
    delta: float
    accountant: str
    solved_for: str


def _steps(q: float, epochs: int) -> int:
    return check_count("--epochs", epochs) * max(1, round(1 / q))


def _noise(q: float, epsilon: float, epochs: int, delta: float, accountant: str) -> Row:
    z = calibrate(epsilon, delta, q, _steps(q, epochs), accountant=accountant)
    return _row("noise_multiplier", q, z, epochs, delta, accountant)


def _epochs(q: float, epsilon: float, z: float, delta: float, accountant: str) -> Row:
    Budget(epsilon=epsilon, delta=delta)  # checks both

    def fits(epochs: int) -> bool:
        return _row("epochs", q, z, epochs, delta, accountant).epsilon <= epsilon

    low, high = 0, 1
    while high < _MOST_EPOCHS and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return _row("epochs", q, z, low, delta, accountant)


def _row(solved_for: str, q: float, z: float, epochs: int, delta: float, accountant: str) -> Row:
    steps = _steps(q, epochs) if solved_for != "epochs" or epochs else 0
    events = [(step_event(z, q), steps)] if steps else []
    spending = account(events, delta, accountant)
    return Row(
        sample_rate=q,
        epochs=epochs,
        steps=steps,
        noise_multiplier=z,
        epsilon=spending.epsilon,
        delta=delta,
        accountant=spending.accountant,
        solved_for=solved_for,
    )


SOLVERS: dict[str, Callable[..., Row]] = {
    "epsilon": functools.partial(_row, "epsilon"),
    "noise_multiplier": _noise,
    "epochs": _epochs,
}
