"""What the number of features costs: rank-10 features embedded in p = 100 … 100,000 dimensions.

    python -m experiments.dimension

Logistic regression on n = 500 records at ε = 1, δ = 1e-6: the same ten numbers a record, turned
into p features by an isometry, so that without privacy nothing depends on p. 100 public rows of the
same kind span the subspace. Shown is the excess risk, loss on the private records above the least
possible, and the time of a step. The learning rate of each method at each p is the best of its
grid for three other seeds. Constrained methods stay in a ball of radius 2; the true weights have
length 1.5. Every finished run is a line of results.jsonl; a run that is already there is not
repeated.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from dp_accounting import GaussianDpEvent
from rich.console import Console
from scipy import optimize, special

from dpspan.accounting import Budget, calibrate_event
from dpspan.convex import (
    FromNoisyGradients,
    GradientDescent,
    Logistic,
    NoisyAdaGrad,
    PublicFeatures,
    Released,
)
from dpspan.convex.fitting import Fit, GaussianNoise, PrivateRecords
from dpspan.convex.methods import Method
from dpspan.convex.oracles import PublicSide
from dpspan.convex.rows import Rows
from dpspan.convex.schedules import ConstantClip
from dpspan.ledger import Ledger
from experiments.runner import Results, execute

N, PUBLIC, RANK, STEPS = 500, 100, 10, 20
LENGTH, RADIUS = 1.5, 2.0  # of the true weights, and of the ball
BUDGET = Budget(epsilon=1.0, delta=1e-6)
TUNING_SEEDS = (1000, 1001, 1002)
CENTRE = {"excess_risk": statistics.mean, "seconds_per_step": min}
IN_SPAN = PublicFeatures(rank=RANK)
METHODS: dict[str, tuple[Sequence[float], Callable[[float], Method]]] = {
    "DP-GD": (
        (0.5, 1.0, 2.0),
        lambda rate: GradientDescent(steps=STEPS, learning_rate=rate),
    ),
    "DP-GD, constrained": (
        (0.1, 0.4, 1.6),
        lambda rate: GradientDescent(steps=STEPS, learning_rate=rate, radius=RADIUS),
    ),
    "AdaGrad, diagonal, constrained": (
        (0.02, 0.1, 0.5),
        lambda rate: NoisyAdaGrad(
            steps=STEPS,
            learning_rate=rate,
            radius=RADIUS,
            preconditioner=FromNoisyGradients(diagonal=True),
        ),
    ),
    "projected DP-GD, constrained": (
        (0.5, 1.0, 2.0),
        lambda rate: GradientDescent(
            steps=STEPS, learning_rate=rate, radius=RADIUS, subspace=IN_SPAN
        ),
    ),
    "projected AdaGrad, constrained": (
        (0.15, 0.3, 0.6),
        lambda rate: NoisyAdaGrad(steps=STEPS, learning_rate=rate, radius=RADIUS, subspace=IN_SPAN),
    ),
    "projected AdaGrad, released, constrained": (
        (0.1, 0.2, 0.3, 0.5, 1.0, 2.0),
        lambda rate: NoisyAdaGrad(
            steps=STEPS,
            learning_rate=rate,
            radius=RADIUS,
            subspace=IN_SPAN,
            preconditioner=Released(),
        ),
    ),
}


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


def work(run: Run) -> dict[str, Any]:
    """A run in a process of its own."""
    problem = problem_of(run.p, run.seed)
    x = problem.z @ problem.embedding
    method = METHODS[run.method][1](run.rate)
    z = noise_multiplier()
    ledger = Ledger(budget=BUDGET)
    ledger.reserve(GaussianDpEvent(z), STEPS)
    moments: list[float] = []

    def timed(steps: Iterable[int]) -> Iterator[int]:
        for step in steps:
            moments.append(time.perf_counter())
            yield step
        moments.append(time.perf_counter())

    fit = Fit(
        records=PrivateRecords(
            rows=Rows(x[:N], intercept=False),
            targets=problem.y[:N, None],
            loss=Logistic(),
            divisor=N,
        ),
        public=PublicSide(
            outputs=1, width=run.p, loss=Logistic(), rows=Rows(x[N:], intercept=False)
        ),
        clip=ConstantClip(clip=1.0),
        noise_multiplier=z,
        ledger=ledger,
        noise=GaussianNoise(),
        start=np.zeros(run.p),
        watch=timed,
    )
    theta = method.minimise(fit)
    return {
        **asdict(run),
        "excess_risk": problem.risk(problem.embedding @ theta) - problem.least_risk(),
        "seconds_per_step": statistics.median(np.diff(moments)),
        "epsilon": ledger.epsilon(),
        "delta": BUDGET.delta,
    }


def best_rate(method: str, p: int, results: Results) -> float:
    """The learning rate that did best in the search."""

    def risk(rate: float) -> float:
        rows = [results.of(Run(method, p, rate, seed)) for seed in TUNING_SEEDS]
        return statistics.mean(row["excess_risk"] for row in rows if row is not None)

    return min(METHODS[method][0], key=risk)


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


def main() -> None:
    """Search, run, and show tables and plot."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dimensions", type=int, nargs="+", default=[100, 1000, 10_000, 100_000])
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("runs/dimension"))
    options = parser.parse_args()
    results = Results(options.out / "results.jsonl")
    search = [
        Run(method, p, rate, seed)
        for p in options.dimensions
        for method, (rates, _) in METHODS.items()
        for rate in rates
        for seed in TUNING_SEEDS
    ]
    execute(search, results, work, options.jobs, "search")
    first = Run("", 0, 0.0, 0)
    final = [
        replace(first, method=method, p=p, rate=best_rate(method, p, results), seed=seed)
        for p in options.dimensions
        for method in METHODS
        for seed in range(options.seeds)
    ]
    execute(final, results, work, options.jobs, "runs")
    rows = [row for run in final if (row := results.of(run)) is not None]
    text = markdown(rows)
    (options.out / "dimension.md").write_text(text + "\n")
    plot(rows, options.out / "dimension.png")
    Console().print(text, soft_wrap=True, markup=False)


if __name__ == "__main__":
    main()
