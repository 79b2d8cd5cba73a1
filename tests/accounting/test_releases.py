"""The algebra of records: added, united, continued, and through JSON."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from dp_accounting.dp_event import ComposedDpEvent, GaussianDpEvent
from hypothesis import given
from hypothesis import strategies as st

from dpspan.accounting.events import pure_event, step_event
from dpspan.accounting.ledger import Ledger, steps_beyond
from dpspan.accounting.releases import (
    Releases,
    added,
    beyond,
    releases_from_json,
    releases_to_json,
    united,
)

A, B = step_event(2.0, 0.1), GaussianDpEvent(3.0)
EVENTS = (A, B, pure_event(0.1), ComposedDpEvent([A, B]))  # the last cannot be hashed


def ledger(releases: Releases) -> Ledger:
    made = Ledger()
    for event, count in releases:
        made.charge(event, count)
    return made


# As a ledger would hold them: equal neighbours merged.
records = st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(1, 5)), max_size=5).map(
    lambda entries: ledger(entries).events
)


def tally(releases: Releases) -> Counter[str]:
    counts: Counter[str] = Counter()
    for event, count in releases:
        counts[repr(event)] += count
    return counts


@given(records, records)
def test_added_and_united_are_the_sum_and_the_maximum_of_counts(one, other):
    assert tally(added(one, other)) == tally(one) + tally(other)
    assert tally(united(one, other)) == tally(one) | tally(other)
    assert added(one, other) == added(other, one)
    assert united(one, other) == united(other, one)
    assert united(one, one) == added(one)


@given(records, records)
def test_what_comes_beyond_a_record_is_what_was_charged_after_it(earlier, more):
    later = ledger([*earlier, *more]).events
    beyond_it = beyond(earlier, later)
    assert beyond_it is not None
    assert ledger([*earlier, *beyond_it]).events == later
    assert tally(beyond_it) == tally(more)
    states = ledger(earlier).state_dict(), ledger(later).state_dict()
    assert steps_beyond(*states) == ledger(more).steps


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ([(A, 3)], []),
        ([(A, 3)], [(A, 2)]),
        ([(A, 3)], [(B, 3)]),
        ([(A, 3), (B, 1)], [(A, 3)]),
        ([(A, 3), (B, 1)], [(A, 4), (B, 1)]),
        ([(B, 1), (A, 3)], [(A, 3), (B, 1)]),
    ],
)
def test_a_record_that_leaves_something_out_or_changes_it_is_no_continuation(earlier, later):
    assert beyond(earlier, later) is None
    assert steps_beyond(ledger(earlier).state_dict(), ledger(later).state_dict()) is None
    assert not ledger(later).covers(ledger(earlier))


def test_a_ledger_covers_another_only_with_its_notes():
    earlier, later = ledger([(A, 3)]), ledger([(A, 4), (B, 1)])
    assert later.covers(earlier)
    for note in (
        lambda kept: kept.warn("a warning"),
        lambda kept: kept.invalidate("a fixed seed"),
        lambda kept: kept.declare_public("cifar", "ab12", 2000),
    ):
        note(earlier)
        assert not later.covers(earlier)
        note(later)
        assert later.covers(earlier)


@given(records)
def test_a_record_survives_json(releases):
    assert releases_from_json(json.loads(json.dumps(releases_to_json(releases)))) == releases


@pytest.mark.parametrize("count", [0, -1, True, 1.5, "2"])
def test_counts_in_json_are_checked(count):
    (entry,) = releases_to_json([(A, 1)])
    with pytest.raises(ValueError, match="count to be an integer of at least 1"):
        releases_from_json([{**entry, "count": count}])
