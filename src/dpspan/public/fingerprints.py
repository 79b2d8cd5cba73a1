"""What samples are known by: a hash of each, and a quick look at many at once."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

Array = np.ndarray[Any, Any]

_SIZE = 16  # bytes of a fingerprint


def fingerprints(inputs: Any) -> list[bytes]:
    """A hash of each sample's inputs: equal for equal values of equal shapes.

    Neither the labels nor the width of a dtype count (floats are compared as float32, integers as
    int64), nor padding that an "attention_mask" marks, or another length would hide a copy.
    """
    mask = _mask(inputs)
    kept = None if mask is None else mask.cpu().bool().numpy()
    columns = [_contents(_canonical(leaf), kept) for _, leaf in leaves(inputs)]
    samples = zip(*columns, strict=True)
    return [hashlib.blake2b(b"".join(parts), digest_size=_SIZE).digest() for parts in samples]


def packed(pieces: Iterable[Sequence[bytes]]) -> Array:
    """Fingerprints in an array, a quarter of a list's size; `tolist` gives them back."""
    return np.frombuffer(b"".join(b"".join(piece) for piece in pieces), f"V{_SIZE}")


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its path, keys in sorted order: how a dict was built does not matter."""
    if isinstance(tree, Mapping):
        for key in sorted(tree, key=str):
            yield from leaves(tree[key], f"{path}.{key}")
    elif isinstance(tree, tuple | list):
        for index, value in enumerate(tree):
            yield from leaves(value, f"{path}.{index}")
    else:
        yield path, tree


class Sieve:
    """Samples to look for among others.

    All inputs of a batch are first hashed at once, by random weights that nobody knows. What no
    sample has the hash of cannot be a copy of one; fingerprints are made of the rest alone. They
    are made of everything where padding counts, and of data that are known by what they were
    before a layer was applied to them (`raw`).
    """

    def __init__(
        self, inputs: Callable[[], Iterable[Any]], raw: Sequence[bytes] | None = None
    ) -> None:
        """`inputs` reads those of the samples piece by piece, and is called more than once."""
        # Stamps of the data among which none of these samples was found (see `unchanged`).
        self.cleared: set[bytes] = set()
        self.prints = packed(map(fingerprints, inputs()) if raw is None else [raw])
        self._weights: Array | None = None
        if raw is None and all(_mask(piece) is None for piece in inputs()):
            widest = max(sum(part.shape[1] for part in _words(piece)) for piece in inputs())
            self._weights = np.random.default_rng().integers(2**64, size=widest, dtype=np.uint64)
            hashes = [self._hashed(_words(piece)) for piece in inputs()]
            self._hashes = np.sort(np.concatenate(hashes))

    @cached_property
    def _known(self) -> frozenset[bytes]:
        return frozenset(self.prints.tolist())

    def among(self, inputs: Any) -> dict[int, bytes]:
        """Which samples of a batch are copies, and of what."""
        suspects = self._suspects(inputs)
        if not len(suspects):
            return {}
        made = fingerprints(tree_map(itemgetter(torch.from_numpy(suspects)), inputs))
        pairs = zip(suspects.tolist(), made, strict=True)
        return {place: each for place, each in pairs if each in self._known}

    def places(self, found: Iterable[bytes]) -> list[int]:
        """Which of its own samples have one of these fingerprints."""
        wanted = self._known.intersection(found)
        return [place for place, each in enumerate(self.prints.tolist()) if each in wanted]

    def _suspects(self, inputs: Any) -> Array:
        parts = _words(inputs)
        if self._weights is None or _mask(inputs) is not None:
            return np.arange(len(parts[0]))
        if sum(part.shape[1] for part in parts) > len(self._weights):
            return np.arange(0)  # of more values than any sample has
        hashes = self._hashed(parts)
        nearest = np.searchsorted(self._hashes[:-1], hashes)
        return np.flatnonzero(self._hashes[nearest] == hashes)

    def _hashed(self, parts: list[Array]) -> Array:
        """Σ weight · word modulo 2⁶⁴, of each sample."""
        assert self._weights is not None
        first, total = 0, np.uint64(0)
        for part in parts:
            last = first + part.shape[1]
            total = total + np.einsum("ij,j->i", part, self._weights[first:last])
            first = last
        return np.asarray(total)


def _mask(inputs: Any) -> Any:
    return inputs.get("attention_mask") if isinstance(inputs, Mapping) else None


def _words(inputs: Any) -> list[Array]:
    """The contents, leaf by leaf, in words of four bytes."""
    columns = (np.ascontiguousarray(_canonical(leaf)) for _, leaf in leaves(inputs))
    return [column.reshape(len(column), -1).view("<u4") for column in columns]


def _contents(column: Array, kept: Array | None) -> list[bytes]:
    """Shape and values of every row, without its padding."""
    if kept is not None and _is_padded(column, kept):
        rows = [row[keep] for row, keep in zip(column, kept, strict=True)]
        return [f"{row.shape};".encode() + row.tobytes() for row in rows]
    header, values = f"{column.shape[1:]};".encode(), column.tobytes()
    size = len(values) // max(1, len(column))
    return [header + values[size * row : size * (row + 1)] for row in range(len(column))]


def _is_padded(column: Array, kept: Array) -> bool:
    """Whether what the mask drops is one constant: a mask of other meaning would drop content."""
    if column.shape[: kept.ndim] != kept.shape:
        return False
    dropped = column[~kept]
    return bool((dropped == dropped.reshape(-1)[:1]).all())


def _canonical(leaf: Tensor) -> Array:
    """The values in one dtype for all floats and one for all integers."""
    leaf = leaf.detach().cpu()
    if leaf.is_complex():
        leaf = torch.view_as_real(leaf)
    if leaf.is_floating_point():
        return (leaf.float() + 0.0).numpy().astype("<f4", copy=False)  # −0.0 + 0.0 is 0.0
    return leaf.numpy().astype("<i8", copy=False)
