"""`advise`: rehearse the private run on public data, and recommend what did best there.

The private records are never touched: not read, not counted. How many there are (`records`) is
taken from the caller, who must be free to say it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rich.console import Console

from dpspan.accounting.epsilon import Budget, account
from dpspan.app.advice.results import Advice, Trial, conclude
from dpspan.app.advice.stand_in import Rehearsal, public_of, rehearsal
from dpspan.app.run.jobs import workers
from dpspan.app.run.task import Contender, Task, with_baselines
from dpspan.app.run.training import Spent, calibrated, rehearse
from dpspan.engine.sampling import PoissonDraw
from dpspan.mechanisms import DPSGD, GEP, PDPSGD, RGP, Method
from dpspan.public.data import PublicData
from dpspan.support.checks import check_count, check_positive, expect

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
    check_count("folds", folds, least=3)
    expect(bool(rates), "at least 1 learning rate", rates)
    for rate in rates:
        check_positive("every learning rate", rate)
    everyone = with_baselines(task, default_contenders(task) if contenders is None else contenders)
    scenes = _scenes(task, everyone, stand_in, records=records, folds=folds)
    tuned = [c for c in everyone if c.method is not None]
    noise = {c.name: _noise(task, c, records) for c in tuned}
    first: list[Job] = [
        (scenes[0], dataclasses.replace(c, learning_rate=r), noise[c.name], 0)
        for c in tuned
        for r in rates
    ]
    total = len(first) + len(everyone) * (folds - 1)
    with workers(jobs, console, "rehearsing on public data", total=total) as run_all:
        reached = iter(run_all(_work, first))
        best = {c.name: max((next(reached), r) for r in rates)[1] for c in tuned}
        settled = [dataclasses.replace(c, learning_rate=best.get(c.name)) for c in everyone]
        final: list[Job] = [
            (scenes[fold], c, noise.get(c.name, 0.0), fold)
            for c in settled
            for fold in range(1, folds)
        ]
        values = iter(run_all(_work, final))
    trials = tuple(
        Trial(
            name=c.name,
            private=c.method is not None,
            warm=c.warm_start is not None,
            settings=None if c.method is None else c.method.describe(),
            learning_rate=c.learning_rate,
            at_the_end=len(rates) > 1 and c.learning_rate in (min(rates), max(rates)),
            values=tuple(next(values) for _ in range(1, folds)),
        )
        for c in settled
    )
    notes = _notes(trials, scenes[0], records, stand_in is None)
    return conclude(trials, (*notes, *_paid(task, everyone)))


def default_contenders(task: Task) -> tuple[Contender, ...]:
    """Each method with a few ranks and clips, from scratch and, with public labels, warm-started.

    The learning rates are placeholders: `advise` tries its own.
    """
    methods: dict[str, Method] = {f"DP-SGD, clip {clip:g}": DPSGD(clip=clip) for clip in (1.0, 0.3)}
    methods["RGP, rank 2"] = RGP(rank=2, clip=1.0)
    if task.public is not None:
        data = PublicData.of(task.public)
        for rank in sorted({max(1, data.count // 5), max(1, data.count // 2)}):
            methods[f"PDP-SGD, rank {rank}"] = PDPSGD(public=data, rank=rank, clip=1.0)
            methods[f"GEP, rank {rank}, clips 1 and 0.2"] = GEP(
                public=data, rank=rank, clip=1.0, residual_clip=0.2
            )
    cold = [Contender(name=n, method=m, learning_rate=1.0) for n, m in methods.items()]
    start = task.start
    return tuple(cold) if start is None else (*cold, *(c.warmed(start) for c in cold))


def _scenes(
    task: Task, contenders: Sequence[Contender], stand_in: object, *, records: int, folds: int
) -> list[Rehearsal]:
    given = task.public if stand_in is None else stand_in
    source = None if given is None else PublicData.of(given, name="stand-in")
    if source is None or not source.labelled:
        raise ValueError(
            "Expected labelled public data to rehearse on, got none. Pass stand_in= (inputs and "
            "labels of the same kind as the private ones); without any, no advice is free."
        )
    used = {d.digest: d for c in contenders for d in public_of(c)} if stand_in is not None else {}
    return [
        rehearsal(
            task, source, records=records, fold=fold, keep_public=stand_in is None,
            others=tuple(used.values()),
        )
        for fold in range(folds)
    ]  # fmt: skip


def _noise(task: Task, contender: Contender, records: int) -> float:
    """z of the real run."""
    rate = task.batch_size / records
    steps = task.epochs * PoissonDraw.one_pass(records=records, sample_rate=rate).steps_per_epoch
    assert isinstance(task.budget, Budget)
    return calibrated(task.budget, contender.spent, rate, steps, task.accountant)


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
        if spent := contender.spent:
            payers.setdefault(spent, []).append(f"“{contender.name}”")
    return tuple(
        f"What these pay beside their steps, ε = "
        f"{account(spent, task.budget.delta, task.accountant).epsilon:.3g} alone, is taken off "
        f"their budget: {', '.join(names)}."
        for spent, names in payers.items()
    )


def _work(scene: Rehearsal, contender: Contender, noise: float, seed: int) -> float:
    changed = scene.contender(contender)
    return rehearse(scene.task, changed, seed, scene.noise(noise), scene.sample_rate)
