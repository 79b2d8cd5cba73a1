"""A small medical private set: PneumoniaMNIST after pre-training and a second phase.

    python -m experiments.second_phase --data FOLDER

FOLDER holds fashion_mnist.npz (60,000 public images to pre-train on) and pneumoniamnist.npz: 4,708
private chest X-rays, 524 whose patients have opted in (its validation part), 624 to test on. The
CNN of PDP-SGD's paper, ε = 1. The second phase trains a part of the pre-trained network on the 524
labelled images, then any method goes on privately with the same part. Learning rates are searched
with 500 private images held out, which is not paid for in ε. Every run is a line of results.jsonl.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DataLoader

import dpspan
from dpspan.mechanisms import Method
from dpspan.models import PaperCNN
from dpspan.trainable import Trainable
from experiments.images import Images, collate
from experiments.runner import Results, best_of, execute, spread

EPSILON, DELTA, EPOCHS, BATCH, TUNING_SEED, HELD_OUT = 1.0, 1e-5, 20, 250, 1000, 500
STEPS = EPOCHS * -(-4708 // BATCH)
RATES = (0.02, 0.05, 0.1, 0.2, 0.5)
# Starts: whether the network is pre-trained, and whether it has a second phase.
SCRATCH, PRETRAINED, SECOND = "from scratch", "pre-trained", "second phase"
SETS: dict[str, Trainable | None] = {
    "all": None,
    "last two layers": dpspan.LastLayers(2),
    "first and last": dpspan.FirstAndLast(),
    "biases": dpspan.BiasOnly(also=("9",)),
}
METHODS: dict[str, Callable[[tuple[Tensor, Tensor]], Method] | None] = {
    "no private training": None,
    "DP-SGD": lambda public: dpspan.DPSGD(clip=1.0),
    "GEP": lambda public: dpspan.GEP(public=public, rank=50, clip=1.0, residual_clip=0.2),
    "mirror descent": lambda public: dpspan.MirrorDescent(
        public=public, mixing=dpspan.CosineMixing(steps=2 * STEPS), clip=1.0
    ),
}
ROWS = [
    (SCRATCH, "all", "DP-SGD"),
    (PRETRAINED, "all", "DP-SGD"),
    *((SECOND, trained, "no private training") for trained in SETS),
    *((SECOND, trained, "DP-SGD") for trained in SETS),
    (SECOND, "all", "GEP"),
    (SECOND, "all", "mirror descent"),
]


@dataclass(frozen=True)
class Run:
    """One row of the table with one learning rate and seed."""

    start: str
    trained: str
    method: str
    rate: float
    seed: int
    tuning: bool = False


@lru_cache(maxsize=1)
def pretrained(folder: Path, seed: int) -> dict[str, Tensor]:
    """The CNN after Fashion-MNIST, with a new head."""
    torch.manual_seed(seed)
    model, (x, y) = PaperCNN(), _read(folder / "fashion_mnist.npz", "train")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(3):
        for part in torch.randperm(len(x)).split(250):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
    fresh = PaperCNN(classes=2).state_dict()
    weights = model.state_dict()
    return {n: w if w.shape == fresh[n].shape else fresh[n] for n, w in weights.items()}


def train(run: Run, folder: Path) -> dict[str, Any]:
    """One run; accuracy balanced over the two classes, and AUC."""
    torch.set_num_threads(1)
    begin = time.perf_counter()
    path = folder / "pneumoniamnist.npz"
    x, y = _read(path, "train")
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(x)))
    kept, held_out = order[:-HELD_OUT], order[-HELD_OUT:]
    test = (x[held_out], y[held_out]) if run.tuning else _read(path, "test")
    private = Images(x[kept], y[kept]) if run.tuning else Images(x, y)
    public = _read(path, "val")
    # Eight of the X-rays are in both parts: they are public, then, and no longer private.
    records = dpspan.without_public(private, public)
    torch.manual_seed(run.seed)
    model: nn.Module = PaperCNN(classes=2)
    if run.start != SCRATCH:
        model.load_state_dict(pretrained(folder, run.seed))
    phase: dpspan.WarmStart | None = None
    if run.start == SECOND:
        chosen = SETS[run.trained]
        phase = dpspan.WarmStart(data=public, seed=run.seed)
        if chosen is not None:
            phase = dpspan.SecondPhase(data=public, seed=run.seed, trainable=chosen)
            model = phase.prepare(model)
    criterion, make, engine = nn.CrossEntropyLoss(), METHODS[run.method], None
    if make is None:
        assert phase is not None
        phase.run(model, criterion)
    else:
        engine = dpspan.PrivacyEngine()
        trained = [p for p in model.parameters() if p.requires_grad]
        model, optimizer, loader = engine.make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(trained, lr=run.rate),
            data_loader=DataLoader(records, batch_size=BATCH, collate_fn=collate),
            criterion=criterion,
            method=make(public),
            target_epsilon=EPSILON,
            target_delta=DELTA,
            epochs=EPOCHS,
            warm_start=phase,
        )
        for _ in range(EPOCHS):
            for images, labels in loader:
                optimizer.zero_grad()
                criterion(model(images), labels).backward()
                optimizer.step()
    model.eval()
    with torch.no_grad():
        scores = model(test[0])
    return {
        **asdict(run),
        "accuracy": balanced_accuracy_score(test[1], scores.argmax(1)),
        "auc": roc_auc_score(test[1], scores[:, 1] - scores[:, 0]),
        "epsilon": 0.0 if engine is None else engine.get_epsilon(),
        "delta": DELTA,
        "seconds": time.perf_counter() - begin,
        "certificate": None if engine is None else engine.certificate(),
    }


def searched(start: str, trained: str, method: str) -> list[Run]:
    """The runs that settle the learning rate of a row."""
    rates = (0.0,) if METHODS[method] is None else RATES
    return [Run(start, trained, method, rate, TUNING_SEED, tuning=True) for rate in rates]


def table(results: Results) -> Table:
    """Mean ± standard deviation over seeds."""
    shown = Table(title=f"PneumoniaMNIST, ε = {EPSILON:g}, δ = {DELTA:g}, test, in %")
    for heading in ("start", "trained", "then", "rate", "balanced accuracy", "AUC"):
        shown.add_column(heading)
    for row in ROWS:
        own = [
            r
            for r in results.rows
            if (r["start"], r["trained"], r["method"]) == row and not r["tuning"]
        ]
        if own:
            rates = ", ".join(f"{rate:g}" for rate in sorted({r["rate"] for r in own}))
            cells = (spread([r[name] for r in own]) for name in ("accuracy", "auc"))
            shown.add_row(*row, rates, *cells)
    return shown


def _read(path: Path, part: str) -> tuple[Tensor, Tensor]:
    if not path.exists():
        raise FileNotFoundError(f"{path} not found: put {path.name} with x_train, … there.")
    with np.load(path) as file:
        x, y = file[f"x_{part}"], file[f"y_{part}"]
    return torch.from_numpy(x)[:, None] / 127.5 - 1, torch.from_numpy(y).long()


def main() -> None:
    """Search, run what is missing, and show the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("runs/second_phase"))
    options = parser.parse_args()
    results = Results(options.out / "results.jsonl")
    work = partial(train, folder=options.data)
    search = [runs for row in ROWS if len(runs := searched(*row)) > 1]
    execute([run for runs in search for run in runs], results, work, options.jobs, "search")
    final = [
        Run(*row, best_of(searched(*row), results), seed)
        for row in ROWS
        for seed in range(options.seeds)
    ]
    execute(final, results, work, options.jobs, "runs")
    console = Console()
    console.width = max(console.width, 110)
    console.print(table(results))


if __name__ == "__main__":
    main()
