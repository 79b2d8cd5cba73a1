"""Schedules of α, how much the private gradient counts beside the public one at a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dpspan.support.checks import check_count, check_number, expect


@runtime_checkable
class Mixing(Protocol):
    """A schedule: it sees the number of the step, and nothing else."""

    def alpha(self, step: int) -> float:
        """α_t, from 0 (the public gradient alone) to 1 (plain DP-SGD); steps count from 0."""


@dataclass(frozen=True, kw_only=True)
class ConstantMixing:
    """The same α at every step.

    Examples:
        >>> import dpspan
        >>> dpspan.ConstantMixing(share=0.7).alpha(step=5)
        0.7
    """

    share: float

    def __post_init__(self) -> None:
        share = check_number("share", self.share)
        expect(0 <= share <= 1, "share from 0 (public) to 1 (private)", self.share)

    def alpha(self, step: int) -> float:
        """α."""
        return float(self.share)


@dataclass(frozen=True, kw_only=True)
class CosineMixing:
    """The paper's schedule cos(πt/2K): the private gradient first, the public one at the end.

    `steps` is K. From step K on α is 0: take more than the steps you will train for.

    Examples:
        >>> import dpspan
        >>> mixing = dpspan.CosineMixing(steps=100)
        >>> [round(mixing.alpha(step), 2) for step in (0, 50, 100)]
        [1.0, 0.71, 0.0]
    """

    steps: int

    def __post_init__(self) -> None:
        check_count("steps", self.steps)

    def alpha(self, step: int) -> float:
        """cos(πt/2K)."""
        return math.cos(math.pi * step / (2 * self.steps)) if step < self.steps else 0.0
