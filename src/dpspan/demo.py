"""`make demo`: scikit-learn's digits, trained privately at ε = 3, in a minute.

The data is embedded in scikit-learn, so nothing is downloaded: 1,797 real handwritten digits of
8 × 8 pixels. A fifth is held out; the rest is treated as private.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpspan.engine import PrivacyEngine
from dpspan.mechanisms import DPSGD

EPSILON, DELTA = 3.0, 1e-5
EPOCHS, BATCH, LEARNING_RATE, CLIP = 30, 256, 2.0, 1.0
RUNS = 3


@dataclass(frozen=True)
class Digits:
    """Private training records and a held-out test set."""

    train: TensorDataset
    x_test: Tensor
    y_test: Tensor


def load() -> Digits:
    """The digits as images in [−1, 1], split once and for all."""
    x, y = load_digits(return_X_y=True)
    x = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    parts = train_test_split(x, torch.tensor(y), test_size=360, random_state=0, stratify=y)
    x_train, x_test, y_train, y_test = parts
    return Digits(TensorDataset(x_train, y_train), x_test, y_test)


def network(seed: int) -> nn.Module:
    """A small convolutional network with GroupNorm."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def accuracy(model: nn.Module, digits: Digits) -> float:
    """Share of held-out digits that are recognised."""
    model.eval()
    with torch.no_grad():
        right = (model(digits.x_test).argmax(1) == digits.y_test).float().mean()
    model.train()
    return float(right)


def train(model: nn.Module, optimizer: Any, loader: Any, progress: Progress, bar: Any) -> None:
    """The loop everyone writes; it is the same with and without privacy."""
    criterion = nn.CrossEntropyLoss()
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        progress.advance(bar)


def run(out: Path, console: Console) -> None:
    """Train without and with privacy, print the table, write the certificate."""
    digits = load()
    loader = DataLoader(digits.train, batch_size=BATCH, shuffle=True)
    console.print(
        f"[bold]dpspan demo[/]: {len(digits.train)} private digits, {len(digits.x_test)} held out"
    )
    results: dict[str, list[float]] = {"without privacy": [], f"DP-SGD, ε = {EPSILON:g}": []}
    engine = PrivacyEngine()
    start = time.perf_counter()
    columns = (TextColumn("{task.description:>22}"), BarColumn(), MofNCompleteColumn(),
               TextColumn("epochs"), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console) as progress:
        for private, (name, accuracies) in enumerate(results.items()):
            bar = progress.add_task(name, total=RUNS * EPOCHS)
            for seed in range(RUNS):
                model = network(seed)
                rate = LEARNING_RATE if private else 0.3
                optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=rate)
                chosen: Any = loader
                if private:
                    # Each run is a release of its own with its own budget: a user would train
                    # once. The certificate written is that of the last run.
                    engine = PrivacyEngine()
                    model, optimizer, chosen = engine.make_private_with_epsilon(
                        module=model,
                        optimizer=optimizer,
                        data_loader=loader,
                        method=DPSGD(clip=CLIP),
                        target_epsilon=EPSILON,
                        target_delta=DELTA,
                        epochs=EPOCHS,
                    )
                train(model, optimizer, chosen, progress, bar)
                accuracies.append(accuracy(model, digits))
    engine.note_unprivate("accuracy on held-out records, shown to the operator")
    table = Table(title=f"Accuracy on held-out digits, {RUNS} runs")
    table.add_column("training")
    table.add_column("mean", justify="right")
    table.add_column("lowest … highest", justify="right")
    table.add_column("ε spent", justify="right")
    for private, (name, accuracies) in enumerate(results.items()):
        table.add_row(
            name,
            f"{statistics.mean(accuracies):.1%}",
            f"{min(accuracies):.1%} … {max(accuracies):.1%}",
            f"{engine.get_epsilon(DELTA):.3f} a run" if private else "∞",
        )
    console.print(table)
    path = engine.write_certificate(out / "certificate.json", DELTA)
    console.print(
        f"Noise multiplier {engine.noise_multiplier:.3f}, clip {CLIP:g}, δ = {DELTA:g}; "
        f"{time.perf_counter() - start:.0f} s in all. What the last run spent: {path}"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m dpspan.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder to write to")
    run(parser.parse_args().out, Console())


if __name__ == "__main__":
    main()
