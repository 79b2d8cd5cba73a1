"""Subspaces of the parameters, where the noise of a step is drawn, and how public rows find them.

    θ = W.ravel()    parameters, c·p of them
    V                orthonormal columns; embed is Vᵀv (k numbers), lift is V u

    WholeSpace       no subspace: noise in all dimensions
    PublicFeatures   span of public rows: gradients of linear models are multiples of the rows
    PublicGradients  top directions of the public rows' gradients at the present weights

Formal guarantee: ‖Vᵀv‖ ≤ ‖v‖ holds for the V in use, not only for the one it should be. `Span`
shrinks its basis by a bound of how far it is from orthonormal (a part in 1e14), so what is embedded
moves no more than what was clipped. A V, of public rows and released weights, costs no privacy.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias

import numpy as np
from scipy import linalg

from dpspan.convex.losses import Records, required
from dpspan.convex.rows import Array, Rows
from dpspan.support.checks import check_count

_UNIT = 2.0**-53
_NEGLIGIBLE = 1e-12  # share of the largest eigenvalue below which a direction is rounding


class Whole:
    """All parameters: V is the identity, and built on demand only."""

    copies = 1

    def __init__(self, size: int) -> None:
        self.size = size

    @property
    def basis(self) -> Array:
        """V, (P, P)."""
        return np.eye(self.size)

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
        self.basis: Array = v / np.sqrt(1 + slack)
        self.copies = copies
        self.size = int(v.shape[1]) * copies  # how many numbers a step releases

    def embed(self, vectors: Array) -> Array:
        """Vᵀ v for a vector (P,), or for each column of (P, r)."""
        rows = vectors.reshape(self.copies, len(self.basis), -1)
        coordinates = np.einsum("cpr,pk->ckr", rows, self.basis, optimize=True)
        return np.asarray(coordinates.reshape(self.size, *vectors.shape[1:]))

    def lift(self, coordinates: Array) -> Array:
        """V u, (P,)."""
        return np.asarray(coordinates.reshape(self.copies, -1) @ self.basis.T).ravel()


Subspace: TypeAlias = Whole | Span


class SubspaceOracle(Protocol):
    """Configuration of where noise is drawn; frozen and public."""

    turns: ClassVar[bool] = False  # whether it is found anew at every step

    def find(self, public: Records | None, weights: Array) -> Subspace:
        """The subspace for a step at these (released) weights."""


@dataclass(frozen=True, kw_only=True)
class WholeSpace(SubspaceOracle):
    """All dimensions."""

    def find(self, public: Records | None, weights: Array) -> Subspace:
        return Whole(len(weights))


Everything = WholeSpace  # its name in 0.1


@dataclass(frozen=True, kw_only=True)
class _OfPublicRows(SubspaceOracle):
    rank: int = 50

    def __post_init__(self) -> None:
        check_count("rank", self.rank)


class PublicFeatures(_OfPublicRows):
    """The top `rank` principal directions of the public rows, for each output."""

    def find(self, public: Records | None, weights: Array) -> Subspace:
        rows = required(public, "PublicFeatures").rows
        basis = _top_directions(rows, np.ones((len(rows), 1)), self.rank)
        return Span(basis, copies=len(weights) // rows.width)


class PublicGradients(_OfPublicRows):
    """The top `rank` directions of the gradients of labelled public rows, anew at every step."""

    turns = True

    def find(self, public: Records | None, weights: Array) -> Subspace:
        known = required(public, "PublicGradients", labels=True)
        return Span(_top_directions(known.rows, known.derivatives(weights), self.rank))


def _top_directions(rows: Rows, derivatives: Array, rank: int) -> Array:
    """Top right singular vectors of the rows D_i ⊗ x̄_i, (c·width, k), by their Gram matrix.

    ⟨D_i ⊗ x_i, D_j ⊗ x_j⟩ = ⟨D_i, D_j⟩⟨x_i, x_j⟩: as large as there are public rows, whatever p.
    """
    inner = rows.x @ rows.x.T
    gram = np.asarray(inner.todense() if hasattr(inner, "todense") else inner) + rows.intercept
    gram = gram * (derivatives @ derivatives.T)
    m = len(gram)
    values, vectors = linalg.eigh(gram, subset_by_index=(max(m - rank, 0), m - 1))
    kept = values > _NEGLIGIBLE * max(values[-1], 0.0)
    if not kept.any():
        raise ValueError(
            "The public gradients are all zero, so they span no subspace: give other public rows."
        )
    coefficients = (vectors / np.sqrt(np.where(kept, values, 1.0)))[:, kept][:, ::-1]
    columns = [rows.combine(derivatives * column[:, None]).ravel() for column in coefficients.T]
    return np.stack(columns, axis=1)
