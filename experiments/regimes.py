"""Maps of regimes: which method wins with how many records, at which ε.

    python -m experiments regimes-tables --data FOLDER --jobs 2
    python -m experiments regimes-text --data FOLDER --jobs 2

Tables and their preparation are those of `tables`, but `public` rows are public and of the private
ones only so many are used. Sentences are a table of features (`sentences`). Learning rates are
searched for every method, number of records and ε alike, on a table that is in none of the results,
until the best is inside of its grid.

Each cell of the map has the best of our methods and how far its AUC lies above the best of the
simple ones (public rows alone; gradient descent, with and without a start at what public rows
give). Both are picked by the means that are shown, so a lead is called one only if it is longer
than two standard errors; seeds are paired, as all methods get the same records.
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
CLEAR = 2.0  # standard errors


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


Spot = tuple[int, float]  # records and ε: a place on the map


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


Aucs = dict[tuple[str, int], float]  # by table and seed


def measured(experiment: RegimesExperiment, at: Spot, results: Results) -> dict[str, Aucs]:
    """In per cent, of the methods whose runs are all there."""
    found = {}
    for method in (PUBLIC_ONLY, *experiment.methods):
        wanted = reported(experiment, at, method, results)
        rows = [row for run in wanted if (row := results.of(run)) is not None]
        if len(rows) == len(wanted):
            found[method] = {(row["table"], row["seed"]): 100 * row["auc"] for row in rows}
    return found


def mean(aucs: Aucs) -> float:
    """Over all tables and seeds."""
    return statistics.mean(aucs.values())


def lead(own: Aucs, other: Aucs) -> tuple[float, float]:
    """By how much one is above the other, and the standard error of that."""
    tables = {table for table, _ in own}
    variances = [
        statistics.variance([own[t, s] - other[t, s] for t, s in own if t == table])
        / sum(t == table for t, _ in own)
        for table in tables
    ]
    return mean(own) - mean(other), sum(variances) ** 0.5 / len(tables)


@dataclass(frozen=True)
class Cell:
    """A place on the map: the best simple method, and the best of ours."""

    simple: str
    best: str
    auc: float
    lead: float
    error: float

    @property
    def clear(self) -> bool:
        """Whether chance does not explain who is ahead."""
        return abs(self.lead) > CLEAR * self.error


def cell(found: dict[str, Aucs]) -> Cell:
    """What a place shows."""
    simple = max((m for m in found if m in (PUBLIC_ONLY, *SIMPLE)), key=lambda m: mean(found[m]))
    best = max(set(found) - {PUBLIC_ONLY, *SIMPLE}, key=lambda m: mean(found[m]))
    ahead, error = lead(found[best], found[simple])
    return Cell(simple, best, mean(found[best]), ahead, error)


def page(experiment: RegimesExperiment, results: Results, docs: Path) -> str:
    """The map as a table and a picture, and the mean AUC of every method."""
    whole = len(experiment.methods) + 1
    known = {
        at: found
        for at in places(experiment)
        if len(found := measured(experiment, at, results)) == whole
    }
    heads = " | ".join(f"ε = {epsilon:g}" for epsilon in experiment.epsilons)
    lines = [f"| records | {heads} |", "|---" * (len(experiment.epsilons) + 1) + "|"]
    for n in experiment.records:
        texts = [_text(cell(known[n, e])) if (n, e) in known else "—" for e in experiment.epsilons]
        lines.append(f"| {n:,} | " + " | ".join(texts) + " |")
    for epsilon in experiment.epsilons:
        shown = [at for at in places(experiment) if at in known and at[1] == epsilon]
        names = " | ".join(f"{n:,} records" for n, _ in shown)
        lines += ["", f"| mean AUC in %, ε = {epsilon:g} | {names} |"]
        lines += ["|---" * (len(shown) + 1) + "|"]
        means = {at: {m: mean(found) for m, found in known[at].items()} for at in shown}
        for method in (PUBLIC_ONLY, *experiment.methods):
            cells = [_bold(means[at][method], max(means[at].values())) for at in shown]
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
    if known:
        plot(
            experiment,
            {at: cell(found) for at, found in known.items()},
            docs / f"{experiment.picture}.png",
        )
        lines += ["", f"![who is ahead, by records and ε]({experiment.picture}.png)"]
    return "\n".join(lines) + "\n"


def _bold(value: float, best: float) -> str:
    return f"**{value:.1f}**" if value == best else f"{value:.1f}"


def _text(found: Cell) -> str:
    who = f"**{found.best}**" if found.clear and found.lead > 0 else found.best
    if found.clear and found.lead < 0:
        who = f"{found.simple} is ahead of {found.best}"
    return f"{who} {_signed(found.lead)} ± {found.error:.1f} ({found.auc:.1f}; {found.simple})"


def _signed(points: float) -> str:
    return f"{round(points, 1) + 0.0:+.1f}"  # nothing is not −0.0


def plot(experiment: RegimesExperiment, cells: dict[Spot, Cell], path: Path) -> None:
    """A square for each place: colour and number are the lead, the name is the best method's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    size = len(experiment.records), len(experiment.epsilons)
    leads = np.full(size, np.nan)
    figure, axis = plt.subplots(figsize=(1.9 * size[1] + 1.5, 0.9 * size[0] + 1.2))
    for (n, epsilon), found in cells.items():
        row, column = experiment.records.index(n), experiment.epsilons.index(epsilon)
        leads[row, column] = found.lead
        sure = "" if found.clear else "\n(not clear)"
        name = found.best.replace(", ", ",\n", 1)
        text = f"{name}\n{_signed(found.lead)}{sure}"
        axis.text(column, row, text, ha="center", va="center", fontsize=7)
    most = float(np.nanmax(np.abs(leads)))
    axis.imshow(leads, cmap="PuOr", vmin=-1.5 * most, vmax=1.5 * most, aspect="auto")
    axis.set_xticks(range(size[1]), [f"{epsilon:g}" for epsilon in experiment.epsilons])
    axis.set_yticks(range(size[0]), [f"{n:,}" for n in experiment.records])
    axis.set_xlabel("ε")
    axis.set_ylabel("private records")
    axis.set_title("AUC points of our best method above the best simple one", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
