"""The private side of a fit: clipped mean gradients, noise, and the ledger that comes first.

    m(θ) = (1/n) Σ_i clip(g_i(θ), C)   n is a constant: neighbours differ in one record and share n
    z                                  noise multiplier of a step, all its parts together

Formal guarantee: adding or removing a record moves m by at most C/n. A step whose parts have noise
multipliers z_b and z_B, 1/z² = 1/z_b² + 1/z_B², is one Gaussian mechanism of noise multiplier z.
Every step uses every record, so nothing is sampled and nothing amplified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from dp_accounting import GaussianDpEvent

from dpspan.accounting.ledger import Ledger
from dpspan.convex.arrays import Array
from dpspan.convex.losses import Loss
from dpspan.convex.oracles import PublicSide, SubspaceOracle, Tracker
from dpspan.convex.rows import Rows
from dpspan.convex.schedules import ClipSchedule
from dpspan.convex.subspace import Span, Subspace, Whole
from dpspan.support.checks import expect

Watch = Callable[[Iterable[int]], Iterable[int]]
"""Goes over the steps as they come, to show progress."""
_SMALLEST, _LARGEST = 1e-100, 1e100  # clips: their squares, which noise is made of, stay exact


class GaussianNoise:
    """Draws the noise of one fit: seeded from OS entropy, or by a seed, and then not private."""

    def __init__(self, seed: int | None = None) -> None:
        self._generator = np.random.default_rng(seed)

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
class PrivateRecords:
    """The records to protect, as a problem in the weights W (c, width)."""

    rows: Rows
    targets: Array
    loss: Loss
    divisor: int  # n, a public constant

    def weights(self, parameters: Array, clip: float) -> Array:
        """Each record's part of the sum, f_i D_i (n, c)."""
        margins = self.rows.margins(parameters.reshape(self.targets.shape[1], -1))
        with np.errstate(all="ignore"):  # what is not finite counts as zero
            derivatives = self.loss.derivative(margins, self.targets)
        return self.rows.clipped_weights(derivatives, clip)

    def unprivate_mean(self, parameters: Array, clip: float) -> Array:
        """m(θ), (P,)."""
        return self.rows.combine(self.weights(parameters, clip)).ravel() / self.divisor


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One fit: what it is about, what it may spend and where its noise comes from."""

    records: PrivateRecords
    public: PublicSide
    clip: ClipSchedule
    noise_multiplier: float
    ledger: Ledger
    noise: GaussianNoise
    start: Array
    watch: Watch | None = None

    def subspaces(self, oracle: SubspaceOracle) -> Tracker:
        """What the oracle says, as long as it says it by a subspace that never lengthens."""
        tracker = oracle.start(self.public)

        def checked(parameters: Array) -> Subspace:
            subspace = tracker(parameters)
            if type(subspace) not in (Span, Whole):
                raise TypeError(
                    f"Expected a subspace oracle to give a Span or Whole, got {subspace!r}: the "
                    "noise is made for coordinates that are no longer than what they stand for."
                )
            return subspace

        return checked

    def clips(self, count: int) -> tuple[float, ...]:
        """C_1, …, C_count, all of them checked before the first step."""
        clips = tuple(float(self.clip.at(step)) for step in range(1, count + 1))
        sound = all(_SMALLEST <= clip <= _LARGEST for clip in clips)
        expect(sound, f"clips between {_SMALLEST:g} and {_LARGEST:g}", self.clip)
        return clips

    def charge(self) -> None:
        """Enter one step into the ledger; nothing of it is computed before that."""
        self.ledger.charge(GaussianDpEvent(self.noise_multiplier))

    def steps(self, count: int) -> Iterable[int]:
        """1, 2, …, count."""
        steps = range(1, count + 1)
        return steps if self.watch is None else self.watch(steps)
