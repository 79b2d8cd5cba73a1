"""The principal directions of m gradients H, found in their m × m Gram matrix K = H Hᵀ.

A direction is written in coefficients: B = C H, where C is k × m. Its rows are orthonormal when
C K Cᵀ = I. With K = QΛQᵀ the top k directions are C = Λ_k^{-1/2} Q_kᵀ. No privacy rests on how well
that holds: it decides only how good the subspace is.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import scipy.sparse.linalg
import torch
from torch import Tensor

from dpspan.support.checks import check_count

_RIDGE = 2.0**-49  # eight units of rounding

Floor = Tensor | float  # a scalar on the GPU need not be waited for


class Basis(NamedTuple):
    """k directions in coefficients; those beyond the numerical rank of K are zero."""

    coefficients: Tensor  # C (k, m) float64
    eigenvalues: Tensor  # (k,) or (m,) float64, descending: those of K that were computed


class Solver(Protocol):
    """How the top k eigenvectors of a Gram matrix are found."""

    def __call__(self, gram: Tensor, rank: int, *, floor: Floor, previous: Tensor | None) -> Basis:
        """The basis; eigenvalues up to `floor` are rounding, `previous` is the last call's C."""


@dataclass(frozen=True, kw_only=True)
class Eigh:
    """The eigendecomposition of K in float64: exact, and fast up to a few hundred gradients."""

    def __call__(
        self, gram: Tensor, rank: int, *, floor: Floor, previous: Tensor | None = None
    ) -> Basis:
        values, vectors = torch.linalg.eigh(gram)
        return _whitened(values, vectors, rank, floor)


@dataclass(frozen=True, kw_only=True)
class Lanczos:
    """Implicitly restarted Lanczos, as PDP-SGD uses: for few directions among many gradients.

    10 of 2,000 take 54 ms and 50 take 127 on two CPU cores, `Eigh` 0.8 s (`benchmarks.solvers`).
    """

    def __call__(self, gram: Tensor, rank: int, *, floor: Floor, previous: Tensor | None) -> Basis:
        """The top eigenvectors; by `Eigh` where Lanczos does not apply (k ≥ m)."""
        if rank >= len(gram) or not bool(gram.any()):
            return Eigh()(gram, rank, floor=floor)
        # A fixed start: by ARPACK's random one, signs would differ and cancel between processes.
        start = np.random.default_rng(0).standard_normal(len(gram))
        try:
            found, directions = scipy.sparse.linalg.eigsh(
                gram.cpu().numpy(), k=rank, which="LA", v0=start
            )
        except scipy.sparse.linalg.ArpackError:
            return Eigh()(gram, rank, floor=floor)
        values, vectors = (torch.from_numpy(x.copy()).to(gram) for x in (found, directions))
        return _whitened(values, vectors, rank, floor)


@dataclass(frozen=True, kw_only=True)
class PowerIteration:
    """Subspace iteration, as GEP uses: `iterations` passes from the last step's directions.

    B ← orthonormalise(B Hᵀ H), which in coefficients is C ← C K. The first call takes the
    eigendecomposition. Made of products and small Cholesky factors, a step on a GPU waits for
    nothing; directions beyond the rank of K shrink to zero.
    """

    iterations: int = 1

    def __post_init__(self) -> None:
        check_count("iterations", self.iterations)

    def __call__(self, gram: Tensor, rank: int, *, floor: Floor, previous: Tensor | None) -> Basis:
        if previous is None:
            return Eigh()(gram, rank, floor=floor)
        # Unit scale keeps the powers of K below in range.
        scale = gram.diagonal().sum().clamp(min=torch.finfo(gram.dtype).tiny)
        k, shift = gram / scale, floor / scale
        # Rounding may leave K eigenvalues below zero, and then no Cholesky factor. K + floor·I has
        # the same eigenvectors; a direction's length², λ/(λ + floor), is set right at the end.
        k.diagonal().add_(shift)
        # A direction that was lost starts again from one of the gradients.
        there = previous.any(1, keepdim=True) & previous.isfinite().all(1, keepdim=True)
        identity = torch.eye(*previous.shape, dtype=gram.dtype, device=gram.device)
        c = torch.where(there, previous * scale.sqrt(), identity)
        for _ in range(self.iterations):
            c = _orthonormalised(c @ k, k)
        c = _orthonormalised(c, k)  # once more: one pass leaves what rounding it had
        spread = (c @ k).square().sum(1) - shift  # ‖H Bᵀ‖² by direction: the Rayleigh quotients
        # ‖cH‖² is at least a half where λ is above the floor, but for rounding.
        lengths = (1 - shift * c.square().sum(1)).clamp(min=0.5).sqrt() * scale.sqrt()
        c = torch.where((spread > shift).unsqueeze(1), c / lengths.unsqueeze(1), 0.0)
        return Basis(c, (spread * scale).sort(descending=True).values)


def _orthonormalised(c: Tensor, k: Tensor) -> Tensor:
    """L⁻¹C for C K Cᵀ + ridge = L Lᵀ: directions of length one, or less where K has none."""
    # What rounding can hide in the product (K has trace 1): the factor exists, and a direction
    # that is nothing but rounding is not stretched to length one.
    ridge = _RIDGE * k.shape[1] * c.square().sum(1) + torch.finfo(c.dtype).tiny
    lower, _ = torch.linalg.cholesky_ex(c @ k @ c.T + ridge.diag())
    orthonormal: Tensor = torch.linalg.solve_triangular(lower, c, upper=False)
    return orthonormal


def _whitened(values: Tensor, vectors: Tensor, rank: int, floor: Floor) -> Basis:
    """Λ_k^{-1/2} Q_kᵀ of ascending eigenvalues; zeros for those that are nothing but rounding."""
    values, top = values.flip(0), vectors.flip(1)[:, :rank]
    real = values[:rank] > floor
    scales = torch.where(real, values[:rank], 1.0).rsqrt() * real
    return Basis(scales.unsqueeze(1) * top.T, values)
