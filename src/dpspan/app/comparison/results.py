"""What came out of a comparison: as dataclasses, JSON, a table, a picture and sentences."""

import math
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Column, Table
from scipy import stats

from dpspan.app.comparison.search import Try

FORMAT = "dpspan.comparison.1"
UNPRIVATE = "measured on private test records without noise: NOT PRIVATE, for the operator's eyes"
SCORE = "unprivate_held_out_accuracy"  # of a try


@dataclass(frozen=True)
class Tried(Try):
    """What it has reached on private records: None if it diverged, or if that is not shown."""

    value: float | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run: what it spent and what it reached."""

    seed: int
    epsilon: float
    value: float
    folder: str
    status: str = "finished"
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
    own_model: bool = False  # instead of the task's
    tries: tuple[Tried, ...] = ()  # of the search for its learning rate

    @property
    def values(self) -> list[float]:
        return [result.value for result in self.results]

    @property
    def mean(self) -> float:
        return statistics.mean(self.values)

    @property
    def deviation(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def at_the_end(self) -> bool:
        """Whether the best learning rate was the first or the last that was tried."""
        rates = [each.rate for each in self.tries]
        return bool(rates) and self.learning_rate in (min(rates), max(rates))

    @property
    def epsilon(self) -> float:
        """The most that one of the runs spent."""
        return max(result.epsilon for result in self.results)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several contenders at the same budget.

    `metric` is what was measured, `unprivate_…` on test records that are private;
    `epsilon_together` is the price of publishing every run, or the best of them: each is a release
    of its own. `search_runs` trainings on private records settled learning rates; no ε counts them.
    """

    metric: str
    epsilon: float
    delta: float
    epochs: int
    batch_size: int
    rows: tuple[Row, ...]
    epsilon_together: float
    search_runs: int = 0

    @property
    def unprivate(self) -> bool:
        return self.metric.startswith("unprivate_")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with means, deviations and verdicts; values carry the metric's name."""
        said = "unprivate_verdicts" if self.unprivate else "verdicts"
        content = {"format": FORMAT, **asdict(self), said: verdicts(self)}
        for row, plain in zip(self.rows, content["rows"], strict=True):
            for result in plain["results"]:
                result[self.metric] = result.pop("value")
            for each in plain["tries"]:
                each[SCORE] = each.pop("value")
            plain["at_the_end"] = row.at_the_end
            plain[f"{self.metric}_mean"] = row.mean
            plain[f"{self.metric}_deviation"] = row.deviation
        return content

    def __rich__(self) -> Table:
        runs = max(len(row.results) for row in self.rows)
        price = f"ε = {self.epsilon:g}, δ = {self.delta:g}"
        whole = "publishing every run, or the best of them, costs"
        notes = f"mean ± standard deviation; {whole} ε = {self.epsilon_together:.2f}"
        if self.search_runs:
            notes += f"; no ε counts the {self.search_runs} trainings that settled learning rates"
        if any(row.at_the_end for row in self.rows):
            notes += "; * the best rate is at an end of those that were tried"
        numbers = ("mean ± sd", "lowest … highest", "ε a run", "lr")
        shown = Table(
            "training",
            *(Column(heading, justify="right") for heading in numbers),
            title=f"{label(self.metric)}, {price}, {runs} runs each",
            caption=f"{notes}; {UNPRIVATE}" if self.unprivate else notes,
        )
        for row in self.rows:
            values, sd = row.values, row.deviation
            shown.add_row(
                row.name + ended_early(result.status for result in row.results),
                f"{100 * row.mean:.1f}" + ("" if sd is None else f" ± {100 * sd:.1f}"),
                f"{min(values):.1%} … {max(values):.1%}",
                f"{row.epsilon:.3f}" if row.private else "0",
                "" if row.learning_rate is None else f"{row.learning_rate:g}{'*' * row.at_the_end}",
            )
        return shown

    def plot(self, path: str | Path) -> Path:
        """Every run as a dot, the means as lines, as a picture."""
        figure = Figure(figsize=(7, 1.2 + 0.35 * len(self.rows)), layout="constrained")
        axis = figure.subplots()
        for index, row in enumerate(self.rows):
            colour = "#777777" if not row.private else "#d55e00" if row.warm else "#0072b2"
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
    return metric.replace("_", " ").capitalize()


def ending(facts: Mapping[str, Any]) -> str:
    """How the run with this `run.json` ended; 0.1 wrote down no status, and at the end only."""
    unknown = "stopped" if "version" in facts else "finished"
    return "diverged" if facts.get("diverged") else facts.get("status") or unknown


def ended_early(statuses: Iterable[str]) -> str:
    """A mark behind the name of runs, if some of them took fewer steps than planned."""
    counts = Counter(status for status in statuses if status != "finished")
    said = ", ".join(f"{count} {status}" for status, count in counts.items())
    return f" ({said})" if said else ""


# Two rows count as different if Welch's test on their seeds gives p below this, divided by the
# number of rows that the better one was picked from; with a few seeds only large differences pass.
LEVEL = 0.05


def chance(test: Callable[..., Any], a: Sequence[float], b: Sequence[float], **how: Any) -> float:
    """p by a test of scipy's; 1 if there is too little to test."""
    if min(len(a), len(b)) < 2:
        return 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # values that all agree
        p = float(test(a, b, **how).pvalue)
    return float(statistics.mean(a) == statistics.mean(b)) if math.isnan(p) else p


def difference(first: Row, second: Row, *, picked_from: int = 1) -> tuple[bool, str]:
    """The first row, the best of so many, against the second: can the seeds tell, and in words."""
    points = round(100 * first.mean, 1) - round(100 * second.mean, 1)  # as tables show them
    p = chance(stats.ttest_ind, first.values, second.values, equal_var=False)
    one, other, apart = f"“{first.name}”", f"“{second.name}”", f"{abs(points):.1f} points"
    if p < LEVEL / picked_from:
        return True, f"{one} {'beats' if points > 0 else 'is behind'} {other} by {apart}."
    where = "ahead of" if points > 0 else "behind" if points < 0 else "level with"
    by = f" by {apart}, which so few seeds cannot tell from chance" if points else ""
    return False, f"{one} is {where} {other}{by}."


def verdicts(comparison: Comparison) -> list[str]:
    """Is private training worth its ε here, what is the warm start worth, and what a subspace?"""
    rows = comparison.rows
    private = [row for row in rows if row.private]
    free = [row for row in rows if not row.private]
    sentences = [f"All this was {UNPRIVATE}."] if comparison.unprivate else []
    best = max(private, key=lambda row: row.mean)
    if free:
        alone = max(free, key=lambda row: row.mean)
        certain, text = difference(best, alone, picked_from=len(private))
        worth = "" if certain and best.mean > alone.mean else "not shown to be "
        sentences.append(f"Private training is {worth}worth its ε here. {text}")
    simple = [row for row in private if row.method == "DPSGD" and not row.own_model]
    plain = {row.warm: row for row in reversed(simple)}
    for warm, start in ((False, "From scratch"), (True, "After a warm start")):
        others = [row for row in private if row.warm == warm and row not in simple]
        if warm in plain and others:
            top = max(others, key=lambda row: row.mean)
            _, text = difference(top, plain[warm], picked_from=len(others))
            sentences.append(f"{start}, the best other row against DP-SGD: {text}")
    if len(plain) == 2:
        _, text = difference(plain[True], plain[False])
        sentences.append(f"What public labels give for nothing: {text}")
    return sentences
