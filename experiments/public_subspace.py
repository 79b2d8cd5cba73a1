"""What a public subspace is worth, in the setting of the PDP-SGD paper.

    python -m experiments.public_subspace --data FOLDER

Fashion-MNIST, n = 10,000 private and 100 public images, the papers' CNN, 30 epochs of batches of
250, at noise multipliers of the paper: public data only, DP-SGD, PDP-SGD, RPDP-SGD, biased GEP and
GEP, each with and without a warm start on the public labels, with real and with random labels for
the public gradients. The learning rate of each row comes from a search with another seed, judged
on images that are neither private, public nor test; the search is part of the output, and its cost
in privacy is not in ε (all rows had the same search).

Every finished run is a line of results.jsonl; a run that is already there is not repeated.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader

import dpspan
from dpspan.mechanisms import Method
from dpspan.models import PaperCNN
from experiments.images import Split, accuracy, collate, load
from experiments.runner import Results, best_of, execute, spread

PRIVATE, PUBLIC, BATCH, EPOCHS, DELTA = 10_000, 100, 250, 30, 1e-5
TUNING_SEED = 1000
METHODS = ("DP-SGD", "RPDP-SGD", "PDP-SGD", "PDP-SGD from epoch 15", "B-GEP", "GEP")
WITHOUT_PUBLIC_GRADIENTS = ("DP-SGD", "RPDP-SGD")
# Noise in all dimensions wants smaller steps than noise in a few.
RATES = {
    "DP-SGD": (0.005, 0.01, 0.02, 0.05, 0.1, 0.2),
    "GEP": (0.01, 0.02, 0.05, 0.1, 0.2, 0.4),
    "RPDP-SGD": (0.02, 0.05, 0.1, 0.2),
    "PDP-SGD": (0.05, 0.1, 0.2, 0.4, 0.8),
    "PDP-SGD from epoch 15": (0.01, 0.02, 0.05, 0.1, 0.2),
    "B-GEP": (0.02, 0.05, 0.1, 0.2, 0.4),
}


@dataclass(frozen=True)
class Run:
    """One training run."""

    dataset: str
    sigma: float
    method: str
    labels: str  # of the public gradients: real, random, or none
    warm: bool
    rate: float
    seed: int

    @property
    def tuning(self) -> bool:
        """Whether it is part of the search."""
        return self.seed == TUNING_SEED


def method_of(run: Run, public: tuple[torch.Tensor, torch.Tensor]) -> Method:
    """The method with the paper's settings: clip 1, k = 50 (70 from epoch 15, 800 random)."""
    shared: dict[str, Any] = {"public": public, "public_labels": run.labels, "clip": 1.0}
    builders = {
        "DP-SGD": lambda: dpspan.DPSGD(clip=1.0),
        "RPDP-SGD": lambda: dpspan.PDPSGD(
            subspace=dpspan.RandomSubspace(rank=800, seed=run.seed), clip=1.0
        ),
        "PDP-SGD": lambda: dpspan.PDPSGD(**shared, rank=50),
        "PDP-SGD from epoch 15": lambda: dpspan.PDPSGD(**shared, rank=70, start_epoch=15),
        "B-GEP": lambda: dpspan.BiasedGEP(**shared, rank=50),
        "GEP": lambda: dpspan.GEP(**shared, rank=50, residual_clip=0.2),
    }
    return builders[run.method]()


def train(run: Run, data: Split, device: str) -> dict[str, Any]:
    """One run through the engine; what it reached and what it cost."""
    start = time.perf_counter()
    torch.manual_seed(run.seed)
    model = PaperCNN().to(device)
    criterion = nn.CrossEntropyLoss()
    warm_start = dpspan.WarmStart(data=data.public, seed=run.seed) if run.warm else None
    engine = dpspan.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=run.rate),
        data_loader=DataLoader(data.private, batch_size=BATCH, collate_fn=collate),
        criterion=criterion,
        noise_multiplier=run.sigma,
        method=method_of(run, data.public),
        warm_start=warm_start,
    )
    public_only = accuracy(model, data.test) if run.warm else None
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
    return {
        **asdict(run),
        "accuracy": accuracy(model, data.test),
        "public_only": public_only,
        "epsilon": engine.get_epsilon(DELTA),
        "delta": DELTA,
        "seconds": time.perf_counter() - start,
        "certificate": engine.certificate(DELTA),
    }


def work(run: Run, folder: Path, device: str) -> dict[str, Any]:
    """A run in a process of its own."""
    torch.set_num_threads(1)
    data = load(
        folder,
        run.dataset,
        private=PRIVATE,
        public=PUBLIC,
        seed=run.seed,
        device=device,
        tuning=run.tuning,
    )
    return train(run, data, device)


def cells(options: argparse.Namespace) -> list[Run]:
    """Every row of the table, still without a learning rate and a seed."""
    return [
        Run(options.dataset, sigma, method, labels, warm, 0.0, 0)
        for sigma in options.sigmas
        for method in options.methods
        for labels in (("none",) if method in WITHOUT_PUBLIC_GRADIENTS else ("real", "random"))
        for warm in (False, True)
    ]


def table(final: list[dict[str, Any]], options: argparse.Namespace) -> Table:
    """Mean and standard deviation over seeds, beside public data only."""
    shown = Table(
        title=f"{options.dataset}, n = {PRIVATE:,}, {PUBLIC} public, test accuracy in %",
        caption="mean ± standard deviation over seeds [learning rate]",
    )
    columns = ["σ", "ε (PLD)", "method", "public labels", "from scratch", "after warm start"]
    for name in columns:
        shown.add_column(name, justify="left" if name in columns[2:4] else "right")
    for sigma in options.sigmas:
        here = [row for row in final if row["sigma"] == sigma]
        alone = {row["seed"]: row["public_only"] for row in here if row["public_only"] is not None}
        shown.add_section()
        shown.add_row(str(sigma), "0", "public data only", "real", "", spread(alone.values()))
        for method in options.methods:
            for labels in ("none", "real", "random"):
                own = [r for r in here if (r["method"], r["labels"]) == (method, labels)]
                if not own:
                    continue
                texts = []
                for warm in (False, True):
                    part = [r for r in own if r["warm"] == warm]
                    rates = sorted({r["rate"] for r in part})
                    texts.append(f"{spread([r['accuracy'] for r in part])} {rates}")
                epsilon = f"{max(r['epsilon'] for r in own):.3f}"
                shown.add_row(str(sigma), epsilon, method, labels, *texts)
    return shown


def main() -> None:
    """Search, run, and show the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with DATASET.npz")
    parser.add_argument("--dataset", default="fashion_mnist")
    parser.add_argument("--sigmas", type=float, nargs="+", default=[18.0, 6.0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("runs/public_subspace"))
    options = parser.parse_args()
    results = Results(options.out / "results.jsonl")
    rows = cells(options)
    # Random labels use the learning rate that was found for real ones.
    search = [run for cell in rows if cell.labels != "random" for run in _search(cell)]
    execute(
        search,
        results,
        partial(work, folder=options.data, device=options.device),
        options.jobs,
        "search",
    )
    final = [
        replace(cell, rate=best_of(_search(cell), results), seed=seed)
        for cell in rows
        for seed in range(options.seeds)
    ]
    execute(
        final,
        results,
        partial(work, folder=options.data, device=options.device),
        options.jobs,
        "runs",
    )
    console = Console()
    console.width = max(console.width, 110)
    rows_of_runs = [row for run in final if (row := results.of(run)) is not None]
    console.print(table(rows_of_runs, options))


def _search(cell: Run) -> list[Run]:
    """The runs that settle the learning rate of a cell: with real labels only."""
    labels = "real" if cell.labels == "random" else cell.labels
    return [
        replace(cell, labels=labels, rate=rate, seed=TUNING_SEED) for rate in RATES[cell.method]
    ]


if __name__ == "__main__":
    main()
