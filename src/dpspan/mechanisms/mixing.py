"""Schedules of mirror descent: how much the private gradient counts at each step."""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dpspan.support.checks import check_count, check_number, expect


@runtime_checkable
class Mixing(Protocol):
    """A schedule of α: it sees the number of the step, and nothing else."""

    def alpha(self, step: int) -> float:
        """α_t, from 0 (the public gradient alone) to 1 (plain DP-SGD); steps count from 0."""


@dataclass(frozen=True, kw_only=True)
class ConstantMixing:
    """The same α at every step."""

    share: float

    def __post_init__(self) -> None:
        share = check_number("share", self.share)
        expect(0 <= share <= 1, "share from 0 (public) to 1 (private)", self.share)

    def alpha(self, step: int) -> float:
        return float(self.share)


@dataclass(frozen=True, kw_only=True)
class CosineMixing:
    """The paper's schedule cos(πt/2K): the private gradient first, the public one at the end.

    `steps` is K. From step K on α is 0: take more than the steps you will train for.
    """

    steps: int

    def __post_init__(self) -> None:
        check_count("steps", self.steps)

    def alpha(self, step: int) -> float:
        return math.cos(math.pi * step / (2 * self.steps)) if step < self.steps else 0.0
