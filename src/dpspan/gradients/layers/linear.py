"""nn.Linear with any leading dimensions, and the outer-product term other layers share."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from dpspan.gradients.layers.groups import Groups, Ragged
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
    merged_rows,
)
from dpspan.gradients.numerics import (
    Arithmetic,
    SquaredNorms,
    full_precision,
    squared_norms,
    squared_norms_of,
    underflow,
)


@dataclass(frozen=True)
class Outer(Factored):
    """Row i is Σ_t b_it ⊗ a_it: inputs a (n, T, d_in), output gradients b (n, T, d_out)."""

    a: Tensor
    b: Tensor

    def rows(self, start: int, stop: int) -> Tensor:
        a, b = full_precision(self.a[start:stop]), full_precision(self.b[start:stop])
        return torch.bmm(b.transpose(1, 2), a).flatten(1)

    def lines(self, start: int, stop: int, width: int) -> Tensor:
        return Outer(self.a, self.b[:, :, start:stop]).rows(0, self.samples)

    def squared_norms(self, arithmetic: Arithmetic) -> SquaredNorms:
        return ghost_norms([self], arithmetic)[0]

    def magnitudes(self) -> Tensor:
        return squared_norms(self.a) * squared_norms(self.b)

    def combine(self, weights: Tensor, dropped: Tensor | None) -> Tensor:
        a, b = kept(self.a, dropped), kept(self.b, dropped)
        w = weights.view(-1, 1, 1)
        a, b = (a * w, b) if a.shape[2] < b.shape[2] else (a, b * w)  # scale the smaller side
        return (b.flatten(0, 1).T @ a.flatten(0, 1)).flatten()

    def _kernel(self, other: Self) -> Tensor | None:
        """⟨a, a'⟩⟨b, b'⟩ summed over both sequences, where that is cheaper than rows."""
        n, m, d_in, d_out = self.samples, other.samples, self.a.shape[2], self.b.shape[2]
        # By the cost of one pair of many: how many there are is private (see `compact`).
        if COST_OF_FLOAT64 * self.depth * other.depth * (d_in + d_out) > d_in * d_out:
            return None
        a, b = (x.double().flatten(0, 1) for x in (other.a, other.b))

        def products(start: int, stop: int) -> Tensor:
            left = self.a[start:stop].double().flatten(0, 1) @ a.T
            right = self.b[start:stop].double().flatten(0, 1) @ b.T
            each = left.mul_(right).view(stop - start, self.depth, m, other.depth)
            return each.sum((1, 3))

        return by_blocks(products, n, 2 * self.depth * b.shape[0], b)

    def compact(self, planned: int) -> Term:
        d_in, d_out = self.a.shape[2], self.b.shape[2]
        return compact(self, d_in * d_out, self.depth * (d_in + d_out))

    def merged(self, groups: Groups) -> Term:
        d_in, d_out = self.a.shape[2], self.b.shape[2]
        if isinstance(groups, Ragged) and d_in * d_out <= groups.most * self.depth * (d_in + d_out):
            return merged_rows(self, groups, d_in * d_out)
        # A sum over the sequences of several rows is one over a longer sequence.
        return Outer(*map(groups.in_line, (self.a, self.b)))

    def compress(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        a, b = full_precision(self.a), full_precision(self.b)
        left_image = torch.bmm(b.transpose(1, 2), a @ right.T)
        return left_image, torch.bmm((b @ left).transpose(1, 2), a)


def ghost_norms(terms: Sequence[Outer], arithmetic: Arithmetic) -> list[SquaredNorms]:
    """Σ_ts ⟨a_t, a_s⟩⟨b_t, b_s⟩ of each term (‖a‖²‖b‖² for T = 1), for all layers together."""
    single = [term for term in terms if term.depth == 1]
    several = [term for term in terms if term.depth != 1]
    found = {}
    if single:
        squares = squared_norms_of([x for term in single for x in (term.a, term.b)])
        for term, value in zip(single, squares[::2] * squares[1::2], strict=True):
            error = 2 * arithmetic.norm
            found[id(term)] = SquaredNorms(value, value, error, 0.0, arithmetic.summand)
    if several:
        parts = [part for term in several for part in _gram_sums(term)]
        value, na, nb = torch.stack(parts).unflatten(0, (-1, 3)).unbind(1)
        # An entry of the Gram matrices can lose d squares by underflow.
        lost = max(underflow(x, x.shape[1:].numel()) for term in several for x in (term.a, term.b))
        magnitude = (na + lost) * (nb + lost)
        value = (value + (magnitude - na * nb)).clamp_(min=0)
        # |error| ≤ (…)·Σ_ts ‖a_t‖‖a_s‖‖b_t‖‖b_s‖ ≤ (…)·‖A‖²‖B‖²
        errors = [
            arithmetic.product(term.a.shape[2]) + arithmetic.product(term.b.shape[2])
            for term in several
        ]
        magnitude *= 1 + 2 * max(errors)
        for term, error, own, relative_to in zip(several, errors, value, magnitude, strict=True):
            error += (2 * term.depth + 4) * arithmetic.unit
            found[id(term)] = SquaredNorms(own, relative_to, 0.0, error, arithmetic.summand)
    return [found[id(term)] for term in terms]


def _gram_sums(term: Outer) -> tuple[Tensor, Tensor, Tensor]:
    """Of A Aᵀ ∘ B Bᵀ, A Aᵀ and B Bᵀ, each T × T: the sum of the first, the traces of the others."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for start, stop in blocks(term.samples, 2 * term.depth**2, term.a):
        a, b = full_precision(term.a[start:stop]), full_precision(term.b[start:stop])
        aa, bb = torch.bmm(a, a.transpose(1, 2)), torch.bmm(b, b.transpose(1, 2))
        na, nb = (k.diagonal(dim1=1, dim2=2).sum(1, dtype=torch.float64) for k in (aa, bb))
        parts.append((aa.mul_(bb).sum(2).sum(1, dtype=torch.float64), na, nb))
    value, na, nb = (joined(each) for each in zip(*parts, strict=True))
    return value, na, nb


def as_sequence(x: Tensor) -> Tensor:
    """(n, …, d) as (n, T, d)."""
    return x.reshape(x.shape[0], x.shape[1:-1].numel(), x.shape[-1])


def linear_terms(module: nn.Module, x: Tensor, grad: Tensor) -> Iterator[tuple[str, Term]]:
    """Terms of a linear layer's weight and bias."""
    a, b = as_sequence(x), as_sequence(grad)
    yield "weight", Outer(a, b)
    yield "bias", Rows(b.sum(1))
