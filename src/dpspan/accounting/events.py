"""dp_accounting's events: those of a step and of a choice, and the JSON form of all of them."""

import math
from collections.abc import Mapping
from typing import Any

from dp_accounting import dp_event
from dp_accounting.dp_event import DpEvent

from dpspan.support.checks import check_number, check_positive, check_share, expect

_KINDS: dict[str, Any] = {
    name: kind
    for name, kind in vars(dp_event).items()
    if isinstance(kind, type) and issubclass(kind, DpEvent) and kind is not DpEvent
}


def gaussian_event(noise_multiplier: float) -> DpEvent:
    """A Gaussian mechanism; no noise is no privacy."""
    in_range = 0 <= check_number("noise_multiplier", noise_multiplier) < math.inf
    expect(in_range, "noise_multiplier >= 0 and finite", noise_multiplier)
    if noise_multiplier == 0:
        return dp_event.NonPrivateDpEvent()
    return dp_event.GaussianDpEvent(float(noise_multiplier))


def step_event(noise_multiplier: float, sample_rate: float) -> DpEvent:
    """The event of one training step, for every method: a Gaussian on a Poisson sample."""
    check_share("sample_rate", sample_rate)
    event = gaussian_event(noise_multiplier)
    if noise_multiplier == 0:
        return event
    return dp_event.PoissonSampledDpEvent(float(sample_rate), event)


def pure_event(epsilon: float) -> DpEvent:
    """The event of anything that is ε-DP with δ = 0, a private choice for example.

    Randomised response costs the most of all that is ε-DP. dp-accounting refuses its event when
    records are added or removed; the discrete Laplace mechanism of sensitivity 1 has the same
    privacy losses, +ε and −ε with odds of exp(ε) to 1. (The Laplace mechanism's are smaller.)
    """
    return dp_event.DiscreteLaplaceDpEvent(check_positive("epsilon", epsilon), 1)


def event_to_json(event: DpEvent) -> dict[str, Any]:
    """A dp_accounting event as plain JSON values, its numbers checked."""
    kind = type(event).__name__
    expect(_KINDS.get(kind) is type(event), "an event of dp_accounting.dp_event", event)
    fields = {
        field.name: _field_to_json(f"{kind}.{field.name}", field.type, getattr(event, field.name))
        for field in event.__attrs_attrs__
    }
    return {"kind": kind, **fields}


def _field_to_json(name: str, kind: Any, value: Any) -> Any:
    if isinstance(value, DpEvent) and kind not in (int, float):
        return event_to_json(value)
    if isinstance(value, list | tuple) and kind not in (int, float, DpEvent):
        return [_field_to_json(name, None, item) for item in value]
    expect(kind is not DpEvent, f"{name} to be an event", value)
    plain = check_number(name, value)
    if name.endswith(".shape"):  # of a number of repetitions: may be infinite, or above −1
        return "infinity" if plain == math.inf else plain
    # A negative count or probability would lower ε.
    expect(0 <= plain < math.inf, f"{name} to be finite and not negative", value)
    expect(plain <= 1 or not name.endswith("probability"), f"{name} to be at most 1", value)
    expect(kind is not int or isinstance(plain, int), f"{name} to be an integer", value)
    return plain


def event_from_json(data: Any) -> DpEvent:
    """The event that `event_to_json` wrote; ValueError if it could not have."""
    known = isinstance(data, Mapping) and data.get("kind") in _KINDS
    expect(known, "an event of a known kind", data)
    fields = {name: _field_from_json(value) for name, value in data.items() if name != "kind"}
    try:
        event = _KINDS[data["kind"]](**fields)
    except TypeError:
        raise ValueError(f"Expected the fields of a {data['kind']}, got others.") from None
    event_to_json(event)  # checks the numbers
    return event


def _field_from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_field_from_json(item) for item in value]
    if value == "infinity":
        return math.inf
    return event_from_json(value) if isinstance(value, Mapping) else value
