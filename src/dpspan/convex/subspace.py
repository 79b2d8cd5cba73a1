"""Subspaces of parameters: where the noise of a step is drawn.

    θ = W.ravel()   parameters, c·p of them
    V               orthonormal columns; embed is Vᵀv (k numbers), lift is V u

Formal guarantee: ‖Vᵀv‖ ≤ ‖v‖ holds for the V in use, not only for the one it should be. `Span`
shrinks its basis by a bound of how far it is from orthonormal (a part in 1e14), so what is embedded
moves no more than what was clipped.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from dpspan.convex.arrays import Array

_UNIT = 2.0**-53


class Subspace(Protocol):
    """A linear subspace of the parameters, with coordinates."""

    @property
    def size(self) -> int:
        """k, how many numbers a step releases."""

    @property
    def basis(self) -> Array:
        """V for all parameters, or for one output if there are `copies` of it."""

    @property
    def copies(self) -> int:
        """How many outputs share the basis, one after the other."""

    def embed(self, vectors: Array) -> Array:
        """Vᵀ v for a vector (P,), or for each column of (P, r)."""

    def lift(self, coordinates: Array) -> Array:
        """V u, (P,)."""


class Whole:
    """All parameters: V is the identity, and never built."""

    def __init__(self, size: int) -> None:
        self._size = size

    @property
    def size(self) -> int:
        """P."""
        return self._size

    @property
    def basis(self) -> Array:
        """The identity, built on demand."""
        return np.eye(self._size)

    @property
    def copies(self) -> int:
        """One."""
        return 1

    def embed(self, vectors: Array) -> Array:
        return vectors

    def lift(self, coordinates: Array) -> Array:
        return coordinates


class Span:
    """The span of the columns of `basis`, (p, k).

    With `copies` = c, parameters are c rows of p weights and each row gets the same basis: that is
    where gradients D ⊗ x are, for x in the span.
    """

    def __init__(self, basis: Array, *, copies: int = 1) -> None:
        v: Array = np.linalg.qr(basis)[0]
        # ‖V‖² ≤ 1 + ‖VᵀV − I‖, the latter as computed and with what its computation rounds.
        error = float(np.linalg.norm(v.T @ v - np.eye(v.shape[1])))
        slack = error + (v.shape[0] + 8) * v.shape[1] * _UNIT
        self._basis: Array = v / np.sqrt(1 + slack)
        self._copies = copies

    @property
    def basis(self) -> Array:
        """V, (p, k)."""
        return self._basis

    @property
    def copies(self) -> int:
        """c."""
        return self._copies

    @property
    def size(self) -> int:
        """c·k."""
        return int(self.basis.shape[1]) * self.copies

    def embed(self, vectors: Array) -> Array:
        rows = vectors.reshape(self.copies, len(self.basis), -1)
        coordinates = np.einsum("cpr,pk->ckr", rows, self.basis, optimize=True)
        return np.asarray(coordinates.reshape(self.size, *vectors.shape[1:]))

    def lift(self, coordinates: Array) -> Array:
        lifted: Array = coordinates.reshape(self.copies, -1) @ self.basis.T
        return lifted.ravel()


def rotation(new: Subspace, old: Subspace) -> Array | None:
    """V_newᵀ V_old, (k_new, k_old); None where both are the same."""
    if new is old:
        return None
    columns = [old.lift(unit) for unit in np.eye(old.size)]
    return new.embed(np.stack(columns, axis=1))
