"""A term: what one call of one module adds to the per-sample gradients of one parameter.

The per-sample gradient of a parameter is the sum of its terms. A module called once gives one term;
a module called twice, or a weight tied between modules, gives several.
"""

from __future__ import annotations

import importlib.util
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from typing import Any, Self

import torch
from torch import Tensor

from dpspan.gradients.layers.groups import Groups
from dpspan.gradients.numerics import (
    Arithmetic,
    SquaredNorms,
    full_precision,
    product,
    square_product,
    squared_norms,
)

# Working memory of one block of samples. On a CPU larger temporaries cost more than they save: they
# leave the cache, and the system maps and zeroes them anew at every step. A GPU wants few large
# launches, and its allocator keeps what it has.
_CPU_WORKSPACE_BYTES = 4 * 2**20
_GPU_WORKSPACE_BYTES = 1024 * 2**20

# The same for blocks of lines: beyond it a CPU pays more for fresh memory than products gain.
_CPU_LINES_BYTES = 16 * 2**20
_GPU_LINES_BYTES = 4096 * 2**20
_ALIGNED = 64  # lines

COST_OF_FLOAT64 = 2  # of a product, in products of float32


class Term(ABC):
    """One summand of the per-sample gradients (n, d) of a parameter of d entries."""

    @property
    @abstractmethod
    def samples(self) -> int:
        """Number of samples n."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """How many products are added up in one entry of a row."""

    @abstractmethod
    def rows(self, start: int, stop: int) -> Tensor:
        """The gradients of samples start … stop − 1 as rows, (stop − start, d)."""

    def rows_to_keep(self, start: int, stop: int) -> Tensor:
        """The same where these rows are measured *and* summed: however they round is right."""
        return self.rows(start, stop)

    @abstractmethod
    def lines(self, start: int, stop: int, width: int) -> Tensor:
        """Lines start … stop − 1 of all rows, `width` numbers each: indices of the first axis."""

    def squared_norms(self, arithmetic: Arithmetic) -> SquaredNorms:
        """Squared row norms by the cheaper of instantiating and the kernel form.

        Here from rows, a block of samples at a time. `combine` sums products of the factors, not
        these rows, so the bound adds what rounding the rows can have hidden.
        """
        empty = self.rows(0, 0)
        value = by_blocks(
            lambda i, j: squared_norms(self.rows(i, j)), self.samples, empty.shape[1], empty
        )
        hidden = arithmetic.product(self.depth) + arithmetic.summand
        return SquaredNorms(value, self.magnitudes(), arithmetic.norm, 0.0, hidden)

    @abstractmethod
    def magnitudes(self) -> Tensor:
        """Squares of an upper bound of Σ_t ‖a_t‖‖b_t‖ per sample: what rounding is relative to."""

    @abstractmethod
    def combine(self, weights: Tensor, dropped: Tensor | None) -> Tensor:
        """Weighted sum of the rows, (d,); `dropped` ones are blanked, as 0 · NaN is not 0."""

    def kernel(self, other: Term) -> Tensor | None:
        """Inner products by factors, (n, m) float64; None if kinds differ or rows are cheaper."""
        if isinstance(other, Stack):
            return _all([self.kernel(part) for part in other.parts], dim=1)
        return self._kernel(other) if isinstance(other, type(self)) else None

    def _kernel(self, other: Any) -> Tensor | None:
        """`kernel` of a term of the same kind."""
        return None

    def compress(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Each row as a matrix G: G Rᵀ and Lᵀ G. Here from the rows, a block at a time."""
        d_out, d_in = left.shape[0], right.shape[1]
        parts = []
        for start, stop in blocks(self.samples, d_out * d_in, right):
            g = self.rows(start, stop).unflatten(1, (d_out, d_in))
            parts.append((g @ right.T, left.T @ g))
        return joined_pairs(parts)

    def scaled(self, factor: float) -> Term:
        """Every row times a factor."""
        return _with_rows(self, lambda x: x * factor)

    def double(self) -> Self:
        """The same in float64, where a difference of two norms still means something."""
        tensors = {n: x for n, x in vars(self).items() if isinstance(x, Tensor)}
        floats = {n: x.double() for n, x in tensors.items() if x.is_floating_point()}
        return replace(self, **floats)  # type: ignore[type-var]

    def compact(self, planned: int) -> Term:
        """The form in which it is kept until the step: its rows, where that pays.

        Forms have bounds of their own, so none may be chosen by how many samples there are, which
        is private: one more would change the clip of all. `planned` is how many to plan for.
        """
        return self

    @abstractmethod
    def merged(self, groups: Groups) -> Term:
        """The rows that belong to one sample added up to one."""


def blocks(samples: int, numbers_per_sample: int, like: Tensor) -> Iterator[tuple[int, int]]:
    """Cut the samples into ranges whose working memory, in `like`'s dtype, stays within bounds."""
    workspace = _CPU_WORKSPACE_BYTES if like.device.type == "cpu" else _GPU_WORKSPACE_BYTES
    size = max(1, workspace // max(1, numbers_per_sample * max(4, like.element_size())))
    for start in range(0, max(samples, 1), size):  # no samples: one empty block
        yield start, min(start + size, samples)


def by_blocks(
    compute: Callable[[int, int], Tensor], samples: int, numbers_per_sample: int, like: Tensor
) -> Tensor:
    """What `compute` gives for each range of samples, one after the other."""
    return joined([compute(i, j) for i, j in blocks(samples, numbers_per_sample, like)])


def joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The blocks' results one after the other; one block needs no copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def joined_pairs(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The same for two results a block."""
    lefts, rights = zip(*parts, strict=True)
    return joined(lefts), joined(rights)


def kept(x: Tensor, dropped: Tensor | None) -> Tensor:
    """`x` (n, …) with the dropped samples blanked."""
    if dropped is None:
        return full_precision(x)
    return full_precision(x).masked_fill(dropped.view(-1, *([1] * (x.dim() - 1))), 0.0)


def weighted_sum(rows: Tensor, weights: Tensor, dropped: Tensor | None) -> Tensor:
    """Σ_i w_i rows_i, in which `dropped` rows, of weight zero, do not count even if not finite."""
    if dropped is not None and fused(rows) and rows.stride(1) == 1:
        from dpspan.gradients.layers import kernels

        return kernels.weighted_sum(rows, weights)
    return weights @ kept(rows, dropped)


def fused(x: Tensor) -> bool:
    """Whether there are kernels of our own for a tensor like `x`."""
    return x.is_cuda and x.dtype == torch.float32 and _has_triton()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None and torch.version.hip is None


def only_first(term: Term, count: int) -> Term:
    """The term as it was recorded, with zeros for all samples but the first `count`."""
    return _with_rows(term, lambda x: torch.cat([x[:count], torch.zeros_like(x[count:])]))


def weighted(term: Term, weights: Tensor) -> Term:
    """The term as it was recorded, each row times its weight."""
    return _with_rows(term, lambda x: x * weights.to(x.dtype).view(-1, *([1] * (x.dim() - 1))))


def _with_rows(term: Term, change: Callable[[Tensor], Tensor]) -> Term:
    name = "values" if isinstance(term, Rows) else "b"
    return replace(term, **{name: change(getattr(term, name))})  # type: ignore[type-var]


class Factored(Term):
    """A term kept as its factors, of which `b`, the gradients of outputs, is (n, T, …)."""

    b: Tensor

    @property
    def samples(self) -> int:
        return self.b.shape[0]

    @property
    def depth(self) -> int:
        return self.b.shape[1]


@dataclass(frozen=True)
class Rows(Term):
    """A term kept as its rows: biases, norms' affine maps, and whatever is smaller this way."""

    depth = 1

    values: Tensor  # (n, *shape)

    def flat(self) -> Tensor:
        """(n, d); a parameter that is a single number has d = 1."""
        return self.values.flatten(1) if self.values.dim() > 1 else self.values.unsqueeze(1)

    @property
    def samples(self) -> int:
        return self.values.shape[0]

    def rows(self, start: int, stop: int) -> Tensor:
        return full_precision(self.flat()[start:stop])

    def lines(self, start: int, stop: int, width: int) -> Tensor:
        return full_precision(self.flat()[:, start * width : stop * width])

    def squared_norms(self, arithmetic: Arithmetic) -> SquaredNorms:
        # The rows are the vectors that are summed; only a reduced precision rounds them again.
        value = self.magnitudes()
        return SquaredNorms(value, value, arithmetic.norm, 0.0, 2 * arithmetic.factor)

    def magnitudes(self) -> Tensor:
        return squared_norms(self.flat())

    def combine(self, weights: Tensor, dropped: Tensor | None) -> Tensor:
        return weighted_sum(self.flat(), weights, dropped)

    def merged(self, groups: Groups) -> Rows:
        return Rows(groups.added_up(full_precision(self.values)))


@dataclass(frozen=True)
class _Several(Term):
    """Terms of one parameter that are taken together."""

    parts: Sequence[Term]

    def merged(self, groups: Groups) -> Self:
        return type(self)([part.merged(groups) for part in self.parts])

    def scaled(self, factor: float) -> Term:
        return type(self)([part.scaled(factor) for part in self.parts])

    def double(self) -> Self:
        return type(self)([part.double() for part in self.parts])


class Sum(_Several):
    """Several terms of different kinds for one parameter (an embedding tied to a linear layer)."""

    @property
    def samples(self) -> int:
        return self.parts[0].samples

    @property
    def depth(self) -> int:
        return sum(part.depth for part in self.parts)

    def rows(self, start: int, stop: int) -> Tensor:
        return reduce(torch.add, (part.rows(start, stop) for part in self.parts))

    def lines(self, start: int, stop: int, width: int) -> Tensor:
        return reduce(torch.add, (part.lines(start, stop, width) for part in self.parts))

    def magnitudes(self) -> Tensor:
        return torch.stack([part.magnitudes().sqrt() for part in self.parts]).sum(0).square()

    def combine(self, weights: Tensor, dropped: Tensor | None) -> Tensor:
        return reduce(torch.add, (part.combine(weights, dropped) for part in self.parts))


class Stack(_Several):
    """The samples of several batches one after the other, each as it was recorded."""

    @property
    def samples(self) -> int:
        return sum(part.samples for part in self.parts)

    @property
    def depth(self) -> int:
        return max(part.depth for part in self.parts)

    def rows(self, start: int, stop: int) -> Tensor:
        pieces, first = [], 0
        for part in self.parts:
            begin, end = max(start - first, 0), min(stop - first, part.samples)
            if begin < end:
                pieces.append(part.rows(begin, end))
            first += part.samples
        return joined(pieces or [self.parts[0].rows(0, 0)])

    def lines(self, start: int, stop: int, width: int) -> Tensor:
        return joined([part.lines(start, stop, width) for part in self.parts])

    def squared_norms(self, arithmetic: Arithmetic) -> SquaredNorms:
        values, magnitudes, *errors = zip(
            *(part.squared_norms(arithmetic) for part in self.parts), strict=True
        )
        return SquaredNorms(joined(values), joined(magnitudes), *map(max, errors))

    def magnitudes(self) -> Tensor:
        return joined([part.magnitudes() for part in self.parts])

    def combine(self, weights: Tensor, dropped: Tensor | None) -> Tensor:
        sizes = [part.samples for part in self.parts]
        blanked = [None] * len(sizes) if dropped is None else dropped.split(sizes)
        each = zip(self.parts, weights.split(sizes), blanked, strict=True)
        return reduce(torch.add, (part.combine(w, d) for part, w, d in each))

    def kernel(self, other: Term) -> Tensor | None:
        return _all([part.kernel(other) for part in self.parts], dim=0)

    def compress(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return joined_pairs([part.compress(left, right) for part in self.parts])


def stacked(parts: Sequence[Term]) -> Term:
    """The samples of several terms of one parameter as one term."""
    rows = [part.flat() for part in parts if isinstance(part, Rows)]
    if len(rows) == len(parts):  # joined once, here, rather than at every use
        return Rows(torch.cat(rows))
    return Stack(parts)


def _all(parts: Sequence[Tensor | None], dim: int) -> Tensor | None:
    """The parts side by side, if none is missing."""
    known = [part for part in parts if part is not None]
    return torch.cat(known, dim=dim) if len(known) == len(parts) else None


def merged_rows(term: Term, groups: Groups, size: int) -> Rows:
    """The rows of a term, `size` numbers each, those of a sample added up."""

    def rows(i: int, j: int) -> Tensor:
        start, stop, part = groups.between(i, j)
        return part.added_up(term.rows_to_keep(start, stop))

    samples = groups.samples(term.samples)
    numbers = math.ceil(term.samples / max(1, samples)) * size
    return Rows(by_blocks(rows, samples, numbers, term.rows(0, 0)))


def compact(term: Term, row_size: int, stored: int) -> Term:
    """The term, or its rows where they take no more memory than the factors they come from.

    This is the cost rule of the library. For a linear map used T times per sample, rows take
    d_in·d_out numbers against T·(d_in + d_out) for the factors; instantiating costs T·d_in·d_out
    multiplications against T²·(d_in + d_out) for the ghost norm. Dividing by T, it is the same
    inequality: what is smaller is also faster.
    """
    return Rows(term.rows_to_keep(0, term.samples)) if row_size <= stored else term


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
    """The rows of both terms of a parameter, a block of lines at a time.

    For all samples at once: every product is then one large one, and no row is computed twice.
    """
    empty = term.rows(0, 0)
    lines = shape[0] if shape else 1
    samples = term.samples + (0 if term is other else other.samples)
    width = shape.numel() // max(1, lines)
    line_bytes = max(1, samples * width * empty.element_size())
    workspace = _CPU_LINES_BYTES if empty.device.type == "cpu" else _GPU_LINES_BYTES
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
