"""Gaussian noise for NumPy, from a generator of its own."""

from __future__ import annotations

import numpy as np

from dpspan.convex.arrays import Array


class GaussianNoise:
    """Draws the noise of one fit: seeded from OS entropy, or by a seed, and then not private."""

    def __init__(self, seed: int | None = None) -> None:
        self._generator = np.random.default_rng(seed)

    def normal(self, size: int, std: float) -> Array:
        """N(0, std²·I)."""
        return std * self._generator.standard_normal(size)

    def goe(self, size: int, scale: float) -> Array:
        """scale·GOE: symmetric, variance 1 off the diagonal and 2 on it.

        Isotropic among symmetric matrices with the Frobenius norm, of standard deviation
        √2·scale in every direction; VᵀGOE V is GOE again for an orthonormal V.
        """
        half = self._generator.standard_normal((size, size))
        return np.asarray((half + half.T) * (scale / np.sqrt(2)))
