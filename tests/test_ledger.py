"""The ledger: published numbers, monotonicity, calibration, the hard stop, and its saved state."""

import copy
import json
import logging
import math
import re

import dp_accounting
import numpy as np
import pytest
from dp_accounting import dp_event, pld, rdp
from dp_accounting.dp_event import GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent
from hypothesis import given, settings
from hypothesis import strategies as st

from dpspan import ledger as ledger_module
from dpspan.errors import BudgetExceeded, DPSpanError
from dpspan.ledger import (
    Budget,
    Ledger,
    calibrate,
    calibrate_event,
    event_from_json,
    event_to_json,
    pld_interval,
    step_event,
)

DELTA = 1e-5


def spent(*runs, accountant="pld"):
    ledger = Ledger(accountant=accountant)
    for event, count in runs:
        ledger.charge(event, count)
    return ledger


def steps_epsilon(z, q, steps, *, accountant="pld", delta=DELTA):
    return spent((step_event(z, q), steps), accountant=accountant).epsilon(delta)


def count_calls(monkeypatch, name="pld"):
    calls = []
    original = ledger_module._ACCOUNTANTS[name]

    def counted(runs, delta):
        calls.append(runs)
        return original(runs, delta)

    monkeypatch.setitem(ledger_module._ACCOUNTANTS, name, counted)
    return calls


# -- published and golden numbers ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("z", "by_rdp", "by_pld", "replace_one"),
    [
        (18, 0.1762, 0.1541, 0.3267),
        (14, 0.2246, 0.2029, 0.4296),
        (10, 0.3240, 0.2936, 0.6200),
        (6, 0.5678, 0.5165, 1.0846),
        (2, 2.0516, 1.8773, 3.7176),
    ],
)
def test_golden_epsilon(z, by_rdp, by_pld, replace_one):
    # PDP-SGD's setting: n = 10,000, batches of 250, 30 epochs.
    assert steps_epsilon(z, 0.025, 1200, accountant="rdp") == pytest.approx(by_rdp, abs=1e-3)
    run = spent((step_event(z, 0.025), 1200))
    assert run.epsilon(DELTA) == pytest.approx(by_pld, abs=1e-3)
    assert run.replace_one_epsilon(DELTA) == pytest.approx(replace_one, abs=1e-3)


@pytest.mark.parametrize(
    ("q", "steps", "epsilon", "by_rdp", "by_pld"),
    [
        (1000 / 50_000, 2500, 2.0, 2.2967, 2.1432),
        (1000 / 50_000, 10_000, 8.0, 1.4596, 1.3893),
        (1000 / 60_000, 6000, 5.0, 1.4265, 1.3526),
    ],
)
def test_golden_noise(q, steps, epsilon, by_rdp, by_pld):
    # ε falls by 0.95 (first row) to 7 (second) for each unit of z, and may end 1e-3 below its
    # target: so z may be 1e-3 above the exact one, and 2e-3 leaves room for the tables' digits.
    assert calibrate(epsilon, DELTA, q, steps, accountant="rdp") == pytest.approx(by_rdp, abs=2e-3)
    assert calibrate(epsilon, DELTA, q, steps) == pytest.approx(by_pld, abs=2e-3)


@pytest.mark.parametrize(("z", "count"), [(1.0, 1), (5.0, 20), (0.3, 1), (60.0, 3)])
def test_gaussians_match_the_closed_form(z, count):
    exact = dp_accounting.get_epsilon_gaussian(z / math.sqrt(count), DELTA)
    assert spent((GaussianDpEvent(z), count)).epsilon(DELTA) == pytest.approx(exact, rel=1e-4)


def test_many_tiny_steps_are_not_rounded_up_to_the_grid():
    # On dp-accounting's fixed grid of 1e-4 these steps cost 0.0353, more than RDP says.
    by_pld = steps_epsilon(5.0, 1e-4, 100_000)
    assert by_pld < 0.7 * steps_epsilon(5.0, 1e-4, 100_000, accountant="rdp")
    finer = pld.PLDAccountant(value_discretization_interval=1e-6)
    finer.compose(step_event(5.0, 1e-4), 100_000)
    assert by_pld == pytest.approx(finer.get_epsilon(DELTA), rel=1e-2)


def test_grids_are_nested_and_grow_with_the_loss():
    intervals = [pld_interval([(GaussianDpEvent(z), 1)]) for z in (100.0, 10.0, 1.0, 0.1, 0.02)]
    assert intervals == sorted(set(intervals))
    assert all(math.log2(interval / 1e-4).is_integer() for interval in intervals)


# -- monotonicity -------------------------------------------------------------------------------

noises = st.floats(0.8, 20.0)
rates = st.floats(0.005, 0.1)
counts = st.integers(1, 2000)
factors = st.floats(1.05, 2.0)
few = settings(max_examples=6, deadline=None, derandomize=True)


@few
@given(noises, rates, counts, factors)
def test_more_noise_costs_less(z, q, steps, factor):
    assert steps_epsilon(z * factor, q, steps) < steps_epsilon(z, q, steps) or (
        steps_epsilon(z, q, steps) == 0
    )


@few
@given(noises, rates, counts, factors)
def test_sampling_more_costs_more(z, q, steps, factor):
    assert steps_epsilon(z, q * factor, steps) >= steps_epsilon(z, q, steps)


@few
@given(noises, rates, counts, st.integers(1, 1000))
def test_more_steps_cost_more(z, q, steps, more):
    assert steps_epsilon(z, q, steps + more) >= steps_epsilon(z, q, steps)


def test_steps_cost_more_across_a_change_of_grid():
    event, grids, before = step_event(6.0, 0.05), set(), 0.0
    for count in range(60, 600, 60):
        grids.add(pld_interval([(event, count)]))
        now = spent((event, count)).epsilon(DELTA)
        assert now > before
        before = now
    assert len(grids) > 1


# -- ε of awkward records -----------------------------------------------------------------------


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_nothing_spent_and_nothing_private(accountant):
    ledger = Ledger(accountant=accountant)
    assert ledger.epsilon(DELTA) == 0.0
    assert ledger.replace_one_epsilon(DELTA) == 0.0
    ledger.charge(step_event(0, 0.1))
    assert ledger.epsilon(DELTA) == math.inf
    assert ledger.replace_one_epsilon(DELTA) == math.inf
    assert ledger.warnings == ()


class BrokenPLD(pld.PLDAccountant):
    def get_epsilon(self, target_delta):
        raise FloatingPointError("the transform failed")


class NaNPLD(pld.PLDAccountant):
    def get_epsilon(self, target_delta):
        return math.nan


class InfinitePLD(pld.PLDAccountant):
    def get_epsilon(self, target_delta):
        return math.inf


@pytest.mark.parametrize(
    ("accountant", "why"),
    [
        (BrokenPLD, "the transform failed"),
        (NaNPLD, "not a number"),
        (InfinitePLD, "pld gives no finite ε"),
    ],
)
def test_rdp_steps_in_when_pld_fails(monkeypatch, accountant, why):
    monkeypatch.setattr(pld, "PLDAccountant", accountant)
    ledger = spent((step_event(6, 0.025), 1200))
    assert ledger.epsilon(DELTA) == pytest.approx(0.5678, abs=1e-3)
    assert ledger.spending(DELTA).accountant == "rdp"
    assert len(ledger.warnings) == 1
    assert why in ledger.warnings[0]


def test_events_that_pld_refuses():
    ledger = spent((dp_event.ZCDpEvent(0.1), 1), (step_event(6, 0.025), 10))
    direct = rdp.RdpAccountant()
    direct.compose(dp_event.ZCDpEvent(0.1)).compose(step_event(6, 0.025), 10)
    assert ledger.epsilon(DELTA) == pytest.approx(direct.get_epsilon(DELTA), rel=1e-9)
    assert "ZCDpEvent" in ledger.warnings[0]
    assert ledger.replace_one_epsilon(DELTA) == math.inf
    assert "replacing one record" in ledger.warnings[1]


def test_events_that_rdp_refuses():
    sampled_laplace = PoissonSampledDpEvent(0.1, LaplaceDpEvent(2.0))
    ledger = spent((sampled_laplace, 1), accountant="rdp")
    assert ledger.epsilon(DELTA) == spent((sampled_laplace, 1)).epsilon(DELTA) > 0
    assert ledger.spending(DELTA).accountant == "pld"


def test_an_event_nobody_knows_is_infinite_not_an_error():
    ledger = spent((dp_event.UnsupportedDpEvent(), 1))
    assert ledger.epsilon(DELTA) == math.inf
    assert "infinite" in ledger.warnings[0]


def test_huge_losses_do_not_build_a_huge_grid():
    ledger = spent((step_event(1e-3, 0.01), 100))
    assert 1e5 < ledger.epsilon(DELTA) < math.inf
    assert "too large for a grid" in ledger.warnings[0]


def test_orders_that_rdp_leaves_out_are_not_shouted_about(monkeypatch):
    records = []
    monkeypatch.setattr(logging.getLogger("absl"), "handle", records.append)
    direct = rdp.RdpAccountant().compose(step_event(4.0, 0.3)).get_epsilon(DELTA)
    assert records  # dp-accounting itself does log here
    records.clear()
    assert steps_epsilon(4.0, 0.3, 1, accountant="rdp") == pytest.approx(direct)
    assert not records
    assert logging.getLogger("absl").isEnabledFor(logging.WARNING)


def test_a_negative_divergence_is_not_taken_for_zero_epsilon(monkeypatch):
    honest = steps_epsilon(2, 0.025, 1200, accountant="rdp")

    class Rounded(rdp.RdpAccountant):
        @property
        def rdp(self):
            values = super().rdp
            values[0] = -0.5 * np.max(values)
            values[1] = math.nan
            return values

    monkeypatch.setattr(rdp, "RdpAccountant", Rounded)
    assert steps_epsilon(2, 0.025, 1200, accountant="rdp") == pytest.approx(honest)


def test_epsilon_is_computed_once_per_record_and_delta(monkeypatch):
    calls = count_calls(monkeypatch)
    ledger = spent((GaussianDpEvent(5.0), 3))
    first = ledger.epsilon(DELTA)
    assert ledger.epsilon(DELTA) == first
    assert len(calls) == 1
    ledger.charge(GaussianDpEvent(5.0))
    assert ledger.epsilon(DELTA) > first
    assert ledger.epsilon(1e-7) > ledger.epsilon(DELTA)


# -- the record ---------------------------------------------------------------------------------


def test_equal_neighbours_are_merged():
    a, b = step_event(2, 0.1), GaussianDpEvent(3.0)
    ledger = spent((a, 2), (step_event(2, 0.1), 1), (b, 1), (a, 4))
    assert ledger.events == ((a, 3), (b, 1), (a, 4))
    assert ledger.steps == 8
    together = rdp.RdpAccountant().compose(ledger.event).get_epsilon(DELTA)
    assert together == pytest.approx(spent((a, 7), (b, 1), accountant="rdp").epsilon(DELTA))


def test_accounting_merges_equal_events_wherever_they_stand(monkeypatch):
    calls = count_calls(monkeypatch)
    a, b = GaussianDpEvent(30.0), GaussianDpEvent(40.0)
    ledger = spent(*[(a, 1), (b, 1)] * 5)
    assert ledger.epsilon(DELTA) == spent((a, 5), (b, 5)).epsilon(DELTA)
    assert [sorted(count for _, count in runs) for runs in calls] == [[5, 5], [5, 5]]


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
@pytest.mark.parametrize("prefix", [(), ((GaussianDpEvent(8.0), 2), (LaplaceDpEvent(20.0), 1))])
def test_the_stop_is_where_brute_force_puts_it(accountant, prefix):
    event, budget = step_event(2.5, 0.3), Budget(epsilon=1.7, delta=DELTA)
    ledger = Ledger(accountant=accountant, budget=budget)
    for run in prefix:
        ledger.charge(*run)
    brute = 0
    while spent(*prefix, (event, brute + 1), accountant=accountant).epsilon(DELTA) <= 1.7:
        brute += 1
    assert 3 < brute < 20
    assert charge_until_refused(ledger, event) == brute
    assert ledger.steps == brute + sum(count for _, count in prefix)
    assert ledger.epsilon() <= 1.7


def test_the_stop_agrees_with_the_closed_form():
    z, budget = 40.0, Budget(epsilon=1.0, delta=1e-6)
    ledger = Ledger(budget=budget)
    done = charge_until_refused(ledger, GaussianDpEvent(z))
    at = [dp_accounting.get_epsilon_gaussian(z / math.sqrt(n), 1e-6) for n in (done, done + 1)]
    assert at[0] <= 1.0 < at[1]


def test_a_long_stream_costs_few_evaluations(monkeypatch):
    calls = count_calls(monkeypatch)
    event = step_event(20.0, 0.02)
    ledger = Ledger(budget=Budget(epsilon=0.3, delta=DELTA))
    done = charge_until_refused(ledger, event)
    assert done > 1000
    assert len(calls) <= 12
    assert spent((event, done)).epsilon(DELTA) <= 0.3 < spent((event, done + 1)).epsilon(DELTA)
    before = len(calls)
    for _ in range(5):  # a refusal is remembered too
        with pytest.raises(BudgetExceeded):
            ledger.charge(event)
    assert len(calls) == before


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


def test_a_reservation_is_checked_once(monkeypatch):
    event, target = step_event(6.0, 0.025), 0.6
    ledger = Ledger(budget=Budget(epsilon=target, delta=DELTA))
    calls = count_calls(monkeypatch)
    ledger.reserve(event, 1200)
    for _ in range(1200):
        ledger.charge(event)
    assert len(calls) == 1
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


@pytest.mark.parametrize(
    ("target", "q", "steps", "delta"),
    [
        (0.05, 0.01, 1000, 1e-5),
        (0.05, 1e-4, 20_000, 1e-6),
        (0.05, 1.0, 1, 1e-5),
        (0.5, 0.002, 5000, 1e-7),
        (3.0, 0.05, 400, 1e-5),
        (1.0, 0.5, 10, 1e-3),
        (20.0, 0.1, 500, 1e-5),
        (50.0, 0.02, 1000, 1e-5),
        (50.0, 1.0, 1, 1e-5),
    ],
)
def test_calibration_ends_within_a_thousandth_below_the_target(target, q, steps, delta):
    z = calibrate(target, delta, q, steps)
    assert target - 1e-3 <= steps_epsilon(z, q, steps, delta=delta) <= target


@pytest.mark.parametrize("target", [0.05, 0.4, 2.0, 10.0, 50.0])
@pytest.mark.parametrize(("q", "steps"), [(0.001, 10_000), (0.02, 500), (1.0, 3)])
def test_calibration_by_rdp(target, q, steps):
    z = calibrate(target, DELTA, q, steps, accountant="rdp")
    assert target - 1e-3 <= steps_epsilon(z, q, steps, accountant="rdp") <= target


def test_calibration_needs_few_evaluations(monkeypatch):
    calls = count_calls(monkeypatch)
    calibrate(2.0, DELTA, 0.02, 2500)
    assert len(calls) <= 6


def test_small_targets_waste_little():
    # A band of 1e-3 would be 2 % of ε = 0.05, and about as much noise.
    z = calibrate(0.05, DELTA, 0.01, 1000)
    assert steps_epsilon(z, 0.01, 1000) >= 0.05 * (1 - 1e-3)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_calibration_on_top_of_what_is_spent(accountant):
    ledger = spent((GaussianDpEvent(6.0), 1), accountant=accountant)
    z = calibrate(2.0, DELTA, 0.02, 500, spent=ledger)
    assert z > calibrate(2.0, DELTA, 0.02, 500, accountant=accountant)
    assert ledger.steps == 1
    ledger.budget = Budget(epsilon=2.0, delta=DELTA)
    ledger.reserve(step_event(z, 0.02), 500)  # calibrated by the ledger's own accountant: it fits
    ledger.charge(step_event(z, 0.02), 500)
    assert 2.0 - 1e-3 <= ledger.epsilon() <= 2.0


def test_calibration_of_shuffled_epochs():
    budget = Budget(epsilon=3.0, delta=DELTA)
    z = calibrate_event(GaussianDpEvent, 10, budget)
    exact = dp_accounting.get_epsilon_gaussian(z / math.sqrt(10), DELTA)
    assert 3.0 - 1e-3 <= exact <= 3.0


def test_calibration_of_an_event_that_rdp_does_not_know():
    budget = Budget(epsilon=1.0, delta=DELTA)
    z = calibrate_event(lambda z: PoissonSampledDpEvent(0.1, LaplaceDpEvent(z)), 20, budget)
    ledger = spent((PoissonSampledDpEvent(0.1, LaplaceDpEvent(z)), 20))
    assert 1.0 - 1e-3 <= ledger.epsilon(DELTA) <= 1.0


def test_calibration_where_any_noise_will_do():
    # Sampled with a probability below δ: ε is 0 however little noise there is.
    z = calibrate(1.0, 1e-3, 1e-4, 1)
    assert steps_epsilon(z, 1e-4, 1, delta=1e-3) <= 1.0
    assert z < 0.1


def test_nothing_left_to_calibrate_for():
    ledger = spent((GaussianDpEvent(1.0), 1), accountant="rdp")
    with pytest.raises(BudgetExceeded, match="Raise the target"):
        calibrate(1.0, DELTA, 0.02, 500, spent=ledger)
    with pytest.raises(BudgetExceeded, match="No noise multiplier up to"):
        calibrate_event(lambda z: dp_event.NonPrivateDpEvent(), 1, Budget(epsilon=1, delta=DELTA))


# -- arguments ----------------------------------------------------------------------------------


def test_step_event_is_one_sampled_gaussian():
    assert step_event(1.5, 0.1) == PoissonSampledDpEvent(0.1, GaussianDpEvent(1.5))
    assert step_event(0, 0.1) == dp_event.NonPrivateDpEvent()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Budget(epsilon=-1, delta=0.1), "Expected target_epsilon > 0, got -1."),
        (lambda: Budget(epsilon=0.0, delta=0.1), "Expected target_epsilon > 0, got 0.0."),
        (lambda: Budget(epsilon=math.inf, delta=0.1), "Expected a finite target_epsilon, got inf."),
        (lambda: Budget(epsilon=math.nan, delta=0.1), "target_epsilon to be a number, got nan"),
        (lambda: Budget(epsilon="8", delta=0.1), "target_epsilon to be a number, got '8'"),
        (lambda: Budget(epsilon=True, delta=0.1), "target_epsilon to be a number, got True"),
        (lambda: Budget(epsilon=1, delta=0), "Expected 0 < target_delta < 1, got 0."),
        (lambda: Budget(epsilon=1, delta=1.0), "Expected 0 < target_delta < 1, got 1.0."),
        (lambda: Ledger(accountant="gdp"), "one of 'pld', 'rdp', got 'gdp'."),
        (lambda: Ledger().epsilon(), "Expected delta, as the ledger has no budget"),
        (lambda: Ledger().epsilon(2.0), "Expected 0 < delta < 1, got 2.0."),
        (lambda: Ledger().replace_one_epsilon(0.0), "Expected 0 < delta < 1, got 0.0."),
        (lambda: Ledger().charge(GaussianDpEvent(1.0), 0), "count to be a whole number of at leas"),
        (lambda: Ledger().charge(GaussianDpEvent(1.0), 1.5), "count to be a whole number of at le"),
        (lambda: Ledger().charge(GaussianDpEvent(-1.0)), "GaussianDpEvent.noise_multiplier to be"),
        (lambda: Ledger().charge(GaussianDpEvent(math.nan)), "noise_multiplier to be a number"),
        (
            lambda: Ledger().reserve(GaussianDpEvent(1.0), -2),
            "count to be a whole number of at lea",
        ),
        (
            lambda: Ledger().declare_public("mnist", "00", 0),
            "count to be a whole number of at least",
        ),
        (lambda: Ledger().declare_public("mnist", b"00", 1), "digest to be a text"),
        (lambda: step_event(-1, 0.1), "noise_multiplier >= 0 and finite, got -1"),
        (lambda: step_event(math.inf, 0.1), "noise_multiplier >= 0 and finite, got inf"),
        (lambda: step_event(1, 0), "Expected 0 < sample_rate <= 1, got 0."),
        (lambda: step_event(1, 1.1), "Expected 0 < sample_rate <= 1, got 1.1."),
        (lambda: calibrate(-1, DELTA, 0.1, 10), "Expected target_epsilon > 0, got -1."),
        (lambda: calibrate(1, 2, 0.1, 10), "Expected 0 < target_delta < 1, got 2."),
        (lambda: calibrate(1, DELTA, 0, 10), "Expected 0 < sample_rate <= 1, got 0."),
        (lambda: calibrate(1, DELTA, 0.1, 0), "steps to be a whole number of at least 1, got 0."),
        (lambda: calibrate(1, DELTA, 0.1, 2.0), "steps to be a whole number of at least 1, got 2"),
        (lambda: calibrate(1, DELTA, 0.1, 10, accountant="gdp"), "one of 'pld', 'rdp', got 'gdp'"),
    ],
)
def test_wrong_arguments_are_refused_in_a_sentence(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_only_events_can_be_charged():
    with pytest.raises(TypeError, match="Expected a dp_accounting DpEvent, got float"):
        Ledger().charge(1.0)


# -- saved state --------------------------------------------------------------------------------

EVENTS = [
    GaussianDpEvent(1.5),
    LaplaceDpEvent(2.0),
    PoissonSampledDpEvent(0.1, GaussianDpEvent(1.5)),
    dp_event.SelfComposedDpEvent(GaussianDpEvent(3.0), 4),
    dp_event.ComposedDpEvent([GaussianDpEvent(3.0), dp_event.NoOpDpEvent()]),
    dp_event.NonPrivateDpEvent(),
    dp_event.NoOpDpEvent(),
    dp_event.ZCDpEvent(0.2, 0.1),
    dp_event.RepeatAndSelectDpEvent(GaussianDpEvent(10.0), 5.0, math.inf),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_events_survive_json(event):
    text = json.dumps(event_to_json(event), allow_nan=False)
    assert event_from_json(json.loads(text)) == event


def test_numbers_of_numpy_become_plain():
    event = PoissonSampledDpEvent(np.float64(0.1), GaussianDpEvent(np.float32(1.5)))
    ledger = spent((event, np.int64(3)))
    loaded = Ledger()
    loaded.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert loaded.events == ((PoissonSampledDpEvent(0.1, GaussianDpEvent(1.5)), 3),)


class HomeMadeEvent(dp_event.DpEvent):
    pass


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (HomeMadeEvent(), "an event of dp_accounting.dp_event"),
        (PoissonSampledDpEvent(1.2, GaussianDpEvent(1.0)), "sampling_probability to be at most 1"),
        (PoissonSampledDpEvent(0.2, 3.0), "PoissonSampledDpEvent.event to be an event"),
        (dp_event.SelfComposedDpEvent(GaussianDpEvent(1.0), -3), "count to be finite and not neg"),
        (dp_event.SelfComposedDpEvent(GaussianDpEvent(1.0), 1.5), "count to be a whole number"),
        (GaussianDpEvent(math.inf), "noise_multiplier to be finite"),
        (GaussianDpEvent([1.0]), "noise_multiplier to be a number"),
    ],
)
def test_events_that_cannot_be_recorded(event, message):
    ledger = Ledger()
    with pytest.raises(ValueError, match=message):
        ledger.charge(event)
    assert ledger.events == ()


def full_ledger():
    ledger = Ledger(accountant="rdp", budget=Budget(epsilon=50.0, delta=DELTA))
    ledger.charge(step_event(2, 0.1), 5)
    ledger.charge(GaussianDpEvent(3.0))
    ledger.warn("a warning")
    ledger.invalidate("a fixed seed")
    ledger.declare_public("cifar", "ab12", 2000, "unlabelled")
    return ledger


def test_state_round_trip():
    ledger = full_ledger()
    state = json.loads(json.dumps(ledger.state_dict(), allow_nan=False))
    loaded = Ledger(accountant="rdp")
    loaded.load_state_dict(state)
    assert loaded.state_dict() == ledger.state_dict()
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
        (changed(["version"], 2), "version 1, got 2"),
        (changed(["steps"], 7), "the 6 steps held, got 7"),
        (changed(["events"], []), "the 0 steps held, got 6"),
        (changed(["events"], full_ledger().state_dict()["events"][:1]), "the 5 steps held, got 6"),
        (changed(["events"], "truncated"), "events to be a list"),
        (changed(["events", 0], "x"), "string indices"),
        (changed(["events", 0, "count"], KeyError), "'count' is missing"),
        (changed(["events", 0, "count"], -5), "count to be a whole number of at least 1, got -5"),
        (changed(["events", 0, "count"], 2.5), "count to be a whole number of at least 1, got 2.5"),
        (changed(["events", 0, "event"], 3), "an event of a known kind, got 3"),
        (changed(["events", 0, "event", "kind"], "Mystery"), "an event of a known kind"),
        (changed(["events", 0, "event", "event"], KeyError), "fields of a PoissonSampledDpEvent"),
        (changed(["events", 0, "event", "event"], 1.0), "event to be an event, got 1.0"),
        (changed(["events", 1, "event", "surprise"], 1.0), "fields of a GaussianDpEvent"),
        (changed(["events", 1, "event", "noise_multiplier"], -1.0), "not negative, got -1.0"),
        (changed(["events", 1, "event", "noise_multiplier"], "3"), "to be a number, got '3'"),
        (changed(["warnings"], "text"), "warnings to be a list"),
        (changed(["invalid"], [1]), "invalid to hold texts, got 1"),
        (changed(["public", 0, "digest"], KeyError), "'digest' is missing"),
        (changed(["public", 0, "count"], "many"), "count to be a whole number"),
        (changed(["budget", "delta"], KeyError), "'delta' is missing"),
        (changed(["budget", "epsilon"], -1), "target_epsilon > 0, got -1"),
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


@pytest.mark.parametrize(
    ("held", "accepted"),
    [
        ([], True),
        ([(A, 3)], True),
        ([(A, 5)], True),
        ([(A, 5), (B, 1)], True),
        ([(A, 6)], False),
        ([(B, 1)], False),
        ([(A, 4), (B, 1)], False),
        ([(A, 5), (B, 2)], False),
        ([(A, 5), (B, 1), (A, 1)], False),
    ],
)
def test_loading_never_forgets_a_release(held, accepted):
    ledger = spent(*held)
    ledger.invalidate("known here already")
    if accepted:
        ledger.load_state_dict(full_ledger().state_dict())
        assert ledger.events == full_ledger().events
        assert ledger.invalid == ("known here already", "a fixed seed")
    else:
        with pytest.raises(ValueError, match="would forget them"):
            ledger.load_state_dict(full_ledger().state_dict())
        assert list(ledger.events) == held
        assert ledger.warnings == ()
