"""A batch whose per-sample gradients are expected, and what it has brought of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dpspan.gradients.graphs import Graphs
from dpspan.gradients.layers.groups import Alike, Groups, Ragged
from dpspan.gradients.layers.terms import Rows, Term


@dataclass
class ExpectedBatch:
    """A batch whose gradients are expected, and what it has brought."""

    rows: int
    views: int = 1  # rows that belong to one record
    units: tuple[int, ...] | None = None  # records that belong to one sample, if not one each
    largest: int | None = None  # records that a unit can have; None: that one here has
    planned: int | None = None  # rows to plan for: how many there are is private
    scale: float = 1.0  # what gradients are multiplied by
    at_outputs: bool | None = None  # whether where they enter the model, not at each layer
    live: int | None = None  # the samples in front that count, if others fill up the batch
    discard: bool = False
    everywhere: bool = False  # whether every process has the same samples
    carriers: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    graphs: Graphs | None = None
    terms: dict[str, list[Term]] = field(default_factory=dict)
    heard: bool = False  # whether a backward pass has reached it
    called: bool = False  # whether `graphs` was asked for it

    ragged: dict[Any, Ragged] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        return self.rows // self.views if self.units is None else len(self.units)

    def groups(self, rows: int, term: Term) -> Groups | None:
        """What belongs together of a term with so many rows a record; None: every row is alone."""
        if self.units is None:
            return None if rows == 1 else Alike(rows)
        largest = max(self.units, default=1) if self.largest is None else self.largest
        if rows == largest == 1:
            return None
        device = term.rows(0, 0).device
        made = Ragged(self.units, rows, rows * largest, device)
        return self.ragged.setdefault((rows, device), made)

    def put(self, name: str, term: Term) -> None:
        """Add a term to those of this name."""
        terms = self.terms.setdefault(name, [])
        if terms and isinstance(terms[-1], Rows) and isinstance(term, Rows):
            terms[-1] = Rows(terms[-1].values + term.values)
        else:
            terms.append(term)
