"""A low-dimensional subspace of parameter space, spanned by gradients and written in coefficients.

The paper's B (k × p, orthonormal rows) is C H: H are m gradients, kept as the operator they are,
and C is k × m (see `solvers`), so no p × k matrix exists. Where one is cheaper (few directions of
many gradients, used for several steps), it is the same thing with H = B and C = I: `explicit`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from dpspan.gradients.layers.terms import Rows, inner, joined, line_blocks
from dpspan.gradients.numerics import Arithmetic, ieee, plain_arithmetic, product
from dpspan.gradients.operator import Names, PerSampleGradients
from dpspan.subspaces.residual import Residual
from dpspan.subspaces.solvers import Eigh, Solver
from dpspan.support.checks import check_count, expect


@dataclass(eq=False, repr=False)
class Subspace:
    """The span of B = C H."""

    gradients: PerSampleGradients  # H
    coefficients: Tensor  # C (k, m) float64
    eigenvalues: Tensor  # of K, descending: those that were computed
    kernels: Mapping[Names, Tensor]  # K by parameter, where it came from factors alone

    @classmethod
    @plain_arithmetic()
    def from_gradients(
        cls,
        gradients: PerSampleGradients,
        rank: int,
        *,
        solver: Solver | None = None,
        previous: Tensor | None = None,
    ) -> Self:
        """The top `rank` principal directions of the gradients (fewer, if they span fewer).

        `previous` are the last step's coefficients, of the same samples, for iterative solvers.
        """
        rank, m = min(check_count("rank", rank), gradients.samples), gradients.samples
        if m == 0:
            raise ValueError("Expected at least one gradient to span a subspace, got none.")
        gram, kernels = _inner_products(gradients, gradients)
        if previous is not None and previous.shape != (rank, m):
            previous = None
        # Solvers have errors of their own for what is not finite; here it gives no directions.
        finite = torch.isfinite(gram).all()
        gram = torch.where(finite, gram, 0.0)
        floor = _rounding(gradients) * gram.diagonal().max()
        solver = Eigh() if solver is None else solver
        basis = solver(gram, rank, floor=floor, previous=previous)
        coefficients = torch.where(finite, basis.coefficients, math.nan)
        return cls(gradients, coefficients, basis.eigenvalues, kernels)

    @property
    def dimensions(self) -> int:
        """Length of an embedding: the rank that was asked for, or m."""
        return self.coefficients.shape[0]

    @property
    def rank(self) -> int:
        """How many of the directions are there; the others are zero."""
        return int(self.live)

    @cached_property
    def live(self) -> Tensor:
        """`rank`, without waiting for a GPU."""
        return (self.coefficients != 0).any(1).sum()

    @plain_arithmetic()
    def embed(self, gradients: PerSampleGradients) -> Tensor:
        """J Bᵀ, (n, k) float64."""
        products, _ = _inner_products(self._comparable(gradients), self.gradients)
        return products @ self.coefficients.T

    @plain_arithmetic()
    def split(self, gradients: PerSampleGradients) -> tuple[Tensor, Residual]:
        """J Bᵀ, and J − (J Bᵀ) B: each gradient inside and outside of the subspace."""
        gradients = self._comparable(gradients)
        products, kernels = _inner_products(gradients, self.gradients)
        embedding = products @ self.coefficients.T
        return embedding, Residual(
            gradients,
            self.gradients,
            embedding @ self.coefficients,
            taken=torch.linalg.vector_norm(embedding, dim=1),
            kernels={n: (kernels[n], self.kernels[n]) for n in kernels if n in self.kernels},
        )

    def _comparable(self, gradients: PerSampleGradients) -> PerSampleGradients:
        if gradients.shapes != self.gradients.shapes:
            raise ValueError("Expected gradients of the parameters that the subspace is made of.")
        return gradients.aligned(self.gradients)

    @plain_arithmetic()
    def lift(self, z: Tensor, *, finite: bool = False) -> dict[str, Tensor]:
        """zᵀB = (zᵀC) H, a vector of the subspace by parameter; `finite` as in `combine`."""
        length = f"a vector of length {self.dimensions}"
        expect(z.shape == (self.dimensions,), length, f"shape {tuple(z.shape)}")
        with ieee(self.gradients.like):  # weights of near directions are large and cancel
            weights = self.coefficients.T @ z.to(self.coefficients)
            return self.gradients.combine(weights, finite=finite)

    @plain_arithmetic()
    def embed_vector(self, vector: Mapping[str, Tensor]) -> Tensor:
        """B v for one vector in parameter space."""
        shapes = self.gradients.shapes
        if {name: value.shape for name, value in vector.items()} != shapes:
            raise ValueError("Expected a vector over the parameters that the subspace is made of.")
        rows: dict[str, list[Any]] = {name: [Rows(vector[name][None])] for name in shapes}
        like = next(iter(vector.values()))
        return self.embed(PerSampleGradients(shapes, rows, 1, like=like))[0]

    def project(self, vector: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """BᵀB v: the part of a vector that lies in the subspace."""
        return self.lift(self.embed_vector(vector))

    @plain_arithmetic()
    def explicit(self) -> Self:
        """The same subspace with its basis written out: k × p numbers, and C = I."""
        c = (self.coefficients * self.gradients.scale).to(self.gradients.like)
        rows: dict[str, list[Any]] = {}
        for name, term in self.gradients.terms.items():
            shape = self.gradients.shapes[name]
            parts = [product(c, lines) for lines, _ in line_blocks(term, term, shape)]
            rows[name] = [Rows(joined(parts, dim=1).view(len(c), *shape))]
        shapes, like = self.gradients.shapes, self.gradients.like
        identity = (self.coefficients != 0).any(1).double().diag()
        place = self.gradients.placement
        basis = PerSampleGradients(shapes, rows, len(c), like=like, placement=place)
        return type(self)(basis, identity, self.eigenvalues, {})

    def captured_energy(self, gradients: PerSampleGradients) -> Tensor:
        """‖B g‖²/‖g‖² of each gradient, (n,), between 0 and 1; 0 for a gradient of zero."""
        norms = gradients.norms().square()
        tiny = torch.finfo(norms.dtype).tiny
        energy = self.embed(gradients).square().sum(1) / norms.clamp(min=tiny)
        return energy.clamp(max=1.0)

    def drift(self, earlier: Self) -> Tensor:
        """Mean of sin² of the principal angles to an earlier one: 0 if equal, 1 if orthogonal."""
        cosines = earlier.coefficients @ earlier.gradients.gram(self.gradients)
        shared = (cosines @ self.coefficients.T).square().sum()
        return (1 - shared / torch.minimum(self.live, earlier.live).clamp(min=1)).clamp(0, 1)


def _inner_products(
    own: PerSampleGradients, other: PerSampleGradients
) -> tuple[Tensor, dict[Names, Tensor]]:
    """J Hᵀ in float64, and its part of each pack of parameters that came from factors alone."""
    total = torch.zeros(own.samples, other.samples, dtype=torch.float64, device=own.device)
    kernels = {}
    for names, (term, shape) in own.packs.items():
        if names not in other.packs:
            continue
        others = other.packs[names].term
        by_kernel = term.kernel(others)
        if by_kernel is not None:
            kernels[names] = by_kernel
        total += inner(term, others, shape) if by_kernel is None else by_kernel
    total *= own.scale * other.scale
    return total, kernels


def stable_rank(eigenvalues: Tensor) -> Tensor:
    """‖G‖_F²/‖G‖² of a gradient matrix from the eigenvalues of its Gram matrix G Gᵀ."""
    values = eigenvalues.clamp(min=0)
    return values.sum() / values.max().clamp(min=torch.finfo(values.dtype).tiny)


def _rounding(gradients: PerSampleGradients) -> float:
    """Eigenvalues below this share of the longest gradient's ‖h‖² are rounding.

    The share is of ‖h‖², not of the largest eigenvalue: that is up to m times as much where the
    gradients have a direction in common, and their rounding does not grow with it. Errors along the
    common direction do, but they turn it a little, and move the other eigenvalues by their square.
    """
    arithmetic = Arithmetic.precise(gradients.like)
    size = sum(shape.numel() for shape in gradients.shapes.values())
    # Rounded factors err independently, so their errors average out over the p products.
    unit = arithmetic.unit + arithmetic.factor / math.sqrt(size)
    return 8 * unit * math.sqrt(gradients.samples)
