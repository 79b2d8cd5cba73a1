"""The arrays of convex learning: float64 throughout, features dense or in CSR form."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

Array: TypeAlias = NDArray[np.float64]
Features: TypeAlias = Any  # an Array, or a CSR matrix of float64 (scipy is untyped)


def is_sparse(x: Features) -> bool:
    """Whether these features are in CSR form."""
    return bool(sparse.issparse(x))


def scale_rows(x: Features, factors: Array) -> Features:
    """Every row times its factor, in the form it came in."""
    return sparse.diags_array(factors).tocsr() @ x if is_sparse(x) else x * factors[:, None]


@contextmanager
def no_echo() -> Iterator[None]:
    """numpy's complaint about a text among numbers would quote it: say it without."""
    try:
        yield
    except ValueError as error:
        if "convert" not in str(error):
            raise
        raise ValueError(
            "Expected numbers only, got texts among them: encode categories by a list of them that "
            "is known in advance, and fill gaps with constants."
        ) from None
