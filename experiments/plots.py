"""Accuracy against ε, a line for each row of a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

Curves = Mapping[str, Mapping[float, Sequence[float]]]


def against_epsilon(curves: Curves, path: Path, title: str) -> None:
    """Draw means with bars of one standard deviation; what costs nothing is a level."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.8), layout="constrained")
    colours = matplotlib.colormaps["tab10"].colors
    drawn = [name for name, curve in curves.items() if curve]
    for index, name in enumerate(drawn):
        curve = curves[name]
        means = [100 * statistics.mean(values) for values in curve.values()]
        colour, style = colours[index % 10], "--" if index >= 10 else "-"
        if set(curve) == {0.0}:
            axis.axhline(means[0], color="grey", linestyle=":", label=name)
            continue
        bars = [100 * statistics.stdev(v) if len(v) > 1 else 0.0 for v in curve.values()]
        axis.errorbar(
            list(curve),
            means,
            bars,
            color=colour,
            linestyle=style,
            marker="o",
            capsize=3,
            label=name,
        )
    axis.set_xscale("log")
    ticks = sorted({e for name in drawn for e in curves[name] if e > 0})
    axis.set_xticks(ticks, [f"{e:g}" for e in ticks])
    axis.minorticks_off()
    axis.set_xlabel("ε")
    axis.set_ylabel("test accuracy, %")
    axis.set_title(title, fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
