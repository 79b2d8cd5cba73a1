"""How far a computed norm can lie below the true one: the rounding bounds that clipping rests on.

A clip factor C/‖g‖ is only a clip if ‖g‖ is not underestimated. Where a norm and the sum it guards
come from different arithmetic (ghost norms, book-keeping), the norm carries a slack that provably
covers the precision in use. Everything here is the textbook bound for dot products in any order of
summation: |fl(x·y) − x·y| ≤ (2r + d·u)·|x|·|y| for d terms, unit roundoff u, and factors that the
hardware rounds to relative precision r first (TF32, bfloat16; r = 0 when they enter as they are).
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

_TF32 = 2.0**-11  # relative rounding of a factor
_LOW_BITS = 13  # of a float32, that TF32 does not have
# Tensor cores round sums towards zero, which adds up: 7·10⁻⁹ of the sum for each term of one sign,
# as measured on an H200. Between blocks of so many terms sums are rounded to the nearest.
_EXACT_TERMS = 2048
# Splitting moves every number several times, and saves half of the time of the multiplications: an
# H200 gains by it from about so many multiplications per number on.
_SPLIT_FROM = 200
_PRODUCTS = 2**26  # numbers in the products of blocks that are made at a time
_SYMMETRIC_BLOCK = 512
_BLOCK = 256  # squares summed in working precision before float64 takes over

# Relative rounding of the factors under settings of torch's float32 precision; under any other, as
# "medium" and "bf16" are, it is that of bfloat16.
_FACTOR_ROUNDING = {"none": 0.0, "ieee": 0.0, "highest": 0.0, "high": _TF32, "tf32": _TF32}
_BFLOAT16 = 2.0**-8


class SquaredNorms(NamedTuple):
    """Squared norms of n vectors Σ_t b_t ⊗ a_t, and how far off they can be.

    The vector that is summed is at most √(value·(1 + α) + β·magnitude) + γ·√magnitude long.
    """

    value: Tensor  # (n,) float64, the estimate
    magnitude: Tensor  # (n,) float64, at least (Σ_t ‖a_t‖‖b_t‖)²: what rounding is relative to
    value_error: float  # α
    magnitude_error: float  # β
    summand_error: float  # γ: how far the summed vector can be from the measured one


def bounds(value: Tensor, magnitude: Tensor, errors: Tensor) -> Tensor:
    """Upper bounds of squared norms by the formula above, for rows (α, β, γ) of `errors`."""
    alpha, beta, gamma = errors.unsqueeze(2).unbind(1)
    measured = (value * (1 + alpha) + beta * magnitude).sqrt()
    return (measured + gamma * magnitude.sqrt()).square()


@dataclass(frozen=True)
class Arithmetic:
    """The precision in which matrix products are computed."""

    unit: float  # u, relative error of one rounded operation
    factor: float  # r, relative rounding of the factors of a matrix product

    @classmethod
    def of(cls, x: Tensor) -> Self:
        """The arithmetic for tensors like `x` under torch's current settings."""
        if x.dtype == torch.float64:
            return cls(2.0**-53, 0.0)
        backends = torch.backends
        sources = [(backends.cuda, "matmul")]
        if not x.is_cuda:
            sources += [(backends.mkldnn, "matmul"), (backends.mkldnn, "conv")]
        settings = [
            str(getattr(getattr(backend, operation, None), "fp32_precision", "none"))
            for backend, operation in sources
        ]
        with contextlib.suppress(RuntimeError):  # torch may refuse it once the new setting was used
            settings.append(torch.get_float32_matmul_precision())
        return cls(2.0**-24, max(_FACTOR_ROUNDING.get(name, _BFLOAT16) for name in settings))

    @classmethod
    def precise(cls, x: Tensor) -> Self:
        """The arithmetic of `product`, whatever torch is set to."""
        now = cls.of(x)
        return cls(now.unit, 2.0**-20 if _splits(x, now) else 0.0)

    def product(self, terms: int) -> float:
        """Bound of the error of a dot product of `terms` terms, relative to Σ|x_i||y_i|."""
        return 2 * self.factor + (terms + 2) * self.unit

    @property
    def summand(self) -> float:
        """Bound of the error of a weighted product w·b·a that enters a sum, relative to |b||a|."""
        return 2 * self.factor + 4 * self.unit

    @property
    def norm(self) -> float:
        """Relative error bound of `squared_norms`."""
        return (_BLOCK + 8) * self.unit


def product(a: Tensor, b: Tensor, *, off: Tensor | None = None) -> Tensor:
    """a @ b, or `off` − a @ b, as precise as IEEE float32, whatever torch is set to.

    Differences of long vectors, and eigenvalues far below the largest, need it. On a GPU with TF32
    the factors of a large product are split in two each that TF32 takes as they are: three
    products, still faster than one in IEEE float32.
    """
    sign = 1.0 if off is None else -1.0

    def first(left: Tensor, right: Tensor) -> Tensor:
        return left @ right if off is None else torch.addmm(off, left, right, alpha=sign)

    if not _splits(a, Arithmetic.of(a)) or not _pays(len(a), len(b), b.shape[1]):
        with ieee(a):
            return first(a, b)
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    total = first(a_high, b_low).addmm_(a_low, b_high, alpha=sign)
    lefts, rights = _in_blocks(a_high, b.shape[1]), _in_blocks(b_high.T, len(a))
    for left, right in zip(lefts, rights, strict=True):
        if len(left) == 1:  # without a copy of what may be large
            total.addmm_(left[0], right[0].T, alpha=sign)
        else:
            total.add_(torch.bmm(left, right.mT).sum(0), alpha=sign)
    return total


def square_product(x: Tensor) -> Tensor:
    """x xᵀ in the same precision, of which one half is computed where it is large."""
    if not _splits(x, Arithmetic.of(x)) or not _pays(len(x), x.shape[1], len(x)):
        with ieee(x):
            return _symmetric(x)
    high, low = _halves(x)
    mixed = high @ low.T
    total = mixed + mixed.T
    for blocks in _in_blocks(high, len(x)):
        total += _symmetric(blocks).sum(0)
    return total


def _in_blocks(x: Tensor, others: int) -> Iterator[Tensor]:
    """The columns of x (n, d) by blocks of few enough terms, (blocks, n, terms).

    As many at a time, in one launch, as their products with `others` rows have memory for.
    """
    whole = x.shape[1] // _EXACT_TERMS * _EXACT_TERMS
    together = max(1, _PRODUCTS // max(1, len(x) * others))
    if whole:
        yield from x[:, :whole].unflatten(1, (-1, _EXACT_TERMS)).transpose(0, 1).split(together)
    if whole < x.shape[1]:
        yield x[:, whole:].unsqueeze(0)


def _splits(x: Tensor, arithmetic: Arithmetic) -> bool:
    return x.is_cuda and arithmetic.factor == _TF32


def _pays(rows: int, terms: int, columns: int) -> bool:
    """Whether a product is large enough to split: by multiplications per number that is moved."""
    moved = rows * terms + terms * columns + rows * columns
    return rows * terms * columns > _SPLIT_FROM * moved


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """x as a TF32 number and the rest, at most 2⁻¹⁰ of it; not finite where x is not."""
    high = x.view(torch.int32).bitwise_and(-(1 << _LOW_BITS)).view(torch.float32)
    return high, x - high


def _symmetric(x: Tensor) -> Tensor:
    """x xᵀ for x (…, n, d)."""
    n = x.shape[-2]
    if n < 2 * _SYMMETRIC_BLOCK:
        return x @ x.mT
    first, second = x.split([n // 2, n - n // 2], dim=-2)
    corner = first @ second.mT
    upper = torch.cat([_symmetric(first), corner], dim=-1)
    lower = torch.cat([corner.mT, _symmetric(second)], dim=-1)
    return torch.cat([upper, lower], dim=-2)


@contextlib.contextmanager
def ieee(like: Tensor) -> Iterator[None]:
    """Products of float32 take their factors as they are, whatever torch is set to."""
    if Arithmetic.of(like).factor == 0:
        yield
        return
    # Before torch 2.9 there is the overall setting only.
    on_cpu: Any = getattr(torch.backends.mkldnn, "matmul", None)
    named = [x for x in (torch.backends.cuda.matmul, on_cpu) if hasattr(x, "fp32_precision")]
    before = [backend.fp32_precision for backend in named]
    try:
        overall = torch.get_float32_matmul_precision()
    except RuntimeError:  # backends were set apart, which leaves the overall setting as it is
        overall = "highest"
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(overall)
        for backend, precision in zip(named, before, strict=True):
            backend.fp32_precision = precision


def full_precision(x: Tensor) -> Tensor:
    """`x` in at least float32: half precision is a storage format here, not an arithmetic."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def squared_norms(rows: Tensor) -> Tensor:
    """Squared norm of each row (over all dimensions but the first), float64.

    Blocks of at most 256 squares are summed in working precision and the blocks in float64, so the
    relative error is at most `Arithmetic.norm`, however long the row is.
    """
    return squared_norms_of([rows])[0]


def squared_norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """The same for several tensors of as many rows, (tensors, rows): in few launches."""
    flats = [full_precision(rows).flatten(1) for rows in tensors]
    by_block = [torch.linalg.vector_norm(_in_blocks_of_squares(flat), dim=2) for flat in flats]
    squares = torch.cat(by_block, dim=1).double().square_()
    sums = [part.sum(1) for part in squares.split([part.shape[1] for part in by_block], dim=1)]
    return torch.stack(sums).add_(max(underflow(flat, flat.shape[1]) for flat in flats))


def _in_blocks_of_squares(flat: Tensor) -> Tensor:
    """(n, d) as (n, blocks, at most 256); with zeros at the end where d has no such divisor."""
    width = flat.shape[1]
    block = _divisor(width)
    if width % block:
        flat = torch.nn.functional.pad(flat, (0, -width % block))
    blocks: Tensor = flat.unflatten(1, (-1, block))
    return blocks


@functools.cache
def _divisor(width: int) -> int:
    """How long blocks are: a divisor, if there is a large one."""
    if width <= _BLOCK:
        return max(width, 1)
    return next((b for b in range(_BLOCK, _BLOCK // 8, -1) if width % b == 0), _BLOCK)


def underflow(x: Tensor, squares: int) -> float:
    """What that many squares can lose by underflow, in the dtype of `x`.

    Nothing in itself (1e-35 in float32), but a norm of exactly zero is no bound: times a huge
    other factor, or under a clip factor without limit, what was lost would come back.
    """
    return squares * (2.0**-1022 if x.dtype == torch.float64 else 2.0**-126)


@contextlib.contextmanager
def plain_arithmetic() -> Iterator[None]:
    """No autograd and no autocast: the bounds hold for the arithmetic as it is written."""
    with torch.no_grad():
        if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
            yield  # the usual case, and entered once per layer
            return
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
