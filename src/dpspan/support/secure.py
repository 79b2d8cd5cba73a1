"""Random numbers for the cautious: cryptographic bits, normal numbers that hide their making."""

import hashlib
import itertools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import ndtri

SECURE = "from a cryptographic generator, hardened against attacks on floating point"
_DRAWS = 4  # whose sum is one normal number
_BLOCK = 1 << 15  # numbers at a time, which fit a cache

Floats = np.ndarray[Any, np.dtype[np.float64]]


class SecureGenerator:
    """Draws what numpy's Generator does, of bits that nobody can compute from others.

    They come from the operating system, so that neither a fork nor a checkpoint draws one twice. Or
    by SHAKE-128 from a `key`, for those who have to draw the same as others who know it.
    """

    def __init__(self, key: Sequence[int] | None = None) -> None:
        self._key, self._calls = None if key is None else repr([*key]), itertools.count()

    def random(self, size: int) -> Floats:
        """Between 0 and 1, and neither: odd multiples of 2^-53."""
        expand = hashlib.shake_128(f"{self._key} {next(self._calls)}".encode()).digest
        drawn = (os.urandom if self._key is None else expand)(8 * size)
        words = np.frombuffer(drawn, dtype=np.uint64) >> np.uint64(12)
        return (words.astype(np.float64) + 0.5) * 2.0**-52

    def integers(self, high: int, *, size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return (self.random(size) * high).astype(np.int64)

    def standard_normal(self, size: Any = None, *, out: Floats | None = None) -> Floats:
        """Each is half the sum of four draws (Holohan and Braghin, 2021).

        One draw can take few values compared with the floats near it, and which ones it cannot take
        tells what it was added to. Of a sum nobody can search all that it may be made of.
        """
        numbers = np.empty(size) if out is None else out
        flat = numbers.reshape(-1)
        for start in range(0, len(flat), _BLOCK):
            some = flat[start : start + _BLOCK]
            draws = self.random(_DRAWS * len(some)).reshape(_DRAWS, -1)
            np.divide(ndtri(draws).sum(0), _DRAWS**0.5, out=some)
        return numbers
