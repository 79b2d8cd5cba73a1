"""docs/results.md: every experiment's table, from the stored results alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import page as speed
from scipy.stats import spearmanr

from experiments import (
    anchors,
    dimension,
    image_regimes,
    pate_table,
    plots,
    regimes,
    reproduction,
    spectra,
    tables,
)
from experiments.catalogue import Experiment, load, names
from experiments.claims import CLAIMS
from experiments.distances import MEASURES, MODELS, ChoosingExperiment
from experiments.runner import Results, spread
from experiments.schema import PUBLIC_ONLY, TrainingExperiment
from experiments.sweep import CellSearch, cell_runs

ENOUGH_SEEDS = 3
HEAD = """# Results

Made by `make results` from the files in `experiments/results/`; not written by hand.
`make experiment NAME=… DATA=FOLDER` runs one again, from `experiments/NAME.yaml`. Every private run
has its ε in its line of the results file (PLD; Poisson sampling, or every record at every step in
the convex methods; add or remove one record). Runs made since that file has this form have
hardware, versions, commit and certificate there too; searches have no certificate.

Test accuracy in %, mean ± standard deviation over seeds: other weights and noise, and other private
and public samples where only a part of a file is used. The paper's number stands in brackets behind
ours. Learning rates were searched with another seed, on training samples that were held out; the
search is not paid for in ε. \\* the best rate is at an end of its grid; ‡ the rate was not searched
for this row: it is another row's, or the only one tried, or the search is not over; † fewer than
three seeds.
"""


def render(folder: Path, docs: Path) -> Path:
    """Write docs/results.md and its plots; the path of the page."""
    parts = [HEAD, reproduction.table(CLAIMS, folder)]
    for name in names():
        experiment = load(name)
        results = Results(folder / f"{name}.jsonl")
        if all(row.get("tuning") for row in results.rows):
            continue  # nothing, or no more than a search
        parts.append(f"## {experiment.title}\n\n*{experiment.paper}.* {experiment.about}\n")
        parts.append(_page(name, experiment, results, docs))
        others = getattr(experiment, "others", ())
        parts += [anchors.table(others)] if others else []
        parts += [f"- {note}" for note in experiment.notes]
        parts.append(f"\n{_made(results)}\n")
    parts.append(speed.page(docs))
    page = docs / "results.md"
    page.write_text("\n".join(parts), encoding="utf-8")
    return page


def _page(name: str, experiment: Experiment, results: Results, docs: Path) -> str:
    if isinstance(experiment, tables.TablesExperiment):
        return tables.page(experiment, results, docs)
    if isinstance(experiment, dimension.DimensionExperiment):
        return dimension.page(experiment, results, docs)
    if isinstance(experiment, spectra.SpectraExperiment):
        return spectra.page(experiment, results, docs)
    if isinstance(experiment, regimes.RegimesExperiment):
        return regimes.page(experiment, results, docs)
    if isinstance(experiment, pate_table.PateExperiment):
        return pate_table.page(experiment, results)
    if isinstance(experiment, image_regimes.ImageRegimesExperiment):
        return image_regimes.page(name, experiment, results, docs)
    text = training_table(name, experiment, results)
    if len(experiment.targets.values) > 1:
        rows = experiment.plotted or tuple(experiment.rows)
        curves = {row: _curve(name, experiment, row, results) for row in rows}
        plots.against_epsilon(curves, docs / f"{name}.png", experiment.title)
        text += f"\n![accuracy against ε]({name}.png)\n"
    if isinstance(experiment, ChoosingExperiment):
        text += "\n" + distance_table(name, experiment, results)
    return text


def training_table(name: str, experiment: TrainingExperiment, results: Results) -> str:
    """Rows by targets; a target that no private row has been run at is left out."""
    targets, rows = experiment.targets, experiment.rows
    cells = {
        (row, value): cell_runs(name, experiment, row, value, results)
        for row in rows
        for value in targets.values
    }
    shown = [v for v in targets.values if any(cells[r, v] for r in rows if rows[r].private)]
    heads = ["", "public data", *(f"{targets.symbol} = {value:g}" for value in shown)]
    with_area = experiment.metric == "balanced_accuracy"  # which depends on a threshold
    heads += ["AUC"] if with_area else []
    heads += ["attack"] if experiment.attack else []
    lines = [_line(heads), _line(["---"] * len(heads))]
    for row in rows:
        found = [cells[row, value] for value in shown]
        if any(found):
            texts = [
                _cell(name, experiment, row, value, runs, results)
                for value, runs in zip(shown, found, strict=True)
            ]
            area = [spread(run["auc"] for run in found[-1])] if with_area else []
            attack = [_attack(found[-1])] if experiment.attack else []
            lines.append(_line([row, _public(experiment, row), *texts, *area, *attack]))
    text = "\n".join(lines) + "\n"
    if targets.noise_multiplier:
        runs = [run for found in cells.values() for run in found if run["target"] is not None]
        spent = {f"{run['target']:g}": f"{run['epsilon']:.3f}" for run in runs}
        text += "\n" + ", ".join(f"σ = {s}: ε = {e}" for s, e in spent.items()) + ".\n"
    if with_area:
        text += f"\nAUC: area under the ROC curve, in %, at {targets.symbol} = {shown[-1]:g}.\n"
    if experiment.attack:
        text += "\nAttack: success rate of membership inference by the loss, 50 is guessing.\n"
    return text


def _public(experiment: TrainingExperiment, row: str) -> str:
    """A row's public data, and whether they have labels."""
    section = experiment.rows[row]
    words = [
        f"{name} (labelled)" if experiment.data.public[name].labelled else name
        for name in sorted(section.public)
    ]
    if section.pretraining is not None:
        words.append(f"{section.pretraining.name} (labelled)")
    return ", ".join(words)


def _attack(runs: Sequence[dict[str, Any]]) -> str:
    attacked = [
        run["unprivate_membership"]["success_rate"] for run in runs if "unprivate_membership" in run
    ]
    return f"{100 * statistics.mean(attacked):.1f}" if attacked else ""


def _cell(
    name: str,
    experiment: TrainingExperiment,
    row: str,
    target: float,
    runs: Sequence[dict[str, Any]],
    results: Results,
) -> str:
    section = experiment.rows[row]
    if section.private and target not in experiment.targets_of(row):
        return ""
    text = spread([run[experiment.metric] for run in runs])
    if runs and len(runs) < ENOUGH_SEEDS:
        text += " †"
    if runs and section.method != PUBLIC_ONLY:
        of_row = target if section.private else None
        search = CellSearch.of(name, experiment, row, of_row, results)
        text += search.marks(row, runs[0]["rate"])
    return f"{text} ({section.paper[target]:g})" if target in section.paper else text


def _curve(
    name: str, experiment: TrainingExperiment, row: str, results: Results
) -> dict[float, list[float]]:
    """ε → what the runs reached."""
    curve: dict[float, list[float]] = {}
    for value in experiment.targets.values:
        for run in cell_runs(name, experiment, row, value, results):
            curve.setdefault(round(run["epsilon"] or 0.0, 2), []).append(run[experiment.metric])
    return curve


def distance_table(name: str, experiment: ChoosingExperiment, results: Results) -> str:
    """Each candidate's distances, and how well each measure orders the accuracies."""
    settings = experiment.distance_digest()
    comparisons = [
        row for row in results.rows if "unprivate_ranking" in row and row["settings"] == settings
    ]
    if not comparisons:
        return ""
    candidates = list(experiment.data.public)
    target = experiment.targets.values[0]
    reached = {}
    for row, section in experiment.rows.items():
        for public in section.public:
            runs = cell_runs(name, experiment, row, target, results)
            if runs:
                reached[public] = statistics.mean(run[experiment.metric] for run in runs)
    columns = {
        f"{label}, {model}": values
        for key, label in MEASURES.items()
        for model in MODELS
        if (values := _means(comparisons, model, key, candidates))
    }
    lines = [_line(["public data", *columns]), _line(["---"] * (len(columns) + 1))]
    for each in sorted(candidates, key=lambda c: -reached.get(c, 0.0)):
        cells = (f"{values[each]:.3g}" if each in values else "" for values in columns.values())
        lines.append(_line([each, *cells]))
    correlations = [
        f"{spearmanr([v[c] for c in reached], list(reached.values()))[0]:+.2f}"
        if len(reached) > 2 and set(reached) <= set(v)
        else "—"
        for v in columns.values()
    ]
    lines.append(_line(["**Spearman's ρ with accuracy**", *correlations]))
    picked = ", ".join(
        f"{model}: " + ", ".join(str(row["choice"]) for row in comparisons if row["model"] == model)
        for model in MODELS
    )
    distances = experiment.distances
    return (
        "\n".join(lines)
        + "\n\nA useful distance (GSD, Task2Vec, OT) has ρ near −1, captured energy near +1. "
        f"`choose_public` at ε = {distances.choice_epsilon:g}, on a Poisson sample of about "
        f"{2 * distances.samples:,} records, by seed: {picked}.\n"
    )


def _means(
    comparisons: Sequence[dict[str, Any]], model: str, key: str, candidates: Sequence[str]
) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for comparison in comparisons:
        for row in comparison["unprivate_ranking"]["rows"]:
            value = row.get(f"unprivate_{key}")
            if comparison["model"] == model and row["name"] in candidates and value is not None:
                found.setdefault(row["name"], []).append(value)
    return {name: statistics.mean(values) for name, values in found.items()}


def _made(results: Results) -> str:
    """What the results were made with, in a sentence."""
    made = [row["made"] for row in results.rows if "made" in row]
    if not made:
        return ""

    def several(key: str) -> str:
        return ", ".join(dict.fromkeys(m[key] for m in made))

    torches = ", ".join(dict.fromkeys(m["versions"]["torch"] for m in made))
    dates = sorted({m["date"][:10] for m in made})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    converted = sum("converted" in m for m in made)
    inferred = (
        f" {converted:,} of them were converted from an earlier form of the file: their hardware "
        "and versions are partly inferred, and they have no commit."
    )
    tf32 = ", TF32" if any(m["tf32"] for m in made) else ""
    tf32 += ", bfloat16" if any(m.get("bf16") for m in made) else ""
    return (
        f"{len(results.rows):,} runs in all, {when}; "
        f"{several('hardware')}{tf32}; torch {torches}.{inferred if converted else ''}"
    )


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
