"""The record of what a run has released, and its price: dp_accounting's events and accountants."""

import bisect
import contextlib
import dataclasses
import logging
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import attr
import numpy as np
from dp_accounting import dp_event, pld, rdp
from dp_accounting.dp_event import DpEvent
from dp_accounting.privacy_accountant import NeighboringRelation

from dpspan.errors import BudgetExceeded

Runs = Sequence[tuple[DpEvent, int]]

_STATE_VERSION = 1
_LOOK_AHEAD = 1_000_000
_NOISE_LIMITS = (1e-2, 1e7)
# Whole orders only: quick, quiet, and close enough to start a search or to size a grid.
_HINT_ORDERS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_KINDS: dict[str, Any] = {
    name: kind
    for name, kind in vars(dp_event).items()
    if isinstance(kind, type) and issubclass(kind, DpEvent) and kind is not DpEvent
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """The (ε, δ) that a run may spend."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        epsilon = _number("target_epsilon", self.epsilon)
        _expect(epsilon > 0, "target_epsilon > 0", self.epsilon)
        _expect(epsilon < math.inf, "a finite target_epsilon", self.epsilon)
        _check_delta("target_delta", self.delta)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spending:
    """ε at one δ, the accountant that gave it and, if it was not the chosen one, why."""

    epsilon: float
    delta: float
    accountant: str
    warning: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublicRecord:
    """One data set that the user declared public; `digest` is the sha256 of its content."""

    name: str
    digest: str
    count: int
    detail: str = ""


class Ledger:
    """Records each event before its release and refuses what the budget cannot pay for."""

    def __init__(self, *, accountant: str = "pld", budget: Budget | None = None) -> None:
        _check_accountant(accountant)
        self.accountant = accountant
        self._budget = budget
        self._runs: list[tuple[DpEvent, int]] = []
        self._warnings: list[str] = []
        self._invalid: list[str] = []
        self._public: list[PublicRecord] = []
        self._headroom: _Headroom | None = None
        self._spendings: dict[float, Spending] = {}

    @property
    def budget(self) -> Budget | None:
        """What may be spent; nothing is refused without one."""
        return self._budget

    @budget.setter
    def budget(self, budget: Budget | None) -> None:
        self._budget = budget
        self._headroom = None

    @property
    def events(self) -> tuple[tuple[DpEvent, int], ...]:
        """Every event with its count, in order, equal neighbours merged."""
        return tuple(self._runs)

    @property
    def event(self) -> DpEvent:
        """Everything recorded, as one composed event."""
        return dp_event.ComposedDpEvent([dp_event.SelfComposedDpEvent(*run) for run in self._runs])

    @property
    def steps(self) -> int:
        """How many events have been charged."""
        return sum(count for _, count in self._runs)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the certificate has to mention, each once, in order."""
        return tuple(self._warnings)

    @property
    def invalid(self) -> tuple[str, ...]:
        """Why the run is not private, whatever ε says; empty for a private run."""
        return tuple(self._invalid)

    @property
    def public(self) -> tuple[PublicRecord, ...]:
        """What was declared public."""
        return tuple(self._public)

    def charge(self, event: DpEvent, count: int = 1) -> None:
        """Record `count` releases about to happen; BudgetExceeded, and no record, if too dear."""
        self._check_affordable(event, count, look_ahead=True)
        if not self._runs or self._runs[-1][0] != event:
            # A copy: a composed event holds a list, which its owner could still change.
            self._runs.append((event_from_json(event_to_json(event)), 0))
        self._runs[-1] = (self._runs[-1][0], self._runs[-1][1] + int(count))
        self._spendings.clear()
        if self._headroom is not None:
            self._headroom.used += count

    def reserve(self, event: DpEvent, count: int) -> None:
        """Check once that `count` more of `event` fit the budget; charges then cost nothing."""
        self._check_affordable(event, count, look_ahead=False)

    def spending(self, delta: float | None = None) -> Spending:
        """ε at `delta` (the budget's, if there is one) and the accountant it comes from."""
        delta = self._delta(delta)
        if delta not in self._spendings:
            self._spendings[delta] = _account(_merged(self._runs), delta, self.accountant)
        spending = self._spendings[delta]
        if spending.warning is not None:
            self.warn(spending.warning)
        return spending

    def epsilon(self, delta: float | None = None) -> float:
        """ε spent so far for adding or removing one record; infinite if nothing bounds it."""
        return self.spending(delta).epsilon

    def get_epsilon(self, delta: float | None = None) -> float:
        """`epsilon`, under the name that dp-accounting's and Opacus' accountants use."""
        return self.epsilon(delta)

    def replace_one_epsilon(self, delta: float | None = None) -> float:
        """ε for replacing one record: PLD only, as dp-accounting's RDP under-counts it."""
        delta = self._delta(delta)
        try:
            return _pld_epsilon(_merged(self._runs), delta, NeighboringRelation.REPLACE_ONE)
        except Exception as error:
            self.warn(f"ε for replacing one record is unknown, reported as infinite ({error}).")
            return math.inf

    def warn(self, message: str) -> None:
        """Remember a warning for the certificate."""
        if message not in self._warnings:
            self._warnings.append(message)

    def invalidate(self, reason: str) -> None:
        """Mark the run as not private for good, whatever its ε (a fixed noise seed, say)."""
        if reason not in self._invalid:
            self._invalid.append(reason)

    def declare_public(self, name: str, digest: str, count: int, detail: str = "") -> None:
        """Record that `count` samples with this sha256 are taken to be public."""
        for label, text in (("name", name), ("digest", digest), ("detail", detail)):
            _expect(isinstance(text, str), f"{label} to be a text", text)
        _check_count("count", count)
        record = PublicRecord(name=name, digest=digest, count=int(count), detail=detail)
        if record not in self._public:
            self._public.append(record)

    def state_dict(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return {
            "version": _STATE_VERSION,
            "budget": None if self.budget is None else dataclasses.asdict(self.budget),
            "steps": self.steps,
            "events": [{"event": event_to_json(e), "count": n} for e, n in self._runs],
            "warnings": list(self._warnings),
            "invalid": list(self._invalid),
            "public": [dataclasses.asdict(record) for record in self._public],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a saved record; ValueError, and no change, if it is damaged or not ours.

        The ledger keeps its accountant and its budget (the saved one, if it has none). What it
        holds already must be how the saved record begins: loading never forgets a release.
        """
        loaded = _parse_state(state)
        if not _is_prefix(self._runs, loaded._runs):
            raise ValueError(
                "Cannot load the ledger state: this ledger holds releases that the state does not "
                "begin with, and loading would forget them. Load into a new ledger."
            )
        for message in loaded._warnings:
            self.warn(message)
        for reason in loaded._invalid:
            self.invalidate(reason)
        self._public += [record for record in loaded._public if record not in self._public]
        self._runs = loaded._runs
        self.budget = self.budget or loaded.budget  # also forgets the headroom
        self._spendings.clear()

    def _delta(self, delta: float | None) -> float:
        if delta is None and self.budget is None:
            raise ValueError("Expected delta, as the ledger has no budget to take it from.")
        delta = self.budget.delta if delta is None and self.budget is not None else delta
        return _check_delta("delta", delta)

    def _check_affordable(self, event: DpEvent, count: int, *, look_ahead: bool) -> None:
        if not isinstance(event, DpEvent):
            raise TypeError(f"Expected a dp_accounting DpEvent, got {type(event).__name__}.")
        _check_count("count", count)
        if self.budget is None:
            return
        if self._headroom is None or self._headroom.event != event:
            event = event_from_json(event_to_json(event))
            self._headroom = _Headroom(event, _merged(self._runs), self.budget, self.accountant)
        if not self._headroom.fits(count, look_ahead=look_ahead):
            raise BudgetExceeded(
                f"{count} more of {event} would exceed the budget of ε = {self.budget.epsilon:g} "
                f"at δ = {self.budget.delta:g}: ε = {self.epsilon():.4f} is spent, after "
                f"{self.steps} steps. Stop training (the model is as private as its certificate "
                "says), or set a larger budget."
            )


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
        share = self.low_gap / (self.low_gap - self.high_gap) if self.low_gap else 0.5
        return self.low + (self.high - self.low) * (share if 0 < share < 1 else 0.5)


class _Headroom:
    """How many of one event fit on top of a fixed record: known up to where it was asked."""

    def __init__(self, event: DpEvent, base: Runs, budget: Budget, accountant: str) -> None:
        self.event = event
        self.used = 0
        self._base, self._budget, self._accountant = base, budget, accountant
        self._bracket = _Bracket(low=0)
        self._guess: int | None = None

    def fits(self, count: int, *, look_ahead: bool) -> bool:
        """Whether ε stays within the budget; looking ahead settles many later answers too."""
        total, bracket = self.used + count, self._bracket
        while bracket.low < total < bracket.high:
            if not look_ahead:
                probe = total
            elif bracket.high == math.inf:
                if self._guess is None:
                    self._guess = _affordable_by_renyi(self.event, self._base, self._budget)
                probe = max(total, self._guess, 2 * int(bracket.low))
            else:
                probe = round(min(max(bracket.guess(), bracket.low + 1), bracket.high - 1))
            runs = _merged([*self._base, (self.event, probe)])
            epsilon = _account(runs, self._budget.delta, self._accountant).epsilon
            bracket.learn(probe, epsilon - self._budget.epsilon)
        return total <= bracket.low


def step_event(noise_multiplier: float, sample_rate: float) -> DpEvent:
    """The event of one training step, for every method; no noise is no privacy."""
    _check_sample_rate(sample_rate)
    in_range = 0 <= _number("noise_multiplier", noise_multiplier) < math.inf
    _expect(in_range, "noise_multiplier >= 0 and finite", noise_multiplier)
    if noise_multiplier == 0:
        return dp_event.NonPrivateDpEvent()
    return dp_event.PoissonSampledDpEvent(
        float(sample_rate), dp_event.GaussianDpEvent(float(noise_multiplier))
    )


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

    What `spent` has recorded counts towards the target. The accountant is by default its own, or
    "pld".
    """
    budget = Budget(epsilon=target_epsilon, delta=target_delta)
    _check_sample_rate(sample_rate)
    _check_count("steps", steps)
    return calibrate_event(
        lambda z: step_event(z, sample_rate), steps, budget, accountant=accountant, spent=spent
    )


def calibrate_event(
    make_event: Callable[[float], DpEvent],
    count: int,
    budget: Budget,
    *,
    accountant: str | None = None,
    spent: Ledger | None = None,
) -> float:
    """The noise multiplier z with which `count` events `make_event(z)` use up the budget.

    Where ε does not depend on z so finely (a sampling rate below δ, say), it is the smallest z
    found that keeps to the budget.
    """
    accountant = accountant or ("pld" if spent is None else spent.accountant)
    _check_accountant(accountant)
    _check_count("count", count)
    base: Runs = () if spent is None else _merged(spent.events)
    if base and _account(base, budget.delta, accountant).epsilon >= budget.epsilon:
        raise BudgetExceeded(
            f"Nothing is left to calibrate for: the ledger has spent the target of "
            f"ε = {budget.epsilon:g} at δ = {budget.delta:g} already. Raise the target."
        )

    def runs(z: float) -> Runs:
        return _merged([*base, (make_event(z), count)])

    # Rényi's answer costs milliseconds and is some per cent off: the search starts there.
    start = _solve(lambda z: _hint(runs(z), budget.delta), 1.0, budget.epsilon)
    z = _solve(
        lambda z: _account(runs(z), budget.delta, accountant).epsilon, start or 1.0, budget.epsilon
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


def pld_interval(runs: Runs) -> float:
    """The grid on which PLD rounds privacy losses up: as fine as the losses need.

    dp-accounting's fixed 1e-4 doubles ε where steps cost less than that, and exhausts the memory
    where they cost hundreds. Grids are nested, so that ε still grows with every event.
    """
    loss = _hint(runs, 1e-22)
    if loss == math.inf:  # not private, or known to PLD alone
        return 1e-4
    if loss > 1e5:
        raise OverflowError(f"privacy losses of up to {loss:.3g} are too large for a grid")
    return math.ldexp(1e-4, math.floor(math.log2(max(loss, 1e-2) / 4)))


def _pld_epsilon(
    runs: Runs,
    delta: float,
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
) -> float:
    accountant = pld.PLDAccountant(relation, pld_interval(runs))
    for event, count in runs:
        accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))


def _renyi(runs: Runs, orders: Sequence[float] | None) -> tuple[Any, Any]:
    accountant = rdp.RdpAccountant(orders)
    with _quiet_absl():
        for event, count in runs:
            accountant.compose(event, count)
    # A negative divergence is a rounding error; dp-accounting would take it for ε = 0.
    divergences = np.abs(accountant.rdp)
    return accountant.orders, np.where(np.isnan(divergences), np.inf, divergences)


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


def _rdp_epsilon(runs: Runs, delta: float, orders: Sequence[float] | None = None) -> float:
    return float(rdp.compute_epsilon(*_renyi(runs, orders), delta)[0])


_ACCOUNTANTS: Mapping[str, Callable[[Runs, float], float]] = {
    "pld": _pld_epsilon,
    "rdp": _rdp_epsilon,
}


def _account(runs: Runs, delta: float, accountant: str) -> Spending:
    """ε by the chosen accountant, or by another if it cannot, or infinity: never an exception."""
    if not runs:
        return Spending(epsilon=0.0, delta=delta, accountant=accountant)
    problems = []
    for name in sorted(_ACCOUNTANTS, key=lambda name: name != accountant):
        try:
            epsilon = _ACCOUNTANTS[name](runs, delta)
        except Exception as error:  # refused, or numerical trouble of any kind
            problems.append(textwrap.shorten(f"{name}: {error}", 200))
            continue
        if math.isfinite(epsilon):
            reason = "; ".join(problems) or f"{accountant} gives no finite ε"
            warning = f"ε at δ = {delta:g} is by the {name} accountant ({reason})."
            return Spending(
                epsilon=epsilon,
                delta=delta,
                accountant=name,
                warning=None if name == accountant else warning,
            )
        if math.isnan(epsilon):
            problems.append(f"{name}: ε is not a number")
    warning = f"ε at δ = {delta:g} is reported as infinite ({'; '.join(problems)})."
    return Spending(
        epsilon=math.inf,
        delta=delta,
        accountant=accountant,
        warning=warning if problems else None,
    )


def _hint(runs: Runs, delta: float) -> float:
    """A quick, rough ε; infinite where Rényi accounting does not know an event."""
    try:
        return _rdp_epsilon(runs, delta, _HINT_ORDERS)
    except Exception:
        return math.inf


def _affordable_by_renyi(event: DpEvent, base: Runs, budget: Budget) -> int:
    """How many of `event` Rényi accounting would allow: a guess that costs milliseconds."""
    try:
        orders, spent = _renyi(base, _HINT_ORDERS)
        _, once = _renyi([(event, 1)], _HINT_ORDERS)
    except Exception:
        return 0

    def too_many(count: int) -> bool:
        epsilon = rdp.compute_epsilon(orders, spent + count * once, budget.delta)[0]
        return bool(epsilon > budget.epsilon)

    return bisect.bisect_left(range(1, _LOOK_AHEAD), True, key=too_many)


def _merged(runs: Runs) -> Runs:
    """Equal events together: composition does not depend on order, its cost on the runs."""
    totals: dict[str, tuple[DpEvent, int]] = {}
    for event, count in runs:
        _, before = totals.get(repr(event), (event, 0))
        totals[repr(event)] = (event, before + count)
    return tuple(totals.values())


def event_to_json(event: DpEvent) -> dict[str, Any]:
    """A dp_accounting event as plain JSON values, its numbers checked."""
    kind = type(event).__name__
    _expect(_KINDS.get(kind) is type(event), "an event of dp_accounting.dp_event", event)
    fields = {
        field.name: _field_to_json(f"{kind}.{field.name}", field.type, getattr(event, field.name))
        for field in attr.fields(type(event))
    }
    return {"kind": kind, **fields}


def _field_to_json(name: str, kind: Any, value: Any) -> Any:
    if isinstance(value, DpEvent) and kind not in (int, float):
        return event_to_json(value)
    if isinstance(value, list | tuple) and kind not in (int, float, DpEvent):
        return [_field_to_json(name, None, item) for item in value]
    _expect(kind is not DpEvent, f"{name} to be an event", value)
    number = _number(name, value)
    if name.endswith(".shape"):  # of a number of repetitions: may be infinite, or above −1
        return "infinity" if number == math.inf else number
    # A negative count or probability would lower ε.
    _expect(0 <= number < math.inf, f"{name} to be finite and not negative", value)
    _expect(number <= 1 or not name.endswith("probability"), f"{name} to be at most 1", value)
    _expect(kind is not int or isinstance(number, int), f"{name} to be a whole number", value)
    return number


def event_from_json(data: Any) -> DpEvent:
    """The event that `event_to_json` wrote; ValueError if it could not have."""
    known = isinstance(data, Mapping) and data.get("kind") in _KINDS
    _expect(known, "an event of a known kind", data)
    fields = {name: _field_from_json(value) for name, value in data.items() if name != "kind"}
    try:
        event = _KINDS[data["kind"]](**fields)
    except TypeError as error:
        raise ValueError(f"Expected the fields of a {data['kind']}: {error}.") from error
    event_to_json(event)
    return event


def _field_from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_field_from_json(item) for item in value]
    if value == "infinity":
        return math.inf
    return event_from_json(value) if isinstance(value, Mapping) else value


def _parse_state(state: Mapping[str, Any]) -> Ledger:
    """A new ledger with the record of `state`, every part of it checked."""
    ledger = Ledger()
    try:
        _expect(isinstance(state, Mapping), "a mapping", state)
        _expect(state["version"] == _STATE_VERSION, f"version {_STATE_VERSION}", state["version"])
        for key in ("events", "warnings", "invalid", "public"):
            _expect(isinstance(state[key], list), f"{key} to be a list", state[key])
        for entry in state["events"]:
            ledger.charge(event_from_json(entry["event"]), entry["count"])
        _expect(state["steps"] == ledger.steps, f"the {ledger.steps} steps held", state["steps"])
        for key, keep in (("warnings", ledger.warn), ("invalid", ledger.invalidate)):
            for text in state[key]:
                _expect(isinstance(text, str), f"{key} to hold texts", text)
                keep(text)
        for record in state["public"]:
            ledger.declare_public(*(record[f.name] for f in dataclasses.fields(PublicRecord)))
        budget = state["budget"]
        if budget is not None:
            ledger.budget = Budget(epsilon=budget["epsilon"], delta=budget["delta"])
    except KeyError as error:
        raise ValueError(f"Cannot load the ledger state: {error} is missing.") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"Cannot load the ledger state: {error}") from error
    return ledger


def _is_prefix(held: Runs, loaded: Runs) -> bool:
    if not held:
        return True
    *earlier, (event, count) = held
    runs = list(loaded[: len(held)])
    return len(runs) == len(held) and (
        runs[:-1] == earlier and runs[-1][0] == event and runs[-1][1] >= count
    )


def _expect(holds: bool, what: str, value: Any) -> None:
    if not holds:
        raise ValueError(f"Expected {what}, got {value!r}.")


def _number(name: str, value: Any) -> float | int:
    a_number = not isinstance(value, bool) and isinstance(value, Real) and not math.isnan(value)
    _expect(a_number, f"{name} to be a number", value)
    return int(value) if isinstance(value, Integral) else float(value)


def _check_delta(name: str, value: Any) -> float:
    _expect(0 < _number(name, value) < 1, f"0 < {name} < 1", value)
    return float(value)


def _check_sample_rate(value: Any) -> None:
    _expect(0 < _number("sample_rate", value) <= 1, "0 < sample_rate <= 1", value)


def _check_count(name: str, value: Any) -> None:
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    _expect(whole and value >= 1, f"{name} to be a whole number of at least 1", value)


def _check_accountant(name: str) -> None:
    allowed = ", ".join(repr(known) for known in _ACCOUNTANTS)
    _expect(name in _ACCOUNTANTS, f"accountant to be one of {allowed}", name)
