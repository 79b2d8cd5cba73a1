"""Are batches drawn as the ledger assumes: every record by its own coin, anew at every step?"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
from scipy.stats import chi2, norm

from dpspan.audit.findings import Check, rare
from dpspan.engine.sampling import PartitionDraw, Piece, PrivateLoader
from dpspan.public.fingerprints import Array

_STEPS, _NUMBERS = 400, 40_000_000  # so many steps, unless records times steps were more


def drawn_batches(loader: PrivateLoader, steps: int) -> list[Array]:
    """The places of the records in so many batches, as this loader would read them."""
    batches, parts, pieces, feed = list[Array](), list[int](), list[Piece](), loader._feed
    with patch.multiple(loader, _inner=feed, on_piece=pieces.append, on_batch=lambda _: None):
        while len(batches) < steps:
            for places in loader:
                piece = pieces.pop()
                parts += places[: piece.samples]
                if piece.last:
                    batches.append(np.array(parts, dtype=int))
                    parts = []
    return batches


def sampler_checks(loader: PrivateLoader) -> Iterator[Check]:
    """Sizes, each record's share, and what two steps have in common."""
    draw, epoch = loader.draw, len(loader)
    n, partition = draw.records, isinstance(draw, PartitionDraw)
    q = 1 / epoch if partition else draw.sample_rate  # type: ignore[union-attr]
    epochs = max(2, math.ceil(min(_STEPS, max(32, _NUMBERS // n)) / epoch))
    batches = drawn_batches(loader, steps := epochs * epoch)
    sizes = np.array([len(batch) for batch in batches], dtype=float)
    twice, check = sum(len(np.unique(x)) < len(x) for x in batches), partial(Check, "sampler")
    yield check("batches with a record twice", twice, "0", twice == 0)
    taken = np.bincount(np.concatenate(batches), minlength=n)
    if partition:
        each = [np.concatenate(batches[i : i + epoch]) for i in range(0, steps, epoch)]
        wrong = sum(len(one) != n or len(np.unique(one)) != n for one in each)
        yield check("epochs that do not hold every record once", wrong, "0", wrong == 0)
    if q == 1:
        least = float(sizes.min()) / n
        yield check("smallest batch, of all records", least, "1", least == 1)
        return
    spread = n * q * (1 - q)
    if not partition:
        total = (sizes.sum() - steps * n * q) / math.sqrt(steps * spread)
        yield check("records drawn in all, in std errors", total, "small", not rare(norm, total))
        shares = float(((taken - steps * q) ** 2).sum()) / (steps * q * (1 - q))
        good = not rare(*_like_square(shares, n, steps, q))
        yield check("variance of a record's number of steps", shares / n, "about 1", good)
    # The sizes of a partition's batches add up: one of them is known from the others.
    free = steps - epochs if partition else steps
    squares = float(((sizes - n * q) ** 2).sum()) / (n * q if partition else spread)
    good = free == 0 or not rare(*_like_square(squares, free, n, q))
    squares /= max(free, 1)
    yield check("variance of the sizes, of a binomial one", squares, "about 1", good)
    for apart in {epoch} if partition else {1, epoch}:
        both = [len(np.intersect1d(*two)) for two in zip(batches, batches[apart:], strict=False)]
        # Given the sizes, what two independent batches share is hypergeometric, or nearly so.
        pairs = list(zip(sizes, sizes[apart:], strict=False))
        mean = sum(a * b / n for a, b in pairs)
        variance = sum(a * b * (n - a) * (n - b) / (n * n * max(n - 1, 1)) for a, b in pairs)
        value = (sum(both) - mean) / math.sqrt(variance) if variance else 0.0
        name = f"records shared by steps {apart} apart, in std errors"
        yield check(name, value, "small", not rare(norm, value))


def _like_square(total: float, freedom: int, trials: int, q: float) -> tuple[Any, float]:
    """Σ (x - Eₓ)²/Var x of binomial numbers as a χ²: its mean is right, its variance made so."""
    kurtosis = (1 - 6 * q * (1 - q)) / (trials * q * (1 - q))
    scale = 1 + max(kurtosis, 0.0) / 2
    return chi2(freedom / scale), total / scale
