"""How much noise fits a budget."""

import functools
import math
from collections.abc import Callable

from dp_accounting.dp_event import DpEvent
from scipy.optimize import brentq

from dpspan.accounting.epsilon import account, check_accountant, rough_epsilon
from dpspan.accounting.events import step_event
from dpspan.accounting.ledger import Ledger
from dpspan.accounting.promises import Budget
from dpspan.accounting.releases import Releases, added
from dpspan.support.checks import check_count
from dpspan.support.errors import BudgetExceeded

_NOISE_LIMITS = (1e-2, 1e7)


def calibrate(
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    *,
    accountant: str | None = None,
    spent: Ledger | None = None,
) -> float:
    """The noise multiplier for `steps` Poisson steps: ε within 1e-3 below the target, never above.

    What `spent` holds counts towards the target. The accountant is by default its own, or "pld".
    """
    budget = Budget(epsilon=target_epsilon, delta=target_delta)
    return calibrate_event(
        lambda z: step_event(z, sample_rate),
        check_count("steps", steps),
        budget,
        accountant=accountant or ("pld" if spent is None else spent.accountant),
        spent=() if spent is None else spent.events,
    )


def calibrate_event(
    make_event: Callable[[float], DpEvent],
    count: int,
    budget: Budget,
    *,
    accountant: str = "pld",
    spent: Releases = (),
) -> float:
    """The noise multiplier z with which `count` events `make_event(z)` use up the budget.

    Where ε does not depend on z so finely (a sampling rate below δ, say), it is the smallest z
    found that keeps to the budget.
    """
    check_accountant(accountant)
    check_count("count", count)
    before = added(spent)
    if account(before, budget.delta, accountant).epsilon >= budget.epsilon:
        raise BudgetExceeded(
            f"Nothing is left to calibrate for: the ledger has spent the target of "
            f"ε = {budget.epsilon:g} at δ = {budget.delta:g} already. Raise the target."
        )

    def rough(z: float) -> float:
        return rough_epsilon([*before, (make_event(z), count)], budget.delta)

    def exact(z: float) -> float:
        return account([*before, (make_event(z), count)], budget.delta, accountant).epsilon

    start = _smallest_noise(rough, 1.0, budget.epsilon)  # cheap, so the search starts there
    z = _smallest_noise(exact, start or 1.0, budget.epsilon)
    if z is None:
        raise BudgetExceeded(
            f"No noise multiplier up to {_NOISE_LIMITS[1]:g} keeps {count} events within "
            f"ε = {budget.epsilon:g} at δ = {budget.delta:g}. Raise the target or take fewer steps."
        )
    return z


def _smallest_noise(
    epsilon_at: Callable[[float], float], start: float, target: float
) -> float | None:
    """The z with ε(z) just below the target, never above: log ε is nearly linear in log z."""
    tolerance = min(1e-3, 1e-3 * target)
    kept: list[float] = []  # each log z that keeps to the target

    @functools.cache
    def gap(x: float) -> float:
        epsilon = epsilon_at(math.exp(x))
        if epsilon <= target:
            kept.append(x)
        if target - tolerance <= epsilon <= target:
            return 0.0  # where Brent's method stops
        # Bounded, or a chord to an infinite ε would say nothing.
        return min(max(math.log(max(epsilon, 1e-12) / (target - tolerance / 2)), -5.0), 5.0)

    low = high = math.log(start)
    reach = min(max(abs(gap(low)), 0.01), 1.0)  # ε falls at least like 1/z: mostly lands beyond
    while gap(low) * gap(high) > 0:
        low, high, reach = high, high + math.copysign(reach, gap(high)), 2 * reach
        if not _NOISE_LIMITS[0] < math.exp(high) < _NOISE_LIMITS[1]:
            break
    else:
        brentq(gap, low, high, xtol=1e-6)
    return math.exp(min(kept, key=lambda x: (gap(x) != 0, x))) if kept else None
