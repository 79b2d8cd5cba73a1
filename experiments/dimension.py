"""What the number of features costs: rank-10 features embedded in p = 100 … 100,000 dimensions.

    python -m experiments dimension

Logistic regression on n = 500 records at ε = 1, δ = 1e-6: the same ten numbers a record, turned
into p features by an isometry, so that without privacy nothing depends on p. 100 public rows of the
same kind span the subspace. Shown is the excess risk, loss on the private records above the least
possible, and the time of a step. The learning rate of each method at each p is the best of its
grid for three other seeds. Constrained methods stay in a ball of radius 2; the true weights have
length 1.5.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent
from pydantic import model_validator
from pydantic_core import PydanticCustomError
from scipy import optimize, special

from dpspan.accounting.calibration import calibrate_event
from dpspan.accounting.ledger import Ledger
from dpspan.accounting.promises import Budget
from dpspan.app.section import Count, Counts, Numbers, Section, Texts
from dpspan.convex import (
    FromNoisyGradients,
    GradientDescent,
    Logistic,
    NoisyAdaGrad,
    PublicFeatures,
    Released,
)
from dpspan.convex.fitting import ConstantClip, Fit, GaussianNoise, PrivateRecords
from dpspan.convex.losses import Records
from dpspan.convex.methods import Method
from dpspan.convex.rows import Rows
from experiments.runner import Place, Results, execute

N, PUBLIC, RANK, STEPS = 500, 100, 10, 20
LENGTH, RADIUS = 1.5, 2.0  # of the true weights, and of the ball
BUDGET = Budget(epsilon=1.0, delta=1e-6)
TUNING_SEEDS = (1000, 1001, 1002)
CENTRE = {"excess_risk": statistics.mean, "seconds_per_step": min}
IN_SPAN = PublicFeatures(rank=RANK)
METHODS: dict[str, Callable[[float], Method]] = {
    "DP-GD": lambda rate: GradientDescent(steps=STEPS, learning_rate=rate),
    "DP-GD, constrained": lambda rate: GradientDescent(
        steps=STEPS, learning_rate=rate, radius=RADIUS
    ),
    "AdaGrad, diagonal, constrained": lambda rate: NoisyAdaGrad(
        steps=STEPS,
        learning_rate=rate,
        radius=RADIUS,
        preconditioner=FromNoisyGradients(diagonal=True),
    ),
    "projected DP-GD, constrained": lambda rate: GradientDescent(
        steps=STEPS, learning_rate=rate, radius=RADIUS, subspace=IN_SPAN
    ),
    "projected AdaGrad, constrained": lambda rate: NoisyAdaGrad(
        steps=STEPS, learning_rate=rate, radius=RADIUS, subspace=IN_SPAN
    ),
    "projected AdaGrad, released, constrained": lambda rate: NoisyAdaGrad(
        steps=STEPS,
        learning_rate=rate,
        radius=RADIUS,
        subspace=IN_SPAN,
        preconditioner=Released(),
    ),
}


class DimensionExperiment(Section):
    """Which p, how many seeds, and the learning rates that each method is searched among."""

    kind: Literal["dimension"] = "dimension"
    title: str
    paper: str
    about: str
    notes: Texts = ()
    dimensions: Counts
    seeds: Count
    rates: dict[str, Numbers]

    @model_validator(mode="after")
    def _methods_exist(self) -> Self:
        unknown = set(self.rates) - set(METHODS)
        if unknown:
            raise PydanticCustomError(
                "unknown",
                "Expected rates of {known}, got {unknown}.",
                {"known": ", ".join(METHODS), "unknown": ", ".join(sorted(unknown))},
            )
        return self


@dataclass(frozen=True)
class Run:
    """One fit."""

    method: str
    p: int
    rate: float
    seed: int


@dataclass(frozen=True)
class Problem:
    """Ten numbers a record, and the map to p features."""

    z: np.ndarray  # (n + public, 10)
    y: np.ndarray
    embedding: np.ndarray  # (10, p), orthonormal rows

    def risk(self, w: np.ndarray) -> float:
        """Mean loss of the private records for weights of the ten numbers."""
        return float(Logistic().value(self.z[:N] @ w[:, None], self.y[:N, None]).mean())

    def least_risk(self) -> float:
        """What is possible without privacy."""
        z, y = self.z[:N], self.y[:N]

        def gradient(w: np.ndarray) -> np.ndarray:
            return z.T @ (special.expit(z @ w) - y) / N

        return float(optimize.minimize(self.risk, np.zeros(RANK), jac=gradient, tol=1e-10).fun)


def problem_of(p: int, seed: int) -> Problem:
    """Records that depend on the seed alone; the embedding on p too."""
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((N + PUBLIC, RANK))
    true = rng.standard_normal(RANK)
    true *= LENGTH / np.linalg.norm(true)
    y = (rng.random(len(z)) < special.expit(z @ true)).astype(float)
    columns = np.linalg.qr(rng.standard_normal((p, RANK)))[0]
    return Problem(z, y, columns.T)


@lru_cache(maxsize=1)
def noise_multiplier() -> float:
    """The same for all runs."""
    return calibrate_event(GaussianDpEvent, STEPS, BUDGET)


class _TimedLedger(Ledger):
    """Remembers when it was charged: once in every step."""

    def __init__(self, *, budget: Budget) -> None:
        super().__init__(budget=budget)
        self.moments: list[float] = []

    def charge(self, event: DpEvent, count: int = 1) -> None:
        self.moments.append(time.perf_counter())
        super().charge(event, count)


def work(run: Run, place: Place) -> dict[str, Any]:
    """A run in a process of its own."""
    problem = problem_of(run.p, run.seed)
    x = problem.z @ problem.embedding
    method = METHODS[run.method](run.rate)
    z = noise_multiplier()
    ledger = _TimedLedger(budget=BUDGET)
    ledger.reserve(GaussianDpEvent(z), STEPS)
    fit = Fit(
        records=PrivateRecords(
            rows=Rows(x[:N], intercept=False),
            targets=problem.y[:N, None],
            loss=Logistic(),
            divisor=N,
        ),
        public=Records(rows=Rows(x[N:], intercept=False), loss=Logistic()),
        clip=ConstantClip(clip=1.0),
        noise_multiplier=z,
        ledger=ledger,
        noise=GaussianNoise(),
        start=np.zeros(run.p),
    )
    theta = method.minimise(fit)
    return {
        **asdict(run),
        "excess_risk": problem.risk(problem.embedding @ theta) - problem.least_risk(),
        "seconds_per_step": statistics.median(np.diff(ledger.moments)),
        "epsilon": ledger.epsilon(),
        "delta": BUDGET.delta,
        "made": place.provenance(),
    }


def best_rate(rates: Sequence[float], method: str, p: int, results: Results) -> float:
    """The learning rate that did best in the search."""

    def risk(rate: float) -> float:
        rows = [results.of(Run(method, p, rate, seed)) for seed in TUNING_SEEDS]
        return statistics.mean(row["excess_risk"] for row in rows if row is not None)

    return min(rates, key=risk)


def summary(rows: Sequence[dict[str, Any]], key: str) -> dict[str, dict[int, tuple[float, float]]]:
    """Mean and standard error by method and p; of times the least, as others use the machine."""
    grouped: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        grouped.setdefault(row["method"], {}).setdefault(row["p"], []).append(row[key])
    return {
        method: {
            p: (CENTRE[key](v), statistics.stdev(v) / len(v) ** 0.5 if len(v) > 1 else 0.0)
            for p, v in sorted(by_p.items())
        }
        for method, by_p in grouped.items()
    }


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Excess risk and milliseconds of a step, by p."""
    lines = []
    for key, title, factor in (
        ("excess_risk", "excess risk × 1000 (mean ± standard error)", 1000),
        ("seconds_per_step", "milliseconds of a step (the fastest run)", 1000),
    ):
        table = summary(rows, key)
        dimensions = sorted({row["p"] for row in rows})
        heads = [f"p = {p:,}" for p in dimensions]
        lines += [f"| {title} | " + " | ".join(heads) + " | largest / smallest |"]
        lines += ["|---" * (len(heads) + 2) + "|"]
        for method, by_p in table.items():
            means = [mean for mean, _ in by_p.values()]
            cells = [
                f"{factor * mean:.1f} ± {factor * error:.1f}"
                if key == "excess_risk"
                else f"{factor * mean:.2g}"
                for mean, error in by_p.values()
            ]
            ratio = f"{max(means) / min(means):.3g}"
            lines.append(f"| {method} | " + " | ".join(cells) + f" | {ratio} |")
        lines.append("")
    return "\n".join(lines)


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Both against p."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 5))
    for axis, key, label in (
        (axes[0], "excess_risk", "excess risk"),
        (axes[1], "seconds_per_step", "seconds of a step"),
    ):
        for method, by_p in summary(rows, key).items():
            means, errors = zip(*by_p.values(), strict=True)
            bars = errors if key == "excess_risk" else None
            axis.errorbar(list(by_p), means, bars, marker="o", capsize=3, label=method)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("p")
        axis.set_ylabel(label)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def reported(experiment: DimensionExperiment, results: Results) -> list[Run]:
    """The runs that are shown, at the learning rates that the search found."""
    return [
        Run(method, p, best_rate(rates, method, p, results), seed)
        for p in experiment.dimensions
        for method, rates in experiment.rates.items()
        for seed in range(experiment.seeds)
    ]


def run(experiment: DimensionExperiment, results: Results, place: Place) -> None:
    """Search, and make every run that is missing."""
    search = [
        Run(method, p, rate, seed)
        for p in experiment.dimensions
        for method, rates in experiment.rates.items()
        for rate in rates
        for seed in TUNING_SEEDS
    ]
    task = partial(work, place=place)
    execute(search, results, task, place.jobs, "dimension: search")
    execute(reported(experiment, results), results, task, place.jobs, "dimension: runs")


def page(experiment: DimensionExperiment, results: Results, docs: Path) -> str:
    """The tables and their plot, from stored results alone."""
    runs = reported(experiment, results)
    rows = [row for each in runs if (row := results.of(each)) is not None]
    plot(rows, docs / "dimension.png")
    return f"{markdown(rows)}\n![excess risk and time against p](dimension.png)\n"
