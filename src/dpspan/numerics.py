"""How far a computed norm can lie below the true one: the rounding bounds that clipping rests on.

A clip factor C/‖g‖ is only a clip if ‖g‖ is not underestimated. Where a norm and the sum it guards
come from different arithmetic (ghost norms, book-keeping), the norm carries a slack that provably
covers the precision in use. Everything here is the textbook bound for dot products in any order of
summation: |fl(x·y) − x·y| ≤ (2r + d·u)·|x|·|y| for d terms, unit roundoff u, and factors that the
hardware rounds to relative precision r first (TF32, bfloat16; r = 0 when they enter as they are).
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
from torch import Tensor

_BLOCK = 256  # squares summed in working precision before float64 takes over

# Relative rounding of the factors under each setting of torch's float32 precision.
_FACTOR_ROUNDING = {
    "none": 0.0,
    "ieee": 0.0,
    "highest": 0.0,
    "high": 2.0**-11,
    "tf32": 2.0**-11,
    "medium": 2.0**-8,
    "bf16": 2.0**-8,
}


class Squared(NamedTuple):
    """Squared norms, one per sample: the best estimate and a bound it cannot exceed."""

    value: Tensor
    bound: Tensor


def unit_roundoff(x: Tensor) -> float:
    """Relative error of one rounded operation in the dtype of `x`."""
    return float(torch.finfo(x.dtype).eps) / 2


def factor_rounding(x: Tensor) -> float:
    """Relative rounding of the factors of a matrix product on `x`, by torch's current settings."""
    if x.dtype == torch.float64:
        return 0.0
    backends = torch.backends
    sources = (
        (backends.cuda, "matmul"),
        *(((backends.mkldnn, "matmul"), (backends.mkldnn, "conv")) if not x.is_cuda else ()),
    )
    settings = [
        str(getattr(getattr(backend, operation, None), "fp32_precision", "none"))
        for backend, operation in sources
    ]
    with contextlib.suppress(RuntimeError):  # torch may refuse it once the new setting was used
        settings.append(torch.get_float32_matmul_precision())
    return max(_FACTOR_ROUNDING.get(setting, 2.0**-8) for setting in settings)


def product_error(x: Tensor, terms: int) -> float:
    """Bound of the error of a dot product of `terms` terms, relative to Σ|x_i||y_i|."""
    return 2 * factor_rounding(x) + (terms + 2) * unit_roundoff(x)


def full_precision(x: Tensor) -> Tensor:
    """`x` in at least float32: half precision is a storage format here, not an arithmetic."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def squared_norms(rows: Tensor) -> Tensor:
    """Squared norm of each row (over all dimensions but the first), float64.

    Blocks of 256 squares are summed in working precision and the blocks in float64, so the
    relative error is at most (256 + 4)·u however long the row is: see `norm_error`.
    """
    flat = full_precision(rows).flatten(1)
    whole = flat.shape[1] - flat.shape[1] % _BLOCK
    blocks = flat[:, :whole].unflatten(1, (whole // _BLOCK, _BLOCK))
    total: Tensor = torch.linalg.vector_norm(blocks, dim=2).double().square().sum(1)
    rest: Tensor = torch.linalg.vector_norm(flat[:, whole:], dim=1).double().square()
    return total + rest


def norm_error(x: Tensor) -> float:
    """Relative error bound of `squared_norms`."""
    return (_BLOCK + 8) * unit_roundoff(full_precision(x))
