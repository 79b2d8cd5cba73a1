"""What the training experiments still lack, and about how long that takes.

    python -m experiments --missing [NAME]

A search that is not over counts with all of its short tries, and with those that are trained in
full. Times are those of stored runs of the same row, by epochs, which may have shared a GPU with
others; a row without any has none.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from experiments.catalogue import load, names
from experiments.runner import Results
from experiments.schema import TrainingExperiment
from experiments.sweep import CellSearch, all_cells, reported


@dataclass(frozen=True)
class Lack:
    """Of one cell: short tries, full runs of its search and its table, minutes of all of them."""

    experiment: str
    row: str
    target: float | None
    tries: int
    finals: int
    runs: int
    minutes: float | None


def lacks(name: str, experiment: TrainingExperiment, results: Results) -> list[Lack]:
    """Of the cells that are not complete."""
    found = []
    for row, target in all_cells(experiment):
        cell = CellSearch.of(name, experiment, row, target, results)
        tries, finals = cell.left if experiment.searched(row)[0] == row else (0, 0)
        runs = reported(name, experiment, row, target, results, experiment.seeds)
        missing = sum(results.of(run) is None for run in runs)
        if not tries + finals + missing:
            continue
        seconds = _seconds(experiment, row, target, results)
        work = tries * cell.search.share + finals + missing
        minutes = None if seconds is None else seconds * work / 60
        found.append(Lack(name, row, target, tries, finals, missing, minutes))
    return found


def _seconds(
    experiment: TrainingExperiment, row: str, target: float | None, results: Results
) -> float | None:
    """Of a full run, by those of the row that are stored, at this target if there are any."""

    def epochs(at: float | None) -> float:
        return (experiment.rows[row].training or experiment.training).epochs_at(at)

    rows = [r for r in results.rows if r.get("row") == row and "seconds" in r]
    near = [r for r in rows if r["target"] == target] or rows
    found = [r["seconds"] / (r.get("share") or 1) / epochs(r["target"]) for r in near]
    return statistics.median(found) * epochs(target) if found else None


def table(folder: Path, only: str | None = None) -> str:
    """A line for each cell that lacks something, and the sum."""
    lines = ["| experiment | row | at | tries | finals | runs | minutes |", "|---" * 7 + "|"]
    total = 0.0
    for name in [only] if only else names():
        experiment = load(name)
        if not isinstance(experiment, TrainingExperiment):
            continue
        for lack in lacks(name, experiment, Results(folder / f"{name}.jsonl")):
            minutes = "?" if lack.minutes is None else f"{lack.minutes:.0f}"
            at = "" if lack.target is None else f"{lack.target:g}"
            counts = f"{lack.tries} | {lack.finals} | {lack.runs}"
            lines.append(f"| {name} | {lack.row} | {at} | {counts} | {minutes} |")
            total += lack.minutes or 0.0
    return "\n".join([*lines, "", f"{total:.0f} minutes in all, one run after another."])
