"""Where the demo's learning rates come from: a rehearsal on printed digits, at no cost in privacy.

Digits in one italic font play the labelled public data; digits in all other fonts play the private
records, as many of them, and, without labels, the opt-in scans. Of the nine families the italic one
is least like the others: trained on it alone, the network gets 72 % of them right (trained on
all printed digits, 61 % of the handwritten ones). `python -m experiments.demo_rates` repeats it.
"""

from __future__ import annotations

import dataclasses
import os

import torch
from rich.console import Console
from torch.utils.data import TensorDataset

from dpspan.accounting.promises import Budget
from dpspan.app.advice import Advice, advise
from dpspan.app.comparison import Task
from dpspan.app.demo import (
    BATCH,
    DELTA,
    EPOCHS,
    EPSILON,
    LARGE_EPSILON,
    OPT_IN,
    RENDERED,
    TEST,
    WARM,
    contenders,
    data,
    network,
)
from dpspan.public.data import PublicData

GRID = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


def tune(
    console: Console,
    *,
    records: int,
    jobs: int,
    epsilon: float = EPSILON,
    folds: int = 3,
    epochs: int = EPOCHS,
) -> Advice:
    """Try each learning rate where it costs nothing."""
    seen = data.rendered(RENDERED, seed=1, families=data.ITALIC)
    scans = data.rendered(OPT_IN, seed=2, families=data.OTHERS)[0]
    unlabelled = PublicData.of(scans, name="other digits")
    # A quarter is kept to measure on.
    play = data.rendered(round(records / 0.74), seed=3, families=data.OTHERS)
    public = PublicData.of(seen, name="italic digits")
    nothing = TensorDataset(torch.empty(0))  # the rehearsal must not need the real records
    task = Task(
        model=network,
        private=nothing,
        test=nothing,
        batch_size=BATCH,
        epochs=epochs,
        budget=Budget(epsilon=epsilon, delta=DELTA),
        public=public,
        warm_start=dataclasses.replace(WARM, data=public),
    )
    advice = advise(
        task,
        contenders(epsilon=epsilon, public=unlabelled, start=task.start, paid=None),
        records=records,
        stand_in=play,
        rates=GRID,
        folds=folds,
        jobs=jobs,
        console=console,
    )
    console.print(advice)
    return advice


if __name__ == "__main__":
    private = data.handwritten(opt_in=OPT_IN, test=TEST).private
    for epsilon in (EPSILON, LARGE_EPSILON):
        tune(Console(), records=len(private), jobs=min(2, os.cpu_count() or 1), epsilon=epsilon)
