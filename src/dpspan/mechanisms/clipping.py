"""Rules that turn gradient norms into clip factors, and the one place that enforces the clip."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dpspan.support.checks import check_fraction, check_positive


class ClippingRule(Protocol):
    """Chooses the factor of one sample from the norm of its gradient, and from nothing else.

    Whatever it chooses, `clip_factors` keeps it within the clip.
    """

    def factor(self, norm: Tensor, clip: float) -> Tensor:
        """Desired factor for a gradient of this norm (a number, by torch operations)."""


@dataclass(frozen=True, kw_only=True)
class FlatClipping:
    """min(1, C/‖g‖): short gradients stay, long ones end on the sphere of radius C."""

    def factor(self, norm: Tensor, clip: float) -> Tensor:
        return (clip / norm).clamp(max=1.0)


@dataclass(frozen=True, kw_only=True)
class AutomaticClipping:
    """C/(‖g‖ + γ): every gradient is normalised (Bu et al. 2023), so C needs no tuning."""

    stability: float = 0.01

    def __post_init__(self) -> None:
        check_positive("stability", self.stability)

    def factor(self, norm: Tensor, clip: float) -> Tensor:
        return clip / (norm + self.stability)


@dataclass(frozen=True, kw_only=True)
class AdaptiveClipping:
    """A flat clip that moves until `quantile` of the gradients are shorter (Andrew et al. 2021).

    The method's `clip` is where it begins. After each step it is multiplied by
    exp(−rate·(b − quantile)), b the share of records below it, which is released with noise beside
    the gradient, within the same price: `share` of each step's 1/z² is spent on it, so that the
    noise on the gradient is larger by 1/√(1 − share). For `DPSGD` and `MirrorDescent`.
    """

    quantile: float = 0.5
    rate: float = 0.2
    share: float = 0.01

    def __post_init__(self) -> None:
        check_positive("rate", self.rate)
        for name in ("quantile", "share"):
            check_fraction(name, getattr(self, name))

    def factor(self, norm: Tensor, clip: float) -> Tensor:
        return FlatClipping().factor(norm, clip)


def clip_factors(rule: ClippingRule, norm_bounds: Tensor, clip: float) -> Tensor:
    """The rule's factors, never above C/‖g‖, and zero for a gradient that is not finite.

    A NaN or Inf gradient must not pass (it would tell that its owner took part), and a rule,
    whoever wrote it, must not be able to break the clip: it sees one norm at a time, since a
    factor that depends on other samples would let one sample move all of them.
    """
    if len(norm_bounds) == 0:
        return norm_bounds
    if type(rule) in (FlatClipping, AutomaticClipping):
        chosen = rule.factor(norm_bounds, clip)  # entry by entry, and without the time of vmap
    else:
        chosen = torch.vmap(lambda norm: rule.factor(norm, clip))(norm_bounds)
    factors = torch.minimum(chosen, clip / norm_bounds)  # C/∞ is 0, and NaN stays so
    return factors.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(min=0.0)
