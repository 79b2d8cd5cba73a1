"""Which learning rates to try next: a search that knows their scores, and nothing of runs or files.

Short trainings first. While one of the best rates is at an end of the grid, the grid grows beyond
it; tries that are left go between the best rate and its neighbours, so every search has as many.
Then the best rates are trained in full with several seeds, and decide.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dpspan.support.checks import check_count, check_share

FIRST_SEED = 1000  # far from those of the runs that are reported


@dataclass(frozen=True, order=True)
class Try:
    """One training: a learning rate, for a share of the epochs, with a seed."""

    rate: float
    share: float
    seed: int


# What a try has reached: NaN if it diverged, None if it was not made yet.
Known = Callable[[Try], float | None]


@dataclass(frozen=True, kw_only=True)
class Search:
    """How learning rates are searched, alike for every method.

    Args:
        tries: rates, each trained once for `share` of the epochs.
        share: of the epochs.
        finalists: the best of these rates, which are then trained in full; 1 for none.
        seeds: of each of them.
    """

    tries: int = 7
    share: float = 0.25
    finalists: int = 2
    seeds: int = 3

    def __post_init__(self) -> None:
        for name in ("tries", "finalists", "seeds"):
            check_count(name, getattr(self, name))
        check_share("share", self.share)

    def plan(self, rates: Sequence[float], known: Known) -> tuple[list[Try], list[Try]]:
        """Of a search that began at these rates: the short tries, by rate, and the full ones.

        Both follow from what is known so far; the last of the short ones may not be made yet.
        """
        grid = [Try(rate, self.share, FIRST_SEED) for rate in sorted(set(rates))]
        while not (missing := _missing(grid, known)) and len(grid) < self.tries:
            further = replace(grid[0], rate=float(f"{self._further(grid, known):.3g}"))
            if further in grid:  # there is nothing between two that are so close
                break
            grid = sorted([*grid, further])
        best = _ranked([each for each in grid if each not in missing], known)[: self.finalists]
        seeds = range(FIRST_SEED, FIRST_SEED + self.seeds) if self.finalists > 1 else ()
        return grid, [replace(each, share=1.0, seed=seed) for each in best for seed in seeds]

    def wanted(self, rates: Sequence[float], known: Known) -> list[Try]:
        """What to train next; nothing if the search is over."""
        grid, finals = self.plan(rates, known)
        return _missing(grid, known) or _missing(finals, known)

    def best(self, rates: Sequence[float], known: Known) -> float:
        """The rate that was found, by what is known."""
        grid, finals = self.plan(rates, known)
        reached: dict[float, list[float]] = {}
        for each in grid if _missing(finals, known) else finals or grid:
            reached.setdefault(each.rate, []).append(_worth(known(each)))
        return max(sorted(reached), key=lambda rate: statistics.fmean(reached[rate]))

    def _further(self, grid: Sequence[Try], known: Known) -> float:
        """Beyond the end where one of the best is; else beside the best, in the wider gap."""
        ranked, ends = _ranked(grid, known), {grid[0]: grid[1], grid[-1]: grid[-2]}
        for each in ranked[: self.finalists]:
            if each in ends and (each == ranked[0] or _worth(known(each)) > -math.inf):
                return each.rate**2 / ends[each].rate
        best, at = ranked[0].rate, grid.index(ranked[0])
        sides = [each for each in ranked if each in (grid[at - 1], grid[at + 1])]
        wider = max(sides, key=lambda each: round(abs(math.log(each.rate / best)), 2))
        return math.sqrt(best * wider.rate)


def _missing(tries: Sequence[Try], known: Known) -> list[Try]:
    return [each for each in tries if known(each) is None]


def _ranked(tries: Sequence[Try], known: Known) -> list[Try]:
    """The best first; of equal ones the smallest rate, which is the least likely to diverge."""
    return sorted(tries, key=lambda each: (-_worth(known(each)), each))


def _worth(score: float | None) -> float:
    return -math.inf if score is None or math.isnan(score) else score
