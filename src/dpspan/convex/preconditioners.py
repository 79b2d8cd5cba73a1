"""The preconditioner H_t of noisy AdaGrad: released with its own noise, or of noisy gradients.

    m_s   clipped mean gradient of step s ≤ t, clip C_s
    u_s   what was released of it, Vᵀm_s + b_s
    G_t   (Σ_s m_s m_sᵀ)^{1/2}
    Δ_t   its sensitivity: √2·√(ΣC_s²)/n in Frobenius norm
    σ_B   scale of the GOE noise, of standard deviation √2·σ_B in every direction

Formal guarantees. The paper's proof of its Lemma 5 takes the root of an indefinite matrix; the
bound holds with a constant √2, by ‖|X| − |Y|‖_F ≤ √2‖X − Y‖_F (Araki and Yamagami) for the t × p
matrix of mean gradients, each row of which moves by at most C_s/n. So z_B = √2·σ_B/Δ_t. VᵀGOE V is
GOE of k dimensions, so k × k numbers are drawn. A preconditioner of noisy gradients costs nothing.

The history of mean gradients is kept in factored form, never p × p:

    M = L Qᵀ   t × p, the gradients; Q has orthonormal columns (p × r, r ≤ min(t, p)), L is t × r
    G_t = (MᵀM)^{1/2} = Q |L| Qᵀ, |L| = (LᵀL)^{1/2} by the singular values of L

By way of Q and not of M Mᵀ, whose square root would keep only half of the digits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
from scipy import optimize

from dpspan.convex.fitting import Fit
from dpspan.convex.rows import Array
from dpspan.convex.subspaces import Subspace
from dpspan.support.checks import check_fraction, check_number, expect

LARGEST_MATRIX = 4000  # dimensions in which a full matrix is still built and decomposed
COMFORTABLE_MATRIX = 1000  # and up to which nobody has to ask for it
_DEPENDENT = 1e-14  # of a vector's length: what is left of it within rounding of the span


@dataclass(frozen=True)
class Metric:
    """H = Q diag(λ) Qᵀ with λ ≥ 0; without vectors Q is the identity."""

    values: Array
    vectors: Array | None = None

    def solve(self, u: Array) -> Array:
        """H⁺u: the pseudo-inverse, zero where λ is."""
        inverse = np.divide(1.0, self.values, out=np.zeros_like(self.values), where=self._positive)
        return self._from_axes(inverse * self._to_axes(u))

    def closest_in_ball(self, u: Array, radius: float) -> Array:
        """argmin ‖a − u‖_H over ‖a‖ ≤ radius.

        The optimum is (H + μI)⁻¹H u for the μ ≥ 0 that brings it into the ball; its norm falls
        with μ. Where λ is zero the seminorm does not care, and the optimum is zero there.
        """
        if np.linalg.norm(u) <= radius:
            return u
        positive = self._positive
        values, b = self.values[positive], self._to_axes(u)
        inside = b[positive]
        beyond = float(np.linalg.norm(inside)) / radius - 1
        if beyond > 0:
            high = 2 * float(values.max()) * beyond  # if all λ were the largest, half of it is μ

            def excess(mu: float) -> float:
                return float(np.linalg.norm(values / (values + mu) * inside)) - radius

            # Next to the ball rounding may put the end of the bracket before the root.
            tight = {"xtol": np.finfo(float).tiny, "rtol": 1e-14, "maxiter": 2000}
            mu = high if excess(high) >= 0 else optimize.brentq(excess, 0.0, high, **tight)
            inside = values / (values + mu) * inside
            inside *= min(1.0, radius / float(np.linalg.norm(inside)))
        b = np.zeros_like(b)
        b[positive] = inside
        return self._from_axes(b)

    @property
    def _positive(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return np.asarray(self.values > 1e-14 * self.values.max(initial=0.0))

    def _to_axes(self, u: Array) -> Array:
        return u if self.vectors is None else self.vectors.T @ u

    def _from_axes(self, u: Array) -> Array:
        return u if self.vectors is None else self.vectors @ u


def project_onto_ball(
    y: Array, radius: float | None, subspace: Subspace, metric: Metric | None = None
) -> Array:
    """The point of the ball ‖θ‖ ≤ radius that is closest to y in the metric of a subspace.

    What lies outside of the subspace does not count in that (semi-)norm: it stays, shortened if
    the ball has no room for it. Without a metric it is the ordinary projection.
    """
    length = float(np.linalg.norm(y))
    if radius is None or length <= radius:
        return y
    if metric is None:
        return y * (radius / length)
    inside = subspace.embed(y)
    outside = y - subspace.lift(inside)
    nearest = metric.closest_in_ball(inside, radius)
    room = np.sqrt(max(radius**2 - float(nearest @ nearest), 0.0))
    rest = float(np.linalg.norm(outside))
    return np.asarray(subspace.lift(nearest) + outside * min(1.0, room / max(rest, 1e-300)))


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step, as a preconditioner sees it."""

    subspace: Subspace
    clip: float  # C_t
    theta: Array  # θ_t
    unprivate_mean: Array  # m_t, (P,)
    released: Array  # u_t, (k,)
    std: float  # of its noise


Update = Callable[[Step], Metric]
"""H_t of one step after the other, in its subspace's coordinates; nothing un-noised leaves it."""
Root = Callable[[Step], Array]
"""What is released of a step but for its noise, (k, k)."""


@dataclass(frozen=True, kw_only=True)
class Released:
    """The paper's: VᵀG_tV + σ_B·GOE. Eigenvalues are raised to `floor` times the noise's edge.

    The edge, 2σ_B√k, is the largest eigenvalue of the noise alone: what lies below it is noise, and
    may be negative. A floor of 0 leaves those directions out of the step (the pseudo-inverse).
    `share` is the part of 1/z² that pays for H_t; the gradient has the rest.
    """

    share: float = 0.5
    floor: float = 1.0

    def __post_init__(self) -> None:
        check_fraction("share", self.share)
        expect(check_number("floor", self.floor) >= 0, "floor >= 0", self.floor)

    def begin(self, fit: Fit, subspace: Subspace, *, turns: bool) -> Update:
        """The updates of a fit in a subspace that may turn; what cannot work is refused."""
        _check_size(subspace)
        z = fit.noise_multiplier / math.sqrt(self.share)
        root_at, sensitivity = self.root(fit)
        squares = 0.0  # ΣC_s²

        def update(step: Step) -> Metric:
            nonlocal squares
            squares += step.clip**2
            scale = z * sensitivity * math.sqrt(squares) / math.sqrt(2)  # σ_B = z_B·Δ_t/√2
            root = root_at(step)
            values, vectors = np.linalg.eigh(root + fit.noise.goe(len(root), scale))
            edge = 2 * scale * math.sqrt(len(root))
            return Metric(np.maximum(values, self.floor * edge), vectors)

        return update

    def root(self, fit: Fit) -> tuple[Root, float]:
        """VᵀG_tV, and Δ_t in units of √(ΣC_s²)."""
        history = GradientHistory(len(fit.start))

        def root(step: Step) -> Array:
            history.add(step.unprivate_mean)
            return history.root_in(step.subspace)

        return root, math.sqrt(2) / fit.records.divisor


@dataclass(frozen=True, kw_only=True)
class FromNoisyGradients:
    """(Σ_s u_s u_sᵀ)^{1/2} of what was released anyway: no privacy spent.

    What noise adds on average, Σσ_s² in every direction, is taken out; eigenvalues of the sum are
    then raised to at least `floor` times that. `diagonal` keeps one number a coordinate, not a full
    matrix; by default beyond 1,000 dimensions, if they stay the same at every step.
    """

    diagonal: bool | None = None
    floor: float = 3.0
    share: ClassVar[float] = 0.0  # of a step's noise

    def __post_init__(self) -> None:
        expect(check_number("floor", self.floor) >= 0, "floor >= 0", self.floor)

    def begin(self, fit: Fit, subspace: Subspace, *, turns: bool) -> Update:
        if self.diagonal and turns:
            raise ValueError(
                "A diagonal preconditioner needs coordinates that stay, but the subspace changes "
                "between steps: take diagonal=False, or PublicFeatures."
            )
        large = subspace.size > COMFORTABLE_MATRIX and not turns
        diagonal = self.diagonal or (self.diagonal is None and large)
        if not diagonal:
            _check_size(subspace)
        sums = CoordinateSum()

        def update(step: Step) -> Metric:
            u, noise = step.released, np.full(len(step.released), step.std**2)
            both = [u**2, noise] if diagonal else [np.outer(u, u), np.diag(noise)]
            total, bias = sums.add(np.stack(both), step.subspace)
            floor = self.floor * float((bias if diagonal else np.diag(bias)).mean())
            values, vectors = (total - bias, None) if diagonal else np.linalg.eigh(total - bias)
            return Metric(np.sqrt(np.maximum(values, floor)), vectors)

        return update


Preconditioner: TypeAlias = Released | FromNoisyGradients


class GradientHistory:
    """Mean gradients, added one by one; private, unless the gradients are not."""

    def __init__(self, size: int) -> None:
        self._q, self._l = np.empty((size, 0)), np.empty((0, 0))

    def add(self, gradient: Array) -> None:
        """Gram–Schmidt, twice: once loses orthogonality where little is left.

        At a scale of 1, whatever the gradient's: squares of small numbers underflow, and what a
        wrong norm leaves in Q would lengthen every gradient to come.
        """
        scale = float(np.abs(gradient).max(initial=0.0))
        coordinates = np.zeros(self._q.shape[1])
        rest = unit = gradient / scale if scale > 0 else gradient
        for _ in range(2):
            along = self._q.T @ rest
            coordinates, rest = coordinates + along, rest - self._q @ along
        left = float(np.linalg.norm(rest))
        new = left > _DEPENDENT * float(np.linalg.norm(unit)) and self._q.shape[1] < len(rest)
        if new:
            self._q = np.column_stack([self._q, rest / left])
            coordinates = np.append(coordinates, left)
        self._l = np.pad(self._l, [(0, 1), (0, int(new))])
        self._l[-1] = scale * coordinates

    def root_in(self, subspace: Subspace) -> Array:
        """VᵀG V, (k, k)."""
        _, singular, right = np.linalg.svd(self._l, full_matrices=False)
        # VᵀG V = Aᵀ diag(s) A with A = Rᵀ QᵀV
        a = right @ subspace.embed(self._q).T
        return np.asarray((a.T * singular) @ a)


class CoordinateSum:
    """A sum of k × k matrices, or of stacks of them, that goes along when the subspace turns."""

    def __init__(self) -> None:
        self._subspace: Subspace | None = None
        self._total: Array | float = 0.0

    def add(self, matrix: Array, subspace: Subspace) -> Array:
        """The sum so far, what came before projected onto this subspace."""
        before, self._subspace = self._subspace, subspace
        if before is not None and before is not subspace:
            turn = subspace.embed(before.basis)
            self._total = turn @ self._total @ turn.T
        self._total = self._total + matrix
        return self._total


def _check_size(subspace: Subspace) -> None:
    if subspace.size > LARGEST_MATRIX:
        raise ValueError(
            f"A full preconditioner in {subspace.size} dimensions would be a matrix of "
            f"{subspace.size}² numbers, and decomposed at every step: give a subspace "
            f"(PublicFeatures or PublicGradients) of at most {LARGEST_MATRIX} dimensions, or "
            "preconditioner=FromNoisyGradients(diagonal=True)."
        )
