"""DP-SGD with a clip that follows a quantile of the gradients' norms (Andrew et al. 2021).

    h_i     ½ if ‖g_i‖ ≤ C_t, else −½
    release Σ clip(g_i, C_t) + z1·C_t·N(0, I)  and  Σ h_i + z2·½·N(0, 1)
    b_t     the noisy Σ h_i / L + ½, about the share of records below the clip, kept within [0, 1]
    next    C_{t+1} = C_t·exp(−rate·(b_t − quantile))

Formal guarantee: both sums are of one sample, so they are one release: divided by C_t and by ½ a
record adds a vector of two parts, each of length at most 1, and with 1/z1² + 1/z2² = 1/z² that is a
Gaussian mechanism of noise multiplier z. `share` of 1/z² is spent on the count: z2 = z/√share, and
z1 = z/√(1 − share). C_t follows from what earlier steps released: it is post-processing.

C_t stays on the device: no step waits for it. What fills up a padded batch does not count.
"""

import math
from typing import Any

import torch

from dpspan.gradients.operator import PerSampleGradients, SmallGradient
from dpspan.mechanisms.base import Gradient, Setting, SteppedMechanism, Sums, of_parameters
from dpspan.mechanisms.clipping import AdaptiveClipping, FlatClipping, clip_factors
from dpspan.mechanisms.noise import Noise
from dpspan.support.checks import check_positive

BELOW = SmallGradient("records below the clip")


class AdaptiveMechanism(SteppedMechanism):
    """One step of DP-SGD with an adaptive clip; notes of the clip at the steps 1, 2, 4, 8, …."""

    stays_in_place = True  # the clip is written over

    def __init__(self, clip: float, rule: AdaptiveClipping, setting: Setting) -> None:
        super().__init__()
        self._rule, self._lot_size = rule, setting.expected_batch_size
        self.clip = torch.tensor(clip, dtype=torch.float64)  # C of the next step, on the device

    def clipped_sum(self, gradients: PerSampleGradients) -> Sums:
        """Σ_i clip(g_i, C), by parameter, and Σ_i h_i."""
        norms = gradients.norm_bounds()
        self.clip = self.clip.to(norms.device)  # at the first step
        lengths = norms / self.clip
        half = torch.where(lengths <= 1, 0.5, -0.5)  # a NaN is not below
        if gradients.counted is not None:
            half = half.masked_fill(~gradients.counted, 0.0)
        sums = gradients.combine(clip_factors(FlatClipping(), lengths, 1.0))
        return {**sums, BELOW: half.double().sum()[None]}

    def release(self, total: Sums, noise: Noise, noise_multiplier: float) -> Sums:
        """Both sums with their noise."""
        share = self._rule.share
        on_gradient, on_count = (noise_multiplier / math.sqrt(x) for x in (1 - share, share))
        noisy = noise.add(of_parameters(total), std=on_gradient * self.clip)
        return {**noisy, **noise.add({BELOW: total[BELOW]}, std=on_count / 2)}

    def gradient(self, released: Sums) -> Gradient:
        """What DP-SGD releases; then the clip moves."""
        below = (released[BELOW][0] / self._lot_size + 0.5).clamp(0.0, 1.0)
        self.clip.mul_(torch.exp(self._rule.rate * (self._rule.quantile - below)))
        self.step += 1
        if self.step.bit_count() == 1:
            self._notes.append({"step": self.step, "clip": self.clip.clone()})
        return of_parameters(released)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "clip": float(self.clip)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.clip.fill_(check_positive("the saved clip", state["clip"]))
