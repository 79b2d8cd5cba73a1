"""`render`: folders of runs in, one HTML file out."""

from __future__ import annotations

import datetime
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from dpspan.accounting.epsilon import account
from dpspan.accounting.events import event_from_json
from dpspan.accounting.promises import LARGE_DELTA, weaknesses
from dpspan.app.comparison.results import Comparison, verdicts
from dpspan.app.report import figures
from dpspan.app.report.reading import UNPRIVATE, Found, Run, read
from dpspan.support.files import replacing

_METRICS = ("test_accuracy", "test_loss")


def render(folders: Sequence[str | Path], out: str | Path, include_unprivate: bool = False) -> Path:
    """Write the report about every run in the folders and below.

    One file that loads nothing from anywhere. Numbers computed from private records without noise
    (`unprivate_…`) are left out unless asked for; then the page says at its top that it must not be
    published.

    Examples:
        >>> import dpspan
        >>> from dpspan.accounting.certificate import certificate
        >>> from dpspan.app.report import render
        >>> document = certificate(dpspan.Ledger(), delta=1e-5, training={"method": "mine"})
        >>> _ = dpspan.write_certificate("runs/first/certificate.json", document)
        >>> render(["runs/first"], "report.html").name
        'report.html'
    """
    found = read([Path(folder) for folder in folders], include_unprivate=include_unprivate)
    environment = Environment(
        loader=PackageLoader("dpspan.app.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.j2").render(_content(found, include_unprivate))
    path = Path(out)
    with replacing(path, what="the report") as temporary:
        temporary.write_text(page, encoding="utf-8")
    return path


def _content(found: Found, include_unprivate: bool) -> dict[str, Any]:
    runs, groups = found.runs, found.groups
    most = max(runs, key=lambda run: run.epsilon)  # the most expensive one speaks for all
    epsilon, delta = most.epsilon, most.certificate["delta"]
    warnings = {warning for run in runs for warning in run.certificate["warnings"]}
    return {
        **_results(found, include_unprivate),
        "created": datetime.datetime.now(datetime.UTC).strftime("%d %B %Y, %H:%M UTC"),
        "include_unprivate": include_unprivate,
        "not_private": sorted({r for run in runs for r in run.not_private_because}),
        "found": found,
        "certificate": most.certificate,
        "epsilon": epsilon,
        "delta": delta,
        "runs": len(runs),
        "several": len(runs) > 1,
        "delta_in_words": delta_in_words(delta),
        "sampling": sampling(most.certificate),
        "spent": spent_on(most.certificate),
        "records_told": any(r.certificate.get("discloses_number_of_records") for r in runs),
        "nearness": figures.nearness(found.candidates) if found.candidates else None,
        "inner": [p for p in (figures.spectrum(groups), figures.noise_parts(groups)) if p],
        "guess": best_guess(epsilon, delta),
        "detection": detection(epsilon, delta, 0.01),
        "public": _public(runs),
        "warnings": sorted(warnings.union(weaknesses(epsilon, delta))),
        "settings": [(name, group[0].settings) for name, group in groups.items()],
        "unprivate": _unprivate(runs) if include_unprivate else [],
    }


def _results(found: Found, include_unprivate: bool) -> dict[str, Any]:
    """What came out: sentences, a table, pictures."""
    groups = found.groups
    accuracy, loss = (_with(name, include_unprivate, found.runs) for name in _METRICS)
    metric = accuracy or loss
    rows = [_row(name, runs, metric) for name, runs in groups.items()]
    dots = [(row["name"], row["values"]) for row in rows if row["values"]]
    pictures = [
        figures.accuracy_by_epsilon(groups, metric) if metric else None,
        figures.every_run(dots, metric) if metric and dots and len(found.runs) > 1 else None,
        figures.training_curve(groups, loss) if loss else None,
    ]
    percent = ", %" if metric and metric.endswith("accuracy") else ""
    return {
        "metric": figures.label(metric) + percent if metric else None,
        "rows": rows,
        "verdicts": _verdicts(found.comparison),
        "pictures": [picture for picture in pictures if picture is not None],
    }


def _with(name: str, include_unprivate: bool, runs: Sequence[Run]) -> str | None:
    """The name under which the runs hold this metric, if they do and it may be shown."""
    names = (name, UNPRIVATE + name) if include_unprivate else (name,)
    return next((n for n in names if any(run.curve(n) for run in runs)), None)


def _row(name: str, runs: Sequence[Run], metric: str | None) -> dict[str, Any]:
    values = [run.curve(metric)[-1][1] for run in runs if metric and run.curve(metric)]
    percent = metric is not None and metric.endswith("accuracy")
    scale, digits = (100, 1) if percent else (1, 3)
    mean = f"{scale * statistics.mean(values):.{digits}f}" if values else ""
    deviation = f" ± {scale * statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return {
        "name": name,
        "runs": len(runs),
        "values": values,
        "value": f"{mean}{deviation}" if values else "not shown",
        "epsilon": max(run.epsilon for run in runs),
    }


def _verdicts(comparison: dict[str, Any] | None) -> list[str]:
    """What a comparison says, unless its values were left out."""
    rows, metric = (comparison["rows"], comparison["metric"]) if comparison else ([], "")
    known = all(metric in result for row in rows for result in row["results"])
    return verdicts(Comparison.from_dict(comparison)) if comparison and rows and known else []


def _public(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """What was declared public, each dataset once, with all that it was used for."""
    merged: dict[tuple[str, str], dict[str, Any]] = {}
    for run in runs:
        for record in run.certificate["public"]:
            entry = merged.setdefault((record["name"], record["sha256"]), {**record, "uses": []})
            use = re.sub(r", seed \d+$", "", record["detail"])
            if use and use not in entry["uses"]:
                entry["uses"].append(use)
    return list(merged.values())


def _unprivate(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The last value of everything that is not private, and what an audit found."""
    return [
        {"run": run.name, "seed": run.seed, "what": key, "value": value}
        for run in runs
        for key, value in {**(run.metrics[-1] if run.metrics else {}), **run.audit}.items()
        if key.startswith(UNPRIVATE)
    ]


# -- a certificate in plain words -------------------------------------------------------------


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
