"""A term: what one call of one module adds to the per-sample gradients of one parameter.

The per-sample gradient of a parameter is the sum of its terms. A module called once gives one term;
a module called twice, or a weight tied between modules, gives several.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dpspan.gradients.numerics import Arithmetic, SquaredNorms, full_precision, squared_norms

# Working memory of one block of samples. On a CPU larger temporaries cost more than they save: they
# leave the cache, and the system maps and zeroes them anew at every step. A GPU wants few large
# launches, and its allocator keeps what it has.
_CPU_WORKSPACE_BYTES = 4 * 2**20
_GPU_WORKSPACE_BYTES = 1024 * 2**20

COST_OF_FLOAT64 = 2  # of a product, in products of float32


class Term(Protocol):
    """One summand of the per-sample gradients (n, d) of a parameter of d entries."""

    @property
    def samples(self) -> int:
        """Number of samples n."""

    @property
    def depth(self) -> int:
        """How many products are added up in one entry of a row."""

    def rows(self, start: int, stop: int) -> Tensor:
        """The gradients of samples start … stop − 1 as rows, (stop − start, d)."""

    def lines(self, start: int, stop: int, width: int) -> Tensor:
        """All samples' rows, but only lines start … stop − 1 of the parameter.

        A line is what one index of the first axis holds, `width` numbers.
        """

    def squared_norms(self, arithmetic: Arithmetic) -> SquaredNorms:
        """Squared row norms by the cheaper of instantiating and the kernel form."""

    def magnitudes(self) -> Tensor:
        """Squares of an upper bound of Σ_t ‖a_t‖‖b_t‖ per sample: what rounding is relative to."""

    def combine(self, weights: Tensor, dropped: Tensor | None) -> Tensor:
        """Weighted sum of the rows, (d,), in which `dropped` samples are blanked.

        A dropped sample has weight zero, but 0 · NaN is not 0. None: all samples are kept.
        """

    def kernel(self, other: Term) -> Tensor | None:
        """Inner products with the rows of `other` from the factors alone, (n, m) float64.

        None where the two are of different kinds, or where rows are cheaper.
        """

    def compress(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Each row as a matrix G: G Rᵀ and Lᵀ G."""

    def scaled(self, factor: float) -> Term:
        """The same rows times a number."""

    def compact(self) -> Term:
        """The form in which it is kept until the step: its rows, where that pays."""

    def merged(self, views: int) -> Term:
        """Every `views` rows, which belong to one record, added up to one."""


def blocks(samples: int, numbers_per_sample: int, like: Tensor) -> Iterator[tuple[int, int]]:
    """Cut the samples into ranges whose working memory, in `like`'s dtype, stays within bounds."""
    workspace = _CPU_WORKSPACE_BYTES if like.device.type == "cpu" else _GPU_WORKSPACE_BYTES
    size = max(1, workspace // max(1, numbers_per_sample * max(4, like.element_size())))
    for start in range(0, max(samples, 1), size):  # no samples: one empty block
        yield start, min(start + size, samples)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The blocks' results one after the other; one block needs no copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def kept(x: Tensor, dropped: Tensor | None) -> Tensor:
    """`x` (n, …) with the dropped samples blanked."""
    if dropped is None:
        return full_precision(x)
    return full_precision(x).masked_fill(dropped.view(-1, *([1] * (x.dim() - 1))), 0.0)


def instantiated_norms(term: Term, row_size: int, arithmetic: Arithmetic) -> SquaredNorms:
    """Squared norms from rows, a block of samples at a time, each block dropped after use.

    `combine` sums products of the factors, not these rows, so the bound adds what rounding the
    rows can have hidden.
    """
    empty = term.rows(0, 0)
    values = [
        squared_norms(term.rows(start, stop))
        for start, stop in blocks(term.samples, row_size, empty)
    ]
    hidden = arithmetic.product(term.depth) + arithmetic.summand
    return SquaredNorms(joined(values), term.magnitudes(), arithmetic.norm, 0.0, hidden)


@dataclass(frozen=True)
class Rows:
    """A term kept as its rows: biases, norms' affine maps, and whatever is smaller this way."""

    values: Tensor  # (n, *shape)

    def flat(self) -> Tensor:
        """(n, d); a parameter that is a single number has d = 1."""
        return self.values.flatten(1) if self.values.dim() > 1 else self.values.unsqueeze(1)

    @property
    def samples(self) -> int:
        return self.values.shape[0]

    @property
    def depth(self) -> int:
        return 1

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
        return weights @ kept(self.flat(), dropped)

    def kernel(self, other: Term) -> Tensor | None:
        return None

    def compress(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return compress_rows(self, left, right)

    def compact(self) -> Rows:
        return self

    def merged(self, views: int) -> Rows:
        return Rows(full_precision(self.values).unflatten(0, (-1, views)).sum(1))

    def scaled(self, factor: float) -> Rows:
        return Rows(self.values * factor)


@dataclass(frozen=True)
class Sum:
    """Several terms of different kinds for one parameter (an embedding tied to a linear layer)."""

    terms: Sequence[Term]
    row_size: int

    @property
    def samples(self) -> int:
        return self.terms[0].samples

    @property
    def depth(self) -> int:
        return sum(term.depth for term in self.terms)

    def rows(self, start: int, stop: int) -> Tensor:
        total = self.terms[0].rows(start, stop)
        for term in self.terms[1:]:
            total = total + term.rows(start, stop)
        return total

    def lines(self, start: int, stop: int, width: int) -> Tensor:
        total = self.terms[0].lines(start, stop, width)
        for term in self.terms[1:]:
            total = total + term.lines(start, stop, width)
        return total

    def squared_norms(self, arithmetic: Arithmetic) -> SquaredNorms:
        return instantiated_norms(self, self.row_size, arithmetic)

    def magnitudes(self) -> Tensor:
        roots = torch.stack([term.magnitudes().sqrt() for term in self.terms])
        return roots.sum(0).square()

    def combine(self, weights: Tensor, dropped: Tensor | None) -> Tensor:
        return torch.stack([term.combine(weights, dropped) for term in self.terms]).sum(0)

    def kernel(self, other: Term) -> Tensor | None:
        return None

    def compress(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return compress_rows(self, left, right)

    def compact(self) -> Sum:
        return self

    def merged(self, views: int) -> Sum:
        return Sum([term.merged(views) for term in self.terms], self.row_size)

    def scaled(self, factor: float) -> Sum:
        return Sum([term.scaled(factor) for term in self.terms], self.row_size)


@dataclass(frozen=True)
class Stack:
    """The samples of several batches one after the other, each as it was recorded."""

    parts: Sequence[Term]

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
        norms = [part.squared_norms(arithmetic) for part in self.parts]
        return SquaredNorms(
            joined([part.value for part in norms]),
            joined([part.magnitude for part in norms]),
            max(part.value_error for part in norms),
            max(part.magnitude_error for part in norms),
            max(part.summand_error for part in norms),
        )

    def magnitudes(self) -> Tensor:
        return joined([part.magnitudes() for part in self.parts])

    def combine(self, weights: Tensor, dropped: Tensor | None) -> Tensor:
        sizes = [part.samples for part in self.parts]
        blanked = [None] * len(sizes) if dropped is None else dropped.split(sizes)
        sums = [
            part.combine(w, d)
            for part, w, d in zip(self.parts, weights.split(sizes), blanked, strict=True)
        ]
        return torch.stack(sums).sum(0)

    def kernel(self, other: Term) -> Tensor | None:
        return _all([part.kernel(other) for part in self.parts], dim=0)

    def kernel_of(self, term: Term) -> Tensor | None:
        """Inner products of a term's rows with these."""
        return _all([term.kernel(part) for part in self.parts], dim=1)

    def compress(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        lefts, rights = zip(*(part.compress(left, right) for part in self.parts), strict=True)
        return joined(lefts), joined(rights)

    def compact(self) -> Stack:
        return self

    def merged(self, views: int) -> Stack:
        return Stack([part.merged(views) for part in self.parts])

    def scaled(self, factor: float) -> Stack:
        return Stack([part.scaled(factor) for part in self.parts])


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


def compress_rows(term: Term, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """G Rᵀ and Lᵀ G from the rows, a block of samples at a time."""
    d_out, d_in = left.shape[0], right.shape[1]
    lefts, rights = [], []
    for start, stop in blocks(term.samples, d_out * d_in, right):
        g = term.rows(start, stop).unflatten(1, (d_out, d_in))
        lefts.append(g @ right.T)
        rights.append(left.T @ g)
    return joined(lefts), joined(rights)


def compact(term: Term, row_size: int, stored: int) -> Term:
    """The term, or its rows where they take no more memory than the factors they come from.

    This is the cost rule of the library. For a linear map used T times per sample, rows take
    d_in·d_out numbers against T·(d_in + d_out) for the factors; instantiating costs T·d_in·d_out
    multiplications against T²·(d_in + d_out) for the ghost norm. Dividing by T, it is the same
    inequality: what is smaller is also faster.
    """
    return Rows(term.rows(0, term.samples)) if row_size <= stored else term
