"""All runs of a training experiment: learning rates first, then the seeds that are reported."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dpspan.app.comparison.search import Search, Try
from experiments.one_run import Run, train
from experiments.runner import Place, Results, execute
from experiments.schema import TrainingExperiment


def sweep(
    name: str,
    experiment: TrainingExperiment,
    results: Results,
    place: Place,
    rows: list[str] | None = None,
    seeds: int | None = None,
    targets: list[float] | None = None,
    searching: bool = True,
) -> None:
    """Make every run that is missing; of some rows and targets or with fewer seeds, if asked.

    Without `searching`, of the learning rates that are the best so far.
    """
    work = partial(train, experiment=experiment, place=place)
    cells = [
        (row, target)
        for row, target in all_cells(experiment)
        if not rows or any(row.startswith(start) for start in rows)
        if not targets or target is None or target in targets
    ]
    searches = [CellSearch.of(name, experiment, *cell, results) for cell in cells]
    while searching and (missing := [run for search in searches for run in search.wanted]):
        execute(missing, results, work, place.jobs, f"{name}: learning rates")
    final = [
        run
        for cell in cells
        for run in reported(name, experiment, *cell, results, seeds or experiment.seeds)
    ]
    # Seed by seed: whatever is cut short has all rows.
    execute(sorted(final, key=lambda r: r.seed), results, work, place.jobs, f"{name}: runs")


def all_cells(experiment: TrainingExperiment) -> list[tuple[str, float | None]]:
    """Every row at every target that it has."""
    return [(name, target) for name in experiment.rows for target in experiment.targets_of(name)]


@dataclass(frozen=True)
class CellSearch:
    """The search that settles the learning rate of a cell; it may be that of another row."""

    search: Search
    rates: tuple[float, ...]  # those it begins with; one where there is nothing to choose
    example: Run  # a run of it, whatever its rate, share and seed
    metric: str
    results: Results

    @classmethod
    def of(
        cls,
        name: str,
        experiment: TrainingExperiment,
        row: str,
        target: float | None,
        results: Results,
    ) -> CellSearch:
        """With what has been tried so far."""
        source, rates = experiment.searched(row)
        example = Run(name, source, target, 0.0, 0, True, experiment.digest(source))
        search = Search(**experiment.search_of(source).model_dump())
        return cls(search, rates, example, experiment.metric, results)

    @property
    def wanted(self) -> list[Run]:
        """What to run next; nothing if the search is over."""
        if len(self.rates) == 1:
            return []
        return [self._run(each) for each in self.search.wanted(self.rates, self._known)]

    @property
    def tried(self) -> list[Run]:
        """Of every rate that was searched its first run, by rate."""
        if len(self.rates) == 1:
            return []
        grid, _ = self.search.plan(self.rates, self._known)
        return [self._run(each) for each in grid if self._known(each) is not None]

    @property
    def left(self) -> tuple[int, int]:
        """How many short tries and full ones it lacks, if its grid grows no further than said."""
        if len(self.rates) == 1:
            return 0, 0
        search = self.search
        grid, finals = self.search.plan(self.rates, self._known)
        made = sum(self._known(each) is not None for each in grid)
        tries = max(search.tries, len(self.rates)) - made
        full = search.finalists * search.seeds if search.finalists > 1 else 0
        return max(0, tries), full - sum(self._known(each) is not None for each in finals)

    @property
    def best(self) -> float:
        """The rate, by what has been tried."""
        if len(self.rates) == 1:
            return self.rates[0]
        return self.search.best(self.rates, self._known)

    def marks(self, row: str, rate: float) -> str:
        """How well the rate of a row was found: at an end of its grid, or not by its own search.

        A search that is not over counts as none.
        """
        tried = self.tried
        end = tried and rate in (tried[0].rate, tried[-1].rate)
        own = tried and self.example.row == row and not self.wanted
        return ("\\*" if end else "") + ("" if own else "‡")

    def _run(self, each: Try) -> Run:
        share = None if each.share == 1 else each.share
        return replace(self.example, rate=each.rate, seed=each.seed, share=share)

    def _known(self, each: Try) -> float | None:
        found = self.results.of(self._run(each))
        if found is None:
            return None
        return math.nan if found.get("diverged") else float(found[self.metric])


def reported(
    name: str,
    experiment: TrainingExperiment,
    row: str,
    target: float | None,
    results: Results,
    seeds: int,
) -> list[Run]:
    """The runs of a cell at the learning rate that was found."""
    rate = CellSearch.of(name, experiment, row, target, results).best
    digest = experiment.digest(row)
    return [Run(name, row, target, rate, seed, False, digest) for seed in range(seeds)]


def cell_runs(
    name: str, experiment: TrainingExperiment, row: str, target: float | None, results: Results
) -> list[dict[str, Any]]:
    """The stored runs of one cell."""
    private = experiment.rows[row].private
    runs = reported(name, experiment, row, target if private else None, results, 100)
    return [found for run in runs if (found := results.of(run)) is not None]
