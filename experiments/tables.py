"""Private logistic regression on real tables: which method, at which ε.

    python -m experiments tables --data FOLDER [--peer PYTHON]

FOLDER holds adult.npz, a9a.npz, w8a.npz, bank_additional_full.npz, uci_credit_default_30k.npz and
covtype_20k.npz (x_train, y_train, and x_test, y_test where they exist; else a fifth is held out).
500 rows of each table are public and taken out of the private part. Everybody gets the same
features: 0/1 tables as they are, the others by mean and deviation of the public rows. The setting
of each row, at each ε, is the best of a grid on covtype_20k, which is in none of the results, so
nothing was tuned on the tables shown. Noise comes from OS entropy, as in any private fit.

With "cuts" a row also has whether a number exceeds quantiles of the public rows. DP-EBM (package
interpret-core) makes its own bins, by private histograms between the public rows' extremes.

diffprivlib gives pure ε-DP (objective perturbation), the stronger promise; see
peer_diffprivlib.py for the environment it needs. Without it its row has no new runs.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from scipy import sparse
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from dpspan.app.section import Count, Numbers, Section, Texts
from dpspan.convex import (
    Envelope,
    FromNoisyGradients,
    GradientDescent,
    NoisyAdaGrad,
    PrivateLogisticRegression,
    PublicFeatures,
    PublicRows,
    PublicScaling,
    Released,
)
from dpspan.convex.scaling import Preparation
from experiments.anchors import Anchor
from experiments.runner import Place, Results, execute
from experiments.second_moment import ReleasedSecondMoment

DELTA, PUBLIC, RANK = 1e-6, 500, 50
KEYS = ("accuracy", "auc")
ZERO_ONE = ("a9a", "w8a")
TUNED_ON, TUNING_SEEDS = "covtype_20k", tuple(range(1000, 1008))

DIAGONAL = FromNoisyGradients(diagonal=True)
# What each row is, at a learning rate
OURS: dict[str, Callable[[float], dict[str, Any]]] = {
    "DP-GD": lambda rate: {"method": GradientDescent(learning_rate=rate)},
    "DP-GD, warm start": lambda rate: {
        "method": GradientDescent(learning_rate=rate),
        "start": "public",
    },
    "projected DP-GD": lambda rate: {
        "method": GradientDescent(learning_rate=rate, subspace=_features())
    },
    "AdaGrad": lambda rate: {"method": NoisyAdaGrad(learning_rate=rate)},
    "AdaGrad, warm start": lambda rate: {
        "method": NoisyAdaGrad(learning_rate=rate),
        "start": "public",
    },
    "AdaGrad, 4 cuts": lambda rate: {"method": NoisyAdaGrad(learning_rate=rate), "cuts": 4},
    "AdaGrad, 8 cuts": lambda rate: {"method": NoisyAdaGrad(learning_rate=rate), "cuts": 8},
    "AdaGrad, 8 cuts, warm start": lambda rate: {
        "method": NoisyAdaGrad(learning_rate=rate),
        "cuts": 8,
        "start": "public",
    },
    "AdaGrad, diagonal": lambda rate: {
        "method": NoisyAdaGrad(learning_rate=rate, preconditioner=DIAGONAL)
    },
    "AdaGrad, diagonal, falling clip": lambda rate: {
        "method": NoisyAdaGrad(learning_rate=rate, preconditioner=DIAGONAL),
        "clip": Envelope(start=2.0, decay=0.25),
    },
    "AdaGrad, diagonal, warm start": lambda rate: {
        "method": NoisyAdaGrad(learning_rate=rate, preconditioner=DIAGONAL),
        "start": "public",
    },
    "projected AdaGrad": lambda rate: {
        "method": NoisyAdaGrad(learning_rate=rate, subspace=_features())
    },
    "projected AdaGrad, released": lambda rate: {"method": _adagrad(rate, Released())},
    "projected AdaGrad, second moment": lambda rate: {
        "method": _adagrad(rate, ReleasedSecondMoment())
    },
}
PEER, BOOSTED = "diffprivlib (pure ε)", "DP-EBM"
PEER_SETTINGS = tuple((share, c) for share in (0.1, 0.3) for c in (1e-3, 1e-2, 1e-1))
OPEN = ("public rows only (ε = 0)", "without privacy")


class TablesExperiment(Section):
    """Which tables at which ε, and the learning rates that each method is searched among."""

    kind: Literal["tables"] = "tables"
    title: str
    paper: str
    about: str
    notes: Texts = ()
    others: Annotated[tuple[Anchor, ...], Field(strict=False)] = ()
    tables: Texts
    epsilons: Numbers
    seeds: Count
    rates: dict[str, Numbers]
    only_at: dict[str, Numbers] = Field(default_factory=dict)  # fewer ε, for rows that take long

    @model_validator(mode="after")
    def _methods_exist(self) -> Self:
        unknown = set(self.rates) - {*OURS, BOOSTED}
        if unknown:
            raise PydanticCustomError(
                "unknown",
                "Expected rates of {known}, got {unknown}.",
                {"known": ", ".join((*OURS, BOOSTED)), "unknown": ", ".join(sorted(unknown))},
            )
        return self

    def at(self, method: str) -> Sequence[float]:
        """The ε of a row."""
        return (0.0,) if method in OPEN else self.only_at.get(method, self.epsilons)

    def grid(self, method: str) -> Sequence[Any]:
        """What a method is searched among; one entry where there is nothing to choose."""
        if method in OPEN:
            return (None,)
        return PEER_SETTINGS if method == PEER else self.rates[method]


def _features() -> PublicFeatures:
    return PublicFeatures(rank=RANK)


def _adagrad(rate: float, preconditioner: Released) -> NoisyAdaGrad:
    return NoisyAdaGrad(learning_rate=rate, subspace=_features(), preconditioner=preconditioner)


@dataclass(frozen=True)
class Run:
    """One fit; `choice` is its place in the grid of its method."""

    table: str
    method: str
    epsilon: float
    choice: int
    seed: int


@dataclass(frozen=True)
class Split:
    """Private and public records, and a test set that nothing is tuned on."""

    x: Any
    y: np.ndarray
    public: PublicRows
    x_test: Any
    y_test: np.ndarray
    preparation: Preparation  # what was done to all of them


@lru_cache(maxsize=1)
def load(folder: Path, table: str, seed: int, known: int = PUBLIC) -> Split:
    """A table, prepared by so many public rows and cut by the seed."""
    rng = np.random.default_rng(seed)
    with np.load(folder / f"{table}.npz") as file:
        data = {key: file[key] for key in file.files}
    x, y = data["x_train"].astype(float), data["y_train"].astype(int)
    if table == TUNED_ON:
        y = (y == np.bincount(y).argmax()).astype(int)
    order = rng.permutation(len(x))
    x, y = x[order], y[order]
    if "x_test" in data:
        x_test, y_test = data["x_test"].astype(float), data["y_test"].astype(int)
    else:
        held = len(x) // 5
        x_test, y_test, x, y = x[:held], y[:held], x[held:], y[held:]
    preparation = Preparation()
    if table in ZERO_ONE:
        x, x_test = sparse.csr_matrix(x), sparse.csr_matrix(x_test)
    else:
        preparation = PublicScaling().prepare(x[:known])
        x, x_test = preparation.apply(x), preparation.apply(x_test)
    # Rows of different people that happen to be equal are common in such tables.
    public = PublicRows(x=x[:known], y=y[:known], name=table, equal_rows_allowed=True)
    return Split(x[known:], y[known:], public, x_test, y_test, preparation)


def scores_of(
    run: Run, experiment: TablesExperiment, folder: Path, peer: str | None
) -> tuple[np.ndarray, dict[str, Any]]:
    """Decision values of the test rows, and what the fit says of itself."""
    split = load(folder, run.table, run.seed)
    if run.method in OPEN:
        alone = run.method == OPEN[0]
        x, y = (split.public.x, split.public.y) if alone else (split.x, split.y)
        model = LogisticRegression(C=0.1 if alone else 1.0, max_iter=1000).fit(x, y)
        return model.decision_function(split.x_test), {"epsilon_spent": 0.0 if alone else None}
    if run.method == PEER:
        share, penalty = PEER_SETTINGS[run.choice]
        norm = share * float(np.sqrt(split.x.shape[1]))  # a public number
        process = _peer(folder, run.table, run.seed, str(peer))
        return _ask(process, run.epsilon, norm, penalty), {"epsilon_spent": run.epsilon}
    rate = experiment.grid(run.method)[run.choice]
    if run.method == BOOSTED:
        return _boosted(split, run.epsilon, rate), {"epsilon_spent": run.epsilon, "delta": DELTA}
    model = PrivateLogisticRegression(
        epsilon=run.epsilon,
        delta=DELTA,
        classes=[0, 1],
        accountant="rdp" if run.table == TUNED_ON else "pld",  # some per cent off, but quick
        **OURS[run.method](rate),
    ).fit(split.x, split.y, public=split.public)
    spent = {
        "epsilon_spent": model.epsilon_,
        "delta": DELTA,
        "private": model.certificate_["private"],
        "noise_multiplier": model.certificate_["training"]["noise_multiplier"],
    }
    return model.decision_function(split.x_test), spent


def _boosted(split: Split, epsilon: float, rate: float) -> np.ndarray:
    """DP-EBM's decision values; what it has to know of the columns is the public rows' to tell."""
    from interpret.privacy import DPExplainableBoostingClassifier

    x, seen, x_test = (
        m.toarray() if sparse.issparse(m) else m for m in (split.x, split.public.x, split.x_test)
    )
    several = [len(np.unique(column)) > 2 for column in seen.T]
    ends = zip(seen.min(0), seen.max(0), strict=True)
    model = DPExplainableBoostingClassifier(
        epsilon=epsilon,
        delta=DELTA,
        learning_rate=rate,
        feature_types=["continuous" if many else "nominal" for many in several],
        privacy_bounds={i: (float(low), float(high) + 1e-6) for i, (low, high) in enumerate(ends)},
        n_jobs=1,
    )
    return np.asarray(model.fit(x, split.y).decision_function(x_test))


@lru_cache(maxsize=1)
def _peer(folder: Path, table: str, seed: int, python: str) -> subprocess.Popen[str]:
    """diffprivlib's own Python, with the problem loaded; it ends with this process."""
    split = load(folder, table, seed)
    dense = [m.toarray() if sparse.issparse(m) else m for m in (split.x, split.x_test)]
    script = Path(__file__).with_name("peer_diffprivlib.py")
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "problem.npz"
        np.savez(path, x_train=dense[0], y_train=split.y, x_test=dense[1])
        process = subprocess.Popen(
            [python, str(script), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        _ask(process, 1.0, 1.0, 1.0)  # once, so that the file is read before it is gone
    return process


def _ask(process: subprocess.Popen[str], *numbers: float) -> np.ndarray:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(" ".join(map(str, numbers)) + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise RuntimeError("diffprivlib gave no answer; its error is above.")
    return np.array(json.loads(answer))


def work(run: Run, experiment: TablesExperiment, place: Place, peer: str | None) -> dict[str, Any]:
    """A run in a process of its own."""
    split = load(place.data, run.table, run.seed)
    start = time.perf_counter()
    scores, spent = scores_of(run, experiment, place.data, peer)
    return {
        **asdict(run),
        "accuracy": float(((scores > 0) == split.y_test).mean()),
        "auc": float(roc_auc_score(split.y_test, scores)),
        "records": int(split.x.shape[0]),
        "features": int(split.x.shape[1]),
        "seconds": time.perf_counter() - start,
        **spent,
        "made": place.provenance(),
    }


def best_choice(choices: int, method: str, epsilon: float, results: Results) -> int:
    """The setting with the best accuracy and AUC on the table for tuning."""
    found = []
    for choice in range(choices):
        rows = [results.of(Run(TUNED_ON, method, epsilon, choice, s)) for s in TUNING_SEEDS]
        found.append(statistics.mean((r["accuracy"] + r["auc"]) / 2 for r in rows if r))
    return int(np.argmax(found))


def spread(rows: Sequence[dict[str, Any]], key: str) -> str:
    """Mean and standard deviation in per cent."""
    values = [100 * row[key] for row in rows]
    deviation = statistics.stdev(values) if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):.1f} ± {deviation:.1f}"


def overall(runs: Sequence[dict[str, Any]], methods: Sequence[str]) -> list[str]:
    """The lines of a table of means over all data sets."""
    epsilons = sorted({row["epsilon"] for row in runs if row["method"] not in OPEN})
    heads = [f"ε = {epsilon:g}" for epsilon in epsilons]
    lines = ["| method | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for method in methods:
        cells = []
        for epsilon in epsilons:
            shown = 0.0 if method in OPEN else epsilon
            same = [r for r in runs if (r["method"], r["epsilon"]) == (method, shown)]
            means = [f"{100 * statistics.mean(r[key] for r in same):.1f}" for key in KEYS if same]
            cells.append(" / ".join(means))
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return lines


def markdown(runs: Sequence[dict[str, Any]], methods: Sequence[str]) -> str:
    """Accuracy / AUC by ε, over all data sets and for each."""
    lines = ["**all tables**: accuracy / AUC in %, means", "", *overall(runs, methods), ""]
    for table in dict.fromkeys(row["table"] for row in runs):
        own = [row for row in runs if row["table"] == table]
        if not own:
            continue
        size = f"n = {own[0]['records']:,}, p = {own[0]['features']}"
        epsilons = sorted({row["epsilon"] for row in own if row["method"] not in OPEN})
        heads = [f"ε = {epsilon:g}" for epsilon in epsilons]
        lines += [f"**{table}**, {size}: accuracy / AUC in %", ""]
        lines += ["| method | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
        for method in methods:
            cells = []
            for epsilon in epsilons:
                shown = 0.0 if method in OPEN else epsilon
                same = [r for r in own if (r["method"], r["epsilon"]) == (method, shown)]
                cells.append(f"{spread(same, 'accuracy')} / {spread(same, 'auc')}" if same else "")
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def plot(runs: Sequence[dict[str, Any]], methods: Sequence[str], path: Path) -> None:
    """Accuracy and AUC against ε, a column for each table."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    tables = list(dict.fromkeys(row["table"] for row in runs))
    figure, axes = plt.subplots(
        2, len(tables), figsize=(4 * len(tables), 7), sharex=True, squeeze=False
    )
    colours = matplotlib.colormaps["tab20"].colors
    for column, table in enumerate(tables):
        for row, key in enumerate(KEYS):
            axis = axes[row, column]
            for method in methods:
                own = [r for r in runs if (r["table"], r["method"]) == (table, method)]
                by_epsilon: dict[float, list[float]] = {}
                for r in own:
                    by_epsilon.setdefault(r["epsilon"], []).append(100 * r[key])
                means = {e: statistics.mean(by_epsilon[e]) for e in sorted(by_epsilon)}
                if method in OPEN:
                    colour = "black" if method == OPEN[1] else "grey"
                    axis.axhline(means[0.0], color=colour, linestyle="--", label=method)
                else:
                    style = ":" if method == PEER else "o" if len(means) == 1 else "-"
                    colour = colours[methods.index(method)]
                    axis.plot(*zip(*means.items(), strict=True), style, c=colour, label=method)
            axis.set_xscale("log")
            axis.set_title(f"{table}: {key} in %", fontsize=9)
            ours = [line.get_ydata() for line in axis.lines if line.get_label() != PEER]
            low, high = np.min(np.concatenate(ours)), np.max(np.concatenate(ours))
            axis.set_ylim(low - 0.1 * (high - low) - 0.1, high + 0.1 * (high - low) + 0.1)
    for axis in axes[1]:
        axis.set_xlabel("ε")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=5, fontsize=8)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=120)


def methods_of(experiment: TablesExperiment, results: Results) -> list[str]:
    """The private rows: those that have a grid, and the peer's where it has been run."""
    asked = any(row["method"] == PEER for row in results.rows)
    return [*experiment.rates, *([PEER] if asked else [])]


def reported(experiment: TablesExperiment, results: Results, methods: Sequence[str]) -> list[Run]:
    """The runs of the tables, at the settings that the search found."""
    chosen = {
        (m, e): best_choice(len(experiment.grid(m)), m, e, results)
        for m in methods
        for e in experiment.at(m)
    }
    return [
        Run(table, method, e, chosen.get((method, e), 0), seed)
        for table in experiment.tables
        for seed in range(experiment.seeds)
        for method in (*methods, *OPEN)
        for e in experiment.at(method)
    ]


def run(
    experiment: TablesExperiment, results: Results, place: Place, peer: str | None = None
) -> None:
    """Search, and make every run that is missing."""
    methods = [*experiment.rates, *([PEER] if peer else [])]
    task = partial(work, experiment=experiment, place=place, peer=peer)
    # By table and seed, so that a process that has read a table goes on with it.
    search = [
        Run(TUNED_ON, method, epsilon, choice, seed)
        for seed in TUNING_SEEDS
        for method in methods
        for epsilon in experiment.at(method)
        for choice in range(len(experiment.grid(method)))
    ]
    execute(search, results, task, place.jobs, "tables: search")
    execute(reported(experiment, results, methods), results, task, place.jobs, "tables: runs")


def page(experiment: TablesExperiment, results: Results, docs: Path) -> str:
    """The tables and their plot, from stored results alone."""
    methods = methods_of(experiment, results)
    runs = reported(experiment, results, methods)
    rows = [row for each in runs if (row := results.of(each)) is not None]
    plot(rows, (*OPEN, *methods), docs / "tables.png")
    text = markdown(rows, (*OPEN, *methods))
    return f"{text}\n![accuracy and AUC against ε](tables.png)\n"
