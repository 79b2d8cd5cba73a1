"""nn.Linear with any leading dimensions, and the outer-product term other layers share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpspan.gradients.layers.terms import (
    COST_OF_FLOAT64,
    Factored,
    Rows,
    Term,
    blocks,
    by_blocks,
    compact,
    joined,
    kept,
)
from dpspan.gradients.numerics import (
    Arithmetic,
    SquaredNorms,
    full_precision,
    squared_norms,
    underflow,
)


@dataclass(frozen=True)
class Outer(Factored):
    """Row i is Σ_t b_it ⊗ a_it: inputs a (n, T, d_in), output gradients b (n, T, d_out)."""

    a: Tensor
    b: Tensor

    @property
    def depth(self) -> int:
        return self.a.shape[1]

    def rows(self, start: int, stop: int) -> Tensor:
        a, b = full_precision(self.a[start:stop]), full_precision(self.b[start:stop])
        return torch.bmm(b.transpose(1, 2), a).flatten(1)

    def lines(self, start: int, stop: int, width: int) -> Tensor:
        return Outer(self.a, self.b[:, :, start:stop]).rows(0, self.samples)

    def double(self) -> Outer:
        return Outer(self.a.double(), self.b.double())

    def squared_norms(self, arithmetic: Arithmetic) -> SquaredNorms:
        """Ghost norm: Σ_ts ⟨a_t, a_s⟩⟨b_t, b_s⟩, which for T = 1 is ‖a‖²‖b‖²."""
        steps = self.depth
        if steps == 1:
            value = self.magnitudes()
            return SquaredNorms(value, value, 2 * arithmetic.norm, 0.0, arithmetic.summand)
        # An entry of the Gram matrices below can lose d squares by underflow.
        lost_a, lost_b = (underflow(k, steps * k.shape[2]) for k in (self.a, self.b))
        values, magnitudes = [], []
        for start, stop in blocks(self.samples, 2 * steps * steps, self.a):
            a, b = full_precision(self.a[start:stop]), full_precision(self.b[start:stop])
            aa, bb = torch.bmm(a, a.transpose(1, 2)), torch.bmm(b, b.transpose(1, 2))
            na, nb = (k.diagonal(dim1=1, dim2=2).sum(1).double() for k in (aa, bb))
            magnitude = (na + lost_a) * (nb + lost_b)
            magnitudes.append(magnitude)
            value = aa.mul_(bb).sum(2).double().sum(1)
            values.append(value + (magnitude - na * nb))
        # |error| ≤ (…)·Σ_ts ‖a_t‖‖a_s‖‖b_t‖‖b_s‖ ≤ (…)·‖A‖²‖B‖²
        error = arithmetic.product(self.a.shape[2]) + arithmetic.product(self.b.shape[2])
        return SquaredNorms(
            joined(values).clamp(min=0),
            joined(magnitudes) * (1 + 2 * error),
            0.0,
            error + (2 * steps + 4) * arithmetic.unit,
            arithmetic.summand,
        )

    def magnitudes(self) -> Tensor:
        return squared_norms(self.a) * squared_norms(self.b)

    def combine(self, weights: Tensor, dropped: Tensor | None) -> Tensor:
        a, b = kept(self.a, dropped), kept(self.b, dropped)
        w = weights.view(-1, 1, 1)
        a, b = (a * w, b) if a.shape[2] < b.shape[2] else (a, b * w)  # scale the smaller side
        return (b.flatten(0, 1).T @ a.flatten(0, 1)).flatten()

    def _kernel(self, other: Outer) -> Tensor | None:
        """⟨a, a'⟩⟨b, b'⟩ summed over both sequences, where that is cheaper than rows."""
        n, m, d_in, d_out = self.samples, other.samples, self.a.shape[2], self.b.shape[2]
        kernel_cost = n * m * self.depth * other.depth * (d_in + d_out)
        rows_cost = (n * self.depth + m * other.depth + n * m) * d_in * d_out
        if COST_OF_FLOAT64 * kernel_cost > rows_cost:
            return None
        a, b = (x.double().flatten(0, 1) for x in (other.a, other.b))

        def products(start: int, stop: int) -> Tensor:
            left = self.a[start:stop].double().flatten(0, 1) @ a.T
            right = self.b[start:stop].double().flatten(0, 1) @ b.T
            each = left.mul_(right).view(stop - start, self.depth, m, other.depth)
            return each.sum((1, 3))

        return by_blocks(products, n, 2 * self.depth * b.shape[0], b)

    def compact(self) -> Term:
        d_in, d_out = self.a.shape[2], self.b.shape[2]
        return compact(self, d_in * d_out, self.depth * (d_in + d_out))

    def merged(self, views: int) -> Outer:
        # A sum over the sequences of all views is one over a longer sequence.
        return Outer(*(x.reshape(-1, views * self.depth, x.shape[2]) for x in (self.a, self.b)))

    def compress(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        a, b = full_precision(self.a), full_precision(self.b)
        left_image = torch.bmm(b.transpose(1, 2), a @ right.T)
        return left_image, torch.bmm((b @ left).transpose(1, 2), a)


def as_sequence(x: Tensor) -> Tensor:
    """(n, …, d) as (n, T, d)."""
    return x.reshape(x.shape[0], x.shape[1:-1].numel(), x.shape[-1])


def linear_terms(module: nn.Module, x: Tensor, grad: Tensor) -> Iterator[tuple[str, Term]]:
    """Terms of a linear layer's weight and bias."""
    a, b = as_sequence(x), as_sequence(grad)
    yield "weight", Outer(a, b)
    yield "bias", Rows(b.sum(1))
