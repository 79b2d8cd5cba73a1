"""What the rehearsal says, and how sure it is."""

from __future__ import annotations

import json
import math
import statistics
import warnings
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from scipy import stats

_LEVEL = 0.05


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One contender at its best learning rate, on every fold but the one that found the rate."""

    name: str
    private: bool
    warm: bool
    settings: dict[str, Any] | None  # of the method
    learning_rate: float | None
    at_the_end: bool  # whether the best rate was the first or the last that was tried
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over the folds."""
        return statistics.mean(self.values)

    @property
    def effort(self) -> int:
        """What it asks of its user: nothing private, plain DP-SGD, or more."""
        plain = self.settings is not None and self.settings["method"] == "DPSGD"
        return 0 if not self.private else 1 if plain else 2


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A recommendation from public data alone; all of it may be published.

    `recommended` is the simplest of those that the folds cannot tell from the best (p ≥ 0.05).
    """

    recommended: str
    sure: bool  # whether everything else is worse, p < 0.05 for all of them together
    tied: tuple[str, ...]  # what else might be as good
    trials: tuple[Trial, ...]
    notes: tuple[str, ...]

    @property
    def trial(self) -> Trial:
        """The recommended one."""
        return next(trial for trial in self.trials if trial.name == self.recommended)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def to_json(self) -> str:
        """`to_dict()` as a text."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)

    def sentences(self) -> list[str]:
        """The recommendation in words."""
        best = self.trial
        rate = "" if best.learning_rate is None else f" with learning rate {best.learning_rate:g}"
        said = [f"Try “{best.name}”{rate}: {best.mean:.1%} in the rehearsal."]
        if not best.private:
            said.append("Private training was not clearly better there, so spend no ε on it yet.")
        if self.sure:
            said.append("Everything else was clearly worse.")
        elif self.tied:
            said.append(f"As good, as far as the folds can tell: {', '.join(self.tied)}.")
        else:
            said.append("It was ahead of everything else, if not beyond doubt with so few folds.")
        return [*said, *self.notes]

    def table(self) -> Table:
        """For rich to print."""
        shown = Table(title="Rehearsed on public data (ε = 0)", caption="mean, lowest and highest")
        shown.add_column("training")
        for heading in ("accuracy", "lowest … highest", "learning rate"):
            shown.add_column(heading, justify="right")
        for trial in sorted(self.trials, key=lambda trial: -trial.mean):
            rate = "" if trial.learning_rate is None else f"{trial.learning_rate:g}"
            mark = "→ " if trial.name == self.recommended else ""
            shown.add_row(
                mark + trial.name,
                f"{trial.mean:.1%}",
                f"{min(trial.values):.1%} … {max(trial.values):.1%}",
                rate + ("*" if trial.at_the_end else ""),
            )
        return shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.table()
        for sentence in self.sentences():
            yield f"• {sentence}"


def conclude(trials: tuple[Trial, ...], notes: tuple[str, ...]) -> Advice:
    """Find the best, whatever is not worse by more than chance, and of those the simplest."""
    best = max(trials, key=lambda trial: trial.mean)
    others = [trial for trial in trials if trial is not best]
    chances = {trial.name: _chance(best, trial) for trial in others}
    tied = [trial for trial in others if chances[trial.name] >= _LEVEL]
    chosen = min([best, *tied], key=lambda t: (t.effort, -t.mean, trials.index(t)))
    return Advice(
        recommended=chosen.name,
        # Among many, one is behind by chance sooner or later.
        sure=all(chance < _LEVEL / len(others) for chance in chances.values()),
        tied=tuple(trial.name for trial in (best, *tied) if trial is not chosen),
        trials=trials,
        notes=notes,
    )


def _chance(best: Trial, other: Trial) -> float:
    """How likely so large a lead is by chance: a paired t-test, as both saw the same folds."""
    if len(best.values) < 2:
        return 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # folds that all agree
        p = float(stats.ttest_rel(best.values, other.values, alternative="greater").pvalue)
    return p if not math.isnan(p) else 0.0 if best.mean > other.mean else 1.0
