"""The price of events: ε of what was released, and how much noise or how many steps fit a budget.

dp_accounting's PLD accountant gives the number, its RDP accountant where PLD cannot.
"""

import bisect
import contextlib
import dataclasses
import functools
import logging
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from dp_accounting import pld, rdp
from dp_accounting.dp_event import DiscreteLaplaceDpEvent, DpEvent
from dp_accounting.privacy_accountant import NeighboringRelation

from dpspan.accounting.events import step_event
from dpspan.accounting.promises import check_promised_delta
from dpspan.support.checks import check_count, check_number, expect
from dpspan.support.errors import BudgetExceeded

Events = Sequence[tuple[DpEvent, int]]
"""Events, each with the number of times it was released."""

_LOOK_AHEAD = 1_000_000
_NOISE_LIMITS = (1e-2, 1e7)
# Whole orders only: quick, quiet, and close enough to start a search or to size a grid.
_HINT_ORDERS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """The (ε, δ) that a run may spend.

    Examples:
        >>> import dpspan
        >>> dpspan.Budget(epsilon=3.0, delta=1e-5)
        Budget(epsilon=3.0, delta=1e-05)
        >>> dpspan.Budget(epsilon=-1.0, delta=1e-5)
        Traceback (most recent call last):
        ValueError: Expected target_epsilon > 0, got -1.0.
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        epsilon = check_number("target_epsilon", self.epsilon)
        expect(epsilon > 0, "target_epsilon > 0", self.epsilon)
        expect(epsilon < math.inf, "a finite target_epsilon", self.epsilon)
        check_promised_delta("target_delta", self.delta)


class Record(Protocol):
    """What was released already, and by which accountant it is priced: a `Ledger`, mostly."""

    @property
    def events(self) -> Events: ...
    @property
    def accountant(self) -> str: ...


def calibrate(
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    *,
    accountant: str | None = None,
    spent: Record | None = None,
) -> float:
    """The noise multiplier for `steps` Poisson steps: ε within 1e-3 below the target, never above.

    What `spent` has recorded counts towards the target. The accountant is by default its own, or
    "pld".

    Examples:
        >>> import dpspan
        >>> z = dpspan.calibrate(2.0, 1e-5, sample_rate=0.02, steps=2500)
        >>> round(z, 2)
        2.14
    """
    budget = Budget(epsilon=target_epsilon, delta=target_delta)
    check_count("steps", steps)
    return calibrate_event(
        lambda z: step_event(z, sample_rate), steps, budget, accountant=accountant, spent=spent
    )


def calibrate_event(
    make_event: Callable[[float], DpEvent],
    count: int,
    budget: Budget,
    *,
    accountant: str | None = None,
    spent: Record | None = None,
) -> float:
    """The noise multiplier z with which `count` events `make_event(z)` use up the budget.

    Where ε does not depend on z so finely (a sampling rate below δ, say), it is the smallest z
    found that keeps to the budget.
    """
    chosen = check_accountant(accountant or ("pld" if spent is None else spent.accountant))
    count = check_count("count", count)
    before = () if spent is None else _merged(spent.events)
    if account(before, budget.delta, chosen).epsilon >= budget.epsilon:
        raise BudgetExceeded(
            f"Nothing is left to calibrate for: the ledger has spent the target of "
            f"ε = {budget.epsilon:g} at δ = {budget.delta:g} already. Raise the target."
        )

    def events(z: float) -> Events:
        return [*before, (make_event(z), count)]

    # Rényi's answer is cheap and some per cent off: the search starts there.
    start = _solve(lambda z: _hint(events(z), budget.delta), 1.0, budget.epsilon)
    z = _solve(
        lambda z: account(events(z), budget.delta, chosen).epsilon, start or 1.0, budget.epsilon
    )
    if z is None:
        raise BudgetExceeded(
            f"No noise multiplier up to {_NOISE_LIMITS[1]:g} keeps {count} events within "
            f"ε = {budget.epsilon:g} at δ = {budget.delta:g}. Raise the target or take fewer steps."
        )
    return z


def _solve(epsilon_at: Callable[[float], float], start: float, target: float) -> float | None:
    """The z with ε(z) just below the target: log ε is nearly linear in log z."""
    tolerance = min(1e-3, 1e-3 * target)
    aim = target - tolerance / 2
    smallest, largest = _NOISE_LIMITS
    bracket, x, reach = _Bracket(), -math.log(start), 0.0
    while bracket.high - bracket.low > 1e-6 and smallest < math.exp(-x) < largest:
        epsilon = epsilon_at(math.exp(-x))
        if target - tolerance <= epsilon <= target:
            return math.exp(-x)
        gap = math.log(max(epsilon, 1e-12) / aim)
        bracket.learn(x, gap)
        if math.isfinite(bracket.high - bracket.low):
            x = bracket.guess()
        else:  # one side only so far: ε falls at least like 1/z, so this mostly lands beyond
            reach = 2 * reach or min(max(abs(gap), 0.01), 1.0)
            x += reach if gap <= 0 else -reach
    return math.exp(-bracket.low) if bracket.low > -math.inf else None


class Headroom:
    """How many of one event fit on top of a fixed record: known up to where it was asked."""

    def __init__(self, event: DpEvent, spent: Events, budget: Budget, accountant: str) -> None:
        self.event = event
        self.used = 0
        self._spent, self._budget, self._accountant = _merged(spent), budget, accountant
        self._bracket = _Bracket(low=0)

    def fits(self, count: int, *, look_ahead: bool) -> bool:
        """Whether ε stays within the budget; looking ahead settles many later answers too."""
        total, bracket = self.used + count, self._bracket
        while bracket.low < total < bracket.high:
            if not look_ahead:
                probe = total
            elif bracket.high == math.inf:
                probe = max(total, self._by_renyi, 2 * int(bracket.low))
            else:
                probe = round(min(max(bracket.guess(), bracket.low + 1), bracket.high - 1))
            events = [*self._spent, (self.event, probe)]
            epsilon = account(events, self._budget.delta, self._accountant).epsilon
            bracket.learn(probe, epsilon - self._budget.epsilon)
        return total <= bracket.low

    @functools.cached_property
    def _by_renyi(self) -> int:
        """How many Rényi accounting would allow: a cheap guess, for the search to start from."""
        try:
            orders, spent = _renyi(self._spent, _HINT_ORDERS)
            _, once = _renyi([(self.event, 1)], _HINT_ORDERS)
        except Exception:
            return 0

        def too_many(count: int) -> bool:
            epsilon = rdp.compute_epsilon(orders, spent + count * once, self._budget.delta)[0]
            return bool(epsilon > self._budget.epsilon)

        return bisect.bisect_left(range(1, _LOOK_AHEAD), True, key=too_many)


@dataclasses.dataclass
class _Bracket:
    """Closes in on the zero of an increasing function: at `low` it is ≤ 0, at `high` above 0."""

    low: float = -math.inf
    high: float = math.inf
    low_gap: float = math.nan
    high_gap: float = math.nan
    low_moved: bool | None = None

    def learn(self, x: float, gap: float) -> None:
        """Take in the function's value at x; an end that stays put counts half (Illinois)."""
        if gap <= 0:
            self.low, self.low_gap = x, gap
            self.high_gap *= 0.5 if self.low_moved is True else 1.0
        else:
            self.high, self.high_gap = x, gap
            self.low_gap *= 0.5 if self.low_moved is False else 1.0
        self.low_moved = gap <= 0

    def guess(self) -> float:
        """Where the chord crosses zero, or the middle where the chord is unknown."""
        share = self.low_gap / (self.low_gap - self.high_gap)
        return self.low + (self.high - self.low) * (share if 0 < share < 1 else 0.5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spending:
    """ε at one δ, the accountant that gave it and, if it was not the chosen one, why."""

    epsilon: float
    delta: float
    accountant: str
    warning: str | None = None


def account(events: Events, delta: float, accountant: str) -> Spending:
    """ε by the chosen accountant, or by another if it cannot, or infinity: never an exception."""
    if not events:
        return Spending(epsilon=0.0, delta=delta, accountant=accountant)
    used, epsilon, problems = accountant, math.inf, []
    for name in sorted(_ACCOUNTANTS, key=lambda name: name != accountant):
        try:
            answer = _ACCOUNTANTS[name](events, delta)
        except Exception as error:  # refused, or numerical trouble of any kind
            problems.append(textwrap.shorten(f"{name}: {error}", 200))
            continue
        if math.isfinite(answer):
            used, epsilon = name, answer
            break
        if math.isnan(answer):
            problems.append(f"{name}: ε is not a number")
    warning = None
    if problems or used != accountant:
        how = "reported as infinite" if epsilon == math.inf else f"by the {used} accountant"
        why = "; ".join(problems) or f"{accountant} gives no finite ε"
        warning = f"ε at δ = {delta:g} is {how} ({why})."
    return Spending(epsilon=epsilon, delta=delta, accountant=used, warning=warning)


def check_accountant(name: str) -> str:
    """The name, if it is one of an accountant."""
    allowed = ", ".join(repr(known) for known in _ACCOUNTANTS)
    expect(name in _ACCOUNTANTS, f"accountant to be one of {allowed}", name)
    return name


def pld_epsilon(
    events: Events,
    delta: float,
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
) -> float:
    """ε by privacy loss distributions: tight, but not for every event."""
    accountant = pld.PLDAccountant(relation, pld_interval(events))
    return float(_composed(accountant, events).get_epsilon(delta))


def pld_interval(events: Events) -> float:
    """The grid on which PLD rounds privacy losses up: as fine as the losses need.

    dp-accounting's fixed 1e-4 doubles ε where steps cost less than that, and exhausts the memory
    where they cost hundreds. Grids are nested, so that ε still grows with every event.
    """
    loss = _hint(events, 1e-22)
    if loss == math.inf:  # not private, or known to PLD alone
        return 1e-4
    if loss > 1e5:
        raise OverflowError(f"privacy losses of up to {loss:.3g} are too large for a grid")
    return math.ldexp(1e-4, math.floor(math.log2(max(loss, 1e-2) / 4)))


def _hint(events: Events, delta: float) -> float:
    """A quick, rough ε; infinite where Rényi accounting does not know an event."""
    try:
        return _rdp_epsilon(events, delta, _HINT_ORDERS)
    except Exception:
        return math.inf


def _rdp_epsilon(events: Events, delta: float, orders: Sequence[float] | None = None) -> float:
    return float(rdp.compute_epsilon(*_renyi(events, orders), delta)[0])


_ACCOUNTANTS: Mapping[str, Callable[[Events, float], float]] = {
    "pld": pld_epsilon,
    "rdp": _rdp_epsilon,
}


def _renyi(events: Events, orders: Sequence[float] | None) -> tuple[Any, Any]:
    """The orders and the Rényi divergences at them."""
    pure = [(event, count) for event, count in events if _is_pure(event)]
    others = [(event, count) for event, count in events if not _is_pure(event)]
    with _quiet_absl():
        accountant = _composed(rdp.RdpAccountant(orders), others)
    # A negative divergence is a rounding error; dp-accounting would take it for ε = 0.
    divergences = np.abs(accountant.rdp)
    for event, count in pure:
        divergences = divergences + count * _pure_divergences(event, accountant.orders)
    return accountant.orders, np.where(np.isnan(divergences), np.inf, divergences)


def _is_pure(event: DpEvent) -> bool:
    """Whether it is ε-DP (see `pure_event`), of an ε that dp-accounting does not refuse."""
    return isinstance(event, DiscreteLaplaceDpEvent) and event.noise_parameter > 0


def _pure_divergences(event: Any, orders: Any) -> Any:
    """Rényi divergences of an event that dp-accounting's RDP does not know.

    Randomised response has the largest: log((exp(αε) + exp((1 − α)ε)) / (1 + exp(ε))) / (α − 1).
    """
    epsilon = event.noise_parameter * event.sensitivity
    total = np.logaddexp(orders * epsilon, (1 - orders) * epsilon) - np.logaddexp(0.0, epsilon)
    return total / (orders - 1)


@contextlib.contextmanager
def _quiet_absl() -> Iterator[None]:
    """RDP logs each order that it leaves out, on every call; leaving one out is sound."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _composed(accountant: Any, events: Events) -> Any:
    for event, count in _merged(events):
        accountant.compose(event, count)
    return accountant


def _merged(events: Events) -> Events:
    """Equal events together: composition does not depend on order, its cost on the events."""
    totals: dict[str, tuple[DpEvent, int]] = {}
    for event, count in events:
        _, before = totals.get(repr(event), (event, 0))
        totals[repr(event)] = (event, before + count)
    return tuple(totals.values())
