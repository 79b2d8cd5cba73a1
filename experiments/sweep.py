"""All runs of a training experiment: learning rates first, then the seeds that are reported."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from experiments.one_run import Run, train
from experiments.runner import Place, Results, best_of, execute
from experiments.schema import TrainingExperiment

TUNING_SEED = 1000


def sweep(
    name: str,
    experiment: TrainingExperiment,
    results: Results,
    place: Place,
    rows: list[str] | None = None,
    seeds: int | None = None,
    targets: list[float] | None = None,
) -> None:
    """Make every run that is missing; of some rows and targets or with fewer seeds, if asked."""
    work = partial(train, experiment=experiment, place=place)
    cells = [
        (row, target)
        for row, target in all_cells(experiment)
        if not rows or any(row.startswith(start) for start in rows)
        if not targets or target is None or target in targets
    ]
    search = [run for cell in cells for run in searched(name, experiment, *cell, results)]
    while search:
        execute(search, results, work, place.jobs, f"{name}: learning rates")
        tried = [searched(name, experiment, *cell, results) for cell in cells]
        further = (beyond(runs, results, experiment) for runs in tried)
        # Several rows may take the rate of one search.
        search = list(dict.fromkeys(run for run in further if run is not None))
    best = [run for cell in cells for run in finalists(name, experiment, *cell, results)]
    execute(best, results, work, place.jobs, f"{name}: the best learning rates")
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


def searched(
    name: str,
    experiment: TrainingExperiment,
    row: str,
    target: float | None,
    results: Results,
) -> list[Run]:
    """The runs that settle a learning rate, by rate; none where there is nothing to choose.

    Those of the file, and those beyond it that have been made.
    """
    source, rates = experiment.searched(row)
    if len(rates) == 1:
        return []
    digest, share = experiment.digest(source), experiment.search_of(source).share
    first = Run(name, source, target, 0.0, TUNING_SEED, True, digest, None if share == 1 else share)
    runs = [replace(first, rate=rate) for rate in sorted(rates)]
    while (further := beyond(runs, results, experiment)) and results.of(further):
        runs = sorted([*runs, further], key=lambda run: run.rate)
    return runs


def beyond(runs: list[Run], results: Results, experiment: TrainingExperiment) -> Run | None:
    """The next run of a search whose best rate is at an end of the grid: the optimum is outside."""
    done = runs and all(results.of(run) for run in runs)
    if not done or len(runs) >= experiment.search_of(runs[0].row).tries:
        return None
    rates, best = [run.rate for run in runs], best_of(runs, results, experiment.metric)
    if best not in (rates[0], rates[-1]):
        return None
    neighbour = rates[1] if best == rates[0] else rates[-2]
    return replace(runs[0], rate=float(f"{best * best / neighbour:.3g}"))


def finalists(
    name: str,
    experiment: TrainingExperiment,
    row: str,
    target: float | None,
    results: Results,
) -> list[Run]:
    """The runs, in full and with several seeds, that decide between the best of a search."""
    search, settings = searched(name, experiment, row, target, results), experiment.search_of(row)
    if settings.finalists == 1 or not all(results.of(run) for run in search):
        return []

    def reached(run: Run) -> float:
        return (results.of(run) or {}).get(experiment.metric, 0.0)

    best = sorted(search, key=reached, reverse=True)[: settings.finalists]
    seeds = range(TUNING_SEED, TUNING_SEED + settings.seeds)
    return [replace(run, share=None, seed=seed) for run in best for seed in seeds]


def reported(
    name: str,
    experiment: TrainingExperiment,
    row: str,
    target: float | None,
    results: Results,
    seeds: int,
) -> list[Run]:
    """The runs of a cell at the learning rate that was found."""
    search = finalists(name, experiment, row, target, results)
    search = search or searched(name, experiment, row, target, results)
    _, rates = experiment.searched(row)
    rate = best_of(search, results, experiment.metric) if search else rates[0]
    digest = experiment.digest(row)
    return [Run(name, row, target, rate, seed, False, digest) for seed in range(seeds)]
