"""The table of what reproduces: each claim of a paper beside what the stored results say of it."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from scipy import stats

from dpspan.app.comparison.results import LEVEL, chance
from experiments import dimension, spectra, tables
from experiments.catalogue import load
from experiments.distances import ChoosingExperiment
from experiments.runner import Results, spread
from experiments.schema import TrainingExperiment
from experiments.sweep import CellSearch, cell_runs

REPRODUCED, NOT, NO_GAIN = "reproduced", "not reproduced", "no gain here"
SMALLER, UNSURE = "the same sign, but smaller", "the seeds cannot tell"
SHORTER, NOT_RUN = "not run yet at the paper's length", "not run yet"
CLOSE = 1.0  # points below the paper's figure that count as reproduced
FLAT = 1.5  # largest by smallest, over a factor of 1,000 in the dimension
HEAD = f"""## What reproduces, what does not

One line for each claim of the five papers, the paper's figure beside ours, in % unless a line says
otherwise; where the paper has a plot only, it has no figure here. Verdicts follow from the figures:

- *{REPRODUCED}*: no more than {CLOSE:g} point below the paper's figure. Of "A ahead of B" the
  difference is that near to the paper's, and more than seeds make up (Welch's test, p < {LEVEL:g});
  an order is one that chance gives that well in fewer than 5 of 100 cases, or the paper's order of
  means; what is flat grows by less than a factor of {FLAT:g} while the dimension grows by 1,000.
- *{SMALLER}*: certain, and less than that. *{UNSURE}*: not certain.
- *{SHORTER}*: not reproduced after fewer epochs than the paper's.

Reasons are given only where an experiment tested them. Settings that differ from the paper's stand
in the line, the rest in the table that it comes from. † fewer than three seeds; \\* the best
learning rate is at an end of its grid, ‡ it is another row's or the only one tried, or its search
is not over: a verdict that
rests on these may change with another rate.
"""


class Stored:
    """The experiments and their stored results."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, tuple[Any, Results]] = {}

    def of(self, name: str) -> tuple[Any, Results]:
        """An experiment and its results."""
        if name not in self._read:
            self._read[name] = load(name), Results(self._folder / f"{name}.jsonl")
        return self._read[name]

    def runs(self, cell: Cell) -> tuple[str, list[dict[str, Any]]]:
        """Those of the first of the cell's rows that has any, and that row."""
        experiment, results = self.of(cell.experiment)
        for row in cell.rows:
            found = cell_runs(cell.experiment, experiment, row, cell.target, results)
            if found:
                return row, found
        return cell.rows[-1], []

    def shares(self, cell: Cell) -> list[float]:
        """What those runs have reached."""
        experiment, _ = self.of(cell.experiment)
        _, runs = self.runs(cell)
        if cell.metric == "attack":
            return [run["unprivate_membership"]["success_rate"] for run in runs]
        return [run[cell.metric or experiment.metric] for run in runs]

    def both(self, cell: Cell, other: Cell) -> tuple[Cell, Cell]:
        """The first of their rows, in pairs, of which both have runs: a comparison of equals."""
        pairs = [
            (replace(cell, rows=(one,)), replace(other, rows=(two,)))
            for one, two in zip(cell.rows, other.rows, strict=True)
        ]
        return next((p for p in pairs if all(self.runs(each)[1] for each in p)), pairs[-1])

    def epochs(self, cell: Cell) -> int:
        """How long they took."""
        experiment, _ = self.of(cell.experiment)
        assert isinstance(experiment, TrainingExperiment)
        row, _ = self.runs(cell)
        section = experiment.rows[row]
        target = cell.target if section.private else None
        return (section.training or experiment.training).epochs_at(target)

    def shown(self, cell: Cell) -> str:
        """Mean and deviation, with what there is to be said of seeds and learning rate."""
        experiment, results = self.of(cell.experiment)
        (row, runs), shares = self.runs(cell), self.shares(cell)
        if not runs:
            return "—"
        target = cell.target if experiment.rows[row].private else None
        search = CellSearch.of(cell.experiment, experiment, row, target, results)
        few = "" if len(shares) > 2 else " †"
        return spread(shares) + few + search.marks(row, runs[0]["rate"])


@dataclass(frozen=True)
class Cell:
    """One cell of a table; `rows` are alternatives, the best first."""

    experiment: str
    rows: tuple[str, ...]
    target: float
    metric: str | None = None  # the experiment's; "attack" is the success of membership inference


@dataclass(frozen=True)
class Measured:
    """A part of a line: one setting."""

    label: str
    paper: str
    here: str
    difference: str
    verdict: str


class Evidence(Protocol):
    """What can be looked up."""

    def measured(self, stored: Stored) -> Measured:
        """What is stored, beside the paper's."""
        ...


@dataclass(frozen=True)
class Reaches:
    """A figure of the paper's."""

    cell: Cell
    figure: float
    epochs: int | None = None  # the paper's, if ours may be fewer

    def measured(self, stored: Stored) -> Measured:
        label, shares = _label(stored, self.cell), stored.shares(self.cell)
        if not shares:
            return Measured(label, f"{self.figure:g}", "—", "—", NOT_RUN)
        apart = 100 * statistics.mean(shares) - self.figure
        short = self.epochs is not None and stored.epochs(self.cell) < self.epochs
        verdict = REPRODUCED if apart >= -CLOSE else SHORTER if short else NOT
        return Measured(
            label, f"{self.figure:g}", stored.shown(self.cell), f"{apart:+.1f}", verdict
        )


@dataclass(frozen=True)
class Beats:
    """One row ahead of another; by so much, where the paper has figures."""

    cell: Cell
    other: Cell
    gain: float | None = None
    epochs: int | None = None
    label: str | None = None

    def measured(self, stored: Stored) -> Measured:
        label = self.label or _label(stored, self.cell)
        paper = "ahead" if self.gain is None else f"{self.gain:+.1f}"
        cell, other = stored.both(self.cell, self.other)
        first, second = stored.shares(cell), stored.shares(other)
        if not first or not second:
            return Measured(label, paper, "—", "—", NOT_RUN)
        here = 100 * (statistics.mean(first) - statistics.mean(second))
        short = self.epochs is not None and stored.epochs(cell) < self.epochs
        apart = "" if self.gain is None else f"{here - self.gain:+.1f}"
        said = f"{here:+.1f} ({stored.shown(cell)} against {stored.shown(other)})"
        if here <= 0:
            return Measured(label, paper, said, apart, SHORTER if short else NOT)
        if chance(stats.ttest_ind, first, second, equal_var=False) >= LEVEL:
            verdict = UNSURE
        else:
            verdict = REPRODUCED if here >= (self.gain or 0) - CLOSE else SMALLER
        if short and verdict != REPRODUCED:
            verdict += f"; {SHORTER}"
        return Measured(label, paper, said, apart, verdict)


@dataclass(frozen=True)
class Costs:
    """How far a row is below another, which is not to be more than the paper says."""

    cell: Cell
    below: Cell
    points: float
    epochs: int

    def measured(self, stored: Stored) -> Measured:
        label, paper = _label(stored, self.cell), f"{self.points:g}"
        first, second = stored.shares(self.cell), stored.shares(self.below)
        if not first or not second:
            return Measured(label, paper, "—", "—", NOT_RUN)
        here = 100 * (statistics.mean(second) - statistics.mean(first))
        short = stored.epochs(self.cell) < self.epochs
        close = here <= self.points + CLOSE
        said = f"{here:.1f} ({stored.shown(self.cell)} below {stored.shown(self.below)})"
        verdict = REPRODUCED if close else SHORTER if short else NOT
        return Measured(label, paper, said, f"{here - self.points:+.1f}", verdict)


@dataclass(frozen=True)
class Rises:
    """Cells in an order of which the paper says that each is better than the one before."""

    cells: tuple[tuple[str, Cell], ...]

    def measured(self, stored: Stored) -> Measured:
        found = {name: stored.shares(cell) for name, cell in self.cells}
        if not all(found.values()):
            return Measured("", "rising", "—", "—", NOT_RUN)
        means = [statistics.mean(shares) for shares in found.values()]
        verdict = REPRODUCED if means == sorted(means) else NOT
        said = ", ".join(f"{name}: {stored.shown(cell)}" for name, cell in self.cells)
        return Measured("", "rising", said, "", verdict)


@dataclass(frozen=True)
class Flat:
    """Excess risk that does not grow with the number of features."""

    method: str
    against: str  # one of which the paper says that it does grow

    def measured(self, stored: Stored) -> Measured:
        experiment, results = stored.of("dimension")
        if not results.rows:
            return Measured("", "flat", "—", "—", NOT_RUN)
        rows = [row for run in dimension.reported(experiment, results) if (row := results.of(run))]
        risks = dimension.summary(rows, "excess_risk")
        first, second = (
            max(m for m, _ in risks[method].values()) / min(m for m, _ in risks[method].values())
            for method in (self.method, self.against)
        )
        said = f"× {first:.3g} from p = 100 to 100,000 ({self.against}: × {second:.3g})"
        return Measured("", "flat", said, "", REPRODUCED if first < FLAT < second else NOT)


@dataclass(frozen=True)
class FewerSteps:
    """The least risk after fewer steps than another's, where the gradients of all records fall."""

    method: str
    against: str

    def measured(self, stored: Stored) -> Measured:
        experiment, results = stored.of("noisy-adagrad")
        if not results.rows:
            return Measured("", "fewer", "—", "—", NOT_RUN)
        best = {
            method: min(
                (statistics.mean(risks), setting.steps)
                for _, setting in spectra.sweeps(experiment)["steps, separable"]
                if (risks := spectra.risks(experiment, setting, method, results))
            )
            for method in (self.method, self.against)
        }
        (risk, steps), (other, more) = best[self.method], best[self.against]
        said = f"{steps} steps, excess risk {risk:.3f} ({self.against}: {more} steps, {other:.3f})"
        return Measured(
            "", "fewer", said, "", REPRODUCED if steps < more and risk <= other else NOT
        )


@dataclass(frozen=True)
class Orders:
    """A measure of distance whose order is that of the accuracies, better than another's."""

    experiment: str
    model: str
    measure: str = "gsd"
    than: str | None = None

    def measured(self, stored: Stored) -> Measured:
        experiment, results = stored.of(self.experiment)
        label = experiment.title.removeprefix("Which public data, private ")
        paper = "ρ = −1" if self.than is None else "ahead"
        if not all(self._reached(stored, experiment).values()):
            return Measured(label, paper, "—", "—", NOT_RUN)
        one = self._correlation(stored, experiment, results, self.measure)
        if self.than is None:
            seeds = self._by_seed(stored, experiment, results)
            said = f"ρ = {one[0]:+.2f} of means, {max(seeds):+.2f} to {min(seeds):+.2f} by seed"
            verdict = REPRODUCED if one[1] < LEVEL else NOT
            return Measured(label, paper, said, "", verdict)
        two = self._correlation(stored, experiment, results, self.than)
        said = f"ρ = {one[0]:+.2f} against {two[0]:+.2f}"
        return Measured(label, paper, said, "", REPRODUCED if abs(one[0]) > abs(two[0]) else NOT)

    def _distances(
        self, experiment: ChoosingExperiment, results: Results, measure: str
    ) -> dict[str, float]:
        found: dict[str, list[float]] = {}
        for row in results.rows:
            if row.get("settings") == experiment.distance_digest() and row["model"] == self.model:
                for each in row["unprivate_ranking"]["rows"]:
                    found.setdefault(each["name"], []).append(each[f"unprivate_{measure}"])
        return {name: statistics.mean(values) for name, values in found.items()}

    def _reached(
        self, stored: Stored, experiment: ChoosingExperiment
    ) -> dict[str, list[dict[str, Any]]]:
        """The runs by the public data that they used."""
        target = experiment.targets.values[0]
        return {
            public: stored.runs(Cell(self.experiment, (row,), target))[1]
            for row, section in experiment.rows.items()
            for public in section.public
        }

    def _correlation(
        self, stored: Stored, experiment: ChoosingExperiment, results: Results, measure: str
    ) -> tuple[float, float]:
        """Spearman's ρ with the mean accuracies, and the chance of one as low."""
        distances, reached = self._distances(experiment, results, measure), {}
        for name, runs in self._reached(stored, experiment).items():
            reached[name] = statistics.mean(run[experiment.metric] for run in runs)
        return _spearman([distances[n] for n in reached], list(reached.values()))

    def _by_seed(
        self, stored: Stored, experiment: ChoosingExperiment, results: Results
    ) -> list[float]:
        distances = self._distances(experiment, results, self.measure)
        reached = self._reached(stored, experiment)
        seeds = {run["seed"] for runs in reached.values() for run in runs}
        return [
            _spearman(
                [distances[n] for n in reached],
                [
                    run[experiment.metric]
                    for rs in reached.values()
                    for run in rs
                    if run["seed"] == s
                ],
            )[0]
            for s in sorted(seeds)
        ]


@dataclass(frozen=True)
class TablesAhead:
    """A method of the tables ahead of another, in mean AUC at an ε."""

    method: str
    other: str
    epsilon: float

    def measured(self, stored: Stored) -> Measured:
        experiment, results = stored.of("tables")
        label = f"ε = {self.epsilon:g}"
        if not results.rows:
            return Measured(label, "not compared", "—", "—", NOT_RUN)
        methods = tables.methods_of(experiment, results)
        areas: dict[str, list[float]] = {}
        for run in tables.reported(experiment, results, methods):
            row = results.of(run)
            if row is not None and run.epsilon == self.epsilon:
                areas.setdefault(run.method, []).append(row["auc"])
        first, second = areas[self.method], areas[self.other]  # in the same order
        here = 100 * (statistics.mean(first) - statistics.mean(second))
        ahead = here > 0 and chance(stats.ttest_rel, first, second) < LEVEL
        means = " against ".join(f"{100 * statistics.mean(each):.1f}" for each in (first, second))
        said = f"{here:+.1f} (AUC {means})"
        return Measured(label, "not compared", said, "", "a gain here" if ahead else NO_GAIN)


@dataclass(frozen=True)
class Said:
    """What no stored result of an experiment can be put beside."""

    label: str
    paper: str
    here: str = "—"
    verdict: str = NOT_RUN

    def measured(self, stored: Stored) -> Measured:
        return Measured(self.label, self.paper, self.here, "", self.verdict)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A line of the table."""

    paper: str
    says: str
    where: str
    evidence: tuple[Evidence, ...]
    setting: str = ""  # of ours, where it is another
    reason: Callable[[Stored], str] | None = None  # that an experiment tested

    def line(self, stored: Stored) -> str:
        parts = [each.measured(stored) for each in self.evidence]
        told = [part.paper for part in parts]
        paper = told[0] if len(set(told)) == 1 else " / ".join(told)
        here = " / ".join(part.here for part in parts)
        apart = " / ".join(part.difference for part in parts if part.difference)
        labels = ", ".join(dict.fromkeys(part.label for part in parts if part.label))
        says = f"{self.says} ({labels})" if labels else self.says
        here += f"; {self.setting}" if self.setting else ""
        asked = {part.verdict for part in parts} - {REPRODUCED, NOT_RUN}
        reason = self.reason(stored) if self.reason is not None and asked else ""
        cells = (self.paper, says, self.where, paper, here, apart, _verdict(parts), reason)
        return "| " + " | ".join(cells) + " |"


def table(claims: Sequence[Claim], folder: Path) -> str:
    """The section of the page."""
    stored = Stored(folder)
    heads = ("", "claim", "where", "the paper", "here", "difference", "verdict", "reason, tested")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    return "\n".join([HEAD, *lines, *(claim.line(stored) for claim in claims), ""])


def _verdict(parts: Sequence[Measured]) -> str:
    if len({part.verdict for part in parts}) == 1:
        return f"**{parts[0].verdict}**"
    grouped: dict[str, list[str]] = {}
    for part in parts:
        grouped.setdefault(part.verdict, []).append(part.label)
    return "; ".join(f"**{said}** ({', '.join(labels)})" for said, labels in grouped.items())


def _label(stored: Stored, cell: Cell) -> str:
    experiment, _ = stored.of(cell.experiment)
    return f"{experiment.targets.symbol} = {cell.target:g}"


def _spearman(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """ρ, and how often one as low comes by chance: all orders are tried, as there are few."""
    one, other = np.argsort(np.argsort(first)), np.argsort(np.argsort(second))
    scale = 6 / (len(one) * (len(one) ** 2 - 1))
    found = 1 - scale * float(((one - other) ** 2).sum())
    orders = np.array(list(itertools.permutations(range(len(one)))))
    drawn = 1 - scale * ((one - orders) ** 2).sum(1)
    return found, float((drawn <= found + math.ulp(1.0)).mean())
