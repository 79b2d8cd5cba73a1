"""The record of what a run has released, kept within its budget."""

import bisect
import dataclasses
import functools
import math
import os
import secrets
import threading
from collections.abc import Mapping
from typing import Any, Never, Self

from dp_accounting.dp_event import DpEvent
from dp_accounting.privacy_accountant import NeighboringRelation
from scipy.optimize import brentq

from dpspan.accounting.epsilon import (
    Spending,
    account,
    check_accountant,
    pld_epsilon,
    rough_epsilon,
)
from dpspan.accounting.events import event_from_json, event_to_json
from dpspan.accounting.promises import Budget
from dpspan.accounting.releases import Releases, added, beyond, releases_from_json, releases_to_json
from dpspan.support.checks import check_count, check_fraction, expect, html_table
from dpspan.support.errors import BudgetExceeded

_LOOK_AHEAD = 146  # 1.1 to this power: about a million releases
RECORDS_TOLD = "the number of private records is disclosed"  # how a warning of that begins
UNITS_TOLD = "the number of private units is disclosed"
# Where sums are divided by that number; a warning says so, and with it what the guarantee is for.
ZERO_OUT = "one {0} counted or not (then zero in every sum), the number of {0}s being fixed"
SEARCHED = "unprivate: learning rates were searched"
SETTINGS_SEARCHED = "unprivate: settings were searched"
ADJACENCY = {
    "record": "add or remove one record",
    "unit": "add or remove one unit: every record of one id",
}
_STATE_VERSION = 2
_COPIED = (
    "A ledger cannot be copied or sent to another process: what is charged to the copy would be "
    "missing here. Charge in one process (n_jobs=1, no fork), or move the record with state_dict "
    "and load_state_dict."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublicRecord:
    """One data set that the user declared public; `digest` is the sha256 of its content."""

    name: str
    digest: str
    count: int
    detail: str = ""


class Ledger:
    """Records each event before its release and refuses what the budget cannot pay for.

    Nothing is refused without a `budget`, which may be set later.
    """

    def __init__(self, *, accountant: str = "pld", budget: Budget | None = None) -> None:
        self.accountant = check_accountant(accountant)
        self.budget = budget
        self.unit = "record"  # or "unit": what is protected, as told by `protect`
        self._process = os.getpid()
        self._lock = threading.RLock()  # threads may share a ledger, processes not
        self.mark = secrets.token_hex(8)  # tells what this ledger saved from what others did
        self._events: list[tuple[DpEvent, int]] = []
        self._loaded: list[tuple[str, Releases]] = []  # of which ledgers, and their events then
        # Of these the keys count: each once, in order.
        self._warnings: dict[str, None] = {}
        self._invalid: dict[str, None] = {}
        self._public: dict[PublicRecord, None] = {}
        self._headroom: _Headroom | None = None
        self._spendings: dict[float, Spending] = {}

    def __repr__(self) -> str:
        return f"<Ledger: {self.steps} releases, {self.accountant}, {self.budget}>"

    def _repr_html_(self) -> str:
        spent = [] if self.budget is None else [("ε spent", f"{self.epsilon():.4g}")]
        return html_table([("budget", self.budget), *spent, *((n, e) for e, n in self._events)])

    @classmethod
    def from_state(cls, state: Any) -> Self:
        """A ledger with the saved record; ValueError if it is damaged or not ours."""
        ledger = cls()
        try:
            ledger._parse(state)
        except (KeyError, ValueError, TypeError) as error:
            what = f"{error} is missing." if isinstance(error, KeyError) else error
            raise ValueError(f"Cannot load the ledger state: {what}") from error
        return ledger

    @property
    def events(self) -> tuple[tuple[DpEvent, int], ...]:
        """Every event with its count, in order, equal neighbours merged."""
        return tuple(self._events)

    @property
    def adjacency(self) -> str:
        """Between which datasets ε holds: of all releases, so of the least that one promises."""
        fixed = ZERO_OUT.format(self.unit)
        return fixed if any(fixed in each for each in self._warnings) else ADJACENCY[self.unit]

    def protect(self, unit: str) -> None:
        """Say what the releases to come protect; ValueError if earlier ones protect another."""
        if self._events and self.unit != unit:
            raise ValueError(
                f"This ledger is about each {self.unit}, and a release that protects each {unit} "
                "cannot be added to it: no ε would hold for both. Give unit= (groups= of a fit) "
                "wherever it is used, or nowhere, or take a ledger of its own."
            )
        expect(unit in ADJACENCY, f"what is protected to be one of {list(ADJACENCY)}", unit)
        self.unit = unit

    @property
    def steps(self) -> int:
        return sum(count for _, count in self._events)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the certificate has to mention."""
        return tuple(self._warnings)

    @property
    def discloses_records(self) -> bool:
        """Whether something here was derived from the number of records or units, and tells it."""
        return any(each.startswith((RECORDS_TOLD, UNITS_TOLD)) for each in self._warnings)

    @property
    def invalid(self) -> tuple[str, ...]:
        """Why the run is not private, whatever ε says; empty for a private run."""
        return tuple(self._invalid)

    def notes(self) -> list[tuple[str, str]]:
        """Warnings, and why the run is not private, each with its kind."""
        return [("warning", x) for x in self._warnings] + [("invalid", x) for x in self._invalid]

    @property
    def public(self) -> tuple[PublicRecord, ...]:
        return tuple(self._public)

    def charge(self, event: DpEvent, count: int = 1) -> None:
        """Record `count` releases before they happen; BudgetExceeded if the budget refuses them."""
        if os.getpid() != self._process:
            raise RuntimeError(_COPIED)
        with self._lock:
            event, count = self._own(event), check_count("count", count)
            self._check_affordable(event, count)
            if self._headroom is not None:
                self._headroom.used += count
            self._record(event, count)

    def reserve(self, event: DpEvent, count: int) -> None:
        """Check once that `count` more of `event` fit the budget; charges then cost nothing."""
        with self._lock:
            self._check_affordable(self._own(event), check_count("count", count))

    def spending(self, delta: float | None = None) -> Spending:
        """ε at `delta` (the budget's, if there is one) and the accountant it comes from."""
        delta = self._delta(delta)
        with self._lock:
            if delta not in self._spendings:
                self._spendings[delta] = account(self._events, delta, self.accountant)
            spending = self._spendings[delta]
        if spending.warning is not None:
            self.warn(spending.warning)
        return spending

    def epsilon(self, delta: float | None = None) -> float:
        """ε spent so far, for neighbours as `adjacency` says; infinite if nothing bounds it."""
        return self.spending(delta).epsilon

    get_epsilon = epsilon  # the name in dp-accounting's and Opacus' accountants

    def replace_one_epsilon(self, delta: float | None = None) -> float:
        """ε for replacing one record: PLD only, as dp-accounting's RDP under-counts it."""
        delta = self._delta(delta)
        try:
            return pld_epsilon(self._events, delta, NeighboringRelation.REPLACE_ONE)
        except Exception as error:
            self.warn(f"ε for replacing one record is unknown, reported as infinite ({error}).")
            return math.inf

    def warn(self, *messages: str) -> None:
        self._warnings |= dict.fromkeys(messages)

    def invalidate(self, reason: str) -> None:
        """Mark the run as not private for good, whatever its ε (a fixed noise seed, say)."""
        self._invalid[reason] = None

    def declare_public(self, name: str, digest: str, count: int, detail: str = "") -> None:
        """Record that `count` samples with this sha256 are taken to be public."""
        for label, text in (("name", name), ("digest", digest), ("detail", detail)):
            expect(isinstance(text, str), f"{label} to be a text", text)
        count = check_count("count", count)
        self._public[PublicRecord(name=name, digest=digest, count=count, detail=detail)] = None

    def covers(self, earlier: Self) -> bool:
        """Whether it goes on where `earlier` ends, with all else that must be told of it."""
        notes = ("warnings", "invalid", "public")
        told = all(set(getattr(earlier, note)) <= set(getattr(self, note)) for note in notes)
        same = earlier.unit == self.unit or not earlier.events
        return told and same and beyond(earlier.events, self._events) is not None

    def __reduce__(self) -> Never:
        raise TypeError(_COPIED)

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": _STATE_VERSION,
            "saved_by": self.mark,
            "budget": None if self.budget is None else dataclasses.asdict(self.budget),
            "steps": self.steps,
            **({"unit": "unit"} if self.unit == "unit" else {}),
            "events": releases_to_json(self._events),
            "warnings": list(self._warnings),
            "invalid": list(self._invalid),
            "public": [dataclasses.asdict(record) for record in self._public],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a saved record; ValueError, and no change, if it is damaged or not ours.

        The ledger keeps its accountant and its budget (the saved one, if it has none). Loading
        never forgets a release: what this ledger holds of its own (public data chosen once more,
        before the checkpoint was loaded) is added to the saved record, equal or not. The same state
        counts once, however often it is loaded.
        """
        loaded = Ledger.from_state(state)
        if loaded._events:
            self.protect(loaded.unit)
        source = state["saved_by"], loaded.events
        if state["saved_by"] == self.mark:
            if beyond(self._events, loaded._events) is None:
                raise ValueError(
                    "Cannot load the ledger state: this ledger has released more since it saved "
                    "that state, and loading would forget it. Load into a new ledger."
                )
            self._events = loaded._events
        elif source not in self._loaded:  # else these very releases are held already
            self._loaded.append(source)
            for event, count in self._events:
                loaded._record(event, count)
            self._events = loaded._events
        self._warnings |= loaded._warnings
        self._invalid |= loaded._invalid
        self._public |= loaded._public
        self.budget = self.budget or loaded.budget
        self._headroom = None
        self._spendings.clear()

    def _parse(self, state: Any) -> None:
        """Take over every part of a saved record, checked."""
        expect(isinstance(state, Mapping), "a mapping", state)
        expect(state["version"] == _STATE_VERSION, f"version {_STATE_VERSION}", state["version"])
        expect(isinstance(state["saved_by"], str), "saved_by to be a text", state["saved_by"])
        self.protect(state.get("unit", "record"))
        for key in ("events", "warnings", "invalid", "public"):
            expect(isinstance(state[key], list), f"{key} to be a list", state[key])
        for event, count in releases_from_json(state["events"]):
            self._record(event, count)
        expect(state["steps"] == self.steps, f"the {self.steps} steps held", state["steps"])
        for key, keep in (("warnings", self.warn), ("invalid", self.invalidate)):
            for text in state[key]:
                expect(isinstance(text, str), f"{key} to hold texts", text)
                keep(text)
        for record in state["public"]:
            self.declare_public(*(record[f.name] for f in dataclasses.fields(PublicRecord)))
        if (budget := state["budget"]) is not None:
            self.budget = Budget(epsilon=budget["epsilon"], delta=budget["delta"])

    def _record(self, event: DpEvent, count: int) -> None:
        self._spendings.clear()
        if self._events and self._events[-1][0] == event:
            self._events[-1] = (event, self._events[-1][1] + count)
        else:
            self._events.append((event, count))

    def _delta(self, delta: float | None) -> float:
        if delta is None:
            if self.budget is None:
                raise ValueError("Expected delta, as the ledger has no budget to take it from.")
            delta = self.budget.delta
        return check_fraction("delta", delta)

    def _own(self, event: DpEvent) -> DpEvent:
        """A checked copy: a composed event holds a list, which its owner could still change."""
        if self._events and self._events[-1][0] == event:  # in a stream of steps, nearly always
            return self._events[-1][0]
        if not isinstance(event, DpEvent):
            raise TypeError(f"Expected a dp_accounting DpEvent, got {type(event).__name__}.")
        return event_from_json(event_to_json(event))

    def _check_affordable(self, event: DpEvent, count: int) -> None:
        budget, room = self.budget, self._headroom
        if budget is None:
            self._headroom = None
            return
        if room is None or room.event != event or room.budget != budget:
            room = self._headroom = _Headroom(event, self._events, budget, self.accountant)
        if not room.fits(count):
            raise BudgetExceeded(
                f"{count} more of {event} would exceed the budget of ε = {budget.epsilon:g} "
                f"at δ = {budget.delta:g}: ε = {self.epsilon():.4f} is spent, after "
                f"{self.steps} steps. Stop training (the model is as private as its certificate "
                "says), or set a larger budget."
            )


def steps_beyond(earlier: Any, later: Any) -> int | None:
    """How many more releases one saved state has than another; None if it leaves one out."""
    more = beyond(Ledger.from_state(earlier).events, Ledger.from_state(later).events)
    return None if more is None else sum(count for _, count in more)


class _Headroom:
    """How many of one event fit on top of a fixed record: known up to where it was asked."""

    def __init__(self, event: DpEvent, spent: Releases, budget: Budget, accountant: str) -> None:
        self.event, self.budget = event, budget
        self.used = 0
        self._spent, self._accountant = added(spent), accountant
        self._gaps = {0: -budget.epsilon}  # how far ε is above the budget, by the number of events
        self._most, self._too_many = 0, math.inf  # known to fit, known not to

    def fits(self, count: int) -> bool:
        """Whether ε stays within the budget; looking ahead settles many later answers too."""
        total = self.used + count
        while self._most < total and self._too_many == math.inf:
            self._gap(max(total, self._by_renyi, 2 * self._most))
        if self._most < total < self._too_many:
            brentq(self._gap, self._most, self._too_many, xtol=0.5)
        if self._most < total < self._too_many:  # as near as that was not near enough
            self._gap(total)
        return total <= self._most and total < self._too_many

    def _gap(self, count: float) -> float:
        whole = round(count)
        if whole not in self._gaps:
            events = [*self._spent, (self.event, whole)]
            epsilon = account(events, self.budget.delta, self._accountant).epsilon
            # Bounded, or a chord to an infinite ε would say nothing.
            self._gaps[whole] = min(epsilon - self.budget.epsilon, self.budget.epsilon)
            if epsilon <= self.budget.epsilon:
                self._most = max(self._most, whole)
            else:
                self._too_many = min(self._too_many, whole)
        return self._gaps[whole]

    @functools.cached_property
    def _by_renyi(self) -> int:
        """About how many Rényi accounting would allow: a cheap guess to start the search from."""

        def too_many(power: int) -> bool:
            events = [*self._spent, (self.event, int(1.1**power))]
            return rough_epsilon(events, self.budget.delta) > self.budget.epsilon

        return int(1.1 ** (bisect.bisect_left(range(_LOOK_AHEAD), True, key=too_many) - 1))
