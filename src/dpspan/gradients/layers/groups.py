"""Which rows of a batch are one sample: the views of a record, or the records of a unit."""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Alike:
    """So many rows for each sample, one after the other."""

    each: int

    def samples(self, rows: int) -> int:
        return rows // self.each

    def added_up(self, x: Tensor) -> Tensor:
        """(rows, …) to (samples, …)."""
        return x.reshape(-1, self.each, *x.shape[1:]).sum(1)

    def in_line(self, x: Tensor) -> Tensor:
        """(rows, T, …) to (samples, T·most, …): what a sample's rows hold, one after the other."""
        return x.reshape(-1, self.each * x.shape[1], *x.shape[2:])

    def between(self, start: int, stop: int) -> tuple[int, int, Self]:
        """The rows of some samples, and how they belong together."""
        return start * self.each, stop * self.each, self


@dataclass(frozen=True, eq=False)
class Ragged:
    """Units of so many records each, every record of `times` rows; one after the other."""

    counts: tuple[int, ...]
    times: int
    most: int  # rows that a unit can have: how many the largest here has is private
    device: torch.device

    @cached_property
    def _sizes(self) -> Tensor:
        return torch.tensor(self.counts, dtype=torch.int64).to(self.device)

    @cached_property
    def _owners(self) -> Tensor:
        """Of each row: the place of its unit."""
        units = torch.arange(len(self.counts), device=self.device)
        rows = sum(self.counts) * self.times  # told, so that a GPU need not be asked
        return units.repeat_interleave(self._sizes * self.times, output_size=rows)

    @cached_property
    def weights(self) -> Tensor:
        """Of each row: 1 / the records of its unit, whose mean gradient is clipped."""
        return (1 / self._sizes.double())[self._owners]

    def samples(self, rows: int) -> int:
        return len(self.counts)

    def added_up(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(self.counts), *x.shape[1:]).index_add_(0, self._owners, x)

    def in_line(self, x: Tensor) -> Tensor:
        """Units with fewer rows than one can have are filled up with zeros."""
        sizes = self._sizes * self.times
        first = sizes.cumsum(0) - sizes
        place = torch.arange(len(x), device=x.device) - first[self._owners]
        out = x.new_zeros(len(self.counts), self.most, *x.shape[1:])
        out[self._owners, place] = x
        return out.flatten(1, 2)

    def between(self, start: int, stop: int) -> tuple[int, int, "Ragged"]:
        ends = [0, *accumulate(count * self.times for count in self.counts)]
        part = replace(self, counts=self.counts[start:stop])
        return ends[start], ends[stop], part


Groups = Alike | Ragged
