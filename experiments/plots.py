"""Accuracy against ε, a line for each row of a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

STARTED = "warm start + "

Curves = Mapping[str, Mapping[float, Sequence[float]]]


def against_epsilon(curves: Curves, path: Path, title: str) -> None:
    """Draw means with bars of one standard deviation; what costs nothing is a level."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.8), layout="constrained")
    colours = matplotlib.colormaps["tab10"].colors
    drawn = [name for name, curve in curves.items() if curve]
    methods = list(dict.fromkeys(_method(name) for name in drawn if set(curves[name]) != {0.0}))
    for name in drawn:
        curve = curves[name]
        means = [100 * statistics.mean(values) for values in curve.values()]
        if set(curve) == {0.0}:
            axis.axhline(means[0], color="grey", linestyle=_style(name), label=name)
            continue
        bars = [100 * statistics.stdev(v) if len(v) > 1 else 0.0 for v in curve.values()]
        colour = colours[methods.index(_method(name)) % 10]
        style = {"color": colour, "linestyle": _style(name), "marker": "o", "capsize": 3}
        axis.errorbar(list(curve), means, bars, label=name, **style)
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


def _method(row: str) -> str:
    """A row's name without how it started: the same colour for both."""
    return row.rpartition(STARTED)[2]


def _style(row: str) -> str:
    """Solid from scratch, dashed after a warm start, dotted after an augmented one."""
    if "augmented" in row:
        return ":"
    return "--" if STARTED in row else "-"
