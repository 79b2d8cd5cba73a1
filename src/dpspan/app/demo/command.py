"""The demo from the first line to the report."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpspan.accounting.epsilon import Budget
from dpspan.app.comparison import Comparison, Task, compare, verdicts
from dpspan.app.comparison.compare import locked
from dpspan.app.demo import data
from dpspan.app.demo.candidates import choose, rank_on_stand_in
from dpspan.app.demo.settings import (
    BATCH,
    DELTA,
    EPOCHS,
    EPSILON,
    OPT_IN,
    RENDERED,
    TEST,
    WARM,
    contenders,
    network,
)
from dpspan.app.report import render
from dpspan.app.run.folder import RunFolder, read_json
from dpspan.public.data import PublicData
from dpspan.support.randomness import seeded


def run(
    out: Path,
    console: Console,
    *,
    epsilon: float = EPSILON,
    epochs: int = EPOCHS,
    seeds: int = 3,
    jobs: int | None = None,
) -> Comparison:
    """Rank, choose, compare, report."""
    began = time.perf_counter()
    digits, printed = data.handwritten(opt_in=OPT_IN, test=TEST), data.rendered(RENDERED, seed=0)
    console.print(
        f"[bold]dpspan demo[/]: {len(digits.private):,} private handwritten digits, {TEST} others "
        f"to measure on (declared public), ε = {epsilon:g}, δ = {DELTA:g}.\n"
        f"Public: {OPT_IN} opt-in scans without labels, {RENDERED} printed digits with labels, "
        "patches of photographs, noise."
    )
    with locked(out):
        public = _chosen(out, console, digits, printed[0])
    labelled = PublicData.of(printed, name="printed digits")
    task = Task(
        model=network,
        private=digits.private,
        test=digits.test,
        batch_size=BATCH,
        epochs=epochs,
        budget=Budget(epsilon=epsilon, delta=DELTA),
        public=labelled,
        warm_start=dataclasses.replace(WARM, data=labelled),
        test_is_public=True,
    )
    comparison = compare(
        task,
        contenders(public=public, start=task.start, paid=read_json(RunFolder(out).ledger)),
        out=out,
        seeds=range(seeds),
        jobs=jobs or min(2, os.cpu_count() or 1),
        console=console,
    )
    console.print(comparison)
    for sentence in (*verdicts(comparison), _if_labelled(task, digits.opt_in, seeds, comparison)):
        console.print(f"• {sentence}")
    page = render([out], out / "report.html")
    console.print(f"{time.perf_counter() - began:.0f} s in all. To read on: {page}")
    return comparison


def _chosen(out: Path, console: Console, digits: data.Digits, printed: Tensor) -> PublicData:
    """Rank the public data by public scans, and choose among them by the private digits."""
    scans, model, half = digits.opt_in.tensors[0], _new_network(0), OPT_IN // 2
    near = {"opt-in scans": scans[half:], **_others(printed, half)}
    console.print(rank_on_stand_in(out, model, scans[:half], near))
    candidates = {"opt-in scans": scans, **_others(printed, OPT_IN)}
    choice = choose(out, model, digits.private, candidates)
    console.print(
        f"The private digits themselves chose, for ε = {choice['epsilon']:g}: "
        f"[bold]{choice['chosen']}[/]. {choice['note']}\n"
    )
    return PublicData.of(candidates[choice["chosen"]], name=choice["chosen"])


def _new_network(seed: int) -> nn.Module:
    """Weights that have seen no data."""
    with seeded(nn.Identity(), seed):
        return network()


def _others(printed: Tensor, count: int) -> dict[str, Tensor]:
    return {
        "printed digits": printed[:count],
        "photographs": data.photographs(count, seed=0),
        "noise": data.noise(count, seed=0),
    }


def _if_labelled(task: Task, opt_in: TensorDataset, seeds: int, comparison: Comparison) -> str:
    """The lesson beside the table: labels for the scans would be worth so much."""
    accuracies = []
    assert isinstance(task.test, TensorDataset)
    x, y = task.test.tensors
    for seed in range(seeds):
        model = _new_network(seed)
        dataclasses.replace(WARM, data=opt_in, seed=seed).run(model, task.criterion)
        with torch.no_grad():
            accuracies.append(float((model(x).argmax(1) == y).float().mean()))
    best = max((row for row in comparison.rows if row.private), key=lambda row: row.mean)
    ahead = statistics.mean(accuracies) - best.mean
    return (
        f"Had somebody labelled the {len(opt_in)} opt-in scans, training on them alone would have "
        f"reached {statistics.mean(accuracies):.1%} at ε = 0 ({min(accuracies):.1%} … "
        f"{max(accuracies):.1%}): {100 * abs(ahead):.1f} points {'more' if ahead > 0 else 'less'} "
        f"than the best private row, “{best.name}”."
    )
