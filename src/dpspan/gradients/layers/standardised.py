"""Convolutions of standardised weights (Qiao et al. 2019), as De et al. (2022) train them.

Of each output channel the weight w, d numbers, is used as ŵ = u/max(‖u‖, ε), u = w − mean(w). A
gradient of ŵ becomes one of w when its mean and, where ‖u‖ > ε, its part along ŵ are taken off, and
the rest is divided by the same length: per sample, on the rows that are measured and summed.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from dpspan.gradients.layers.conv import Patches, conv_terms
from dpspan.gradients.layers.terms import Rows, Term

_SHORTEST = 1e-4


class StandardisedConv2d(nn.Conv2d):
    """nn.Conv2d whose weights count by their direction: of mean 0 and length 1 a channel."""

    def forward(self, input: Tensor) -> Tensor:
        direction, _, _ = _standardised(self.weight)
        output: Tensor = self._conv_forward(input, direction.view_as(self.weight), self.bias)
        return output


def _standardised(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ŵ, (channels, d); by what it was divided, and whether that was its length, (channels, 1)."""
    centred = weight.flatten(1) - weight.flatten(1).mean(1, keepdim=True)
    lengths = torch.linalg.vector_norm(centred, dim=1, keepdim=True)
    divisor = lengths.clamp_min(_SHORTEST)
    return centred / divisor, divisor, lengths > _SHORTEST


def standardised_terms(module: nn.Module, x: Tensor, grad: Tensor) -> Iterator[tuple[str, Term]]:
    """Terms of such a convolution's weight, as rows, and of its bias."""
    assert isinstance(module, StandardisedConv2d)
    for name, term in conv_terms(module, x, grad):
        if isinstance(term, Patches):
            rows = term.rows(0, term.samples)
            direction, divisor, long = _standardised(module.weight.detach().to(rows.dtype))
            g = rows.view(len(rows), *direction.shape)
            g = g - g.mean(2, keepdim=True)
            along = (g * direction).sum(2, keepdim=True) * long
            term = Rows((g - along * direction) / divisor)
        yield name, term
