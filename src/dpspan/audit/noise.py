"""Is the noise of a step what it was asked to be: its variance, its tails, and fresh every time?

What a release asks for is read off at `Noise.add`; what it adds is what the release of nothing is,
or, in a step, what was released less what was summed.
"""

import math
import multiprocessing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Self
from unittest.mock import patch

import numpy as np
import torch
from scipy.stats import binom, chi2, norm
from torch import Tensor

from dpspan.audit.findings import Check, rare
from dpspan.engine.private_step import PrivateRun
from dpspan.mechanisms.base import Sums
from dpspan.mechanisms.noise import Noise
from dpspan.public.fingerprints import Array

_DRAWS, _NUMBERS = 3000, 20_000_000  # at most so many draws, and numbers in all
_COMPARED, _CROSSED = 24, 400  # draws that are compared with each other, and part with part
LONGEST = 100_000  # numbers of a draw that are compared
_FORKED = 1000  # numbers of each part that a forked process draws
_TAILS = (3.0, 4.0, 5.0)


@contextmanager
def noted(noise: Noise, asked: dict[str, float]) -> Iterator[None]:
    """Meanwhile the std that each part of a release asks for is put down."""
    add = noise.add

    def watched(parts: Mapping[str, Tensor], std: float | Tensor) -> dict[str, Tensor]:
        asked.update(dict.fromkeys(parts, float(std)))
        return add(parts, std)

    with patch.object(noise, "add", watched):
        yield


class NoiseWatch:
    """Notes the std that each part of a release asks for, and draws noise in units of it."""

    def __init__(self, run: PrivateRun, like: Sums) -> None:
        self._run, self._like, self.std = run, like, dict[str, float]()
        first = self._drawn(like)
        self.unknown = [name for name in like if name not in self.std]
        for name in self.unknown:  # a mechanism may draw in a way of its own: its first draw tells
            self.std[name] = float(first[name].double().square().mean().sqrt()) or 1.0
        self.parts = [*like]
        self.ends = np.cumsum([0, *(value.numel() for value in like.values())])

    def _drawn(self, like: Sums) -> Sums:
        """What the release of nothing is."""
        nothing = {n: torch.zeros_like(x, dtype=torch.float64) for n, x in like.items()}
        z, noise = self._run.plan.noise_multiplier, self._run._noise
        with noted(noise, self.std):
            return self._run.mechanism.release(nothing, noise, z)

    def draw(self, most: int | None = None) -> Array:
        """The noise of one more release, of so many numbers of each part."""
        like = self._like.items()
        return self.scaled(self._drawn({name: value.flatten()[:most] for name, value in like}))

    def scaled(self, noise: Sums, asked: Mapping[str, float] | None = None) -> Array:
        """In units of what this release asked for, which a clip that adapts moves."""
        std = self.std | dict(asked or {})
        flat = [noise[name].detach().double().flatten() / std[name] for name in self._like]
        return np.asarray(torch.cat(flat).cpu())


class _Products:
    """Of each two vectors Σ x·y, as far as both go and within limits, over |x|.

    Given x, that is exactly normal with variance 1, however few numbers there are.
    """

    def __init__(self) -> None:
        self._sums: Array = np.zeros(())
        self._squares: Array = np.zeros(())

    def add(self, vectors: list[Array]) -> Self:
        lengths = np.array([min(len(x), LONGEST) for x in vectors])
        padded = np.zeros((len(vectors), lengths.max()))
        for row, x, length in zip(padded, vectors, lengths, strict=True):
            row[:length] = x[:length]
        reached = (np.arange(lengths.max()) < lengths[:, None]).astype(float)
        self._sums = self._sums + padded @ padded.T
        self._squares = self._squares + padded**2 @ reached.T
        return self

    def largest(self) -> tuple[float, int, int]:
        """The largest of two different vectors, and which they are."""
        products = self._sums / np.sqrt(np.maximum(self._squares, np.finfo(float).tiny))
        np.fill_diagonal(products, 0)
        first, second = np.unravel_index(np.argmax(np.abs(products)), products.shape)
        return float(products[first, second]), int(first), int(second)


class MeasuredNoise:
    """Thousands of fresh draws, and those that real steps made, which have names."""

    def __init__(self, watch: NoiseWatch, steps: Mapping[str, Array]) -> None:
        self._watch, self._kept = watch, dict(steps)
        size = int(watch.ends[-1])
        self._draws = max(_COMPARED, min(_DRAWS, _NUMBERS // size))
        self._sums, self._squares, self._across = np.zeros(size), np.zeros(size), _Products()
        self._fourth, self._beyond = 0.0, np.zeros(len(_TAILS), dtype=int)
        for number in range(self._draws):
            x = watch.draw()
            square = x * x
            self._sums += x
            self._squares += square
            self._fourth += float(square @ square)
            far = square[square > _TAILS[0] ** 2]
            self._beyond += [int((far > at**2).sum()) for at in _TAILS]
            if number < _COMPARED:
                self._kept[f"draw {number + 1}"] = x[:LONGEST].copy()
            if number < _CROSSED:
                self._across.add([x[a:b] for a, b in pairwise(watch.ends)])
        # Parts that asked for the same std have it from all of their numbers.
        self._numbers = self._draws * np.diff(watch.ends)
        self._totals = np.add.reduceat(self._squares, watch.ends[:-1])
        asked, self.std, fewest = np.array([watch.std[n] for n in watch.parts]), {}, math.inf
        for name, own in zip(watch.parts, asked, strict=True):
            alike = asked == own
            count = self._numbers[alike].sum()
            self.std[name] = own * math.sqrt(self._totals[alike].sum() / count)
            fewest = min(fewest, count)
        self.error = 5 / math.sqrt(2 * fewest)  # of any std here, relatively

    def checks(self) -> Iterator[Check]:
        """The std of each part and number, mean, kurtosis, tails, correlations."""
        check, names, ends = partial(Check, "noise"), self._watch.parts, self._watch.ends
        totals, numbers = self._totals, self._numbers
        surplus = (totals - numbers) / np.sqrt(2 * numbers)  # in std errors
        for part in () if self._watch.unknown else {int(surplus.argmin()), int(surplus.argmax())}:
            sound = not rare(chi2(numbers[part]), totals[part], len(names))
            ratio = math.sqrt(totals[part] / numbers[part])
            yield check(f"std of {names[part]}, of what was asked for", ratio, "1", sound)
        place, size = int(np.argmin(self._squares)), len(self._squares)
        where = names[int(np.searchsorted(ends, place, side="right")) - 1]
        least = float(self._squares[place])
        sound = not rare(chi2(self._draws), least, size)
        yield check(f"variance of a number in {where}", least / self._draws, "1", sound)
        means = np.add.reduceat(self._sums, ends[:-1]) / np.sqrt(numbers)
        mean = float(means[np.argmax(np.abs(means))])
        sound = not rare(norm, mean, len(names))
        yield check("largest mean of a part, in std errors", mean, "small", sound)
        count = self._draws * size
        excess = (self._fourth / count - 3) / math.sqrt(96 / count)
        yield check("kurtosis, in std errors", excess, "small", not rare(norm, excess))
        for at, times in zip(_TAILS, self._beyond.tolist(), strict=True):
            law = binom(count, 2 * norm.sf(at))
            declared, sound = f"{law.mean():.1f}", not rare(law, times)
            yield check(f"numbers beyond {at:g} std", times, declared, sound)
        draws, kept = _Products().add([*self._kept.values()]), [*self._kept]
        for products, of in (self._across, len(names)), (draws, len(kept)):
            value, first, second = products.largest()
            pair = "two parts" if products is self._across else f"{kept[first]} and {kept[second]}"
            sound = not rare(norm, value, of**2)
            yield check(f"correlation of {pair}, in std errors", value, "small", sound)


def drawn_by_a_fork(watch: NoiseWatch) -> dict[str, Array]:
    """What a forked process would add at its next release, and what this one would."""
    processes = multiprocessing.get_context("fork")  # where nothing of torch's threads is left
    reading, writing = processes.Pipe(duplex=False)
    child = processes.Process(target=lambda: writing.send(watch.draw(most=_FORKED)), daemon=True)
    child.start()
    writing.close()
    numbers: Array = reading.recv()
    child.join()
    return {"a forked process": numbers, "its parent": watch.draw(most=_FORKED)}
