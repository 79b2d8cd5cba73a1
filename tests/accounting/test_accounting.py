"""Accounting: published numbers, monotonicity, fallbacks and calibration."""

import logging
import math
import re

import dp_accounting
import numpy as np
import pytest
from dp_accounting import dp_event, pld, rdp
from dp_accounting.dp_event import GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent
from dp_accounting.privacy_accountant import NeighboringRelation
from hypothesis import given, settings
from hypothesis import strategies as st

from dpspan.accounting.calibration import calibrate, calibrate_event
from dpspan.accounting.epsilon import account, pld_epsilon, pld_interval, renyi
from dpspan.accounting.events import pure_event, step_event
from dpspan.accounting.promises import Budget
from dpspan.support.errors import BudgetExceeded

DELTA = 1e-5


def epsilon(*events, accountant="pld", delta=DELTA):
    return account(events, delta, accountant).epsilon


def steps_epsilon(z, q, steps, **options):
    return epsilon((step_event(z, q), steps), **options)


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
    events = [(step_event(z, 0.025), 1200)]
    assert epsilon(*events, accountant="rdp") == pytest.approx(by_rdp, abs=1e-3)
    assert epsilon(*events) == pytest.approx(by_pld, abs=1e-3)
    replaced = pld_epsilon(events, DELTA, NeighboringRelation.REPLACE_ONE)
    assert replaced == pytest.approx(replace_one, abs=1e-3)


@pytest.mark.parametrize(
    ("q", "steps", "target", "by_rdp", "by_pld"),
    [
        (1000 / 50_000, 2500, 2.0, 2.2967, 2.1432),
        (1000 / 50_000, 10_000, 8.0, 1.4596, 1.3893),
        (1000 / 60_000, 6000, 5.0, 1.4265, 1.3526),
    ],
)
def test_golden_noise(q, steps, target, by_rdp, by_pld):
    # ε falls by 0.95 (first row) to 7 (second) for each unit of z, and may end 1e-3 below its
    # target: so z may be 1e-3 above the exact one, and 2e-3 leaves room for the tables' digits.
    assert calibrate(target, DELTA, q, steps, accountant="rdp") == pytest.approx(by_rdp, abs=2e-3)
    assert calibrate(target, DELTA, q, steps) == pytest.approx(by_pld, abs=2e-3)


@pytest.mark.parametrize(("z", "count"), [(1.0, 1), (5.0, 20), (0.3, 1), (60.0, 3)])
def test_gaussians_match_the_closed_form(z, count):
    exact = dp_accounting.get_epsilon_gaussian(z / math.sqrt(count), DELTA)
    assert epsilon((GaussianDpEvent(z), count)) == pytest.approx(exact, rel=1e-4)


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


@pytest.mark.slow
@settings(max_examples=3, deadline=None, derandomize=True)
@given(
    z=st.floats(0.8, 20.0),
    q=st.floats(0.005, 0.1),
    steps=st.integers(1, 2000),
    factor=st.floats(1.05, 2.0),
    more=st.integers(1, 1000),
)
def test_less_noise_more_sampling_and_more_steps_cost_more(z, q, steps, factor, more):
    cost = steps_epsilon(z, q, steps)
    assert steps_epsilon(z * factor, q, steps) < cost or cost == 0
    assert steps_epsilon(z, q * factor, steps) >= cost
    assert steps_epsilon(z, q, steps + more) >= cost


def test_steps_cost_more_across_a_change_of_grid():
    event, counts = step_event(6.0, 0.05), range(100, 600, 100)
    costs = [epsilon((event, count)) for count in counts]
    assert costs == sorted(set(costs))
    assert len({pld_interval([(event, count)]) for count in counts}) > 1


# -- awkward events -----------------------------------------------------------------------------


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_nothing_spent_and_nothing_private(accountant):
    for events, expected in ([], 0.0), ([(step_event(0, 0.1), 1)], math.inf):
        spending = account(events, DELTA, accountant)
        assert spending.epsilon == expected
        assert (spending.accountant, spending.warning) == (accountant, None)


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
    spending = account([(step_event(6, 0.025), 1200)], DELTA, "pld")
    assert spending.epsilon == pytest.approx(0.5678, abs=1e-3)
    assert spending.accountant == "rdp"
    assert why in spending.warning


def test_events_that_pld_refuses():
    spending = account([(dp_event.ZCDpEvent(0.1), 1), (step_event(6, 0.025), 10)], DELTA, "pld")
    direct = rdp.RdpAccountant()
    direct.compose(dp_event.ZCDpEvent(0.1)).compose(step_event(6, 0.025), 10)
    assert spending.epsilon == pytest.approx(direct.get_epsilon(DELTA), rel=1e-9)
    assert "ZCDpEvent" in spending.warning


def test_events_that_rdp_refuses():
    sampled_laplace = (PoissonSampledDpEvent(0.1, LaplaceDpEvent(2.0)), 1)
    spending = account([sampled_laplace], DELTA, "rdp")
    assert spending.epsilon == epsilon(sampled_laplace) > 0
    assert spending.accountant == "pld"


def test_an_event_nobody_knows_is_infinite_not_an_error():
    spending = account([(dp_event.UnsupportedDpEvent(), 1)], DELTA, "pld")
    assert spending.epsilon == math.inf
    assert "reported as infinite" in spending.warning


def test_huge_losses_do_not_build_a_huge_grid():
    spending = account([(step_event(1e-3, 0.01), 100)], DELTA, "pld")
    assert 1e5 < spending.epsilon < math.inf
    assert "too large for a grid" in spending.warning


def test_orders_that_rdp_leaves_out_are_not_shouted_about(monkeypatch):
    records = []
    monkeypatch.setattr(logging.getLogger("absl"), "handle", records.append)
    direct = rdp.RdpAccountant().compose(step_event(4.0, 0.3)).get_epsilon(DELTA)
    assert records  # dp-accounting itself does log here
    records.clear()
    assert steps_epsilon(4.0, 0.3, 1, accountant="rdp") == pytest.approx(direct)
    assert not records
    assert logging.getLogger("absl").isEnabledFor(logging.WARNING)


@pytest.mark.parametrize("spent", [1e-12, 1e-9, 1e-7, 1e-5, 1e-3, 0.1])
def test_what_is_pure_has_the_divergences_of_randomised_response(spent):
    orders, found = renyi([(pure_event(spent), 3)])
    # log(cosh((α - 1/2)ε) / cosh(ε/2)), whatever is small
    both = np.sinh(orders * spent / 2) * np.sinh((orders - 1) * spent / 2)
    exact = 3 * np.log1p(2 * both / np.cosh(spent / 2)) / (orders - 1)
    np.testing.assert_allclose(found, exact, rtol=1e-6)
    assert epsilon((pure_event(spent), 3), accountant="rdp", delta=spent / 100) > 0


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


def test_equal_events_are_composed_at_once_wherever_they_stand(monkeypatch):
    counts = []

    class Watched(pld.PLDAccountant):
        def compose(self, event, count=1):
            counts.append(count)
            return super().compose(event, count)

    monkeypatch.setattr(pld, "PLDAccountant", Watched)
    a, b = GaussianDpEvent(30.0), GaussianDpEvent(40.0)
    scattered = epsilon(*[(a, 1), (b, 1)] * 5)
    assert counts == [5, 5]
    assert scattered == epsilon((a, 5), (b, 5))


# -- calibration --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "q", "steps", "delta"),
    [
        (0.05, 1e-4, 20_000, 1e-6),
        (0.05, 1.0, 1, 1e-5),
        (0.5, 0.002, 5000, 1e-7),
        (1.0, 0.5, 10, 1e-3),
        (50.0, 0.02, 1000, 1e-5),
    ],
)
def test_calibration_ends_within_a_thousandth_below_the_target(target, q, steps, delta):
    # Of the target too: a band of 1e-3 would be 2 % of ε = 0.05, and about as much noise.
    z = calibrate(target, delta, q, steps)
    cost = steps_epsilon(z, q, steps, delta=delta)
    assert target - 1e-3 * min(1, target) <= cost <= target


@pytest.mark.parametrize("target", [0.05, 2.0, 50.0])
@pytest.mark.parametrize(("q", "steps"), [(0.001, 10_000), (1.0, 3)])
def test_calibration_by_rdp(target, q, steps):
    z = calibrate(target, DELTA, q, steps, accountant="rdp")
    assert target - 1e-3 <= steps_epsilon(z, q, steps, accountant="rdp") <= target


def test_calibration_needs_few_evaluations(pld_evaluations):
    calibrate(2.0, DELTA, 0.02, 2500)
    assert len(pld_evaluations) <= 6


def test_calibration_of_shuffled_epochs():
    budget = Budget(epsilon=3.0, delta=DELTA)
    z = calibrate_event(GaussianDpEvent, 10, budget)
    exact = dp_accounting.get_epsilon_gaussian(z / math.sqrt(10), DELTA)
    assert 3.0 - 1e-3 <= exact <= 3.0


def test_calibration_of_an_event_that_rdp_does_not_know():
    budget = Budget(epsilon=1.0, delta=DELTA)
    z = calibrate_event(lambda z: PoissonSampledDpEvent(0.1, LaplaceDpEvent(z)), 20, budget)
    assert 1.0 - 1e-3 <= epsilon((PoissonSampledDpEvent(0.1, LaplaceDpEvent(z)), 20)) <= 1.0


@pytest.mark.slow
def test_calibration_where_any_noise_will_do():
    # Sampled with a probability below δ: ε is 0 however little noise there is.
    z = calibrate(1.0, 1e-3, 1e-4, 1)
    assert steps_epsilon(z, 1e-4, 1, delta=1e-3) <= 1.0
    assert z < 0.1


def test_no_noise_is_enough():
    with pytest.raises(BudgetExceeded, match="No noise multiplier up to"):
        calibrate_event(lambda z: dp_event.NonPrivateDpEvent(), 1, Budget(epsilon=1, delta=DELTA))


# -- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Budget(epsilon=-1, delta=0.01), "target_epsilon > 0 and finite, got -1."),
        (
            lambda: Budget(epsilon=0.0, delta=0.01),
            "target_epsilon > 0 and finite, got 0.0.",
        ),
        (
            lambda: Budget(epsilon=math.inf, delta=0.01),
            "Expected target_epsilon > 0 and finite, got inf.",
        ),
        (lambda: Budget(epsilon=math.nan, delta=0.01), "target_epsilon to be a number, got nan"),
        (lambda: Budget(epsilon="8", delta=0.01), "target_epsilon to be a number, got '8'"),
        (lambda: Budget(epsilon=True, delta=0.01), "target_epsilon to be a number, got True"),
        (lambda: Budget(epsilon=1, delta=0), "Expected 0 < target_delta < 1, got 0."),
        (lambda: Budget(epsilon=1, delta=1.0), "Expected 0 < target_delta < 1, got 1.0."),
        (lambda: calibrate(-1, DELTA, 0.1, 10), "target_epsilon > 0 and finite, got -1."),
        (lambda: calibrate(1, 2, 0.1, 10), "Expected 0 < target_delta < 1, got 2."),
        (lambda: calibrate(1, DELTA, 0, 10), "Expected 0 < sample_rate <= 1, got 0."),
        (lambda: calibrate(1, DELTA, 0.1, 0), "steps to be an integer of at least 1, got 0."),
        (lambda: calibrate(1, DELTA, 0.1, 2.0), "steps to be an integer of at least 1, got 2"),
        (lambda: calibrate(1, DELTA, 0.1, 10, accountant="gdp"), "one of 'pld', 'rdp', got 'gdp'"),
    ],
)
def test_wrong_arguments_are_refused_in_a_sentence(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
