"""Projected DP-SGD (Zhou, Wu, Banerjee 2021): noise in k dimensions of a public subspace.

    V_k     orthonormal basis of the top directions of public gradients (here B, in coefficients)
    release B (Σ_i clip(g_i, C)) + z·C·N(0, I_k), then back to parameters by Bᵀ

The paper projects the noisy sum, B Bᵀ(Σ + z·C·N(0, I_p)); B N(0, I_p) has the law of N(0, I_k), so
only k numbers are drawn. Formal guarantee: the vector that is summed is the embedding w_i = B g_i
itself, scaled by min(1, C/‖g_i‖, C/‖w_i‖). So adding or removing a sample moves the sum by at most
C, whatever B is (for an orthonormal one the last term never counts), and one release is a Gaussian
mechanism of noise multiplier z. The subspace comes from public data and released weights.
"""

from dataclasses import dataclass

from dpspan.gradients.capture import Capture
from dpspan.gradients.operator import PerSampleGradients
from dpspan.mechanisms.base import EMBEDDING, Gradient, Setting, Sums
from dpspan.mechanisms.dpsgd import DPSGDMechanism
from dpspan.mechanisms.noise import Noise
from dpspan.mechanisms.subspace_method import SubspaceMechanism, SubspaceMethod


@dataclass(frozen=True, kw_only=True)
class PDPSGD(SubspaceMethod):
    """Projected DP-SGD; plain DP-SGD before step `start` or epoch `start_epoch`.

    `PDPSGD(subspace=RandomSubspace(rank=800))` is the paper's RPDP-SGD.
    """

    counts = {**SubspaceMethod.counts, "start": 0, "start_epoch": 0}  # noqa: RUF012

    start: int = 0
    start_epoch: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start and self.start_epoch:
            raise ValueError("Expected start (in steps) or start_epoch, got both.")

    def bind(self, setting: Setting) -> SubspaceMechanism:
        return PDPSGDMechanism(self, setting)


class PDPSGDMechanism(SubspaceMechanism):
    """One step of PDP-SGD."""

    def __init__(self, method: PDPSGD, setting: Setting) -> None:
        super().__init__(method, setting)
        self._start = method.start or method.start_epoch * setting.steps_per_epoch
        self._unprojected = DPSGDMechanism(self._clip, self._clipping)

    def prepare(self, capture: Capture | None = None) -> None:
        if self.step >= self._start:
            super().prepare(capture)

    def clipped_sum(self, gradients: PerSampleGradients) -> Sums:
        """Σ_i B clip(g_i, C), k numbers."""
        if self.step < self._start:
            return self._unprojected.clipped_sum(gradients)
        w = self.span.embed(gradients)
        return {EMBEDDING: self._clipped_embedding(w, norms=gradients.norm_bounds())}

    def release(self, total: Sums, noise: Noise, noise_multiplier: float) -> Sums:
        if self.step < self._start:
            return self._unprojected.release(total, noise, noise_multiplier)
        return super().release(total, noise, noise_multiplier)

    def gradient(self, released: Sums) -> Gradient:
        if self.step < self._start:
            self.step += 1
            return self._unprojected.gradient(released)
        return super().gradient(released)
