"""DP-SGD (Abadi et al. 2016): Σ_i clip(g_i, C) + z·C·N(0, I).

Formal guarantee: adding or removing a sample adds or removes one vector of norm at most C, so one
release is a Gaussian mechanism of noise multiplier z, subsampled as the batch was.
"""

from dataclasses import dataclass
from typing import ClassVar

from dpspan.gradients.operator import PerSampleGradients
from dpspan.mechanisms.adaptive import AdaptiveMechanism
from dpspan.mechanisms.base import Mechanism, Method, Setting, Sums
from dpspan.mechanisms.clipping import AdaptiveClipping, ClippingRule, clip_factors
from dpspan.mechanisms.noise import Noise


@dataclass(frozen=True, kw_only=True)
class DPSGD(Method):
    """Plain DP-SGD with one clip over all parameters.

    `clip` is C; left out, it is the engine's `max_grad_norm`, or 1. `clipping` chooses the factors
    (`FlatClipping()`, `AutomaticClipping()` or your own), or moves C (`AdaptiveClipping()`).
    """

    adapts: ClassVar[bool] = True

    def bind(self, setting: Setting) -> Mechanism:
        return private_part(self, setting)


def private_part(method: Method, setting: Setting) -> Mechanism:
    """DP-SGD's own step for a method's clip, fixed or adaptive."""
    if isinstance(method.clipping, AdaptiveClipping):
        return AdaptiveMechanism(method.clip_norm, method.clipping, setting)
    return DPSGDMechanism(method.clip_norm, method.clipping)


class DPSGDMechanism(Mechanism):
    """One step of DP-SGD."""

    stays_in_place = True

    def __init__(self, clip: float, clipping: ClippingRule) -> None:
        self._clip, self._clipping = clip, clipping

    def clipped_sum(self, gradients: PerSampleGradients) -> Sums:
        """Σ_i clip(g_i, C), by parameter."""
        factors = clip_factors(self._clipping, gradients.norm_bounds(), self._clip)
        return gradients.combine(factors)

    def release(self, total: Sums, noise: Noise, noise_multiplier: float) -> Sums:
        """The sum plus z·C·N(0, I)."""
        return noise.add(total, std=noise_multiplier * self._clip)
