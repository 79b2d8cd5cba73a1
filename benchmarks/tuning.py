"""What a search is worth at ε = 3: `python -m benchmarks.tuning --repeats 4`.

scikit-learn's digits: in each repetition other 1,097 private records, 300 labelled public ones and
400 to test on. A learning rate that is fixed beforehand, one found by `tune` on the private records
(scored by them or by the public ones), and one found by `advise` on the public records; all models
cost ε = 3 with everything that was done for them. The results are those of docs/tuning.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

from dpspan.app.advice import advise
from dpspan.app.config import Config
from dpspan.app.run.from_config import contender_of, make_parts, task_of
from dpspan.app.run.task import PUBLIC_ONLY, Contender, Task
from dpspan.app.run.training import noise_for, rehearse
from dpspan.app.tune import tune

RESULTS = Path(__file__).parent / "results" / "tuning.json"
PUBLIC, TEST = 300, 400
RATE, CLIP, TRIES = 0.5, 1.0, 5
RATES = (0.05, 0.16, 0.5, 1.6, 5.0)  # of `advise`; `tune` draws between the ends


def write_data(folder: Path, seed: int) -> None:
    """Other records in each repetition."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))
    public, test, private = np.split(order, [PUBLIC, PUBLIC + TEST])
    parts = {"private": private, "public": public, "test": test}
    arrays = {f"{k}_{n}": a[i] for n, i in parts.items() for k, a in (("x", x / 16), ("y", y))}
    np.savez(folder / "digits.npz", **arrays)


def configuration(folder: Path, out: str, *, rate: float = RATE, **method: Any) -> Config:
    """DP-SGD on a linear model; what is not stated is a default of dpspan."""

    def part(name: str) -> dict[str, str]:
        path = str(folder / "digits.npz")
        return {"format": "npz", "path": path, "inputs": f"x_{name}", "labels": f"y_{name}"}

    return Config.model_validate(
        {
            "data": {
                "classes": 10,
                "private": part("private"),
                "public": {"public": part("public")},
                "test": part("test"),
                "test_is_public": True,
                "records": 1100,
            },
            "model": {"name": "logistic"},
            "method": {"name": "dpsgd", "clip": CLIP, **method},
            "budget": {"epsilon": 3.0, "delta": 1e-4},
            "training": {
                "epochs": 30,
                "batch_size": 128,
                "optimizer": {"name": "sgd", "learning_rate": rate},
            },
            "output": {"folder": str(folder / out)},
        }
    )


def parts(folder: Path, **settings: Any) -> tuple[Task, Contender]:
    """The task, with the public records, and DP-SGD with these settings."""
    config = configuration(folder, "unused", **settings)
    read = make_parts(config)
    assert read.test is not None
    task = task_of(config, read.private, read.test.dataset)
    contender = contender_of("DP-SGD", config, read.public, steps=task.steps)
    return dataclasses.replace(task, public=read.public["public"]), contender


def fixed(folder: Path, out: str, **settings: Any) -> dict[str, Any]:
    """One run with settings that nobody searched; its noise is that of ε = 3 by PLD."""
    task, contender = parts(folder, **settings)
    return {"accuracy": trained(task, contender), **settings}


def trained(task: Task, contender: Contender) -> float:
    """The test accuracy of one run."""
    noise = 0.0 if contender.method is None else noise_for(task, contender)
    return rehearse(task, contender, 0, noise, task.sample_rate)


def warm(folder: Path, out: str) -> dict[str, Any]:
    """DP-SGD after training on the public records."""
    task, contender = parts(folder)
    assert task.start is not None
    return {"accuracy": trained(task, contender.warmed(task.start))}


def public_only(folder: Path, out: str) -> dict[str, Any]:
    """The public records alone, for nothing."""
    task, _ = parts(folder)
    return {"accuracy": trained(task, Contender(name=PUBLIC_ONLY, warm_start=task.start))}


def tuned(folder: Path, out: str, **options: Any) -> dict[str, Any]:
    """The best of a random number of tries, about TRIES."""
    found = tune(configuration(folder, out), tries=TRIES, **options)
    accuracy = found.metrics["test_accuracy"]
    return {"accuracy": accuracy, "epsilon": found.epsilon, "rate": found.found["learning_rate"]}


def advised(folder: Path, out: str) -> dict[str, Any]:
    """DP-SGD with the learning rate that public records recommend."""
    task, contender = parts(folder)
    advice = advise(task, [contender], rates=RATES, folds=3)
    rate = next(trial.learning_rate for trial in advice.trials if trial.name == "DP-SGD")
    assert rate is not None
    return {**fixed(folder, out, rate=rate), "recommended": advice.recommended}


ROWS: dict[str, Callable[[Path, str], dict[str, Any]]] = {
    "fixed learning rate 0.05": lambda folder, out: fixed(folder, out, rate=0.05),
    "fixed learning rate 0.5": lambda folder, out: fixed(folder, out, rate=0.5),
    "fixed learning rate 5": lambda folder, out: fixed(folder, out, rate=5.0),
    "tune, scored by private records": tuned,
    "tune, scored by 300 public ones": lambda folder, out: tuned(folder, out, score_on="public"),
    "advise on 300 public records": advised,
    "300 public records alone, ε = 0": public_only,
    "fixed 0.5, after a warm start on them": warm,
    "fixed 0.5, clip 30": lambda folder, out: fixed(folder, out, clip=30.0),
    "fixed 0.5, adaptive clip from 30": lambda folder, out: fixed(
        folder, out, clip=30.0, clipping="adaptive"
    ),
}


def measure(repeat: int) -> dict[str, dict[str, Any]]:
    """Every row once, on the same records."""
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        write_data(folder, repeat)
        return {row: make(folder, f"run-{at}") for at, (row, make) in enumerate(ROWS.items())}


def cells(results: list[dict[str, dict[str, Any]]]) -> list[tuple[str, str, str, str]]:
    """Means, with the lowest and the highest, in per cent."""
    shown = []
    for row in ROWS:
        found = [result[row] for result in results if row in result]
        reached = [each["accuracy"] for each in found]
        spread = statistics.stdev(reached) if len(reached) > 1 else 0.0
        rates = [f"{each['rate']:g}" for each in found if "rate" in each]
        mean = f"{100 * statistics.mean(reached):.1f} ± {100 * spread:.1f}"
        ends = f"{100 * min(reached):.1f} … {100 * max(reached):.1f}"
        shown.append((row, mean, ends, ", ".join(rates if len({*rates}) > 1 else rates[:1])))
    return shown


def main() -> None:
    """Measure what is missing, and show everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    results = json.loads(options.results.read_text()) if options.results.exists() else []
    for repeat in range(len(results), options.repeats):
        results.append(measure(repeat))
        options.results.write_text(json.dumps(results, indent=1) + "\n")
    shown = Table("at ε = 3, δ = 1e-4", "test accuracy", "lowest … highest", "learning rates")
    for row in cells(results):
        shown.add_row(*row)
    Console().print(shown)


if __name__ == "__main__":
    main()
