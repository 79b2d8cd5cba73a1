"""nn.Embedding: a linear layer whose inputs are one-hot and never written out."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from dpspan.gradients.layers.groups import Groups
from dpspan.gradients.layers.linear import as_sequence
from dpspan.gradients.layers.terms import COST_OF_FLOAT64, Factored, Term, by_blocks, compact, kept
from dpspan.gradients.numerics import Arithmetic, SquaredNorms, full_precision, squared_norms


@dataclass(frozen=True)
class Lookup(Factored):
    """Row i adds b_it to line index_it: index (n, T), output gradients b (n, T, d)."""

    index: Tensor
    b: Tensor
    entries: int

    def rows(self, start: int, stop: int) -> Tensor:
        b, n, width = full_precision(self.b[start:stop]), stop - start, self.b.shape[2]
        lines = self.index[start:stop] + self.entries * torch.arange(n, device=b.device)[:, None]
        out = b.new_zeros(n * self.entries, width)
        return out.index_add_(0, lines.flatten(), b.flatten(0, 1)).view(n, self.entries * width)

    def lines(self, start: int, stop: int, width: int) -> Tensor:
        inside = (self.index >= start) & (self.index < stop)
        index = (self.index - start).clamp(0, stop - start - 1)
        b = self.b.masked_fill(~inside.unsqueeze(2), 0.0)  # not b·0, which NaN would survive
        return Lookup(index, b, stop - start).rows(0, self.samples)

    def squared_norms(self, arithmetic: Arithmetic) -> SquaredNorms:
        """Σ_ts [index_t = index_s]⟨b_t, b_s⟩, or by rows when the sequence is the longer side."""
        steps, width = self.b.shape[1:]
        if steps * steps > self.entries:
            return super().squared_norms(arithmetic)

        def products(start: int, stop: int) -> Tensor:
            index, b = self.index[start:stop], full_precision(self.b[start:stop])
            same = index[:, :, None] == index[:, None, :]
            return (torch.bmm(b, b.transpose(1, 2)) * same).sum(2).double().sum(1)

        value = by_blocks(products, self.samples, 2 * steps * steps, self.b).clamp(min=0)
        error = arithmetic.product(width) + (steps + 4) * arithmetic.unit
        return SquaredNorms(value, self.magnitudes(), 0.0, error, arithmetic.summand)

    def magnitudes(self) -> Tensor:
        return self.depth * squared_norms(self.b)

    def combine(self, weights: Tensor, dropped: Tensor | None) -> Tensor:
        b = kept(self.b, dropped) * weights.view(-1, 1, 1)
        out = b.new_zeros(self.entries, b.shape[2])
        return out.index_add_(0, self.index.flatten(), b.flatten(0, 1)).flatten()

    def _kernel(self, other: Self) -> Tensor | None:
        """⟨b, b'⟩ over pairs of equal indices, where that is cheaper than rows."""
        n, m, width = self.samples, other.samples, self.b.shape[2]
        if COST_OF_FLOAT64 * self.depth * other.depth > self.entries:  # as of linear layers
            return None
        b, index = other.b.double().flatten(0, 1), other.index.flatten()

        def products(start: int, stop: int) -> Tensor:
            mine = self.b[start:stop].double().reshape(-1, width)
            same = self.index[start:stop].reshape(-1, 1) == index
            each = ((mine @ b.T) * same).view(stop - start, self.depth, m, other.depth)
            return each.sum((1, 3))

        return by_blocks(products, n, 2 * self.depth * b.shape[0], b)

    def compact(self, planned: int) -> Term:
        depth, width = self.b.shape[1:]
        return compact(self, self.entries * width, depth * (width + 1))

    def merged(self, groups: Groups) -> Self:
        return replace(self, index=groups.in_line(self.index), b=groups.in_line(self.b))


def embedding_terms(module: nn.Module, x: Tensor, grad: Tensor) -> Iterator[tuple[str, Term]]:
    """Term of an embedding's weight."""
    assert isinstance(module, nn.Embedding)
    index, b = x.reshape(x.shape[0], x.shape[1:].numel()), as_sequence(grad)
    if module.padding_idx is not None:  # torch gives the padding line no gradient
        b = b * (index != module.padding_idx).unsqueeze(2)
    yield "weight", Lookup(index, b, module.num_embeddings)
