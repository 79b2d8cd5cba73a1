"""What came out of a comparison: as dataclasses, JSON, a table, a picture and sentences."""

from __future__ import annotations

import json
import math
import statistics
import warnings
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from scipy import stats

FORMAT = "dpspan.comparison.1"
UNPRIVATE = "measured on private test records without noise: NOT PRIVATE, for the operator's eyes"


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run: what it spent and what it reached."""

    seed: int
    epsilon: float
    value: float
    folder: str
    diverged: str | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """All runs of one contender."""

    name: str
    private: bool  # whether private records were used at all
    warm: bool
    method: str | None
    learning_rate: float | None
    results: tuple[Result, ...]

    @property
    def values(self) -> list[float]:
        """What the runs reached."""
        return [result.value for result in self.results]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.mean(self.values)

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation over the seeds; None for one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def epsilon(self) -> float:
        """The most that one of the runs spent."""
        return max(result.epsilon for result in self.results)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several contenders at the same budget.

    `metric` is what was measured, `unprivate_…` on test records that are private;
    `epsilon_together` is the price of publishing every run, or the best of them: each is a release
    of its own.
    """

    metric: str
    epsilon: float
    delta: float
    epochs: int
    batch_size: int
    rows: tuple[Row, ...]
    epsilon_together: float

    @property
    def unprivate(self) -> bool:
        """Whether the values may not be published."""
        return self.metric.startswith("unprivate_")

    def row(self, name: str) -> Row:
        """The row of that name."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"Expected one of {[row.name for row in self.rows]}, got {name!r}.")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with means and deviations; values carry the metric's name."""
        content = {"format": FORMAT, **asdict(self)}
        for row, plain in zip(self.rows, content["rows"], strict=True):
            for result in plain["results"]:
                result[self.metric] = result.pop("value")
            plain[f"{self.metric}_mean"] = row.mean
            plain[f"{self.metric}_deviation"] = row.deviation
        return content

    def to_json(self) -> str:
        """`to_dict()` as a text."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Comparison:
        """What `to_dict()` gave; ValueError if it is something else."""
        if content.get("format") != FORMAT:
            raise ValueError(f"Expected a comparison of format {FORMAT!r}, got another document.")

        def made(kind: type, values: dict[str, Any], **others: Any) -> Any:
            known = {field.name for field in fields(kind)}
            return kind(**{key: values[key] for key in known & set(values)} | others)

        rows = []
        for row in content["rows"]:
            each = [made(Result, r, value=r[content["metric"]]) for r in row["results"]]
            rows.append(made(Row, row, results=tuple(each)))
        comparison: Comparison = made(cls, content, rows=tuple(rows))
        return comparison

    def table(self) -> Table:
        """For rich to print."""
        runs = max(len(row.results) for row in self.rows)
        together = f"ε = {self.epsilon_together:.2f}"
        whole = f"publishing every run, or the best of them, costs {together}"
        notes = f"mean ± standard deviation; {whole}"
        price = f"ε = {self.epsilon:g}, δ = {self.delta:g}"
        shown = Table(
            title=f"{label(self.metric)}, {price}, {runs} runs each",
            caption=f"{notes}; {UNPRIVATE}" if self.unprivate else notes,
        )
        shown.add_column("training")
        for heading in ("mean ± sd", "lowest … highest", "ε a run", "lr"):
            shown.add_column(heading, justify="right")
        for row in self.rows:
            values, failed = row.values, sum(r.diverged is not None for r in row.results)
            sd = row.deviation
            shown.add_row(
                row.name + (f" ({failed} diverged)" if failed else ""),
                f"{100 * row.mean:.1f}" + ("" if sd is None else f" ± {100 * sd:.1f}"),
                f"{min(values):.1%} … {max(values):.1%}",
                f"{row.epsilon:.3f}" if row.private else "0",
                "" if row.learning_rate is None else f"{row.learning_rate:g}",
            )
        return shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.table()

    def plot(self, path: str | Path) -> Path:
        """Every run as a dot, the means as lines, as a picture."""
        figure = Figure(figsize=(7, 1.2 + 0.35 * len(self.rows)), layout="constrained")
        FigureCanvasAgg(figure)
        axis = figure.subplots()
        for index, row in enumerate(self.rows):
            warm = row.warm and row.private
            colour = "#d55e00" if warm else "#0072b2" if row.private else "#777777"
            axis.plot(row.values, [index] * len(row.values), "o", color=colour, alpha=0.7)
            axis.plot([row.mean], [index], "|", color=colour, markersize=16, markeredgewidth=2)
        axis.set_yticks(range(len(self.rows)), [row.name for row in self.rows])
        axis.invert_yaxis()
        axis.grid(axis="x", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel(f"{label(self.metric)} at ε = {self.epsilon:g}")
        if self.unprivate:
            figure.suptitle(UNPRIVATE, fontsize=8, color="#d55e00")
        with warnings.catch_warnings():  # a script that the font lacks is a row of boxes
            warnings.filterwarnings("ignore", message="Glyph")
            figure.savefig(path, dpi=150)
        return Path(path)


def label(metric: str) -> str:
    """The metric in words."""
    return metric.removeprefix("unprivate_").replace("_", " ").capitalize()


# Two rows count as different if Welch's test on their seeds gives p below this, divided by the
# number of rows that the better one was picked from; with a few seeds only large differences pass.
_LEVEL = 0.05


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far one row is ahead of another, in points, and whether the seeds can tell."""

    points: float
    certain: bool
    text: str  # one sentence


def difference(first: Row, second: Row, *, picked_from: int = 1) -> Difference:
    """The first row, the best of so many, against the second."""
    a, b = first.values, second.values
    points, certain = 100 * (first.mean - second.mean), False
    if len(a) > 1 and len(b) > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # rows whose seeds all agree
            p = float(stats.ttest_ind(a, b, equal_var=False).pvalue)
        certain = points != 0 if math.isnan(p) else p < _LEVEL / picked_from
    one, other, apart = f"“{first.name}”", f"“{second.name}”", f"{abs(points):.1f} points"
    text = f"{one} and {other} are {apart} apart, which so few seeds cannot tell from chance."
    if certain:
        text = f"{one} {'beats' if points > 0 else 'is behind'} {other} by {apart}."
    return Difference(points=points, certain=certain, text=text)


def verdicts(comparison: Comparison) -> list[str]:
    """Is private training worth its ε here, what is the warm start worth, and what a subspace?"""
    rows = comparison.rows
    private = [row for row in rows if row.private]
    free = [row for row in rows if not row.private]
    sentences = [f"All this was {UNPRIVATE}."] if comparison.unprivate else []
    best = max(private, key=lambda row: row.mean)
    if free:
        alone = max(free, key=lambda row: row.mean)
        gap = difference(best, alone, picked_from=len(private))
        worth = "worth its ε" if gap.certain and gap.points > 0 else "not shown to be worth its ε"
        sentences.append(f"Private training is {worth} here. {gap.text}")
    plain = {row.warm: row for row in reversed(private) if row.method == "DPSGD"}
    for warm, start in ((False, "From scratch"), (True, "After a warm start")):
        others = [row for row in private if row.warm == warm and row.method != "DPSGD"]
        if warm in plain and others:
            top = max(others, key=lambda row: row.mean)
            gap = difference(top, plain[warm], picked_from=len(others))
            sentences.append(f"{start}, the best other method against DP-SGD: {gap.text}")
    if len(plain) == 2:
        gap = difference(plain[True], plain[False])
        sentences.append(f"What public labels give for nothing: {gap.text}")
    return sentences
