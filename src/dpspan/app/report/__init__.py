"""The report: one HTML file about one or several runs, to be read by people."""

import datetime
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from dpspan.accounting.epsilon import account
from dpspan.accounting.promises import LARGE_DELTA, weaknesses
from dpspan.accounting.releases import releases_from_json
from dpspan.app.comparison.results import ended_early, label
from dpspan.app.report import figures
from dpspan.app.report.reading import UNPRIVATE, Found, Run, read
from dpspan.app.run.evaluation import SHOWN
from dpspan.support.files import replacing

_METRICS = ("test_accuracy", "test_loss")


def render(folders: Sequence[str | Path], out: str | Path, include_unprivate: bool = False) -> Path:
    """Write the report about every run in the folders and below.

    One file that loads nothing from anywhere. Numbers computed from private records without noise
    (`unprivate_…`) are left out unless asked for; then the page says at its top that it must not be
    published.
    """
    found = read([Path(folder) for folder in folders], include_unprivate=include_unprivate)
    environment = Environment(
        loader=PackageLoader("dpspan.app.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"short": "{:.3g}".format, "words": label}
    page = environment.get_template("report.html.j2").render(_content(found, include_unprivate))
    path = Path(out)
    with replacing(path, what="the report") as temporary:
        temporary.write_text(page, encoding="utf-8")
    return path


def _content(found: Found, include_unprivate: bool) -> dict[str, Any]:
    runs = found.runs
    most = max(runs, key=lambda run: run.epsilon)  # the most expensive one speaks for all
    epsilon, delta = most.epsilon, most.certificate["delta"]
    certificates = [run.certificate for run in runs]
    warnings = {warning for each in certificates for warning in each["warnings"]}
    broken = [each["not_private_because"] for each in certificates if not each["private"]]
    said = found.comparison or {}
    unit = "unit" if "unit" in most.certificate["adjacency"] else "record"
    accuracy, loss = (_with(name, runs) for name in _METRICS)
    metric = accuracy or loss
    rows = [_row(name, group, metric) for name, group in found.groups.items()]
    values = {row["name"]: row["values"] for row in rows}
    return {
        "created": datetime.datetime.now(datetime.UTC).strftime("%d %B %Y, %H:%M UTC"),
        "include_unprivate": include_unprivate,
        "not_private": sorted(set().union(*broken)),
        "found": found,
        "about": {"title": "Privacy report", **(found.about or {})},
        "certificate": most.certificate,
        "epsilon": epsilon,
        "delta": delta,
        "delta_is_large": delta > LARGE_DELTA,
        "metric": metric,
        "loss": loss,
        "rows": rows,
        "shown": [n for n in SHOWN if any(n in g for r in runs for g in r.results.values())],
        "verdicts": [*said.get("verdicts", ()), *said.get("unprivate_verdicts", ())],
        "pictures": figures.pictures(found, metric, loss, values),
        "spent": _alone(most.certificate),
        "unit": unit,
        "audited": [run for run in runs if run.audit_bound is not None],
        "unaudited": sum(run.private_steps and run.audit_bound is None for run in runs),
        "records_told": any(each.get("discloses_number_of_records") for each in certificates),
        "guess": best_guess(epsilon, delta),
        "detection": detection(epsilon, delta, 0.01),
        "public": _public(runs),
        "warnings": sorted(warnings.union(weaknesses(epsilon, delta, unit=unit))),
    }


def _with(name: str, runs: Sequence[Run]) -> str | None:
    """The name under which the runs hold this metric, if they do and it may be shown."""
    return next((n for n in (name, UNPRIVATE + name) if any(run.curve(n) for run in runs)), None)


def _row(name: str, runs: Sequence[Run], metric: str | None) -> dict[str, Any]:
    values = [run.curve(metric)[-1][1] for run in runs if metric and run.curve(metric)]
    scale, digits = (100, 1) if metric and metric.endswith("accuracy") else (1, 3)
    mean = f"{scale * statistics.mean(values):.{digits}f}" if values else ""
    deviation = f" ± {scale * statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return {
        "name": name,
        "early": ended_early(run.status for run in runs),
        "runs": len(runs),
        "values": values,
        "mean": statistics.mean(values) if values else None,
        "value": f"{mean}{deviation}" if values else "not shown",
        "epsilon": max(run.epsilon for run in runs),
    }


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


def _alone(certificate: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every kind of release with what it would cost alone; together they cost less than the sum."""
    delta, accountant = certificate["delta"], certificate["accountant"]["used"]
    return [
        {**entry, "epsilon": account(releases_from_json([entry]), delta, accountant).epsilon}
        for entry in certificate["events"]
    ]


def best_guess(epsilon: float, delta: float) -> float:
    """How often somebody is right at most who guesses, at even odds, whether a record took part.

    (exp ε + δ) / (exp ε + 1): the largest accuracy that (ε, δ) allows any test.
    """
    return min(1.0, 1 - (1 - delta) / (math.exp(min(epsilon, 700.0)) + 1))


def detection(epsilon: float, delta: float, false_alarms: float) -> float:
    """The most records that a test finds which accuses so many others wrongly."""
    limit = math.exp(min(epsilon, 700.0)) * false_alarms + delta
    other = 1 - math.exp(-min(epsilon, 700.0)) * (1 - false_alarms - delta)
    return min(1.0, limit, other)
