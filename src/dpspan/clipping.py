"""Rules that turn gradient norms into clip factors, and the one place that enforces the clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class ClippingRule(Protocol):
    """Chooses a factor per sample; whatever it chooses, `clip_factors` keeps it within the clip."""

    def factors(self, norms: Tensor, clip: float) -> Tensor:
        """Desired factors for gradients of these norms, (n,)."""


@dataclass(frozen=True, kw_only=True)
class FlatClipping:
    """min(1, C/‖g‖): short gradients stay, long ones end on the sphere of radius C."""

    def factors(self, norms: Tensor, clip: float) -> Tensor:
        """min(1, C/‖g‖)."""
        return (clip / norms).clamp(max=1.0)


@dataclass(frozen=True, kw_only=True)
class AutomaticClipping:
    """C/(‖g‖ + γ): every gradient is normalised (Bu et al. 2023), so C needs no tuning."""

    stability: float = 0.01

    def __post_init__(self) -> None:
        if not self.stability > 0:
            raise ValueError(f"Expected stability > 0, got {self.stability}.")

    def factors(self, norms: Tensor, clip: float) -> Tensor:
        """C/(‖g‖ + γ)."""
        return clip / (norms + self.stability)


def clip_factors(rule: ClippingRule, norm_bounds: Tensor, clip: float) -> Tensor:
    """The rule's factors, never above C/‖g‖, and zero for a gradient that is not finite.

    A NaN or Inf gradient must not pass (it would tell that its owner took part), and a rule,
    whoever wrote it, must not be able to break the clip.
    """
    factors = torch.minimum(rule.factors(norm_bounds, clip), clip / norm_bounds)
    usable = torch.isfinite(norm_bounds) & torch.isfinite(factors)
    return torch.where(usable, factors.clamp(min=0.0), torch.zeros_like(factors))
