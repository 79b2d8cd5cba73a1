"""The ledger: its record, the hard stop, calibration on top of it, and its saved state."""

import copy
import json
import math
import pickle
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import dp_accounting
import numpy as np
import pytest
from dp_accounting import dp_event, rdp
from dp_accounting.dp_event import GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent

from dpspan.accounting.calibration import calibrate
from dpspan.accounting.epsilon import account
from dpspan.accounting.events import pure_event, step_event
from dpspan.accounting.ledger import Ledger
from dpspan.accounting.promises import Budget
from dpspan.support.errors import BudgetExceeded, DPSpanError

DELTA = 1e-5


def spent(*events, accountant="pld"):
    ledger = Ledger(accountant=accountant)
    for event, count in events:
        ledger.charge(event, count)
    return ledger


# -- ε ------------------------------------------------------------------------------------------


def test_epsilon_is_known_under_the_name_other_accountants_use():
    ledger = Ledger(accountant="rdp", budget=Budget(epsilon=3.0, delta=1e-6))
    ledger.charge(GaussianDpEvent(5.0), 3)
    direct = rdp.RdpAccountant().compose(GaussianDpEvent(5.0), 3)
    for delta in (DELTA, 1e-7):
        assert ledger.get_epsilon(delta=delta) == pytest.approx(direct.get_epsilon(delta))
    assert ledger.get_epsilon() == ledger.epsilon() == ledger.epsilon(1e-6)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_nothing_spent_and_nothing_private(accountant):
    ledger = Ledger(accountant=accountant)
    assert ledger.epsilon(DELTA) == 0.0
    assert ledger.replace_one_epsilon(DELTA) == 0.0
    ledger.charge(step_event(0, 0.1))
    assert ledger.epsilon(DELTA) == math.inf
    assert ledger.replace_one_epsilon(DELTA) == math.inf
    assert ledger.warnings == ()


def test_a_fallback_is_remembered_as_a_warning():
    ledger = spent((dp_event.ZCDpEvent(0.1), 1))
    for _ in range(2):
        assert 0 < ledger.epsilon(DELTA) < math.inf
        assert ledger.spending(DELTA).accountant == "rdp"
        assert ledger.replace_one_epsilon(DELTA) == math.inf
    fallback, unknown = ledger.warnings
    assert "by the rdp accountant" in fallback
    assert "replacing one record is unknown" in unknown


def test_replacing_a_record_costs_what_it_does_by_the_books():
    """The paper's setting of 1,200 steps at σ = 2; and without sampling, twice the sensitivity."""
    ledger = spent((step_event(2.0, 0.025), 1200))
    assert ledger.replace_one_epsilon(DELTA) == pytest.approx(3.7176, abs=1e-3)
    assert ledger.epsilon(DELTA) == pytest.approx(1.8773, abs=1e-3)
    twice = spent((GaussianDpEvent(2.0), 3)).epsilon(DELTA)
    assert spent((GaussianDpEvent(4.0), 3)).replace_one_epsilon(DELTA) == pytest.approx(
        twice, abs=1e-3
    )


def test_epsilon_is_computed_once_per_record_and_delta(pld_evaluations):
    ledger = spent((GaussianDpEvent(5.0), 3))
    first = ledger.epsilon(DELTA)
    assert ledger.epsilon(DELTA) == first
    assert len(pld_evaluations) == 1
    ledger.charge(GaussianDpEvent(5.0))
    assert ledger.epsilon(DELTA) > first
    assert ledger.epsilon(1e-7) > ledger.epsilon(DELTA)


# -- the record ---------------------------------------------------------------------------------


def test_equal_neighbours_are_merged():
    a, b = step_event(2, 0.1), GaussianDpEvent(3.0)
    ledger = spent((a, 2), (step_event(2, 0.1), 1), (b, 1), (a, 4))
    assert ledger.events == ((a, 3), (b, 1), (a, 4))
    assert ledger.steps == 8
    together = rdp.RdpAccountant()
    for event, count in ledger.events:
        together.compose(event, count)
    assert together.get_epsilon(DELTA) == pytest.approx(
        spent((a, 7), (b, 1), accountant="rdp").epsilon(DELTA)
    )


def test_a_recorded_event_cannot_be_changed_from_outside():
    event = dp_event.ComposedDpEvent([GaussianDpEvent(1.0)])
    ledger = spent((event, 1))
    event.events.clear()
    assert ledger.epsilon(DELTA) > 1


def test_warnings_reasons_and_public_data_are_kept_once_and_in_order():
    ledger = Ledger()
    for message in ("b", "a", "b"):
        ledger.warn(message)
        ledger.invalidate(message.upper())
        ledger.declare_public(message, "00ff", 10, "images")
    assert ledger.warnings == ("b", "a")
    assert ledger.invalid == ("B", "A")
    assert [record.name for record in ledger.public] == ["b", "a"]
    assert ledger.public[0].digest == "00ff"
    assert (ledger.public[0].count, ledger.public[0].detail) == (10, "images")


# -- the hard stop ------------------------------------------------------------------------------


def charge_until_refused(ledger, event, count=1):
    for done in range(1_000_000):
        try:
            ledger.charge(event, count)
        except BudgetExceeded:
            return done
    raise AssertionError("never refused")


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_the_stop_is_exact_on_top_of_other_events(accountant):
    before, event = ((GaussianDpEvent(8.0), 2), (LaplaceDpEvent(20.0), 1)), step_event(2.5, 0.3)
    ledger = spent(*before, accountant=accountant)
    ledger.budget = Budget(epsilon=1.7, delta=DELTA)
    done = charge_until_refused(ledger, event)
    assert 3 < done < 20
    assert ledger.steps == 3 + done
    one_more = spent(*before, (event, done + 1), accountant=accountant)
    assert ledger.epsilon() <= 1.7 < one_more.epsilon(DELTA)


def test_the_stop_agrees_with_the_closed_form():
    z, budget = 40.0, Budget(epsilon=1.0, delta=1e-6)
    ledger = Ledger(budget=budget)
    done = charge_until_refused(ledger, GaussianDpEvent(z))
    at = [dp_accounting.get_epsilon_gaussian(z / math.sqrt(n), 1e-6) for n in (done, done + 1)]
    assert at[0] <= 1.0 < at[1]


def test_a_long_stream_costs_few_evaluations(pld_evaluations):
    event = step_event(20.0, 0.02)
    ledger = Ledger(budget=Budget(epsilon=0.3, delta=DELTA))
    done = charge_until_refused(ledger, event)
    assert done > 1000
    assert len(pld_evaluations) <= 12
    assert spent((event, done)).epsilon(DELTA) <= 0.3 < spent((event, done + 1)).epsilon(DELTA)
    before = len(pld_evaluations)
    for _ in range(5):  # a refusal is remembered too
        with pytest.raises(BudgetExceeded):
            ledger.charge(event)
    assert len(pld_evaluations) == before


def test_after_a_change_of_event_the_stop_is_still_exact():
    first, second, budget = step_event(3, 0.1), step_event(2, 0.2), Budget(epsilon=3, delta=DELTA)
    ledger = Ledger(accountant="rdp", budget=budget)
    ledger.charge(first, 30)
    ledger.charge(second, 5)
    ledger.charge(first, 10)
    done = charge_until_refused(ledger, second)

    def after(count):
        return spent((first, 40), (second, 5 + count), accountant="rdp").epsilon(DELTA)

    assert done > 0
    assert after(done) <= 3 < after(done + 1)


def test_a_charge_of_many_is_all_or_nothing():
    ledger = Ledger(accountant="rdp", budget=Budget(epsilon=1.0, delta=DELTA))
    event = step_event(4, 0.1)
    limit = charge_until_refused(Ledger(accountant="rdp", budget=ledger.budget), event)
    with pytest.raises(BudgetExceeded):
        ledger.charge(event, limit + 1)
    assert ledger.events == ()
    ledger.charge(event, limit)
    with pytest.raises(BudgetExceeded):
        ledger.charge(event)
    assert ledger.steps == limit


def test_a_reservation_is_checked_once(pld_evaluations):
    event, target = step_event(6.0, 0.025), 0.6
    ledger = Ledger(budget=Budget(epsilon=target, delta=DELTA))
    ledger.reserve(event, 1200)
    for _ in range(1200):
        ledger.charge(event)
    assert len(pld_evaluations) == 1
    assert ledger.epsilon() == pytest.approx(0.5165, abs=1e-3)
    with pytest.raises(BudgetExceeded):
        ledger.reserve(event, 1200)
    assert charge_until_refused(ledger, event) > 0  # a reservation is not a limit
    assert ledger.epsilon() <= target


def test_no_budget_no_stop_and_a_new_budget_counts_at_once():
    event = step_event(4, 0.1)
    ledger = Ledger(accountant="rdp")
    ledger.reserve(event, 10**9)
    ledger.charge(event, 100)
    assert ledger.steps == 100
    ledger.budget = Budget(epsilon=ledger.epsilon(DELTA), delta=DELTA)
    with pytest.raises(BudgetExceeded):
        ledger.charge(event)
    ledger.budget = Budget(epsilon=2 * ledger.epsilon(DELTA), delta=DELTA)
    ledger.charge(event)
    assert ledger.steps == 101


def test_free_and_unpayable_events():
    ledger = Ledger(budget=Budget(epsilon=1.0, delta=DELTA))
    ledger.charge(dp_event.NoOpDpEvent(), 10)
    with pytest.raises(BudgetExceeded):
        ledger.charge(dp_event.NonPrivateDpEvent())
    with pytest.raises(BudgetExceeded):
        ledger.charge(dp_event.UnsupportedDpEvent())
    assert (ledger.steps, ledger.epsilon()) == (10, 0.0)


def test_the_refusal_says_what_was_spent_and_what_to_do():
    ledger = Ledger(accountant="rdp", budget=Budget(epsilon=1.5, delta=DELTA))
    ledger.charge(GaussianDpEvent(10.0), 7)
    with pytest.raises(DPSpanError) as refusal:
        ledger.charge(GaussianDpEvent(0.5))
    text = str(refusal.value)
    assert f"ε = {ledger.epsilon():.4f} is spent" in text
    for part in ("budget of ε = 1.5", "δ = 1e-05", "7 steps", "Stop training", "larger budget"):
        assert part in text


# -- calibration --------------------------------------------------------------------------------


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_calibration_on_top_of_what_is_spent(accountant):
    ledger = spent((GaussianDpEvent(6.0), 1), accountant=accountant)
    z = calibrate(2.0, DELTA, 0.1, 20, spent=ledger)
    assert ledger.steps == 1
    ledger.budget = Budget(epsilon=2.0, delta=DELTA)
    ledger.reserve(step_event(z, 0.1), 20)  # calibrated by the ledger's own accountant: it fits
    ledger.charge(step_event(z, 0.1), 20)
    assert 2.0 - 1e-3 <= ledger.epsilon() <= 2.0


def test_nothing_left_to_calibrate_for():
    ledger = spent((GaussianDpEvent(1.0), 1), accountant="rdp")
    with pytest.raises(BudgetExceeded, match="Raise the target"):
        calibrate(1.0, DELTA, 0.02, 500, spent=ledger)


# -- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Ledger(accountant="gdp"), "one of 'pld', 'rdp', got 'gdp'."),
        (lambda: Ledger().epsilon(), "Expected delta, as the ledger has no budget"),
        (lambda: Ledger().epsilon(2.0), "Expected 0 < delta < 1, got 2.0."),
        (lambda: Ledger().replace_one_epsilon(0.0), "Expected 0 < delta < 1, got 0.0."),
        (lambda: Ledger().charge(GaussianDpEvent(1.0), 0), "count to be an integer of at leas"),
        (lambda: Ledger().charge(GaussianDpEvent(1.0), 1.5), "count to be an integer of at le"),
        (lambda: Ledger().reserve(GaussianDpEvent(1.0), -2), "count to be an integer of at le"),
        (lambda: Ledger().declare_public("mnist", "00", 0), "count to be an integer of at lea"),
        (lambda: Ledger().declare_public("mnist", b"00", 1), "digest to be a text"),
    ],
)
def test_wrong_arguments_are_refused_in_a_sentence(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.parametrize("budget", [None, Budget(epsilon=1.0, delta=DELTA)])
def test_only_sound_events_can_be_charged(budget):
    ledger = Ledger(budget=budget)
    for refused in (ledger.charge, lambda event: ledger.reserve(event, 1)):
        with pytest.raises(TypeError, match="Expected a dp_accounting DpEvent, got float"):
            refused(1.0)
        with pytest.raises(ValueError, match=r"GaussianDpEvent\.noise_multiplier to be finite"):
            refused(GaussianDpEvent(-1.0))
    assert ledger.events == ()


# -- saved state --------------------------------------------------------------------------------


def test_numbers_of_numpy_become_plain():
    event = PoissonSampledDpEvent(np.float64(0.1), GaussianDpEvent(np.float32(1.5)))
    ledger = spent((event, np.int64(3)))
    loaded = Ledger()
    loaded.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert loaded.events == ((PoissonSampledDpEvent(0.1, GaussianDpEvent(1.5)), 3),)


def full_ledger():
    ledger = spent((step_event(2, 0.1), 5), (GaussianDpEvent(3.0), 1), accountant="rdp")
    ledger.budget = Budget(epsilon=50.0, delta=DELTA)
    ledger.warn("a warning")
    ledger.invalidate("a fixed seed")
    ledger.declare_public("cifar", "ab12", 2000, "unlabelled")
    return ledger


def test_state_round_trip():
    ledger = full_ledger()
    state = json.loads(json.dumps(ledger.state_dict(), allow_nan=False))
    loaded = Ledger(accountant="rdp")
    loaded.load_state_dict(state)
    assert {**loaded.state_dict(), "saved_by": state["saved_by"]} == state
    assert loaded.events == ledger.events
    assert loaded.public == ledger.public
    assert loaded.budget == ledger.budget  # a stop is not lost by resuming without one
    assert loaded.epsilon() == ledger.epsilon()


def test_a_ledger_keeps_its_own_budget():
    budget = Budget(epsilon=1.0, delta=1e-6)
    ledger = Ledger(accountant="rdp", budget=budget)
    ledger.load_state_dict(full_ledger().state_dict())
    assert ledger.budget == budget
    with pytest.raises(BudgetExceeded):  # what was loaded exceeds it
        ledger.charge(GaussianDpEvent(100.0))


def test_the_stop_is_exact_after_resuming():
    event, budget = step_event(4, 0.1), Budget(epsilon=1.0, delta=DELTA)
    limit = charge_until_refused(Ledger(accountant="rdp", budget=budget), event)
    first = Ledger(accountant="rdp", budget=budget)
    first.charge(event, limit - 3)
    resumed = Ledger(accountant="rdp", budget=budget)
    resumed.reserve(event, limit)
    resumed.load_state_dict(first.state_dict())
    assert charge_until_refused(resumed, event) == 3


def changed(path, value):
    state = full_ledger().state_dict()
    target = state
    for key in path[:-1]:
        target = target[key]
    if value is KeyError:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return state


@pytest.mark.parametrize(
    ("state", "message"),
    [
        *((changed([key], KeyError), f"'{key}' is missing") for key in full_ledger().state_dict()),
        (None, "a mapping"),
        ({}, "'version' is missing"),
        (changed(["version"], 3), "version 2, got 3"),
        (changed(["saved_by"], 3), "saved_by to be a text, got 3"),
        (changed(["steps"], 7), "the 6 steps held, got 7"),
        (changed(["events"], []), "the 0 steps held, got 6"),
        (changed(["events"], full_ledger().state_dict()["events"][:1]), "the 5 steps held, got 6"),
        (changed(["events"], "truncated"), "events to be a list"),
        (changed(["events", 0], "x"), "string indices"),
        (changed(["events", 0, "count"], KeyError), "'count' is missing"),
        (changed(["events", 0, "count"], -5), "count to be an integer of at least 1, got -5"),
        (changed(["events", 0, "count"], 2.5), "count to be an integer of at least 1, got 2.5"),
        (changed(["events", 0, "event"], 3), "an event of a known kind, got 3"),
        (changed(["warnings"], "text"), "warnings to be a list"),
        (changed(["invalid"], [1]), "invalid to hold texts, got 1"),
        (
            changed(["public", 0, "digest"], KeyError),
            "'digest' is missing",
        ),
        (changed(["public", 0, "count"], "many"), "count to be an integer"),
        (
            changed(["budget", "delta"], KeyError),
            "'delta' is missing",
        ),
        (changed(["budget", "epsilon"], -1), "target_epsilon > 0 and finite, got -1"),
    ],
)
def test_damaged_states_are_refused_and_change_nothing(state, message):
    ledger = spent((step_event(2, 0.1), 1))
    ledger.warn("before")
    before = copy.deepcopy(ledger.state_dict())
    with pytest.raises(ValueError, match="Cannot load the ledger state") as error:
        ledger.load_state_dict(state)
    assert message in str(error.value)
    assert ledger.state_dict() == before


A, B = step_event(2, 0.1), GaussianDpEvent(3.0)


@pytest.mark.parametrize("held", [[], [(A, 3)], [(A, 5), (B, 1)], [(B, 2)], [(pure_event(0.1), 1)]])
def test_what_another_ledger_saved_comes_on_top(held):
    """Equal events are not the same releases: a choice made again is a second choice."""
    ledger = spent(*held)
    ledger.invalidate("known here already")
    ledger.load_state_dict(full_ledger().state_dict())
    expected = Counter()
    for event, count in [*full_ledger().events, *held]:
        expected[repr(event)] += count
    found = Counter()
    for event, count in ledger.events:
        found[repr(event)] += count
    assert found == expected
    assert ledger.invalid == ("known here already", "a fixed seed")


def test_a_state_that_is_loaded_again_counts_once():
    first = spent((A, 3))
    early = first.state_dict()
    first.charge(A)
    ledger = spent((A, 2))
    for _ in range(2):  # with what was released in between
        ledger.load_state_dict(early)
        ledger.charge(B)
    assert Counter(dict(ledger.events)) == {A: 5, B: 2}
    ledger.load_state_dict(first.state_dict())  # a later one is added whole
    ledger.load_state_dict(spent((A, 3)).state_dict())  # as another's is
    assert Counter(dict(ledger.events))[A] == 5 + 4 + 3


def test_its_own_state_cannot_make_a_ledger_forget():
    ledger = spent((A, 3))
    early = ledger.state_dict()
    ledger.load_state_dict(early)  # nothing has happened since
    assert ledger.steps == 3
    ledger.charge(A)
    with pytest.raises(ValueError, match="would forget it"):
        ledger.load_state_dict(early)
    assert ledger.steps == 4


def test_a_ledger_is_not_sent_to_another_process():
    """What a copy is charged there, this one would never know."""
    ledger = spent((A, 3))
    for action in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="state_dict"):
            action(ledger)


def test_threads_that_share_a_ledger_do_not_exceed_its_budget(monkeypatch) -> None:
    monkeypatch.setattr(  # slow enough for all to be asked before one is written down
        "dpspan.accounting.ledger.account", lambda *asked: time.sleep(0.02) or account(*asked)
    )
    ledger = Ledger(accountant="rdp", budget=Budget(epsilon=1.0, delta=1e-5))

    def charged(_: int) -> bool:
        try:
            ledger.charge(GaussianDpEvent(5.5))
        except BudgetExceeded:
            return False
        return True

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(charged, range(4))) == ledger.steps
    assert 0 < ledger.epsilon() <= 1.0


def test_as_notebooks_show_it() -> None:
    ledger = Ledger(accountant="rdp", budget=Budget(epsilon=3.0, delta=1e-5))
    ledger.charge(step_event(2.0, 0.01), 7)
    assert repr(ledger) == "<Ledger: 7 releases, rdp, Budget(epsilon=3.0, delta=1e-05)>"
    page = ledger._repr_html_()
    assert f"<th>ε spent</th><td>{ledger.epsilon():.4g}</td>" in page
    assert "<th>7</th><td>PoissonSampledDpEvent(" in page
    assert "ε spent" not in Ledger()._repr_html_()
