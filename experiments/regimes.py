"""Maps of regimes: which method wins with how many records, at which ε.

    python -m experiments regimes-tables --data FOLDER --jobs 2
    python -m experiments regimes-text --data FOLDER --jobs 2

Tables and their preparation are those of `tables`, but `public` rows are public and of the private
ones only so many are used. Sentences are a table of features (`sentences`). Learning rates are
searched for every method, number of records and ε alike, on a table that is in none of the results,
until the best is inside of its grid.

Each cell of the map (`leads`) has the best of our methods and how far its AUC lies above the best
of the simple ones: public rows alone; gradient descent, with and without a start at what public
rows give.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from dpspan.app.comparison.search import Search, Try
from dpspan.app.section import Count, Counts, Numbers, Section, Texts
from dpspan.convex import NoisyAdaGrad, PrivateLogisticRegression
from experiments.anchors import Anchor
from experiments.leads import Scores, Spot, cell, leads_table, means_table, plot
from experiments.runner import Place, Results, execute
from experiments.tables import DELTA, OURS, TUNED_ON, load

PUBLIC_ONLY = "public rows only"
SIMPLE = ("DP-GD", "DP-GD, warm start")
METHODS = {
    **{name: OURS[name] for name in (*SIMPLE, "projected DP-GD")},
    **{name: OURS[name] for name in ("AdaGrad", "AdaGrad, warm start", "AdaGrad, 4 cuts")},
    "AdaGrad, 4 cuts, warm start": lambda rate: {
        "method": NoisyAdaGrad(learning_rate=rate),
        "cuts": 4,
        "start": "public",
    },
    "projected AdaGrad, released": OURS["projected AdaGrad, released"],
}
TUNING_SEEDS = (1000, 1001, 1002)
SEARCH = Search(tries=6, share=1.0, finalists=1)


class RegimesExperiment(Section):
    """How many records and which ε."""

    kind: Literal["regimes"] = "regimes"
    title: str
    paper: str
    about: str
    notes: Texts = ()
    others: Annotated[tuple[Anchor, ...], Field(strict=False)] = ()
    tables: Texts
    records: Counts
    public: Count
    epsilons: Numbers
    seeds: Count
    rates: Numbers
    tuned_on: str = TUNED_ON
    methods: Texts = tuple(METHODS)  # of these
    picture: str = "regimes"


@dataclass(frozen=True)
class Run:
    """One fit."""

    table: str
    records: int
    public: int
    method: str
    epsilon: float
    rate: float
    seed: int


def work(run: Run, place: Place) -> dict[str, Any]:
    """A run in a process of its own."""
    split = load(place.data, run.table, run.seed, run.public)
    scores, spent = _scores(run, split)
    return {
        **asdict(run),
        "auc": float(roc_auc_score(split.y_test, scores)),
        "epsilon_spent": spent,
        "delta": DELTA,
        "made": place.provenance(),
    }


def _scores(run: Run, split: Any) -> tuple[np.ndarray, float]:
    if run.method == PUBLIC_ONLY:
        x, y = split.public.x, split.public.y
        if len(np.unique(y)) < 2:  # a rare class that is not among so few rows
            return np.zeros(split.x_test.shape[0]), 0.0
        model = LogisticRegression(C=0.1, max_iter=1000).fit(x, y)
        return model.decision_function(split.x_test), 0.0
    private = PrivateLogisticRegression(
        epsilon=run.epsilon,
        delta=DELTA,
        classes=[0, 1],
        accountant="rdp" if run.seed in TUNING_SEEDS else "pld",  # some per cent off, but quick
        **METHODS[run.method](run.rate),
    ).fit(split.x[: run.records], split.y[: run.records], public=split.public)
    return private.decision_function(split.x_test), private.epsilon_


def _runs(
    experiment: RegimesExperiment, tables: Sequence[str], at: Spot, method: str, rate: float
) -> list[Run]:
    tuning = tables == (experiment.tuned_on,)
    seeds = TUNING_SEEDS if tuning else range(experiment.seeds)
    records, epsilon = at if method != PUBLIC_ONLY else (0, 0.0)
    return [
        Run(table, records, experiment.public, method, epsilon, rate, seed)
        for table in tables
        for seed in seeds
    ]


def _known(
    experiment: RegimesExperiment, at: Spot, method: str, results: Results, each: Try
) -> float | None:
    wanted = _runs(experiment, (experiment.tuned_on,), at, method, each.rate)
    found = [row["auc"] for run in wanted if (row := results.of(run)) is not None]
    return statistics.mean(found) if len(found) == len(wanted) else None


def places(experiment: RegimesExperiment) -> list[Spot]:
    """Of the map."""
    return [(n, epsilon) for n in experiment.records for epsilon in experiment.epsilons]


def reported(experiment: RegimesExperiment, at: Spot, method: str, results: Results) -> list[Run]:
    """The runs that are shown, at the learning rate that the search found."""
    rate = 0.0
    if method != PUBLIC_ONLY:
        known = partial(_known, experiment, at, method, results)
        rate = SEARCH.best(experiment.rates, known)
    return _runs(experiment, experiment.tables, at, method, rate)


def run(experiment: RegimesExperiment, results: Results, place: Place) -> None:
    """Search, and make every run that is missing."""
    task = partial(work, place=place)
    while missing := [
        run
        for at in places(experiment)
        for method in experiment.methods
        for each in SEARCH.wanted(
            experiment.rates, partial(_known, experiment, at, method, results)
        )
        for run in _runs(experiment, (experiment.tuned_on,), at, method, each.rate)
    ]:
        missing.sort(key=lambda run: run.seed)
        execute(missing, results, task, place.jobs, "regimes: learning rates")
    final = [
        run
        for at in places(experiment)
        for method in (PUBLIC_ONLY, *experiment.methods)
        for run in reported(experiment, at, method, results)
    ]
    # A process that has read a table goes on with it.
    final.sort(key=lambda run: (run.table, run.seed))
    execute(final, results, task, place.jobs, "regimes: runs")


def measured(experiment: RegimesExperiment, at: Spot, results: Results) -> dict[str, Scores]:
    """In per cent, of the methods whose runs are all there."""
    found = {}
    for method in (PUBLIC_ONLY, *experiment.methods):
        wanted = reported(experiment, at, method, results)
        rows = [row for run in wanted if (row := results.of(run)) is not None]
        if len(rows) == len(wanted):
            found[method] = {(row["table"], row["seed"]): 100 * row["auc"] for row in rows}
    return found


def page(experiment: RegimesExperiment, results: Results, docs: Path) -> str:
    """The map as a table and a picture, and the mean AUC of every method."""
    whole = len(experiment.methods) + 1
    known = {
        at: found
        for at in places(experiment)
        if len(found := measured(experiment, at, results)) == whole
    }
    cells = {at: cell(found, (PUBLIC_ONLY, *SIMPLE)) for at, found in known.items()}
    lines = leads_table(experiment.records, experiment.epsilons, cells)
    for epsilon in experiment.epsilons:
        lines += ["", *means_table(epsilon, known, "mean AUC in %")]
    if cells:
        title = "AUC points of our best method above the best simple one"
        path = docs / f"{experiment.picture}.png"
        plot(experiment.records, experiment.epsilons, {title: cells}, path)
        lines += ["", f"![who is ahead, by records and ε]({experiment.picture}.png)"]
    return "\n".join(lines) + "\n"
