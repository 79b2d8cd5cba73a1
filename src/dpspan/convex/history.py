"""The history of gradients in factored form: G = (Σ_s m_s m_sᵀ)^{1/2} without a p × p matrix.

    M      t × p, the mean gradients
    M = L Qᵀ   Q with orthonormal columns (p × r, r ≤ min(t, p)), L t × r
    G = (MᵀM)^{1/2} = Q |L| Qᵀ, |L| = (LᵀL)^{1/2} by the singular values of L

By way of Q and not of M Mᵀ, whose square root would keep only half of the digits.
"""

from __future__ import annotations

import numpy as np

from dpspan.convex.arrays import Array
from dpspan.convex.subspace import Subspace

_DEPENDENT = 1e-14  # of a vector's length: what is left of it within rounding of the span


class History:
    """Mean gradients, added one by one; private, unless the gradients are not."""

    def __init__(self, size: int) -> None:
        self._q = np.empty((size, 0))
        self._rows: list[Array] = []

    def add(self, gradient: Array) -> None:
        """Gram–Schmidt, twice: once loses orthogonality where little is left."""
        coordinates, rest = np.zeros(self._q.shape[1]), gradient
        for _ in range(2):
            along = self._q.T @ rest
            coordinates, rest = coordinates + along, rest - self._q @ along
        left = float(np.linalg.norm(rest))
        if left > _DEPENDENT * float(np.linalg.norm(gradient)) and self._q.shape[1] < len(rest):
            self._q = np.column_stack([self._q, rest / left])
            coordinates = np.append(coordinates, left)
        self._rows.append(coordinates)

    def root_in(self, subspace: Subspace) -> Array:
        """VᵀG V, (k, k)."""
        rank = self._q.shape[1]
        lower = np.stack([np.pad(row, (0, rank - len(row))) for row in self._rows])
        _, singular, right = np.linalg.svd(lower, full_matrices=False)
        # VᵀG V = Aᵀ diag(s) A with A = Rᵀ QᵀV
        a = right @ subspace.embed(self._q).T
        return np.asarray((a.T * singular) @ a)
