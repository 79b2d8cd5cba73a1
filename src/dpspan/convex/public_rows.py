"""Public rows of a table: known by their digest, kept apart from the private ones, a first fit."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, sparse

from dpspan.convex.losses import Records, required
from dpspan.convex.rows import Array, Features, Rows, no_echo
from dpspan.support.checks import expect

_PIECE = 8192  # rows compared at a time
_PENALTIES, _FOLDS = (1e-3, 1e-2, 1e-1, 1.0), 5  # of a start


@dataclass(frozen=True, kw_only=True, eq=False)
class PublicRows:
    """Records that anybody may see, with labels or without.

    Rows that also occur among the private records are refused, as they may be the same people's.
    Where features are few and coarse, different people have equal rows: if you know that these
    are others, say so by `equal_rows_allowed`, and the certificate will.
    """

    x: Any
    y: Any = None
    name: str = "public"
    equal_rows_allowed: bool = False

    @classmethod
    def of(cls, given: Any) -> Self:
        """From (X, y), X alone, or such an object itself."""
        if isinstance(given, cls):
            return given
        x, y = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        expect(not isinstance(x, tuple), "public to be X_pub or (X_pub, y_pub)", given)
        return cls(x=x, y=y)


def digest(x: Features, y: Any) -> str:
    """sha256 of shape and content, the same for dense and sparse rows."""
    whole = hashlib.sha256(repr(x.shape).encode())
    rows = _canonical(x)
    for part in (rows.indptr.astype("<i8"), rows.indices.astype("<i8"), rows.data.astype("<f8")):
        whole.update(part.tobytes())
    if y is not None:
        whole.update(repr(np.asarray(y).tolist()).encode())
    return whole.hexdigest()


def refuse_overlap(public: Features, private: Features, name: str) -> None:
    """ValueError if public rows are copies of private ones, whatever their labels.

    Exact copies only (as float32). The outcome depends on private data: it is an error for the
    operator to read, never part of a log or certificate.
    """
    known = list(_fingerprints(public))
    copies = set(known).intersection(_fingerprints(private))
    copied = [index for index, fingerprint in enumerate(known) if fingerprint in copies]
    if copied:
        raise ValueError(
            f"{len(copied)} of the {len(known)} public rows '{name}' also occur among the private "
            f"records (exact copies, e.g. public row {copied[0]}). Take them out of the private "
            "records with dpspan.convex.without_public(X, public), or give "
            "PublicRows(..., equal_rows_allowed=True) if you know that they are other records "
            "which happen to be equal. This message depends on private data: do not publish it."
        )


def without_public(x: Any, public: Any) -> NDArray[np.intp]:
    """The indices of the private rows that are not copies of public ones.

    Taken out of the private side, where a record's fate depends on it and on public rows alone.
    """
    known = set(_fingerprints(PublicRows.of(public).x))
    return np.flatnonzero([fingerprint not in known for fingerprint in _fingerprints(x)])


def _canonical(x: Any) -> Any:
    with no_echo():
        rows = x if sparse.issparse(x) else np.atleast_2d(np.asarray(x, dtype=float))
        rows = sparse.csr_array(rows, dtype=np.float64, copy=True)
    rows.sum_duplicates()
    rows.eliminate_zeros()
    return rows


def _fingerprints(x: Any) -> Iterator[bytes]:
    with no_echo():
        whole = sparse.csr_array(x) if sparse.issparse(x) else np.atleast_2d(np.asarray(x, float))
    for start in range(0, whole.shape[0], _PIECE):
        rows = _canonical(whole[start : start + _PIECE])
        with np.errstate(over="ignore"):
            values, columns = rows.data.astype("<f4"), rows.indices.astype("<i8")
        for first, last in pairwise(rows.indptr.tolist()):
            row = hashlib.blake2b(columns[first:last].tobytes(), digest_size=16)
            row.update(values[first:last].tobytes())
            yield row.digest()


def public_start(public: Records | None) -> Array:
    """Weights of the smallest loss on the public rows, under the ridge penalty they choose.

    Of a fixed list, the penalty whose fits to four fifths of the rows do best on the rest.
    """
    known = required(public, "start='public'", labels=True)
    targets = np.asarray(known.targets)
    fold = np.arange(len(known.rows)) % _FOLDS
    folds = range(min(_FOLDS, len(fold)) if len(fold) > 1 else 0)

    def some(chosen: NDArray[np.bool_]) -> Records:
        rows = Rows(known.rows.x[chosen], intercept=known.rows.intercept)
        return replace(known, rows=rows, targets=targets[chosen])

    def fitted(chosen: NDArray[np.bool_], penalty: float) -> Array:
        part = some(chosen)

        def objective(theta: Array) -> tuple[float, Array]:
            gradient = part.rows.combine(part.derivatives(theta)).ravel() / len(part.rows)
            value = float(part.losses(theta).mean()) + penalty / 2 * float(theta @ theta)
            return value, gradient + penalty * theta

        zero = np.zeros(targets.shape[1] * known.rows.width)
        found = optimize.minimize(objective, zero, jac=True, method="L-BFGS-B")
        return np.asarray(found.x)

    def held_out_loss(penalty: float) -> float:
        return sum(float(some(fold == k).losses(fitted(fold != k, penalty)).sum()) for k in folds)

    return fitted(fold >= 0, min(_PENALTIES, key=held_out_loss))
