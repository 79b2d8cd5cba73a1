"""DP-SGD (Abadi et al. 2016): Σ_i clip(g_i, C) + z·C·N(0, I).

Formal guarantee: adding or removing a sample adds or removes one vector of norm at most C, so one
release is a Gaussian mechanism of noise multiplier z, subsampled as the batch was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dpspan.gradients.operator import PerSampleGradients
from dpspan.mechanisms.base import Setting, Sums, check_one_clip
from dpspan.mechanisms.clipping import ClippingRule, FlatClipping, clip_factors
from dpspan.mechanisms.noise import Noise
from dpspan.public.data import PublicData
from dpspan.support.checks import describe


@dataclass(frozen=True, kw_only=True)
class DPSGD:
    """Plain DP-SGD with one clip over all parameters.

    `clip` is C; left out, it is the engine's `max_grad_norm`, or 1. `clipping` chooses the factors
    (`FlatClipping()`, `AutomaticClipping()` or your own).

    Examples:
        >>> import dpspan
        >>> dpspan.DPSGD(clip=1.0).describe()
        {'method': 'DPSGD', 'clip': 1.0, 'clipping': 'FlatClipping()'}
    """

    clip: float | None = None
    clipping: ClippingRule = field(default_factory=FlatClipping)

    def __post_init__(self) -> None:
        if self.clip is not None and not 0 < self.clip < float("inf"):
            raise ValueError(f"Expected clip > 0, got {self.clip}.")

    def with_clip(self, clip: float) -> DPSGD:
        """This method with clip C, unless it already has another."""
        check_one_clip("DPSGD", self.clip, clip)
        return dataclasses.replace(self, clip=clip)

    def bind(self, setting: Setting) -> DPSGDMechanism:
        """DP-SGD holds no state: the mechanism is the formula."""
        return DPSGDMechanism(1.0 if self.clip is None else self.clip, self.clipping)

    def describe(self) -> dict[str, Any]:
        """Name and configuration."""
        return {
            "method": "DPSGD",
            "clip": 1.0 if self.clip is None else self.clip,
            "clipping": describe(self.clipping),
        }


class DPSGDMechanism:
    """One step of DP-SGD."""

    public: tuple[PublicData, ...] = ()

    def __init__(self, clip: float, clipping: ClippingRule) -> None:
        self._clip, self._clipping = clip, clipping

    def carriers(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """None: gradients are needed in full."""
        return {}

    def clipped_sum(self, gradients: PerSampleGradients) -> Sums:
        """Σ_i clip(g_i, C), by parameter."""
        return gradients.combine(clip_factors(self._clipping, gradients.norm_bounds(), self._clip))

    def release(self, total: Sums, noise: Noise, noise_multiplier: float) -> Sums:
        """The sum plus z·C·N(0, I)."""
        return noise.add(total, std=noise_multiplier * self._clip)

    def diagnostics(self) -> list[dict[str, Any]]:
        """DP-SGD notes nothing."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Nothing is carried from step to step."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""
