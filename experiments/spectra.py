"""Noisy AdaGrad where gradients have a spectrum: one setting after the other is changed.

    python -m experiments noisy-adagrad --data .

Logistic regression on n records with P features, whose standard deviations fall as j^(−γ): unlike
in `dimension`, k directions never hold all of a gradient. Shown is the excess risk, the loss on the
private records above the least in the same ball. `separable` is the case that the paper's envelope
is for: labels without noise, so that the gradients of all records fall. Learning rates are searched
for every method and setting alike, with three other seeds, until the best is inside of its grid.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from dp_accounting import GaussianDpEvent
from pydantic import Field
from scipy import special

from dpspan.accounting.calibration import calibrate_event
from dpspan.accounting.ledger import Ledger
from dpspan.accounting.promises import Budget
from dpspan.app.comparison.search import Search, Try
from dpspan.app.section import Count, Numbers, Section, Texts
from dpspan.convex import GradientDescent, Logistic, NoisyAdaGrad, PublicFeatures, Released
from dpspan.convex.fitting import (
    ClipSchedule,
    ConstantClip,
    Envelope,
    Fit,
    GaussianNoise,
    PrivateRecords,
)
from dpspan.convex.losses import Records
from dpspan.convex.methods import Method
from dpspan.convex.rows import Rows
from experiments.runner import Place, Results, execute

P, DELTA = 500, 1e-6
VARIANCE, LOGITS = 10.0, 1.5  # of a record in all, and the standard deviation of its logit
TUNING_SEEDS = (1000, 1001, 1002)
SEARCH = Search(tries=6, share=1.0, finalists=1)
CONSTANT, FALLING = ConstantClip(clip=1.0), Envelope(start=1.0, decay=0.25)
PUBLIC_ONLY = "public rows only"

Make = Callable[[int, int, float, float], Method]  # steps, directions, radius, learning rate


def _descent(steps: int, k: int, radius: float, rate: float) -> Method:
    return GradientDescent(steps=steps, learning_rate=rate, radius=radius)


def _projected(steps: int, k: int, radius: float, rate: float) -> Method:
    span = PublicFeatures(rank=k)
    return GradientDescent(steps=steps, learning_rate=rate, radius=radius, subspace=span)


def _paper(steps: int, k: int, radius: float, rate: float) -> Method:
    span, released = PublicFeatures(rank=k), Released()
    return NoisyAdaGrad(
        steps=steps, learning_rate=rate, radius=radius, subspace=span, preconditioner=released
    )


def _own(steps: int, k: int, radius: float, rate: float) -> Method:
    span = PublicFeatures(rank=k)
    return NoisyAdaGrad(steps=steps, learning_rate=rate, radius=radius, subspace=span)


METHODS: dict[str, tuple[Make, ClipSchedule]] = {
    "DP-GD": (_descent, CONSTANT),
    "projected DP-GD": (_projected, CONSTANT),
    "projected DP-GD, envelope": (_projected, FALLING),
    "noisy AdaGrad, the paper's": (_paper, CONSTANT),
    "noisy AdaGrad, the paper's, envelope": (_paper, FALLING),
    "noisy AdaGrad, preconditioned by noisy gradients": (_own, CONSTANT),
}


class SpectraExperiment(Section):
    """Which values each setting takes while the others stay."""

    kind: Literal["spectra"] = "spectra"
    title: str
    paper: str
    about: str
    notes: Texts = ()
    seeds: Count
    rates: Annotated[Numbers, Field(min_length=2)]
    gamma: Numbers
    k: Numbers
    m: Numbers
    n: Numbers
    steps: Numbers


@dataclass(frozen=True)
class Setting:
    """One problem and what it is solved with."""

    n: int = 2000
    m: int = 200  # public rows
    gamma: float = 1.0
    k: int = 10
    steps: int = 20
    epsilon: float = 1.0
    separable: bool = False


@dataclass(frozen=True)
class Run(Setting):
    """One fit."""

    method: str = ""
    rate: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Problem:
    """Private rows first, public ones behind them, and the ball."""

    x: np.ndarray
    y: np.ndarray
    n: int
    radius: float

    def risk(self, theta: np.ndarray) -> float:
        """Mean loss of the private records."""
        return float(
            Logistic().value(self.x[: self.n] @ theta[:, None], self.y[: self.n, None]).mean()
        )

    def least(self, rows: slice) -> np.ndarray:
        """The minimiser in the ball over some rows: accelerated, projected gradient descent."""
        x, y = self.x[rows], self.y[rows]
        rate = 4 * len(x) / np.linalg.norm(x, 2) ** 2
        theta = ahead = np.zeros(P)
        for step in range(1, 400):
            moved = ahead - rate * x.T @ (special.expit(x @ ahead) - y) / len(x)
            moved *= min(1.0, self.radius / max(float(np.linalg.norm(moved)), 1e-12))
            theta, ahead = moved, moved + (step - 1) / (step + 2) * (moved - theta)
        return theta


@lru_cache(maxsize=4)
def problem_of(n: int, m: int, gamma: float, separable: bool, seed: int) -> tuple[Problem, float]:
    """Records that depend on the seed; and the least risk."""
    rng = np.random.default_rng(seed)
    deviations = np.arange(1.0, P + 1) ** -gamma
    deviations *= np.sqrt(VARIANCE / (deviations**2).sum())
    x = rng.standard_normal((n + m, P)) * deviations
    true = rng.standard_normal(P)
    true *= LOGITS / np.linalg.norm(true * deviations)
    share = special.expit(x @ true)
    y = (share > 0.5 if separable else rng.random(len(x)) < share).astype(float)
    problem = Problem(x, y, n, radius=4 / 3 * float(np.linalg.norm(true)))
    return problem, problem.risk(problem.least(slice(0, n)))


@lru_cache(maxsize=64)
def noise_multiplier(epsilon: float, steps: int) -> float:
    """The same for all methods."""
    return calibrate_event(GaussianDpEvent, steps, Budget(epsilon=epsilon, delta=DELTA))


def work(run: Run, place: Place) -> dict[str, Any]:
    """A fit in a process of its own."""
    place.configure()
    problem, least = problem_of(run.n, run.m, run.gamma, run.separable, run.seed)
    if run.method == PUBLIC_ONLY:
        theta, epsilon = problem.least(slice(run.n, None)), 0.0
    else:
        theta, epsilon = _fitted(run, problem)
    return {
        **asdict(run),
        "excess_risk": problem.risk(theta) - least,
        "spent": epsilon,
        "delta": DELTA,
        "made": place.provenance(),
    }


def _fitted(run: Run, problem: Problem) -> tuple[np.ndarray, float]:
    make, clip = METHODS[run.method]
    z = noise_multiplier(run.epsilon, run.steps)
    ledger = Ledger(budget=Budget(epsilon=run.epsilon, delta=DELTA))
    ledger.reserve(GaussianDpEvent(z), run.steps)
    n = run.n
    fit = Fit(
        records=PrivateRecords(
            rows=Rows(problem.x[:n], intercept=False),
            targets=problem.y[:n, None],
            loss=Logistic(),
            divisor=n,
        ),
        public=Records(rows=Rows(problem.x[n:], intercept=False), loss=Logistic()),
        clip=clip,
        noise_multiplier=z,
        ledger=ledger,
        noise=GaussianNoise(),
        start=np.zeros(P),
    )
    theta = make(run.steps, run.k, problem.radius, run.rate).minimise(fit)
    return theta, ledger.epsilon()


def sweeps(experiment: SpectraExperiment) -> dict[str, list[tuple[str, Setting]]]:
    """By title: what is changed, and the setting with it."""
    base = Setting()
    separable = replace(base, separable=True)
    return {
        "how fast the spectrum falls": [
            (f"γ = {g:g}", replace(base, gamma=g)) for g in experiment.gamma
        ],
        "directions": [(f"k = {k:g}", replace(base, k=int(k))) for k in experiment.k],
        "public rows": [(f"m = {m:g}", replace(base, m=int(m))) for m in experiment.m],
        "records, at ε = 1": [(f"n = {n:,.0f}", replace(base, n=int(n))) for n in experiment.n],
        "steps": [(f"T = {t:g}", replace(base, steps=int(t))) for t in experiment.steps],
        "steps, separable": [
            (f"T = {t:g}", replace(separable, steps=int(t))) for t in experiment.steps
        ],
    }


def settings(experiment: SpectraExperiment) -> list[Setting]:
    """All of them, each once."""
    return list(dict.fromkeys(s for each in sweeps(experiment).values() for _, s in each))


def _runs(setting: Setting, method: str, rate: float, seeds: Sequence[int]) -> list[Run]:
    return [Run(**asdict(setting), method=method, rate=rate, seed=seed) for seed in seeds]


def _known(setting: Setting, method: str, results: Results, each: Try) -> float | None:
    found = [results.of(run) for run in _runs(setting, method, each.rate, TUNING_SEEDS)]
    risks = [row["excess_risk"] for row in found if row is not None]
    return -statistics.mean(risks) if len(risks) == len(found) else None


def reported(
    experiment: SpectraExperiment, setting: Setting, method: str, results: Results
) -> list[Run]:
    """The runs that are shown, at the learning rate that the search found."""
    rate = 0.0
    if method != PUBLIC_ONLY:
        rate = SEARCH.best(experiment.rates, partial(_known, setting, method, results))
    return _runs(setting, method, rate, range(experiment.seeds))


def run(experiment: SpectraExperiment, results: Results, place: Place) -> None:
    """Search, and make every run that is missing."""
    task, all_settings = partial(work, place=place), settings(experiment)
    while missing := [
        run
        for setting in all_settings
        for method in METHODS
        for each in SEARCH.wanted(experiment.rates, partial(_known, setting, method, results))
        for run in _runs(setting, method, each.rate, TUNING_SEEDS)
    ]:
        execute(missing, results, task, place.jobs, "noisy-adagrad: learning rates")
    final = [
        run
        for setting in all_settings
        for method in (PUBLIC_ONLY, *METHODS)
        for run in reported(experiment, setting, method, results)
    ]
    execute(final, results, task, place.jobs, "noisy-adagrad: runs")


def risks(
    experiment: SpectraExperiment, setting: Setting, method: str, results: Results
) -> list[float]:
    """Of the runs that are shown."""
    found = [results.of(run) for run in reported(experiment, setting, method, results)]
    return [row["excess_risk"] for row in found if row is not None]


def page(experiment: SpectraExperiment, results: Results, docs: Path) -> str:
    """A table a sweep; the best private row of each column is bold."""
    lines: list[str] = []
    for title, columns in sweeps(experiment).items():
        heads = " | ".join(name for name, _ in columns)
        lines += [f"| {title}: excess risk × 1000 | {heads} |", "|---" * (len(columns) + 1) + "|"]
        cells = {
            method: [risks(experiment, setting, method, results) for _, setting in columns]
            for method in (PUBLIC_ONLY, *METHODS)
        }
        best = [
            min(
                (statistics.mean(v[i]) for n, v in cells.items() if v[i] and n != PUBLIC_ONLY),
                default=None,
            )
            for i in range(len(columns))
        ]
        for method, found in cells.items():
            shown = [_shown(each, least) for each, least in zip(found, best, strict=True)]
            lines.append(f"| {method} | " + " | ".join(shown) + " |")
        lines.append("")
    return "\n".join(lines)


def _shown(found: list[float], best: float | None) -> str:
    if not found:
        return "—"
    mean, error = statistics.mean(found), 0.0
    if len(found) > 1:
        error = statistics.stdev(found) / len(found) ** 0.5
    text = f"{1000 * mean:.1f} ± {1000 * error:.1f}"
    return f"**{text}**" if mean == best else text
