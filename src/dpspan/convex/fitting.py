"""The private side of a fit: clipped mean gradients, noise, and the ledger that comes first.

    C_t                                  clip of step t, a public constant
    m(θ) = (1/n) Σ_i clip(g_i(θ), C_t)   n is one too: neighbours differ in one record and share n
    z                                    noise multiplier of a step, all its parts together

Formal guarantee: adding or removing a record moves m by at most C_t/n. A step whose parts have
noise multipliers z_b and z_B, 1/z² = 1/z_b² + 1/z_B², is one Gaussian mechanism of noise multiplier
z. Every step uses every record, so nothing is sampled and nothing amplified.
"""

from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias

import numpy as np

from dpspan.accounting.ledger import Ledger
from dpspan.convex.losses import Records
from dpspan.convex.rows import Array
from dpspan.support.checks import check_number, check_positive, expect, shown
from dpspan.support.secure import SecureGenerator

_SMALLEST, _LARGEST = 1e-100, 1e100  # clips: their squares, which noise is made of, stay exact


@dataclass(frozen=True, kw_only=True)
class ConstantClip:
    """The same clip at every step."""

    clip: float

    def __post_init__(self) -> None:
        check_positive("clip", self.clip)

    def at(self, step: int) -> float:
        return self.clip


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """C_t = start·t^(−decay): the paper's envelope of falling gradients.

    Both are public constants. With noise in proportion, every step costs the same.
    """

    start: float
    decay: float = 0.25

    def __post_init__(self) -> None:
        check_positive("start", self.start)
        expect(check_number("decay", self.decay) >= 0, "decay >= 0", self.decay)

    def at(self, step: int) -> float:
        return float(self.start * step**-self.decay)


ClipSchedule: TypeAlias = ConstantClip | Envelope


def schedule_of(given: Any) -> ClipSchedule:
    """The schedule meant by a number or an object; one inferred from records is refused."""
    if isinstance(given, Real):
        return ConstantClip(clip=float(check_number("clip", given)))
    if not isinstance(given, ConstantClip | Envelope):
        raise ValueError(
            f"Expected clip to be a number or a schedule of numbers, got {shown(given)}. A clip "
            "inferred from private records (their median norm, say) would release them without "
            "noise: choose it in advance, or on public data."
        )
    return given


class GaussianNoise:
    """Draws the noise of one fit: seeded from OS entropy, or by a seed, and then not private."""

    def __init__(self, seed: int | None = None, *, secure: bool = False) -> None:
        self._generator = SecureGenerator() if secure else np.random.default_rng(seed)

    def normal(self, size: int, std: float) -> Array:
        """N(0, std²·I)."""
        return std * self._generator.standard_normal(size)

    def goe(self, size: int, scale: float) -> Array:
        """scale·GOE: symmetric, variance 1 off the diagonal and 2 on it.

        Isotropic among symmetric matrices with the Frobenius norm, of standard deviation
        √2·scale in every direction; VᵀGOE V is GOE again for an orthonormal V.
        """
        half = self._generator.standard_normal((size, size))
        return np.asarray((half + half.T) * (scale / np.sqrt(2)))


@dataclass(frozen=True, kw_only=True)
class PrivateRecords(Records):
    """The records to protect."""

    divisor: int  # n, a public constant

    def weights(self, parameters: Array, clip: float) -> Array:
        """Each record's part of the sum, f_i D_i (n, c)."""
        with np.errstate(all="ignore"):  # what is not finite counts as zero
            derivatives = self.derivatives(parameters)
        return self.rows.clipped_weights(derivatives, clip)

    def unprivate_mean(self, parameters: Array, clip: float) -> Array:
        """m(θ), (P,)."""
        return self.rows.combine(self.weights(parameters, clip)).ravel() / self.divisor


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One fit: what it is about, what it may spend and where its noise comes from."""

    records: PrivateRecords
    public: Records | None
    clip: ClipSchedule
    noise_multiplier: float
    ledger: Ledger
    noise: GaussianNoise
    start: Array

    def clips(self, count: int) -> tuple[float, ...]:
        """C_1, …, C_count, all of them checked before the first step."""
        clips = tuple(float(self.clip.at(step)) for step in range(1, count + 1))
        sound = all(_SMALLEST <= clip <= _LARGEST for clip in clips)
        expect(sound, f"clips between {_SMALLEST:g} and {_LARGEST:g}", self.clip)
        return clips
