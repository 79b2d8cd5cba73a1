"""How a step grows: `python -m benchmarks.growth [--device cuda] [--tf32]`.

Time and peak memory of a step against the batch, the public batch, the rank and the number of
parameters, one of them at a time, beside the non-private step's. The slope of a line through the
larger half of the points, in logarithms, is printed: 1 is proportional growth, 0 none.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import contenders, measure, report
from benchmarks.methods import Case, on_private, step_of
from benchmarks.problems import PROBLEMS, WIDTHS

SCALE = {"cpu": 1, "cuda": 8}
ROUNDS = 5
COLOURS = {
    contenders.PLAIN: "#999999",
    "DP-SGD": "#0072b2",
    "RGP, rank 8": "#cc79a7",
    "mirror descent": "#e69f00",
    "PDP-SGD": "#d55e00",
    "GEP": "#009e73",
}


@dataclass(frozen=True)
class Point:
    """One setting: a model and a case."""

    x: int  # what grows
    problem: str
    case: Case


def curves(device: str) -> Mapping[str, tuple[Sequence[str], Sequence[Point]]]:
    """What grows: the contenders, and the settings from small to large."""
    s = SCALE[device]
    batches = [s * n for n in (32, 64, 128, 256)]
    ranks = [s * k for k in (8, 16, 32, 64)]
    parameters = {w: 785 * w + 10 * (w + 1) for w in WIDTHS}
    n = m = 64 * s
    k = 32 * s
    return {
        f"private samples (ResNet-20, {m} public, k = {k})": (
            ("DP-SGD", "RGP, rank 8", "GEP"),
            [Point(size, "resnet20", Case(size, m, k)) for size in batches],
        ),
        f"public samples (ResNet-20, {n} private, k = {batches[0]})": (
            ("PDP-SGD", "GEP", "mirror descent"),
            [Point(size, "resnet20", Case(n, size, batches[0])) for size in batches],
        ),
        f"directions k (ResNet-20, {n} private, {m} public)": (
            ("PDP-SGD", "GEP"),
            [Point(rank, "resnet20", Case(n, m, rank)) for rank in ranks],
        ),
        "parameters (one hidden layer, 250 private, 64 public, k = 32)": (
            ("DP-SGD", "RGP, rank 8", "GEP"),
            [Point(p, f"mlp-{w}", Case(250, 64, 32)) for w, p in parameters.items()],
        ),
    }


def factories(names: Sequence[str], case: Case) -> dict[str, contenders.Factory]:
    """The non-private step of the private samples first."""
    plain = partial(on_private, case=case, of=contenders.plain_step)
    ours = {name: partial(step_of, case=case, method=name) for name in names}
    return {contenders.PLAIN: plain, **ours}


def at(point: Point, names: Sequence[str], device: str, tf32: bool) -> dict[str, dict[str, float]]:
    """Milliseconds (median) and bytes above the level before, of everyone."""
    case, problem = point.case, PROBLEMS[point.problem]
    batch, made = case.private + case.public, factories(names, case)
    steps = {
        name: measure.prepare(factory, problem, batch, device, contenders.NOISE).step
        for name, factory in made.items()
    }
    times = measure.interleave(steps, device, 0.0, ROUNDS)
    steps.clear()
    found = {}
    for name, factory in made.items():
        memory = measure.peak_memory(point.problem, factory, batch, device, tf32)
        found[name] = {
            "milliseconds": float(np.median(times[name])),
            "bytes": float(memory.get("above", float("nan"))),
        }
    return found


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Of the larger half of the points, in logarithms."""
    half = len(xs) // 2
    return float(np.polyfit(np.log(xs[half:]), np.log(ys[half:]), 1)[0])


def table(results: Mapping[str, Any]) -> Table:
    """The slopes."""
    shown = Table(title="Growth of a step: slope in logarithms", caption="time / peak memory")
    shown.add_column("what grows")
    shown.add_column("from … to")
    shown.add_column("contender")
    shown.add_column("time", justify="right")
    shown.add_column("memory", justify="right")
    for title, curve in results["curves"].items():
        shown.add_section()
        for name, slopes in curve["slopes"].items():
            ends = f"{curve['x'][0]:,} … {curve['x'][-1]:,}"
            shown.add_row(
                title, ends, name, f"{slopes['milliseconds']:.2f}", f"{slopes['bytes']:.2f}"
            )
    return shown


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Time and memory against each, logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter, NullLocator

    count = len(results["curves"])
    figure, axes = plt.subplots(2, count, figsize=(4.2 * count, 7), layout="constrained")
    for column, (title, curve) in enumerate(results["curves"].items()):
        for row, (key, unit) in enumerate((("milliseconds", "ms"), ("bytes", "MB"))):
            axis, factor = axes[row, column], 1.0 if key == "milliseconds" else 1e-6
            for name in curve["points"][0]:
                values = [factor * point[name][key] for point in curve["points"]]
                label = f"{name} ({curve['slopes'][name][key]:.2f})"
                axis.loglog(curve["x"], values, marker="o", label=label, color=COLOURS[name])
            axis.set_xticks(curve["x"], [f"{x:,}" for x in curve["x"]])
            axis.xaxis.set_minor_locator(NullLocator())
            axis.yaxis.set_minor_formatter(NullFormatter())
            axis.set_ylabel(unit)
            axis.legend(fontsize=7, frameon=False)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0, column].set_title(title.replace(" (", "\n("), fontsize=9)
        axes[1, column].set_xlabel(title.split(" (")[0])
    place = results["environment"]["gpu"] or results["environment"]["cpu"]
    figure.suptitle(f"{place}; slope of the larger half in brackets", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Measure, save and show."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tf32", action="store_true", help="instead of float32, on a GPU")
    parser.add_argument("--threads", type=int, help="torch's threads; default: torch's choice")
    parser.add_argument("--out", type=Path, default=Path("runs/growth"))
    options = parser.parse_args()
    measure.configure(options.threads, options.tf32)
    start = time.perf_counter()
    results: dict[str, Any] = {
        "environment": report.environment(options.device),
        "tf32": options.tf32,
        "curves": {},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / options.device
    for title, (names, points) in curves(options.device).items():
        found = [at(point, names, options.device, options.tf32) for point in points]
        xs = [point.x for point in points]

        def grown(name: str, key: str, xs: Sequence[int] = xs, found: Any = found) -> float:
            return slope(xs, [each[name][key] for each in found])

        slopes = {
            name: {key: grown(name, key) for key in ("milliseconds", "bytes")} for name in found[0]
        }
        results["curves"][title] = {"x": xs, "points": found, "slopes": slopes}
        results["seconds"] = time.perf_counter() - start
        stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, stem.with_suffix(".png"))
    Console().print(table(results))


if __name__ == "__main__":
    main()
