"""Events: the one of a step, and all of them to JSON and back, with nothing wrong let through."""

import json
import math
import re

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.dp_event import GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent

from dpspan.accounting.events import event_from_json, event_to_json, step_event


def test_step_event_is_one_sampled_gaussian():
    assert step_event(1.5, 0.1) == PoissonSampledDpEvent(0.1, GaussianDpEvent(1.5))
    assert step_event(0, 0.1) == dp_event.NonPrivateDpEvent()


@pytest.mark.parametrize(
    ("noise_multiplier", "sample_rate", "message"),
    [
        (-1, 0.1, "Expected noise_multiplier >= 0 and finite, got -1."),
        (math.inf, 0.1, "Expected noise_multiplier >= 0 and finite, got inf."),
        (True, 0.1, "Expected noise_multiplier to be a number, got True."),
        (1, 0, "Expected 0 < sample_rate <= 1, got 0."),
        (1, 1.1, "Expected 0 < sample_rate <= 1, got 1.1."),
        (1, math.nan, "Expected sample_rate to be a number, got nan."),
    ],
)
def test_steps_that_cannot_be(noise_multiplier, sample_rate, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        step_event(noise_multiplier, sample_rate)


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
    plain = PoissonSampledDpEvent(0.1, GaussianDpEvent(1.5))
    assert repr(event_to_json(event)) == repr(event_to_json(plain))


class HomeMadeEvent(dp_event.DpEvent):
    pass


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (HomeMadeEvent(), "an event of dp_accounting.dp_event"),
        (PoissonSampledDpEvent(1.2, GaussianDpEvent(1.0)), "sampling_probability to be at most 1"),
        (PoissonSampledDpEvent(0.2, 3.0), "PoissonSampledDpEvent.event to be an event"),
        (dp_event.SelfComposedDpEvent(GaussianDpEvent(1.0), -3), "count to be finite and not neg"),
        (dp_event.SelfComposedDpEvent(GaussianDpEvent(1.0), 1.5), "count to be an integer"),
        (GaussianDpEvent(-1.0), "GaussianDpEvent.noise_multiplier to be finite and not negative"),
        (GaussianDpEvent(math.inf), "noise_multiplier to be finite"),
        (GaussianDpEvent(math.nan), "noise_multiplier to be a number"),
        (GaussianDpEvent([1.0]), "noise_multiplier to be a number"),
    ],
)
def test_events_that_have_no_json_form(event, message):
    with pytest.raises(ValueError, match=message):
        event_to_json(event)


GAUSSIAN = {"kind": "GaussianDpEvent", "noise_multiplier": 3.0}
SAMPLED = {"kind": "PoissonSampledDpEvent", "sampling_probability": 0.1}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "an event of a known kind, got 3"),
        ({}, "an event of a known kind"),
        (GAUSSIAN | {"kind": "Mystery"}, "an event of a known kind"),
        (SAMPLED, "fields of a PoissonSampledDpEvent"),
        (SAMPLED | {"event": 1.0}, "event to be an event, got 1.0"),
        (GAUSSIAN | {"surprise": 1.0}, "fields of a GaussianDpEvent"),
        (GAUSSIAN | {"noise_multiplier": -1.0}, "not negative, got -1.0"),
        (GAUSSIAN | {"noise_multiplier": "3"}, "to be a number, got '3'"),
    ],
)
def test_json_that_is_no_event(data, message):
    with pytest.raises(ValueError, match=message):
        event_from_json(data)
