"""What `secure_mode` costs: `python -m benchmarks.secure [--models …] [--rounds 15]`.

Whole steps through the engine, with the usual noise and the secure one in turn within one process,
so that the ratio does not depend on what else the machine does; and the noise alone. One thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.contenders import LEARNING_RATE, NOISE
from benchmarks.problems import PROBLEMS
from benchmarks.processes import Repeated
from dpspan import PrivacyEngine
from dpspan.mechanisms.noise import Noise

BATCHES = {"mlp-64": 256, "cnn": 256, "resnet20": 64}
WARM_UP = 2


def steps(model: str, batch: int, *, secure: bool) -> Iterator[float]:
    """Milliseconds of one step after the other."""
    problem = PROBLEMS[model]
    module = problem.model("cpu")
    _, optimizer, loader = PrivacyEngine(secure_mode=secure).make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=LEARNING_RATE),
        data_loader=DataLoader(Repeated(*problem.data(batch, "cpu")), batch_size=batch),
        criterion=(criterion := nn.CrossEntropyLoss()),
        noise_multiplier=NOISE,
    )
    start = time.perf_counter()
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            criterion(module(x), y).backward()
            optimizer.step()
            yield 1000 * (time.perf_counter() - start)
            start = time.perf_counter()


def draws(count: int, *, secure: bool) -> Iterator[float]:
    """Milliseconds of the noise of one release after the other."""
    noise, total = Noise(secure=secure), {"sum": torch.zeros(count)}
    while True:
        start = time.perf_counter()
        noise.add(total, 1.0)
        yield 1000 * (time.perf_counter() - start)


def in_turn(make: Callable[..., Iterator[float]], *args: Any, rounds: int) -> dict[str, float]:
    """Medians of both kinds, and of the ratios of neighbours."""
    usual, secure = make(*args, secure=False), make(*args, secure=True)
    pairs = [(next(usual), next(secure)) for _ in range(WARM_UP + rounds)][WARM_UP:]
    found = {"usual": [a for a, _ in pairs], "secure": [b for _, b in pairs]}
    ratios = [b / a for a, b in pairs]
    return {
        **{k: statistics.median(v) for k, v in found.items()},
        "ratio": statistics.median(ratios),
    }


def measure(models: list[str], rounds: int) -> list[dict[str, Any]]:
    """A row for each model."""
    rows = []
    for model in models:
        batch = BATCHES.get(model, 64)
        numbers = sum(p.numel() for p in PROBLEMS[model].model("cpu").parameters())
        step = in_turn(steps, model, batch, rounds=rounds)
        noise = in_turn(draws, numbers, rounds=rounds)
        rows.append(
            {"model": model, "parameters": numbers, "batch": batch, "step": step, "noise": noise}
        )
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    """As docs/privacy.md has it."""
    shown = Table("model", "parameters", "batch", "noise, ms", "ratio", "step, ms", "ratio")
    for row in rows:
        times = []
        for what in ("noise", "step"):
            found = row[what]
            times += [f"{found['usual']:.2f} → {found['secure']:.2f}", f"× {found['ratio']:.2f}"]
        shown.add_row(row["model"], f"{row['parameters']:,}", str(row["batch"]), *times)
    return shown


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=[*BATCHES])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/secure-cpu.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(args.models, args.rounds)
    args.out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=2) + "\n")
    Console().print(table(rows))


if __name__ == "__main__":
    main()
