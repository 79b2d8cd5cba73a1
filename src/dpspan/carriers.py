"""Gradient carriers: a weight's gradient G, d_out × d_in, seen through thin matrices L and R.

RGP keeps of G only ∂L = G Rᵀ and ∂R = Lᵀ G, where L is d_out × r with orthonormal columns and R is
r × d_in with orthonormal rows. What comes back, ∂L R + L ∂R − L Lᵀ ∂L R, is the orthogonal
projection of G onto the matrices whose columns lie in L or whose rows lie in R. Carriers come from
weights that have been released, or from chance: never from gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Draw = Callable[..., Tensor]  # of sizes: standard normals, from a public seed


class Carrier(NamedTuple):
    """L and R of one weight."""

    left: Tensor  # (d_out, r)
    right: Tensor  # (r, d_in)

    def reconstruct(self, left: Tensor, right: Tensor) -> Tensor:
        """∂L R + L ∂R − L Lᵀ ∂L R."""
        return (left - self.left @ (self.left.T @ left)) @ self.right + self.left @ right


def principal(gradient: Tensor, rank: int) -> Carrier:
    """The top singular directions of a gradient: the best carriers, but those of private data."""
    left, _, right = torch.linalg.svd(gradient.double(), full_matrices=False)
    return Carrier(left[:, :rank], right[:rank])


def unprivate_projection_residual(gradient: Tensor, carrier: Carrier) -> Tensor:
    """‖(I − LLᵀ) G (I − RᵀR)‖/‖G‖: what carriers miss of a gradient (the paper's figure 3).

    With `principal(G, r)` it is the self residual, with carriers of an earlier step the historical
    one. Computed from gradients without noise: for the operator's eyes.
    """
    g = gradient.double().flatten(1)
    left, right = carrier.left.to(g), carrier.right.to(g)
    kept = carrier._replace(left=left, right=right).reconstruct(g @ right.T, left.T @ g)
    norm: Tensor = torch.linalg.matrix_norm(g - kept) / torch.linalg.matrix_norm(g)
    return norm


class CarrierSource(Protocol):
    """Where the carriers of a step come from."""

    def carrier(self, weight: Tensor, first: Tensor, rank: int, step: int, draw: Draw) -> Carrier:
        """Carriers for a weight that was `first` at step 0, as a matrix, or a stack of them."""


@dataclass(frozen=True, kw_only=True)
class History:
    """The directions of the update so far, W_t − W_0; in the first `warmup` steps those of W_t.

    Found by one power pass (the paper's Algorithm 2): two products, and no SVD.

    Examples:
        >>> import dpspan
        >>> from dpspan.carriers import History
        >>> method = dpspan.RGP(rank=8, clip=1.0, carriers=History(warmup=10))
    """

    warmup: int = 1
    iterations: int = 1

    def __post_init__(self) -> None:
        for name, value in (("warmup", self.warmup), ("iterations", self.iterations)):
            if not isinstance(value, int) or value < 1:  # W_0 − W_0 has no directions
                raise ValueError(f"Expected {name} an int of at least 1, got {value!r}.")

    def carrier(self, weight: Tensor, first: Tensor, rank: int, step: int, draw: Draw) -> Carrier:
        """The power method on the historical update."""
        update = weight if step < self.warmup else weight - first
        *stack, _, d_in = weight.shape
        right = draw(*stack, rank, d_in)
        for _ in range(self.iterations):
            left = orthonormal(update @ right.mT)
            right = left.mT @ update
        return Carrier(left, orthonormal(right.mT).mT)


@dataclass(frozen=True, kw_only=True)
class Chance:
    """Random directions, new ones at every step: the paper's control, RGP-random."""

    def carrier(self, weight: Tensor, first: Tensor, rank: int, step: int, draw: Draw) -> Carrier:
        """Random L and R."""
        *stack, d_out, d_in = weight.shape
        left, right = (orthonormal(draw(*stack, size, rank)) for size in (d_out, d_in))
        return Carrier(left, right.mT)


def orthonormal(x: Tensor) -> Tensor:
    """Orthonormal columns that span those of x."""
    columns: Tensor = torch.linalg.qr(x).Q
    return columns
