"""What a comparison says, in sentences: computed from the runs, whoever wins.

Two rows count as different if Welch's test on their seeds gives p < 0.05, divided by the number of
rows that the better one was picked from; with a few seeds only large differences pass.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

from scipy import stats

from dpspan.app.comparison.results import UNPRIVATE, Comparison, Row

_LEVEL = 0.05


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far one row is ahead of another, in points, and whether the seeds can tell."""

    points: float
    certain: bool

    def text(self, first: str, second: str) -> str:
        """One sentence."""
        if not self.certain:
            return (
                f"{first} and {second} are {abs(self.points):.1f} points apart, which so few seeds "
                "cannot tell from chance."
            )
        verb = "beats" if self.points > 0 else "is behind"
        return f"{first} {verb} {second} by {abs(self.points):.1f} points."


def difference(first: Row, second: Row, *, picked_from: int = 1) -> Difference:
    """The first row, the best of so many, against the second."""
    a, b = first.values, second.values
    points = 100 * (first.mean - second.mean)
    if len(a) < 2 or len(b) < 2:
        return Difference(points=points, certain=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # rows whose seeds all agree
        p = float(stats.ttest_ind(a, b, equal_var=False).pvalue)
    if math.isnan(p):
        p = 1.0 if points == 0 else 0.0
    return Difference(points=points, certain=p < _LEVEL / picked_from)


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
        sentences.append(
            f"Private training is {worth} here. " + gap.text(f"“{best.name}”", f"“{alone.name}”")
        )
    for warm in (False, True):
        group = [row for row in private if row.warm == warm]
        plain = next((row for row in group if row.method == "DPSGD"), None)
        others = [row for row in group if row.method != "DPSGD"]
        if plain is None or not others:
            continue
        top = max(others, key=lambda row: row.mean)
        sentences.append(
            f"{'After a warm start' if warm else 'From scratch'}, the best other method against "
            "DP-SGD: "
            + difference(top, plain, picked_from=len(others)).text(
                f"“{top.name}”", f"“{plain.name}”"
            )
        )
    warm_plain = next((r for r in private if r.warm and r.method == "DPSGD"), None)
    cold_plain = next((r for r in private if not r.warm and r.method == "DPSGD"), None)
    if warm_plain is not None and cold_plain is not None:
        text = difference(warm_plain, cold_plain).text(
            f"“{warm_plain.name}”", f"“{cold_plain.name}”"
        )
        sentences.append("What public labels give for nothing: " + text)
    return sentences
