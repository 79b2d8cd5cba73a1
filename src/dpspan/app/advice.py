"""What to do with a private dataset, asked of public data before any private step: costs no ε.

The private run is rehearsed on public data, and what did best there is recommended. The private
records are never touched: not read, not counted. How many there are (`records`) is taken from the
caller, who must be free to say it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table
from scipy import stats

from dpspan.accounting.epsilon import account
from dpspan.app.comparison.results import LEVEL, chance
from dpspan.app.run.jobs import workers
from dpspan.app.run.scene import BehindLayer, OnPatches, Scene, public_of, scene_of
from dpspan.app.run.task import Contender, Spent, Task, with_baselines
from dpspan.app.run.training import noise_for, rehearse
from dpspan.mechanisms import DPSGD, GEP, PDPSGD, RGP, Method
from dpspan.mechanisms.carriers import carried_weights
from dpspan.public.data import PublicData
from dpspan.support.checks import check_count, check_positive, expect
from dpspan.support.progress import watched

RATES = (0.1, 0.25, 0.5, 1.0, 2.0)


def advise(
    task: Task,
    contenders: Sequence[Contender] | None = None,
    *,
    records: int | None = None,
    stand_in: object = None,
    rates: Sequence[float] = RATES,
    folds: int = 4,
    jobs: int = 1,
    console: Console | None = None,
) -> Advice:
    """Recommend a method, its settings and a learning rate, at no cost in privacy.

    Args:
        task: as for `compare`; its private and test records are not touched.
        contenders: what to try, whatever their learning rates; by default
            `default_contenders(task)`. What one of them has `paid`, or will, is taken off its
            budget.
        records: how many private records there are, roughly, if that is public; by default the
            task's.
        stand_in: labelled public data that differ from the public data as the private data do. By
            default the public data itself is cut into parts, one of which plays the private data.
        rates: learning rates to try.
        folds: ways to cut the stand-in; the first finds the rates, the others tell how good.
        jobs: trainings at a time, in processes of their own.
        console: where the progress bar goes; none without one.
    """
    records = check_count("records", task.records if records is None else records)
    expect(task.batch_size <= records, f"batch_size of at most {records}", task.batch_size)
    check_count("folds", folds, least=3)
    expect(bool(rates), "at least 1 learning rate", rates)
    for rate in rates:
        check_positive("every learning rate", rate)
    everyone = with_baselines(task, default_contenders(task) if contenders is None else contenders)
    task = dataclasses.replace(task, records=records)
    scenes = _scenes(task, everyone, stand_in, folds)
    layers = {id(c.model): c.model for c in everyone if isinstance(c.model, BehindLayer)}
    seen = functools.partial(watched, scenes, "learning layers", shown=console is not None)
    behind = {name: [scene.behind(layer) for scene in seen()] for name, layer in layers.items()}

    def job(contender: Contender, fold: int) -> tuple[Any, ...]:
        scene = behind.get(id(contender.model), scenes)[fold]
        return scene.job(contender, noise.get(contender.name, 0.0), fold)

    tuned = [c for c in everyone if c.method is not None]
    noise = {c.name: noise_for(task, c) for c in tuned}
    grids = {c.name: [r * _longer(c) for r in rates] for c in tuned}
    first = [job(dataclasses.replace(c, learning_rate=r), 0) for c in tuned for r in grids[c.name]]
    total = len(first) + len(everyone) * (folds - 1)
    with workers(jobs, console, "rehearsing on public data", total=total) as run_all:
        reached = _accuracies(run_all(rehearse, first))
        best = {c.name: max((next(reached), r) for r in grids[c.name])[1] for c in tuned}
        settled = [dataclasses.replace(c, learning_rate=best.get(c.name)) for c in everyone]
        final = [job(c, fold) for c in settled for fold in range(1, folds)]
        values = _accuracies(run_all(rehearse, final))
    trials = tuple(
        Trial(
            name=c.name,
            private=c.method is not None,
            warm=c.warm_start is not None,
            settings=None if c.method is None else c.method.describe(),
            learning_rate=c.learning_rate,
            at_the_end=len(rates) > 1 and c.learning_rate in _ends(grids.get(c.name, rates)),
            layer=c.model.section if isinstance(c.model, BehindLayer) else None,
            values=tuple(next(values) for _ in range(1, folds)),
        )
        for c in settled
    )
    notes = _notes(trials, scenes[0], records, stand_in is None)
    return conclude(trials, (*notes, *_paid(task, everyone)))


def _longer(contender: Contender) -> float:
    return contender.model.more if isinstance(contender.model, BehindLayer) else 1.0


def _ends(grid: Sequence[float]) -> tuple[float, float]:
    return min(grid), max(grid)


def _accuracies(reached: Sequence[float]) -> Iterator[float]:
    """Of what diverged nothing is right."""
    return (0.0 if math.isnan(value) else value for value in reached)


def default_contenders(task: Task) -> tuple[Contender, ...]:
    """Each method with a few ranks and clips, from scratch and, with public labels, warm-started.

    Of images also DP-SGD on a linear layer behind a frozen one of public patches.

    The learning rates are placeholders: `advise` tries its own.
    """
    methods: dict[str, Method] = {f"DP-SGD, clip {clip:g}": DPSGD(clip=clip) for clip in (1.0, 0.3)}
    with contextlib.suppress(ValueError):  # of models without a weight that it makes smaller
        carried_weights(task.new_model(0), 2, None)
        methods["RGP, rank 2"] = RGP(rank=2, clip=1.0)
    if task.public is not None:
        data = PublicData.of(task.public)
        for rank in sorted({max(1, data.count // 5), max(1, data.count // 2)}):
            methods[f"PDP-SGD, rank {rank}"] = PDPSGD(public=data, rank=rank, clip=1.0)
            methods[f"GEP, rank {rank}, clips 1 and 0.2"] = GEP(
                public=data, rank=rank, clip=1.0, residual_clip=0.2
            )
    cold = [Contender(name=n, method=m, learning_rate=1.0) for n, m in methods.items()]
    if task.public is not None and (layer := OnPatches.of(task, PublicData.of(task.public))):
        own: dict[str, Any] = {"method": DPSGD(clip=0.1), "learning_rate": 1.0, "model": layer}
        cold.append(Contender(name="patches + DP-SGD, clip 0.1", **own))
    start = task.start
    return tuple(cold) if start is None else (*cold, *(c.warmed(start) for c in cold))


def _scenes(
    task: Task, contenders: Sequence[Contender], stand_in: object, folds: int
) -> list[Scene]:
    given = task.public if stand_in is None else stand_in
    source = None if given is None else PublicData.of(given, name="stand-in")
    if source is None or not source.labelled:
        raise ValueError(
            "Expected labelled public data to rehearse on, got none. Pass stand_in= (inputs and "
            "labels of the same kind as the private ones). Without any, no advice about your data "
            "is free: docs/which-method.md says what did best on others."
        )
    used = {data.digest: data for contender in contenders for data in public_of(contender)}
    others = None if stand_in is None else tuple(used.values())
    return [scene_of(task, source, fold=fold, others=others) for fold in range(folds)]


def _notes(trials: Sequence[Trial], scene: Scene, records: int, same_data: bool) -> Iterator[str]:
    size = len(scene.task.private)  # type: ignore[arg-type]
    if size < records:
        yield (
            f"An extrapolation: {size:,} public samples stood in for {records:,} records, with "
            "the same noise in every step but fewer records to learn from; the real run should do "
            "better than the rehearsal."
        )
    if same_data:
        yield (
            "Assumes that private records resemble the public ones as those resemble one another. "
            "If they differ more, public data alone, a warm start and public subspaces are worth "
            "less than here, private training more."
        )
    if any(trial.at_the_end for trial in trials):
        yield "Rates marked * are the first or last tried: set another, and others are tried."


def _paid(task: Task, contenders: Sequence[Contender]) -> Iterator[str]:
    """What the budgets were lowered by; all of it is public."""
    payers: dict[Spent, list[str]] = {}
    for contender in contenders:
        if spent := contender.spent:
            payers.setdefault(spent, []).append(f"“{contender.name}”")
    for spent, names in payers.items():
        epsilon = account(spent, task.budget.delta, task.accountant).epsilon
        yield (
            f"What these pay beside their steps, ε = {epsilon:.3g} alone, is taken off their "
            f"budget: {', '.join(names)}."
        )


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One contender at its best learning rate, on every fold but the one that found the rate."""

    name: str
    private: bool
    warm: bool
    settings: dict[str, Any] | None  # of the method
    learning_rate: float | None
    at_the_end: bool  # whether the best rate was the first or the last that was tried
    values: tuple[float, ...]
    layer: str | None = None  # the frozen one that it stands behind

    @property
    def mean(self) -> float:
        return statistics.mean(self.values)

    @property
    def effort(self) -> int:
        """What it asks of its user: nothing private, plain DP-SGD, or more."""
        plain = self.settings is not None and self.settings["method"] == "DPSGD"
        plain = plain and self.layer is None
        return 0 if not self.private else 1 if plain else 2


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A recommendation from public data alone; all of it may be published.

    `recommended` is the simplest of those that the folds cannot tell from the best (p ≥ 0.05).
    """

    recommended: str
    sure: bool  # whether everything else is worse, p < 0.05 for all of them together
    tied: tuple[str, ...]  # what else might be as good
    trials: tuple[Trial, ...]
    notes: tuple[str, ...]

    def sentences(self) -> list[str]:
        """The recommendation in words."""
        best = next(trial for trial in self.trials if trial.name == self.recommended)
        rate = "" if best.learning_rate is None else f" with learning rate {best.learning_rate:g}"
        said = [f"Try “{best.name}”{rate}: {best.mean:.1%} in the rehearsal."]
        if not best.private:
            said.append("Private training was not clearly better there, so spend no ε on it yet.")
        if self.sure:
            said.append("Everything else was clearly worse.")
        elif self.tied:
            said.append(f"As good, as far as the folds can tell: {', '.join(self.tied)}.")
        else:
            said.append("It was ahead of everything else, if not beyond doubt with so few folds.")
        return [*said, *self.notes]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        headings = ("accuracy", "lowest … highest", "learning rate")
        columns = (Column(heading, justify="right") for heading in headings)
        title, caption = "Rehearsed on public data (ε = 0)", "mean, lowest and highest"
        shown = Table("training", *columns, title=title, caption=caption)
        for trial in sorted(self.trials, key=lambda trial: -trial.mean):
            rate = "" if trial.learning_rate is None else f"{trial.learning_rate:g}"
            mark, end = "→ " * (trial.name == self.recommended), "*" * trial.at_the_end
            spread = f"{min(trial.values):.1%} … {max(trial.values):.1%}"
            shown.add_row(mark + trial.name, f"{trial.mean:.1%}", spread, rate + end)
        yield shown
        yield from (f"• {sentence}" for sentence in self.sentences())


def conclude(trials: tuple[Trial, ...], notes: tuple[str, ...]) -> Advice:
    """Find the best, whatever is not worse by more than chance, and of those the simplest."""
    best = max(trials, key=lambda trial: trial.mean)
    others = [trial for trial in trials if trial is not best]
    # Paired, as all saw the same folds.
    chances = {
        other.name: chance(stats.ttest_rel, best.values, other.values, alternative="greater")
        for other in others
    }
    tied = [trial for trial in others if chances[trial.name] >= LEVEL]
    chosen = min([best, *tied], key=lambda t: (t.effort, -t.mean, trials.index(t)))
    return Advice(
        recommended=chosen.name,
        # Among many, one is behind by chance sooner or later.
        sure=all(p < LEVEL / len(others) for p in chances.values()),
        tied=tuple(trial.name for trial in (best, *tied) if trial is not chosen),
        trials=trials,
        notes=notes,
    )
