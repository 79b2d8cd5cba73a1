"""Pictures of a ranking; matplotlib is an extra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.cluster import hierarchy
from scipy.spatial.distance import squareform


def bars(
    path: Path, names: Sequence[str], columns: Mapping[str, Sequence[float]], *, title: str
) -> Path:
    """One group of horizontal bars per column, the candidates in order from the top."""
    figure = _figure((5 * len(columns), 1.5 + 0.4 * len(names)))
    axes = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for axis, (heading, values) in zip(axes, columns.items(), strict=True):
        drawn = axis.barh(range(len(names)), values, color="#0072b2")
        axis.bar_label(drawn, [f"{value:.3f}" for value in values], padding=2, fontsize=8)
        axis.set_title(heading, fontsize=10)
        axis.set_xlim(0, 1.1)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    figure.suptitle(title, fontsize=9, color="#d55e00")
    figure.savefig(path, dpi=150)
    return path


def cluster_map(
    path: Path, names: Sequence[str], distances: Sequence[Sequence[float]], *, title: str
) -> Path:
    """All pairs, datasets that are close next to one another, with the tree that says how."""
    matrix = np.asarray(distances)
    tree = hierarchy.linkage(squareform(matrix, checks=False), method="average")
    figure = _figure((2.5 + 0.7 * len(names), 2.5 + 0.6 * len(names)))
    above, below = figure.subplots(2, 1, height_ratios=[1, 3])
    order = hierarchy.dendrogram(tree, ax=above, no_labels=True, color_threshold=0)["leaves"]
    above.axis("off")
    below.imshow(matrix[np.ix_(order, order)], vmin=0, vmax=1, cmap="viridis", aspect="auto")
    for i, a in enumerate(order):
        for j, b in enumerate(order):
            colour = "white" if matrix[a, b] < 0.5 else "black"
            below.text(j, i, f"{matrix[a, b]:.2f}", ha="center", va="center", color=colour)
    ordered = [names[i] for i in order]
    below.set_xticks(range(len(order)), ordered, rotation=45, ha="right")
    below.set_yticks(range(len(order)), ordered)
    figure.suptitle(title, fontsize=9, color="#d55e00", wrap=True)
    figure.savefig(path, dpi=150)
    return path


def _figure(size: tuple[float, float]) -> Any:
    """A figure of its own: nothing global is touched, no window opens."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Pictures need matplotlib: pip install 'dpspan[choose]', or print the table instead."
        ) from error
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
