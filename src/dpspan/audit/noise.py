"""Is the noise of a step what it was asked to be: its variance, its tails, and fresh every time?

What a release asks for is read off at `Noise.add`; what it adds is what the release of nothing is,
or, in a step, what was released less what was summed.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from scipy.special import ndtr
from torch import Tensor

from dpspan.audit.findings import Check, rare_count, rare_normal, rare_square
from dpspan.engine.private_step import PrivateRun
from dpspan.mechanisms.base import Sums
from dpspan.public.fingerprints import Array

_DRAWS, _NUMBERS = 3000, 20_000_000  # at most so many draws, and numbers in all
_COMPARED, _CROSSED = 24, 400  # draws that are compared with each other, and part with part
LONGEST = 100_000  # numbers of a draw that are compared
_FORKED = 1000  # numbers of each part that a forked process draws
_TAILS = (3.0, 4.0, 5.0)


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
        noise: Any = self._run._noise
        nothing = {n: torch.zeros_like(x, dtype=torch.float64) for n, x in like.items()}
        add = noise.add

        def watched(parts: Mapping[str, Tensor], std: float) -> dict[str, Tensor]:
            self.std |= dict.fromkeys(parts, std)
            result: dict[str, Tensor] = add(parts, std)
            return result

        noise.add = watched
        try:
            return self._run.mechanism.release(nothing, noise, self._run.plan.noise_multiplier)
        finally:
            noise.add = add

    def draw(self, most: int | None = None) -> Array:
        """The noise of one more release, of so many numbers of each part."""
        like = self._like
        if most is not None:
            like = {name: value.flatten()[:most] for name, value in like.items()}
        return self.scaled(self._drawn(like))

    def scaled(self, noise: Sums) -> Array:
        flat = [noise[name].detach().double().flatten() / self.std[name] for name in self._like]
        numbers: Array = torch.cat(flat).cpu().numpy()
        return numbers


@dataclass(frozen=True, kw_only=True)
class MeasuredNoise:
    """Checks, the std of each part as it was measured, and how wrong that may be, relatively."""

    checks: tuple[Check, ...]
    std: Mapping[str, float]
    error: float


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


@dataclass
class _Drawn:
    """What is kept of fresh draws, and of those that real steps made, which have names."""

    draws: int
    squares: Array
    sums: Array
    across: _Products  # of parts
    kept: dict[str, Array]
    fourth: float = 0.0
    beyond: dict[float, int] = field(default_factory=lambda: dict.fromkeys(_TAILS, 0))

    @classmethod
    def by(cls, watch: NoiseWatch, steps: Mapping[str, Array]) -> Self:
        size = int(watch.ends[-1])
        draws = max(_COMPARED, min(_DRAWS, _NUMBERS // size))
        found = cls(draws, np.zeros(size), np.zeros(size), _Products(), dict(steps))
        for number in range(draws):
            x = watch.draw()
            if number < _COMPARED:
                found.kept[f"draw {number + 1}"] = x[:LONGEST].copy()
            if number < _CROSSED:
                found.across.add([x[a:b] for a, b in pairwise(watch.ends)])
            found.sums += x
            found._add(x * x)
        return found

    def _add(self, square: Array) -> None:
        self.squares += square
        self.fourth += float(square @ square)
        far = square[square > _TAILS[0] ** 2]
        for at in _TAILS:
            self.beyond[at] += int((far > at**2).sum())


def measure_noise(watch: NoiseWatch, steps: Mapping[str, Array]) -> MeasuredNoise:
    """From fresh draws, and from those that real steps made, which have names."""
    size, names, ends = int(watch.ends[-1]), watch.parts, watch.ends
    found = _Drawn.by(watch, steps)
    draws, squares, kept = found.draws, found.squares, found.kept
    checks: list[Check] = []

    def check(name: str, measured: float, declared: str, rare: bool) -> None:
        passed, measured = not rare, float(measured)
        checks.append(
            Check(part="noise", name=name, measured=measured, declared=declared, passed=passed)
        )

    totals, numbers = np.add.reduceat(squares, ends[:-1]), draws * np.diff(ends)
    surplus = (totals - numbers) / np.sqrt(2 * numbers)  # in std errors
    extremes: tuple[Callable[..., Any], ...] = (np.argmin, np.argmax)
    for extreme in extremes if not watch.unknown else ():
        part = int(extreme(surplus))
        rare = rare_square(totals[part], numbers[part], len(names))
        ratio = math.sqrt(totals[part] / numbers[part])
        check(f"std of {names[part]}, of what was asked for", ratio, "1", rare)
    place = int(np.argmin(squares))
    where = names[int(np.searchsorted(ends, place, side="right")) - 1]
    rare = rare_square(squares[place], draws, size)
    check(f"variance of a number in {where}", squares[place] / draws, "1", rare)
    means = np.add.reduceat(found.sums, ends[:-1]) / np.sqrt(numbers)
    mean = means[int(np.argmax(np.abs(means)))]
    check("largest mean of a part, in std errors", mean, "small", rare_normal(mean, len(names)))
    count = draws * size
    excess = (found.fourth / count - 3) / math.sqrt(96 / count)
    check("kurtosis, in std errors", excess, "small", rare_normal(excess))
    for at, times in found.beyond.items():
        law = 2 * float(ndtr(-at))
        rare = rare_count(times, count, law)
        check(f"numbers beyond {at:g} std", times, f"{count * law:.1f}", rare)
    value, *_ = found.across.largest()
    rare = rare_normal(value, len(names) ** 2)
    check("correlation of two parts, in std errors", value, "small", rare)
    value, first, second = _Products().add([*kept.values()]).largest()
    pair, rare = f"{[*kept][first]} and {[*kept][second]}", rare_normal(value, len(kept) ** 2)
    check(f"correlation of {pair}, in std errors", value, "small", rare)
    # Parts that asked for the same std have it from all of their numbers.
    asked, std = np.array([watch.std[name] for name in names]), {}
    for name, own in zip(names, asked, strict=True):
        alike = asked == own
        std[name] = own * math.sqrt(totals[alike].sum() / numbers[alike].sum())
    fewest = min(numbers[asked == own].sum() for own in asked)
    return MeasuredNoise(checks=tuple(checks), std=std, error=5 / math.sqrt(2 * fewest))


def drawn_by_a_fork(watch: NoiseWatch) -> dict[str, Array]:
    """What a forked process would add at its next release, and what this one would."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # nothing of torch's threads is left here: numbers, and out
        try:
            noise = watch.draw(most=_FORKED)
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(noise.tobytes())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        numbers = np.frombuffer(pipe.read())
    os.waitpid(child, 0)
    return {"a forked process": numbers, "its parent": watch.draw(most=_FORKED)}
