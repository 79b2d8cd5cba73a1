"""The learning rate of a row, searched by training on private records and judged by others of them.

None of this is private: scores have no noise, and ε counts none of these trainings. Models are not
kept. Each score has a file of its own, so a search that was interrupted goes on.
"""

import dataclasses
import functools
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch.utils.data import Subset

from dpspan.accounting.ledger import SEARCHED
from dpspan.app.comparison.results import SCORE, Tried
from dpspan.app.comparison.search import Search, Try
from dpspan.app.run.folder import RunFolder, read_json
from dpspan.app.run.task import Contender, Task, settings_of
from dpspan.app.run.training import noise_for, rehearse
from dpspan.support.strict_json import plain

_HELD_OUT = 0.2  # of the private records
_FACTOR = 3.0  # between the first rates


def trainings(out: Path, row: str = "*") -> int:
    """How many were made by searches in the folder of a comparison, of one row or of all."""
    return len(list(out.glob(f"{row}/search/*.json")))


def note(count: int) -> str:
    """What a certificate says of them."""
    by = f"by {count} trainings on the private records, judged by others of them"
    return f"{SEARCHED} {by}; ε counts none of these"


@dataclass(frozen=True, kw_only=True)
class RowSearch:
    """The search of a contender, which begins around its own learning rate."""

    search: Search
    task: Task
    contender: Contender
    row: Path

    @functools.cached_property
    def _settings(self) -> dict[str, Any]:
        """Whatever the rate and the seed."""
        return settings_of(self.task, dataclasses.replace(self.contender, learning_rate=1.0), 0)

    @property
    def _rates(self) -> list[float]:
        own = self.contender.learning_rate or 0.0
        return [float(f"{rate:.3g}") for rate in (own / _FACTOR, own, own * _FACTOR)]

    @property
    def wanted(self) -> list[tuple[Self, Try]]:
        """What to `make` next; nothing if the search is over."""
        return [(self, each) for each in self.search.wanted(self._rates, self._known)]

    @property
    def found(self) -> Contender:
        rate = self.search.best(self._rates, self._known)
        return dataclasses.replace(self.contender, learning_rate=rate)

    @property
    def tries(self) -> tuple[Tried, ...]:
        grid, finals = self.search.plan(self._rates, self._known)
        return tuple(self._read(each) for each in dict.fromkeys(grid + finals))

    def _path(self, each: Try) -> Path:
        text = json.dumps([self._settings, dataclasses.astuple(each)], sort_keys=True)
        return self.row / "search" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"

    def _read(self, each: Try) -> Tried:
        return Tried(**vars(each), value=read_json(self._path(each))[SCORE])

    def _known(self, each: Try) -> float | None:
        if not self._path(each).exists():
            return None
        value = self._read(each).value
        return math.nan if value is None else value

    def make(self, each: Try) -> None:
        """Train on a part of the records, and write down how many of the others it has right."""
        units = self.task.units
        order = np.random.default_rng(each.seed).permutation(self.task.drawn)
        held_out = max(1, round(_HELD_OUT * len(order)))
        parts = np.split(order, [held_out])
        if units is not None:  # a unit is in one of the two, with all of its records
            parts = [np.concatenate([units.members[unit] for unit in part]) for part in parts]
        test, private = (Subset(self.task.private, part.tolist()) for part in parts)
        task = dataclasses.replace(
            self.task,
            private=private,
            test=test,
            unit=None if units is None else units.owners[parts[1]].tolist(),
            epochs=max(1, round(each.share * self.task.epochs)),
            records=None,
        )
        contender = dataclasses.replace(self.contender, learning_rate=each.rate)
        score = rehearse(task, contender, each.seed, noise_for(task, contender))
        about = {**vars(each), SCORE: score, "settings": self._settings}
        RunFolder(self.row).write_json(self._path(each), plain(about))
