"""`advise`: rehearse the private run on public data, and recommend what did best there.

The private records are never touched: not read, not counted. How many there are (`records`) is
taken from the caller, who must be free to say it.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dpspan.accounting.epsilon import account
from dpspan.app.advice.defaults import usual_contenders
from dpspan.app.advice.results import Advice, Trial, conclude
from dpspan.app.advice.stand_in import Rehearsal, public_of, rehearsal
from dpspan.app.comparison import Contender, Task, with_baselines
from dpspan.app.comparison.training import Spent, calibrated, rehearse, spent_by
from dpspan.engine.sampling import PoissonDraw
from dpspan.public.data import PublicData
from dpspan.support.checks import check_count, expect

RATES = (0.1, 0.25, 0.5, 1.0, 2.0)
Job = tuple[Rehearsal, Contender, float, int]  # with z of the real run, and a seed


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
        contenders: what to try, whatever their learning rates; `usual_contenders(task)` by default.
            What one of them has `paid`, or will, is taken off its budget.
        records: how many private records there are, roughly, if that is public; by default the
            task's.
        stand_in: labelled public data that differ from the public data as the private data do. By
            default the public data itself is cut into parts, one of which plays the private data.
        rates: learning rates to try.
        folds: ways to cut the stand-in; the first finds the rates, the others tell how good.
        jobs: trainings at a time, in processes of their own.
        console: where the progress bar goes; none without one.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from torch.utils.data import TensorDataset
        >>> import dpspan
        >>> x, y = torch.randn(800, 4), torch.arange(800) % 2
        >>> public = x[400:], y[400:]
        >>> task = dpspan.Task(
        ...     model=lambda: nn.Linear(4, 2),
        ...     private=TensorDataset(x[:400], y[:400]),
        ...     test=TensorDataset(*public),
        ...     batch_size=50,
        ...     epochs=2,
        ...     budget=dpspan.Budget(epsilon=3.0, delta=1e-4),
        ...     public=public,
        ...     warm_start=dpspan.WarmStart(data=public, max_epochs=5),
        ... )
        >>> method = dpspan.DPSGD(clip=1.0)
        >>> contender = dpspan.Contender(name="DP-SGD", method=method, learning_rate=0.5)
        >>> advice = dpspan.advise(task, [contender], records=400, rates=(0.5,), folds=3)
        >>> advice.recommended in {"public only", "DP-SGD", "warm start + DP-SGD"}
        True
    """
    records = check_count("records", task.records if records is None else records)
    expect(task.batch_size <= records, f"batch_size of at most {records}", task.batch_size)
    expect(isinstance(folds, int) and folds >= 3, "folds an int of at least 3", folds)
    expect(bool(rates) and all(rate > 0 for rate in rates), "learning rates > 0", rates)
    source = PublicData.of(task.public if stand_in is None else stand_in, name="stand-in") if (
        task.public is not None or stand_in is not None
    ) else None  # fmt: skip
    if source is None or not source.labelled:
        raise ValueError(
            "Expected labelled public data to rehearse on, got none. Pass stand_in= (inputs and "
            "labels of the same kind as the private ones); without any, no advice is free."
        )
    everyone = with_baselines(task, usual_contenders(task) if contenders is None else contenders)
    rate = task.batch_size / records
    steps = task.epochs * PoissonDraw.one_pass(records=records, sample_rate=rate).steps_per_epoch
    others = tuple(data for c in everyone for data in public_of(c)) if stand_in is not None else ()
    scenes = [
        rehearsal(
            task, source, records=records, fold=fold, keep_public=stand_in is None,
            others=tuple({d.digest: d for d in others}.values()),
        )
        for fold in range(folds)
    ]  # fmt: skip
    tuned = [c for c in everyone if c.method is not None]
    noise = {
        c.name: calibrated(task.budget, spent_by(c), rate, steps, task.accountant) for c in tuned
    }
    first = [
        (scenes[0], dataclasses.replace(c, learning_rate=r), noise[c.name], 0)
        for c in tuned
        for r in rates
    ]
    with _workers(jobs, console, len(first) + len(everyone) * (folds - 1)) as run:
        reached = iter(run(first))
        best = {c.name: max((next(reached), r) for r in rates)[1] for c in tuned}
        settled = [dataclasses.replace(c, learning_rate=best.get(c.name)) for c in everyone]
        final = [
            (scenes[fold], c, noise.get(c.name, 0.0), fold)
            for c in settled
            for fold in range(1, folds)
        ]
        values = iter(run(final))
        trials = tuple(
            Trial(
                name=c.name,
                private=c.method is not None,
                warm=c.warm_start is not None,
                settings=None if c.method is None else c.method.describe(),
                learning_rate=best.get(c.name),
                at_the_end=len(rates) > 1 and best.get(c.name) in (min(rates), max(rates)),
                values=tuple(next(values) for _ in range(1, folds)),
            )
            for c in everyone
        )
    notes = _notes(trials, scenes[0], records, stand_in is None)
    return conclude(trials, (*notes, *_paid(task, everyone)))


def _notes(
    trials: Sequence[Trial], scene: Rehearsal, records: int, same_data: bool
) -> tuple[str, ...]:
    size = len(scene.task.private)  # type: ignore[arg-type]
    notes = []
    if size < records:
        notes.append(
            f"An extrapolation: {size:,} public samples stood in for {records:,} records, with "
            "the same noise in every step but fewer records to learn from; the real run should do "
            "better than the rehearsal."
        )
    if same_data:
        notes.append(
            "Assumes that private records resemble the public ones as those resemble one another. "
            "If they differ more, public data alone, a warm start and public subspaces are worth "
            "less than here, private training more."
        )
    if any(trial.at_the_end for trial in trials):
        notes.append("Rates marked * are the first or the last that was tried: widen rates=.")
    return tuple(notes)


def _paid(task: Task, contenders: Sequence[Contender]) -> tuple[str, ...]:
    """What the budgets were lowered by; all of it is public."""
    payers: dict[Spent, list[str]] = {}
    for contender in contenders:
        if spent := spent_by(contender):
            payers.setdefault(spent, []).append(f"“{contender.name}”")
    return tuple(
        f"What these pay beside their steps, ε = "
        f"{account(spent, task.budget.delta, task.accountant).epsilon:.3g} alone, is taken off "
        f"their budget: {', '.join(names)}."
        for spent, names in payers.items()
    )


def _work(job: Job) -> float:
    scene, contender, noise, seed = job
    changed = scene.contender(contender)
    return rehearse(scene.task, changed, seed, scene.noise(noise), scene.sample_rate)


class _Run:
    """Runs jobs in order, here or in processes, and tells a progress bar."""

    def __init__(self, pool: ProcessPoolExecutor | None, progress: Progress, total: int) -> None:
        self._pool, self._progress = pool, progress
        self._bar = progress.add_task("rehearsing on public data", total=total)

    def __call__(self, jobs: Sequence[Job]) -> list[float]:
        found = []
        for value in map(_work, jobs) if self._pool is None else self._pool.map(_work, jobs):
            found.append(value)
            self._progress.advance(self._bar)
        return found


@contextmanager
def _workers(jobs: int, console: Console | None, total: int) -> Iterator[_Run]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    where = console or Console(quiet=True)  # a disabled bar may still end its line
    with Progress(*columns, TimeRemainingColumn(), console=where, disable=where.quiet) as progress:
        if check_count("jobs", jobs) == 1:
            yield _Run(None, progress, total)
            return
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(
            jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            yield _Run(pool, progress, total)
