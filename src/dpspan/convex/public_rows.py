"""Public rows of a table: known by their digest, and kept apart from the private records."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from dpspan.convex.arrays import Features, no_echo


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
    def of(cls, given: Any) -> PublicRows:
        """From (X, y), X alone, or such an object itself."""
        if isinstance(given, PublicRows):
            return given
        if isinstance(given, tuple):
            if len(given) != 2:
                raise ValueError(
                    f"Expected public to be X_pub or (X_pub, y_pub), got a tuple of {len(given)}."
                )
            return cls(x=given[0], y=given[1])
        return cls(x=given)


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
    """The indices of the private rows that are no copies of public ones.

    They are taken out of the private side, where a record's fate depends on that record and on
    public rows alone.
    """
    known = set(_fingerprints(_features(PublicRows.of(public).x)))
    kept = [
        i for i, fingerprint in enumerate(_fingerprints(_features(x))) if fingerprint not in known
    ]
    return np.asarray(kept, dtype=np.intp)


def _features(x: Any) -> Features:
    with no_echo():
        return x if sparse.issparse(x) else np.atleast_2d(np.asarray(x, dtype=float))


def _canonical(x: Features) -> Any:
    rows = sparse.csr_array(x, dtype=np.float64, copy=True)
    rows.sum_duplicates()
    rows.eliminate_zeros()
    return rows


def _fingerprints(x: Features) -> Iterator[bytes]:
    rows = _canonical(x)
    with np.errstate(over="ignore"):
        values, columns = rows.data.astype("<f4"), rows.indices.astype("<i8")
    for first, last in zip(rows.indptr[:-1], rows.indptr[1:], strict=True):
        row = hashlib.blake2b(columns[first:last].tobytes(), digest_size=16)
        row.update(values[first:last].tobytes())
        yield row.digest()
