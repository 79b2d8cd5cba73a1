"""Gradient Embedding Perturbation (Yu, Zhang, Chen, Liu 2021), its Algorithm 1.

    B       orthonormal basis of the top k directions of public gradients, rows (in coefficients)
    w_i     B g_i, the embedding, clipped to S1
    r_i     g_i − Bᵀw_i, the residual, of the unclipped embedding, clipped to S2
    release Σ w_i + z1·S1·N(0, I_k)  and  Σ r_i + z2·S2·N(0, I_p);  the gradient is Bᵀw + r

Formal guarantee: adding or removing a sample adds or removes one pair (w_i, r_i) with ‖w_i‖ ≤ S1
and ‖r_i‖ ≤ S2. Scaled by its own noise, the pair has length at most √(1/z1² + 1/z2²) = 1/z: one
release is one Gaussian mechanism of noise multiplier z. The bound on r_i is certified (`residual`)
and holds whatever B is. Biased GEP releases the embedding only, with z1 = z.
"""

import math
from dataclasses import dataclass
from typing import Any

from dpspan.gradients.operator import PerSampleGradients
from dpspan.mechanisms.base import EMBEDDING, Setting, Sums, of_parameters
from dpspan.mechanisms.clipping import clip_factors
from dpspan.mechanisms.noise import Noise
from dpspan.mechanisms.subspace_method import SubspaceMechanism, SubspaceMethod


@dataclass(frozen=True, kw_only=True)
class GEP(SubspaceMethod):
    """GEP: embedding and residual, each with its own clip, and equal shares of the noise.

    `residual_clip` is S2; a fifth of `clip` if left out, as in the paper.
    """

    positive = ("clip", "residual_clip")

    residual_clip: float | None = None

    @property
    def residual_norm(self) -> float:
        """S2."""
        return self.clip_norm / 5 if self.residual_clip is None else self.residual_clip

    def bind(self, setting: Setting) -> SubspaceMechanism:
        return GEPMechanism(self, setting)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "residual_clip": self.residual_norm}


class GEPMechanism(SubspaceMechanism):
    """One step of GEP."""

    passes = 2

    def __init__(self, method: GEP, setting: Setting) -> None:
        super().__init__(method, setting)
        self._s2 = method.residual_norm
        trained = (p for p in setting.model.parameters() if p.requires_grad)
        self._size = sum(p.numel() for p in trained)  # p

    def clipped_sum(self, gradients: PerSampleGradients) -> Sums:
        """Σ_i clip(w_i, S1), and Σ_i clip(r_i, S2) by parameter."""
        w, residual = self.span.split(gradients)
        factors = clip_factors(self._clipping, residual.norm_bounds(), self._s2)
        return {EMBEDDING: self._clipped_embedding(w), **residual.combine(factors)}

    def release(self, total: Sums, noise: Noise, noise_multiplier: float) -> Sums:
        """Both sums with noise of z1 = z2 = √2·z: equal shares of the step's privacy."""
        z = math.sqrt(2) * noise_multiplier
        w, r, std = super().release(total, noise, z), of_parameters(total), z * self._s2
        self._noise_energy["residual"] = self._size * std**2
        return {**w, **noise.add(r, std=std)}


@dataclass(frozen=True, kw_only=True)
class BiasedGEP(SubspaceMethod):
    """GEP without the residual (B-GEP): less noise, but what lies outside is lost."""

    def bind(self, setting: Setting) -> SubspaceMechanism:
        return BiasedGEPMechanism(self, setting)


class BiasedGEPMechanism(SubspaceMechanism):
    """One step of biased GEP: the release is the embedding's, with z1 = z."""

    def clipped_sum(self, gradients: PerSampleGradients) -> Sums:
        """Σ_i clip(w_i, S1), k numbers."""
        return {EMBEDDING: self._clipped_embedding(self.span.embed(gradients))}
