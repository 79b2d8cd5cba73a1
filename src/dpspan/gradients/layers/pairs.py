"""Two terms of the same parameter: inner products of their rows, in the memory of a few lines.

Where rows have to be written out, it is for a few lines of the parameter at a time (a line is one
output neuron or channel) and for all samples at once: every product is then one large one, and no
row is computed twice.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from dpspan.gradients.layers.terms import Term
from dpspan.gradients.numerics import product, square_product

# Large enough for efficient products; beyond it a CPU pays more for fresh memory than it saves.
_CPU_WORKSPACE_BYTES = 16 * 2**20
_GPU_WORKSPACE_BYTES = 4096 * 2**20
_ALIGNED = 64


def inner(term: Term, other: Term, shape: torch.Size) -> Tensor:
    """Inner products of the rows of two terms, (n, m) float64."""
    by_kernel = term.kernel(other)
    if by_kernel is not None:
        return by_kernel
    total: Tensor | None = None
    for left, right in line_blocks(term, other, shape):
        block = square_product(left) if term is other else product(left, right.T)
        total = block.double() if total is None else total.add_(block.double())
    assert total is not None
    return total


def line_blocks(term: Term, other: Term, shape: torch.Size) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows of both, a block of lines at a time."""
    empty = term.rows(0, 0)
    lines = shape[0] if shape else 1
    samples = term.samples + (0 if term is other else other.samples)
    width = shape.numel() // max(1, lines)
    line_bytes = max(1, samples * width * empty.element_size())
    workspace = _CPU_WORKSPACE_BYTES if empty.device.type == "cpu" else _GPU_WORKSPACE_BYTES
    size = max(1, workspace // line_bytes)
    if size > _ALIGNED:  # blocks that begin on a round address: GPUs multiply others more slowly
        size -= size % _ALIGNED
    if size >= lines:  # rows that are kept as they are need no copy
        left = term.rows(0, term.samples)
        yield left, left if term is other else other.rows(0, other.samples)
        return
    for start in range(0, lines, size):
        stop = min(start + size, lines)
        left = term.lines(start, stop, width)
        yield left, left if term is other else other.lines(start, stop, width)
