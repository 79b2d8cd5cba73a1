"""A map of regimes: at each place the best simple method, and by how much ours is ahead of it.

Both are picked by the means that are shown, so a lead is called one only if chance gives one as
long in fewer than one of twenty draws of seeds (Student's t, as there are few). Seeds are paired:
all methods get the same records.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field
from scipy.stats import t as student

from dpspan.app.section import Section, Texts

Spot = tuple[int, float]  # records and ε: a place on the map
Scores = dict[tuple[str, int], float]  # in per cent, by table and seed
Measured = Mapping[str, Scores]  # by method
LIKELY = 0.95


class Map(Section):
    """The rows of one map, which know equally much; `simple` are those that need no paper."""

    simple: Annotated[Texts, Field(min_length=1)]
    ours: Annotated[Texts, Field(min_length=1)]


def mean(scores: Scores) -> float:
    """Over all tables and seeds."""
    return statistics.mean(scores.values())


def lead(own: Scores, other: Scores) -> tuple[float, float]:
    """By how much one is above the other, and the standard error of that."""
    tables = {table for table, _ in own}
    variances = [
        statistics.variance([own[t, s] - other[t, s] for t, s in own if t == table])
        / sum(t == table for t, _ in own)
        for table in tables
    ]
    return mean(own) - mean(other), sum(variances) ** 0.5 / len(tables)


@dataclass(frozen=True)
class Cell:
    """A place on the map: the best simple method, and the best of ours."""

    simple: str
    best: str
    score: float
    lead: float
    error: float
    freedom: int  # degrees of it, in the standard error

    @property
    def clear(self) -> bool:
        """Whether chance does not explain who is ahead."""
        return abs(self.lead) > float(student.ppf((1 + LIKELY) / 2, self.freedom)) * self.error

    @property
    def text(self) -> str:
        """For a table."""
        who = f"**{self.best}**" if self.clear and self.lead > 0 else self.best
        if self.clear and self.lead < 0:
            who = f"{self.simple} is ahead of {self.best}"
        return f"{who} {_signed(self.lead)} ± {self.error:.1f} ({self.score:.1f}; {self.simple})"


def cell(found: Measured, simple: Collection[str]) -> Cell:
    """What a place shows."""
    first = max((m for m in found if m in simple), key=lambda m: mean(found[m]))
    best = max((m for m in found if m not in simple), key=lambda m: mean(found[m]))
    ahead, error = lead(found[best], found[first])
    freedom = len(found[best]) - len({table for table, _ in found[best]})
    return Cell(first, best, mean(found[best]), ahead, error, freedom)


def cells_of(rows: Map, known: Mapping[Spot, Measured]) -> dict[Spot, Cell]:
    """The places of one map of which every row is there."""
    names = (*rows.simple, *rows.ours)
    return {
        at: cell({name: found[name] for name in names}, rows.simple)
        for at, found in known.items()
        if all(name in found for name in names)
    }


def leads_table(
    records: Sequence[int], epsilons: Sequence[float], cells: Mapping[Spot, Cell]
) -> list[str]:
    """Records by ε."""
    heads = " | ".join(f"ε = {epsilon:g}" for epsilon in epsilons)
    lines = [f"| records | {heads} |", "|---" * (len(epsilons) + 1) + "|"]
    for n in records:
        texts = [cells[n, e].text if (n, e) in cells else "—" for e in epsilons]
        lines.append(f"| {n:,} | " + " | ".join(texts) + " |")
    return lines


def means_table(epsilon: float, known: Mapping[Spot, Measured], score: str) -> list[str]:
    """Every method at one ε, by records."""
    shown = [at for at in known if at[1] == epsilon]
    names = " | ".join(f"{n:,} records" for n, _ in shown)
    lines = [f"| {score}, ε = {epsilon:g} | {names} |", "|---" * (len(shown) + 1) + "|"]
    means = {at: {m: mean(found) for m, found in known[at].items()} for at in shown}
    for method in dict.fromkeys(m for at in shown for m in means[at]):
        cells = [_bold(means[at].get(method), max(means[at].values())) for at in shown]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return lines


def _bold(value: float | None, best: float) -> str:
    if value is None:
        return "—"
    return f"**{value:.1f}**" if value == best else f"{value:.1f}"


def _signed(points: float) -> str:
    return f"{round(points, 1) + 0.0:+.1f}"  # nothing is not −0.0


def plot(
    records: Sequence[int],
    epsilons: Sequence[float],
    maps: Mapping[str, Mapping[Spot, Cell]],
    path: Path,
) -> None:
    """For each map a square for each place: colour and number are the lead, the name the best's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    size = len(records), len(epsilons)
    each = 1.9 * size[1] + 1.5, 0.9 * size[0] + 1.2
    columns = 1 if len(maps) == 1 else 2
    rows = -(-len(maps) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(columns * each[0], rows * each[1]), squeeze=False
    )
    most = max(abs(found.lead) for cells in maps.values() for found in cells.values())
    for axis in axes.flat[len(maps) :]:
        axis.set_visible(False)
    for axis, (title, cells) in zip(axes.flat, maps.items(), strict=False):
        leads = np.full(size, np.nan)
        for (n, epsilon), found in cells.items():
            row, column = records.index(n), epsilons.index(epsilon)
            leads[row, column] = found.lead
            sure = "" if found.clear else "\n(not clear)"
            name = found.best.replace(", ", ",\n", 1)
            text = f"{name}\n{_signed(found.lead)}{sure}"
            axis.text(column, row, text, ha="center", va="center", fontsize=7)
        axis.imshow(leads, cmap="PuOr", vmin=-1.5 * most, vmax=1.5 * most, aspect="auto")
        axis.set_xticks(range(size[1]), [f"{epsilon:g}" for epsilon in epsilons])
        axis.set_yticks(range(size[0]), [f"{n:,}" for n in records])
        axis.set_xlabel("ε")
        axis.set_ylabel("private records")
        axis.set_title(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
