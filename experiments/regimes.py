"""Maps of regimes: which method wins with how many records, at which ε.

    python -m experiments regimes-tables --data FOLDER --jobs 2
    python -m experiments regimes-text --data FOLDER --jobs 2

Tables and their preparation are those of `tables`, but `public` rows are public and of the private
ones only so many are used. Sentences are a table of features (`sentences`). Learning rates are
searched for every method, number of records and ε alike, on a table that is in none of the results,
until the best is inside of its grid. So is, with them, the scale of a start at what sentences say
that describe the classes (`label_sentences`); their wording is the best one's of all by itself.

Each cell of a map (`leads`) has the best of our methods and how far its AUC lies above the best of
the simple ones. Without `maps` these are public rows alone; gradient descent, with and without a
start at what public rows give.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
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
from experiments.label_sentences import LABELS_ONLY, STARTED, LabelsSection, direction
from experiments.leads import (
    Map,
    Measured,
    Scores,
    Spot,
    cells_of,
    leads_table,
    mean,
    means_table,
    plot,
)
from experiments.runner import Place, Results, execute
from experiments.tables import DELTA, OURS, TUNED_ON, Split, load

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
SCALES = Search(tries=5, share=1.0, finalists=1)  # of a start, each with a search of its own


class Variants(Section):
    """Other tables in place of the experiment's, with NAME_tuning to search on, at some places."""

    tables: dict[str, str]
    records: Counts
    epsilons: Numbers
    methods: Texts


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
    labels: LabelsSection | None = None
    maps: dict[str, Map] = Field(default_factory=dict)
    variants: Variants | None = None

    @property
    def free(self) -> tuple[str, ...]:
        """Rows that spend no ε."""
        return (PUBLIC_ONLY,) if self.labels is None else (PUBLIC_ONLY, LABELS_ONLY)

    def of_table(self, table: str) -> RegimesExperiment:
        """One of the variants."""
        given = self.variants
        assert given is not None
        some = {key: getattr(given, key) for key in ("records", "epsilons", "methods")}
        own = {"tables": (table,), "tuned_on": f"{table}_tuning", "variants": None}
        return self.model_copy(update=some | own)


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
    scale: float | None = None  # of a start at label sentences
    wording: str | None = None  # of them


def work(run: Run, place: Place) -> dict[str, Any]:
    """A run in a process of its own."""
    split = load(place.data, run.table, run.seed, run.public)
    scores, spent = _scores(run, split, place.data)
    return {
        **asdict(run),
        "auc": float(roc_auc_score(split.y_test, scores)),
        "epsilon_spent": spent,
        "delta": DELTA,
        "made": place.provenance(),
    }


def _scores(run: Run, split: Split, folder: Path) -> tuple[np.ndarray, float]:
    if run.method == PUBLIC_ONLY:
        x, y = split.public.x, split.public.y
        if len(np.unique(y)) < 2:  # a rare class that is not among so few rows
            return np.zeros(split.x_test.shape[0]), 0.0
        model = LogisticRegression(C=0.1, max_iter=1000).fit(x, y)
        return model.decision_function(split.x_test), 0.0
    towards = None if run.wording is None else direction(folder, run.table, run.wording, split)
    if run.method == LABELS_ONLY:
        return split.x_test @ towards, 0.0
    if run.method in STARTED:
        weights = run.scale * towards
        options = {"method": STARTED[run.method](learning_rate=run.rate, weights=weights)}
    else:
        options = METHODS[run.method](run.rate)
    private = PrivateLogisticRegression(
        epsilon=run.epsilon,
        delta=DELTA,
        classes=[0, 1],
        accountant="rdp" if run.seed in TUNING_SEEDS else "pld",  # some per cent off, but quick
        **options,
    ).fit(split.x[: run.records], split.y[: run.records], public=split.public)
    return private.decision_function(split.x_test), private.epsilon_


@dataclass(frozen=True)
class Choice:
    """What is searched."""

    rate: float = 0.0
    scale: float | None = None
    wording: str | None = None


@dataclass(frozen=True)
class Searched:
    """A method at a place of the map: what to try next, and what was best."""

    experiment: RegimesExperiment
    at: Spot
    method: str
    results: Results

    def runs(self, tables: Sequence[str], choice: Choice) -> list[Run]:
        """Of all seeds."""
        tuning = tuple(tables) == (self.experiment.tuned_on,)
        seeds = TUNING_SEEDS if tuning else range(self.experiment.seeds)
        records, epsilon = (0, 0.0) if self.method in self.experiment.free else self.at
        place = records, self.experiment.public, self.method, epsilon
        return [
            Run(table, *place, choice.rate, seed, choice.scale, choice.wording)
            for table in tables
            for seed in seeds
        ]

    def tried(self, choice: Choice) -> list[Run]:
        """Where it is searched."""
        return self.runs((self.experiment.tuned_on,), choice)

    def score(self, choice: Choice) -> float | None:
        """There, if all seeds are known."""
        found = [row["auc"] for run in self.tried(choice) if (row := self.results.of(run))]
        return statistics.mean(found) if len(found) == len(TUNING_SEEDS) else None

    def _known(self, choice: Choice, each: Try) -> float | None:
        return self.score(replace(choice, rate=each.rate))

    def _best_rate(self, choice: Choice) -> Choice:
        known = partial(self._known, choice)
        return replace(choice, rate=SEARCH.best(self.experiment.rates, known))

    def _known_scale(self, wording: str, each: Try) -> float | None:
        choice = Choice(scale=each.rate, wording=wording)
        known = partial(self._known, choice)
        if SEARCH.wanted(self.experiment.rates, known):
            return None
        return self.score(self._best_rate(choice))

    def wanted(self) -> list[Choice]:
        """To try next; nothing if the search is over."""
        rates, labels = self.experiment.rates, self.experiment.labels
        if self.method == LABELS_ONLY and labels is not None:
            choices = [Choice(wording=each) for each in labels.wordings]
            return [each for each in choices if self.score(each) is None]
        if self.method == PUBLIC_ONLY:
            return []
        starts = [Choice()]
        if self.method in STARTED and labels is not None:
            wording = best_wording(self.experiment, self.results)
            known = partial(self._known_scale, wording)
            scales = SCALES.wanted(labels.scales, known)
            starts = [Choice(scale=each.rate, wording=wording) for each in scales]
        return [
            replace(start, rate=each.rate)
            for start in starts
            for each in SEARCH.wanted(rates, partial(self._known, start))
        ]

    def best(self) -> Choice:
        """By what is known."""
        labels = self.experiment.labels
        if self.method == PUBLIC_ONLY:
            return Choice()
        if labels is None or self.method not in (LABELS_ONLY, *STARTED):
            return self._best_rate(Choice())
        wording = best_wording(self.experiment, self.results)
        if self.method == LABELS_ONLY:
            return Choice(wording=wording)
        scale = SCALES.best(labels.scales, partial(self._known_scale, wording))
        return self._best_rate(Choice(scale=scale, wording=wording))


def best_wording(experiment: RegimesExperiment, results: Results) -> str:
    """Of the label sentences by themselves."""
    assert experiment.labels is not None
    alone = Searched(experiment, (0, 0.0), LABELS_ONLY, results)
    return max(experiment.labels.wordings, key=lambda each: alone.score(Choice(wording=each)) or 0)


def places(experiment: RegimesExperiment) -> list[Spot]:
    """Of the map."""
    return [(n, epsilon) for n in experiment.records for epsilon in experiment.epsilons]


def reported(experiment: RegimesExperiment, at: Spot, method: str, results: Results) -> list[Run]:
    """The runs that are shown, at what the search found."""
    here = Searched(experiment, at, method, results)
    return here.runs(experiment.tables, here.best())


def run(experiment: RegimesExperiment, results: Results, place: Place) -> None:
    """Search, and make every run that is missing."""
    task = partial(work, place=place)
    for methods in (experiment.free, experiment.methods):
        here = [Searched(experiment, at, m, results) for at in places(experiment) for m in methods]
        while missing := [
            run for each in here for choice in each.wanted() for run in each.tried(choice)
        ]:
            missing.sort(key=lambda run: run.seed)
            execute(missing, results, task, place.jobs, "regimes: learning rates")
    final = [
        run
        for at in places(experiment)
        for method in (*experiment.free, *experiment.methods)
        for run in reported(experiment, at, method, results)
    ]
    # A process that has read a table goes on with it.
    final.sort(key=lambda run: (run.table, run.seed))
    execute(final, results, task, place.jobs, "regimes: runs")
    if experiment.variants is not None:
        for table in experiment.variants.tables.values():
            run(experiment.of_table(table), results, place)


def measured(experiment: RegimesExperiment, at: Spot, results: Results) -> dict[str, Scores]:
    """In per cent, of the methods whose runs are all there."""
    found = {}
    for method in (*experiment.free, *experiment.methods):
        wanted = reported(experiment, at, method, results)
        rows = [row for run in wanted if (row := results.of(run)) is not None]
        if len(rows) == len(wanted):
            found[method] = {(row["table"], row["seed"]): 100 * row["auc"] for row in rows}
    return found


def page(experiment: RegimesExperiment, results: Results, docs: Path) -> str:
    """The maps as tables and a picture, and the mean AUC of every method."""
    known = complete(experiment, results)
    ours = tuple(method for method in experiment.methods if method not in SIMPLE)
    whole = {"": Map(simple=(PUBLIC_ONLY, *SIMPLE), ours=ours)} if not experiment.maps else {}
    maps = {t: cells_of(each, known) for t, each in (whole | experiment.maps).items()}
    lines = []
    for title, cells in maps.items():
        lines += [f"**{title}**", ""] if title else []
        lines += [*leads_table(experiment.records, experiment.epsilons, cells), ""]
    for epsilon in experiment.epsilons:
        lines += [*means_table(epsilon, known, "mean AUC in %"), ""]
    if any(maps.values()):
        title = "AUC points of our best method above the best simple one"
        path = docs / f"{experiment.picture}.png"
        shown = {f"{t}\n{title}" if t else title: cells for t, cells in maps.items() if cells}
        plot(experiment.records, experiment.epsilons, shown, path)
        lines += [f"![who is ahead, by records and ε]({experiment.picture}.png)"]
    return "\n".join([*lines, *_variants(experiment, results)]) + "\n"


def complete(experiment: RegimesExperiment, results: Results) -> dict[Spot, Measured]:
    """The places that have all methods."""
    whole = len(experiment.methods) + len(experiment.free)
    found = {at: measured(experiment, at, results) for at in places(experiment)}
    return {at: each for at, each in found.items() if len(each) == whole}


def _variants(experiment: RegimesExperiment, results: Results) -> list[str]:
    """A column for each variant at each place."""
    given = experiment.variants
    if given is None:
        return []
    columns = {
        f"{name}, {n:,} records, ε = {epsilon:g}": found
        for name, table in given.tables.items()
        for (n, epsilon), found in complete(experiment.of_table(table), results).items()
    }
    lines = [
        "",
        "| mean AUC in % | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for method in (*experiment.free, *given.methods):
        cells = [f"{mean(found[method]):.1f}" for found in columns.values()]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return lines
