"""Whether one record of releases goes on where another ends."""

from __future__ import annotations

from typing import Any

from dpspan.accounting.ledger import Ledger


def steps_beyond(earlier: Any, later: Any) -> int | None:
    """How many more releases `later` has; None if it leaves out one of `earlier`."""
    old, new = _ledger(earlier), _ledger(later)
    held, now = old.events, new.events
    goes_on = len(held) <= len(now) and held[:-1] == now[: max(len(held) - 1, 0)]
    if held and goes_on:
        (event, count), (same, reached) = held[-1], now[len(held) - 1]
        goes_on = event == same and count <= reached
    return new.steps - old.steps if goes_on else None


def tells_all(earlier: Any, later: Any) -> bool:
    """Whether `later` has every release of `earlier`, and all else that must be told of them."""
    old, new = _ledger(earlier), _ledger(later)
    notes = ("warnings", "invalid", "public")
    told = all(set(getattr(old, note)) <= set(getattr(new, note)) for note in notes)
    return told and steps_beyond(earlier, later) is not None


def _ledger(state: Any) -> Ledger:
    ledger = Ledger()
    ledger.load_state_dict(state)
    return ledger
