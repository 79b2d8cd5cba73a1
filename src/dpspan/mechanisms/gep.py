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

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpspan.gradients.operator import PerSampleGradients
from dpspan.mechanisms.base import Setting, Sums
from dpspan.mechanisms.clipping import clip_factors
from dpspan.mechanisms.noise import Noise
from dpspan.mechanisms.subspace_method import (
    EMBEDDING,
    SubspaceMechanism,
    SubspaceMethod,
    lengths,
    weighted_sum,
)


@dataclass(frozen=True, kw_only=True)
class GEP(SubspaceMethod):
    """GEP: embedding and residual, each with its own clip and noise.

    Args:
        residual_clip: S2; a fifth of `clip` if left out, as in the paper.
        embedding_share: the embedding's part of the privacy of a step, between 0 and 1: z1 =
            z/√share, z2 = z/√(1 − share). Equal parts, z1 = z2 = √2·z, by default.
        leftover: clip the residual first and let the embedding use what it left of the joint
            sensitivity: with flat clipping, never clips more than separate clips.
        clean_residual: take the part inside the subspace off the noisy residual, where there is
            only noise (post-processing).

    Examples:
        >>> import torch
        >>> import dpspan
        >>> images = torch.randn(100, 64)  # public, without labels
        >>> method = dpspan.GEP(public=images, rank=50, clip=1.0, residual_clip=0.2)
        >>> dpspan.GEP(public=images, rank=0)
        Traceback (most recent call last):
        ValueError: Expected rank an int of at least 1 in GEP, got 0.
    """

    residual_clip: float | None = None
    embedding_share: float = 0.5
    leftover: bool = False
    clean_residual: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.residual_clip is not None and not 0 < self.residual_clip < float("inf"):
            raise ValueError(f"Expected residual_clip > 0, got {self.residual_clip}.")
        if not 0 < self.embedding_share < 1:
            raise ValueError(
                f"Expected embedding_share between 0 and 1, got {self.embedding_share}. For the "
                "embedding alone, use BiasedGEP."
            )

    def bind(self, setting: Setting) -> GEPMechanism:
        """The mechanism for this run."""
        return GEPMechanism(self, setting)

    def describe(self) -> dict[str, Any]:
        """Name and configuration."""
        return {
            **super().describe(),
            "residual_clip": self.residual_norm,
            "embedding_share": self.embedding_share,
            "leftover": self.leftover,
            "clean_residual": self.clean_residual,
        }

    @property
    def residual_norm(self) -> float:
        """S2."""
        return self.clip_norm / 5 if self.residual_clip is None else self.residual_clip


@dataclass(frozen=True, kw_only=True)
class BiasedGEP(SubspaceMethod):
    """GEP without the residual (B-GEP): less noise, but what lies outside is lost.

    Examples:
        >>> import torch
        >>> import dpspan
        >>> method = dpspan.BiasedGEP(public=torch.randn(100, 64), rank=50, clip=1.0)
    """

    def bind(self, setting: Setting) -> BiasedGEPMechanism:
        """The mechanism for this run."""
        return BiasedGEPMechanism(self, setting, passes=1)


class BiasedGEPMechanism(SubspaceMechanism):
    """One step of biased GEP."""

    def clipped_sum(self, gradients: PerSampleGradients) -> Sums:
        """Σ_i clip(w_i, S1), k numbers."""
        w = self._keeper.span().embed(gradients)
        return {EMBEDDING: weighted_sum(clip_factors(self._clipping, lengths(w), self._clip), w)}

    def release(self, total: Sums, noise: Noise, noise_multiplier: float) -> Sums:
        """The noisy embedding, lifted to parameters."""
        return self._release_embedding(total, noise, noise_multiplier * self._clip)


class GEPMechanism(SubspaceMechanism):
    """One step of GEP."""

    def __init__(self, method: GEP, setting: Setting) -> None:
        super().__init__(method, setting, passes=2)
        self._s1, self._s2 = self._clip, method.residual_norm
        self._share = method.embedding_share
        self._leftover, self._clean = method.leftover, method.clean_residual

    def clipped_sum(self, gradients: PerSampleGradients) -> Sums:
        """Σ_i clip(w_i, S1), and Σ_i clip(r_i, S2) by parameter."""
        w, residual = self._keeper.span().split(gradients)
        bounds = residual.norm_bounds()
        r_factors = clip_factors(self._clipping, bounds, self._s2)
        s1 = self._leftover_clip(r_factors * bounds) if self._leftover else self._s1
        w_factors = clip_factors(self._clipping, lengths(w), s1)
        return {EMBEDDING: weighted_sum(w_factors, w), **residual.combine(r_factors)}

    def _leftover_clip(self, r_norms: Tensor) -> Tensor:
        """How long each w may be: share·(‖w‖/S1)² + (1 − share)·(‖r‖/S2)² ≤ 1."""
        used = torch.nan_to_num(r_norms / self._s2).clamp(max=1.0).square()
        return self._s1 * ((1 - (1 - self._share) * used) / self._share).sqrt()

    def release(self, total: Sums, noise: Noise, noise_multiplier: float) -> Sums:
        """Both sums with their noise, together in parameter space."""
        std1 = self._s1 * noise_multiplier / math.sqrt(self._share)
        std2 = self._s2 * noise_multiplier / math.sqrt(1 - self._share)
        span = self._keeper.span()
        w = noise.add({EMBEDDING: total[EMBEDDING]}, std1)[EMBEDDING]
        r = {name: value for name, value in total.items() if name != EMBEDDING}
        if self._clean:
            r = noise.add(r, std2)
            gradient = _sum(r, span.lift(w - span.embed_vector(r)))
        else:
            gradient = noise.add(_sum(r, span.lift(w)), std2)
        size = sum(value.numel() for value in r.values())
        energy = {"embedding": span.dimensions * std1**2, "residual": size * std2**2}
        self._keeper.finish(w, gradient, energy)
        return gradient


def _sum(x: Sums, y: Sums) -> Sums:
    return {name: value + y[name] for name, value in x.items()}
