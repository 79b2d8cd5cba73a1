"""What a certificate says, in plain words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dpspan.accounting.epsilon import account
from dpspan.accounting.events import event_from_json
from dpspan.accounting.promises import LARGE_DELTA


def spent_on(certificate: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every kind of release with what it would cost alone; together they cost less than the sum."""
    delta, accountant = certificate["delta"], certificate["accountant"]["used"]
    lines = []
    for entry in certificate["events"]:
        priced = account([(event_from_json(entry["event"]), entry["count"])], delta, accountant)
        what = in_words(entry["event"], entry["count"])
        lines.append({"what": what, "epsilon_alone": priced.epsilon})
    return lines


def in_words(event: Mapping[str, Any], count: int) -> str:
    """An event of the ledger as a phrase; the ones we do not know by their names."""
    times, s = (f"{count:,}", "s") if count > 1 else ("One", "")
    kind, inner = event["kind"], event.get("event", {})
    noise = "with noise {:.3g} times what one record may add"
    if kind == "PoissonSampledDpEvent" and inner["kind"] == "GaussianDpEvent":
        share = f"each on a random {event['sampling_probability']:.3g} of the records"
        noise = noise.format(inner["noise_multiplier"])
        return f"{times} training step{s}, {share}, {noise}"
    if kind == "GaussianDpEvent":
        return f"{times} release{s} {noise.format(event['noise_multiplier'])}"
    if kind == "DiscreteLaplaceDpEvent":
        epsilon = event["noise_parameter"] * event["sensitivity"]
        return f"{times} private choice{s} of public data, ε = {epsilon:g}"
    return f"{count:,} × {kind}"


def sampling(certificate: Mapping[str, Any]) -> str:
    """How batches were drawn."""
    events = [entry["event"] for entry in certificate["events"]]
    poisson = [event for event in events if event["kind"] == "PoissonSampledDpEvent"]
    if not poisson:
        return "none was drawn at random" if events else "none was drawn"
    rates = sorted({event["sampling_probability"] for event in poisson})
    shown = " or ".join(f"{rate:.3g}" for rate in rates)
    return f"each record is in a batch with probability {shown}, by a coin of its own (Poisson)"


def delta_in_words(delta: float) -> str:
    """What δ is, for those who have not met it."""
    if delta <= LARGE_DELTA:
        return "a small extra chance beside ε"
    return "the chance that the promise fails, which should be far smaller"


def best_guess(epsilon: float, delta: float) -> float:
    """How often somebody is right at most who guesses, at even odds, whether a record took part.

    (exp ε + δ) / (exp ε + 1): the largest accuracy that (ε, δ) allows any test.
    """
    if not math.isfinite(epsilon):
        return 1.0
    return min(1.0, 1 - (1 - delta) / (math.exp(min(epsilon, 700.0)) + 1))


def detection(epsilon: float, delta: float, false_alarms: float) -> float:
    """The most records that a test finds which accuses so many others wrongly."""
    limit = math.exp(min(epsilon, 700.0)) * false_alarms + delta
    other = 1 - math.exp(-min(epsilon, 700.0)) * (1 - false_alarms - delta)
    return min(1.0, limit, other)
