"""Convolutions of standardised weights (Qiao et al. 2019), as De et al. (2022) train them.

Of each output channel the weight w, d numbers, is used as ŵ = u/max(‖u‖, ε), u = w − mean(w). A
gradient of ŵ becomes one of w when its mean and, where ‖u‖ > ε, its part along ŵ are taken off, and
the rest is divided by the same length: per sample, on the rows that are measured and summed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from dpspan.gradients.layers.conv import Patches, conv_terms
from dpspan.gradients.layers.terms import Rows, Term, weighted_sum

_SHORTEST = 1e-4


class StandardisedConv2d(nn.Conv2d):
    """nn.Conv2d whose weights count by their direction: of mean 0 and length 1 a channel."""

    def forward(self, input: Tensor) -> Tensor:
        direction, _, _ = _standardised(self.weight.flatten(1))
        output: Tensor = self._conv_forward(input, direction.view_as(self.weight), self.bias)
        return output


def _standardised(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ŵ, by what it was divided, and whether that was its length; (channels, d), and (channels,)"""
    centred = weight - weight.mean(1, keepdim=True)
    lengths = torch.linalg.vector_norm(centred, dim=1, keepdim=True)
    divisor = lengths.clamp_min(_SHORTEST)
    return centred / divisor, divisor, lengths > _SHORTEST


@dataclass(frozen=True)
class StandardisedPatches(Patches):
    """The rows of a convolution's weight, brought from ŵ to w; always kept as rows."""

    raw: Tensor  # w, (channels, d)

    def rows(self, start: int, stop: int) -> Tensor:
        rows = super().rows(start, stop)
        direction, divisor, long = _standardised(self.raw.to(rows.dtype))
        g = rows.view(len(rows), *direction.shape)
        g = g - g.mean(2, keepdim=True)
        along = (g * direction).sum(2, keepdim=True) * long
        return ((g - along * direction) / divisor).flatten(1)

    def lines(self, start: int, stop: int, width: int) -> Tensor:
        return self.rows(0, self.samples)[:, start * width : stop * width]

    squared_norms, compress, rows_to_keep = Term.squared_norms, Term.compress, Term.rows_to_keep

    def magnitudes(self) -> Tensor:
        largest = 1 / _standardised(self.raw)[1].min()
        return super().magnitudes() * (2 * largest).square()

    def combine(self, weights: Tensor, dropped: Tensor | None) -> Tensor:
        return weighted_sum(self.rows(0, self.samples), weights, dropped)

    def compact(self) -> Term:
        return Rows(self.rows(0, self.samples))

    def double(self) -> Self:
        return replace(super().double(), raw=self.raw.double())


def standardised_terms(module: nn.Module, x: Tensor, grad: Tensor) -> Iterator[tuple[str, Term]]:
    """Terms of such a convolution's weight and bias."""
    assert isinstance(module, StandardisedConv2d)
    for name, term in conv_terms(module, x, grad):
        if isinstance(term, Patches):
            raw = module.weight.detach().flatten(1)
            term = StandardisedPatches(**vars(term), raw=raw)
        yield name, term
