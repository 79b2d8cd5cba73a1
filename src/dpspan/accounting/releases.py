"""Which releases a record contains: records added up, united, continued, and as JSON.

A record is a sequence of events, each with the number of times it was released. Ledgers, their
saved states and certificates all hold one; `epsilon.account` says what a record costs.
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dp_accounting.dp_event import DpEvent

from dpspan.accounting.events import event_from_json, event_to_json
from dpspan.support.checks import check_count

Releases = Sequence[tuple[DpEvent, int]]
_Releases = tuple[tuple[DpEvent, int], ...]


def added(*records: Releases) -> _Releases:
    """Everything in all of the records, equal events together, in an order of their own.

    The price does not depend on the order, the work of computing it on the number of entries.
    """
    return _combined(operator.add, records)


def united(*records: Releases) -> _Releases:
    """Of each event the most that any record has: for records of the same releases."""
    return _combined(operator.or_, records)


def _combined(operation: Callable[..., Any], records: Sequence[Releases]) -> _Releases:
    events = {repr(event): event for record in records for event, _ in record}
    total: Counter[str] = Counter()
    for record in records:
        tally: Counter[str] = Counter()
        for event, times in record:
            tally[repr(event)] += times
        total = operation(total, tally)
    return tuple((events[name], total[name]) for name in sorted(total))


def beyond(earlier: Releases, later: Releases) -> _Releases | None:
    """What `later` holds on top of `earlier`; None if it does not begin with all of that.

    The last event of `earlier` may have gone on.
    """
    if not earlier:
        return tuple(later)
    *before, (event, times) = earlier
    position = len(before)
    if len(later) <= position or list(later[:position]) != before:
        return None
    same, reached = later[position]
    if same != event or reached < times:
        return None
    more = [(event, reached - times)] if reached > times else []
    return (*more, *later[position + 1 :])


def releases_to_json(releases: Releases) -> list[dict[str, Any]]:
    """The record as plain JSON values."""
    return [{"event": event_to_json(event), "count": times} for event, times in releases]


def releases_from_json(entries: Iterable[Mapping[str, Any]]) -> _Releases:
    """The record in a saved ledger or a certificate, every number checked."""
    return tuple(
        (event_from_json(entry["event"]), check_count("count", entry["count"])) for entry in entries
    )
