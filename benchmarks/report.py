"""What comes out: a table, a JSON file with everything, a plot."""

import json
import platform
import statistics
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.contenders import PLAIN

Results = dict[str, Any]
COLOURS = ["#0072b2", "#56b4e9", "#999999", "#d55e00"]
CAPTION = (
    "ms: median [quartiles]. Factors of time: median over rounds of the ratio within a round. "
    "Memory: peak above the level before the first step, own process. "
    "Error: distance of a noiseless step from per-sample clipping in a loop, relative."
)


def environment(device: str) -> Results:
    """Where the numbers were taken."""
    names = ["torch", "opacus", "dpspan", "numpy"]
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpu = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "cpu": cpu[0] if cpu else platform.processor(),
        "cpus": len(cpu) or None,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "threads": torch.get_num_threads(),
        "torch_build": torch.__config__.show(),
    }


def summarise(results: Results) -> None:
    """Add medians, quartiles and factors to the raw measurements, in place."""
    for model in results["models"].values():
        contenders = model["contenders"]
        timed = {name: c for name, c in contenders.items() if "milliseconds" in c}
        for c in timed.values():
            low, middle, high = np.quantile(c["milliseconds"], [0.25, 0.5, 0.75]).tolist()
            c["time"] = {"median": middle, "quartiles": [low, high]}
        opacus = [name for name in timed if name.startswith("opacus")]
        fastest = min(opacus, key=lambda name: timed[name]["time"]["median"], default=None)
        model["fastest_opacus"] = fastest
        for c in timed.values():
            for key, rival in (("of_plain", PLAIN), ("of_opacus", fastest)):
                if rival in timed:
                    pairs = zip(c["milliseconds"], timed[rival]["milliseconds"], strict=True)
                    c["time"][key] = statistics.median(a / b for a, b in pairs)
        plain = contenders.get(PLAIN, {}).get("memory", {}).get("above")
        for c in contenders.values():
            if plain and "above" in c.get("memory", {}):
                c["memory"]["of_plain"] = c["memory"]["above"] / plain


def _number(value: float | None, pattern: str) -> str:
    return "—" if value is None else format(value, pattern)


def table(results: Results) -> Table:
    """The measurements as a rich table."""
    env, device = results["environment"], results["settings"]["device"]
    place = env["gpu"] or f"{env['cpu']}, {env['threads']} threads"
    out = Table(title=f"One training step on {device} ({place})", caption=Text(CAPTION))
    out.add_column("model")
    out.add_column("contender")
    for heading in ("ms", "× plain", "× Opacus", "peak MB", "× plain", "error"):
        out.add_column(heading, justify="right")
    for name, model in results["models"].items():
        label = f"{name}\nbatch {model['batch']}\n{model['rounds']} rounds"
        out.add_section()
        for contender, c in model["contenders"].items():
            time, memory = c.get("time", {}), c.get("memory", {})
            spread = " [{:.1f}–{:.1f}]".format(*time["quartiles"]) if time else ""
            above = memory.get("above")
            out.add_row(
                label.split("\n")[0] if label else "",
                contender,
                _number(time.get("median"), ".1f") + spread,
                _number(time.get("of_plain"), ".2f"),
                _number(time.get("of_opacus"), ".2f"),
                _number(above and above / 1e6, ".1f"),
                _number(memory.get("of_plain"), ".2f"),
                _number(c.get("error"), ".0e"),
            )
            label = label.partition("\n")[2]
    return out


def plot(results: Results, path: Path) -> None:
    """Grouped bars: time and memory relative to the non-private step, logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = results["models"]
    names = [c for c in next(iter(models.values()))["contenders"] if c != PLAIN]
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for axis, (part, title) in zip(
        axes, (("time", "time of a step"), ("memory", "peak memory of a step")), strict=True
    ):
        for i, name in enumerate(names):
            width = 0.8 / len(names)
            places = [k + (i - (len(names) - 1) / 2) * width for k in range(len(models))]
            values = [m["contenders"][name].get(part, {}).get("of_plain") for m in models.values()]
            heights = [v or float("nan") for v in values]
            bars = axis.bar(places, heights, width, label=name, color=COLOURS[i % len(COLOURS)])
            axis.bar_label(bars, [f"{v:.1f}" if v else "" for v in values], fontsize=7, padding=1)
            for place, value in zip(places, values, strict=True):
                if not value:
                    axis.text(place, 1.03, "—", ha="center", fontsize=8)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_yscale("log")
        axis.set_xticks(range(len(models)), [f"{k}\nbatch {m['batch']}" for k, m in models.items()])
        axis.set_title(f"{title}, non-private = 1", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    env = results["environment"]
    figure.suptitle(
        f"{env['gpu'] or env['cpu']}, torch {env['versions']['torch']}, "
        f"Opacus {env['versions']['opacus']}, {env['date'][:10]}",
        fontsize=9,
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def save(results: Results, folder: Path) -> None:
    """Write `FOLDER/DEVICE.json` and `FOLDER/DEVICE.png`."""
    summarise(results)
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / results["settings"]["device"]
    stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, stem.with_suffix(".png"))


def show(results: Results) -> None:
    """Print the table, and below it what disturbed the timing and what did not run."""
    console = Console()
    console.width = max(console.width, 110)
    console.print(table(results))
    for name, model in results["models"].items():
        if model["disturbance"] > 0.05:
            busy = f"other processes used {model['disturbance']:.0%} of the processors"
            console.print(f"{name}: {busy} during the timing", style="yellow")
        for contender, c in model["contenders"].items():
            for kind in ("reason", "note"):
                if c.get(kind):
                    console.print(f"{name}, {contender}: {c[kind]}", markup=False, style="dim")
    console.print(f"{results['seconds']:.0f} seconds in all", style="dim")
