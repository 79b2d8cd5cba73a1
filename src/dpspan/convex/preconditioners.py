"""The preconditioner H_t of noisy AdaGrad: released with its own noise, or of noisy gradients.

    m_s   clipped mean gradient of step s ≤ t, clip C_s
    u_s   what was released of it, Vᵀm_s + b_s
    G_t   (Σ_s m_s m_sᵀ)^{1/2}
    Δ_t   its sensitivity: √2·√(ΣC_s²)/n in Frobenius norm
    σ_B   scale of the GOE noise, of standard deviation √2·σ_B in every direction

Formal guarantees. The paper's proof of its Lemma 5 takes the root of an indefinite matrix; the
bound holds with a constant √2, by ‖|X| − |Y|‖_F ≤ √2‖X − Y‖_F (Araki and Yamagami) for the t × p
matrix of mean gradients, each row of which moves by at most C_s/n. So z_B = √2·σ_B/Δ_t. For the
second moment (Σ_s Σ_i g_i g_iᵀ)^{1/2} it is √(ΣC_s²), by Powers and Størmer. VᵀGOE V is GOE of k
dimensions, so k × k numbers are drawn. A preconditioner of noisy gradients costs nothing.

The history of mean gradients is kept in factored form, never p × p:

    M = L Qᵀ   t × p, the gradients; Q has orthonormal columns (p × r, r ≤ min(t, p)), L is t × r
    G_t = (MᵀM)^{1/2} = Q |L| Qᵀ, |L| = (LᵀL)^{1/2} by the singular values of L

By way of Q and not of M Mᵀ, whose square root would keep only half of the digits.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from dpspan.convex.arrays import Array
from dpspan.convex.fitting import Fit
from dpspan.convex.metric import Metric
from dpspan.convex.rows import Rows
from dpspan.convex.subspace import Subspace, rotation
from dpspan.support.checks import check_number, expect

LARGEST_MATRIX = 4000  # dimensions in which a full matrix is still built and decomposed
COMFORTABLE_MATRIX = 1000  # and up to which nobody has to ask for it
_DEPENDENT = 1e-14  # of a vector's length: what is left of it within rounding of the span


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step, as a preconditioner sees it."""

    subspace: Subspace
    clip: float  # C_t
    parameters: Array  # θ_t
    unprivate_mean: Array  # m_t, (P,)
    released: Array  # u_t, (k,)
    released_std: float  # of its noise


class PreconditionerState(Protocol):
    """The preconditioner of one fit."""

    def update(self, step: Step) -> Metric:
        """H_t, in the coordinates of the step's subspace; nothing un-noised leaves it."""


class Preconditioner(Protocol):
    """How H_t is made, and what part of a step's noise it takes; frozen and public."""

    @property
    def share(self) -> float:
        """The part of 1/z² that pays for H_t; the gradient has the rest."""

    def begin(self, fit: Fit, subspace: Subspace, *, turns: bool) -> PreconditionerState:
        """The state at the start of a fit, in a subspace that may turn; refuses what cannot be."""

    def describe(self) -> dict[str, Any]:
        """The configuration, for the certificate."""


@dataclass(frozen=True, kw_only=True)
class Released:
    """The paper's: VᵀG_tV + σ_B·GOE. Eigenvalues are raised to `floor` times the noise's edge.

    The edge, 2σ_B√k, is the largest eigenvalue of the noise alone: what lies below it is noise, and
    may be negative. A floor of 0 leaves those directions out of the step (the pseudo-inverse).
    """

    share: float = 0.5
    floor: float = 1.0

    def __post_init__(self) -> None:
        _check(self.share, self.floor)

    def begin(self, fit: Fit, subspace: Subspace, *, turns: bool) -> PreconditionerState:
        _check_size(subspace)
        return _ReleasedState(self, fit)

    def describe(self) -> dict[str, Any]:
        return {"name": "Released", **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class ReleasedSecondMoment:
    """(Σ_s Σ_i g_i g_iᵀ/n)^{1/2} of the records' own clipped gradients, plus σ_B·GOE.

    It does not vanish at the optimum, where the mean gradient does: more signal for its noise.
    """

    share: float = 0.5
    floor: float = 1.0

    def __post_init__(self) -> None:
        _check(self.share, self.floor)

    def begin(self, fit: Fit, subspace: Subspace, *, turns: bool) -> PreconditionerState:
        _check_size(subspace)
        return _SecondMomentState(self, fit)

    def describe(self) -> dict[str, Any]:
        return {"name": "ReleasedSecondMoment", **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class FromNoisyGradients:
    """(Σ_s u_s u_sᵀ)^{1/2} of what was released anyway: no privacy spent.

    `debias` takes out what noise adds on average, Σσ_s² in every direction; eigenvalues of the
    sum are then raised to at least `floor` times that. `diagonal` keeps one number a coordinate,
    instead of a full matrix; by default that is done from more than 1,000 dimensions on, if they
    are the same ones at every step.
    """

    diagonal: bool | None = None
    debias: bool = True
    floor: float = 3.0

    def __post_init__(self) -> None:
        expect(check_number("floor", self.floor) >= 0, "floor >= 0", self.floor)

    @property
    def share(self) -> float:
        """Nothing."""
        return 0.0

    def begin(self, fit: Fit, subspace: Subspace, *, turns: bool) -> PreconditionerState:
        if self.diagonal and turns:
            raise ValueError(
                "A diagonal preconditioner needs coordinates that stay, but the subspace changes "
                "between steps: take diagonal=False, or PublicFeatures or a GivenBasis."
            )
        large = subspace.size > COMFORTABLE_MATRIX and not turns
        if self.diagonal or (self.diagonal is None and large):
            return _DiagonalState(self)
        _check_size(subspace)
        return _NoisyState(self)

    def describe(self) -> dict[str, Any]:
        return {"name": "FromNoisyGradients", **asdict(self)}


class History:
    """Mean gradients, added one by one; private, unless the gradients are not."""

    def __init__(self, size: int) -> None:
        self._q = np.empty((size, 0))
        self._rows: list[Array] = []

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
        if left > _DEPENDENT * float(np.linalg.norm(unit)) and self._q.shape[1] < len(rest):
            self._q = np.column_stack([self._q, rest / left])
            coordinates = np.append(coordinates, left)
        self._rows.append(scale * coordinates)

    def root_in(self, subspace: Subspace) -> Array:
        """VᵀG V, (k, k)."""
        lower = np.zeros((len(self._rows), self._q.shape[1]))
        for place, row in zip(lower, self._rows, strict=True):
            place[: len(row)] = row
        _, singular, right = np.linalg.svd(lower, full_matrices=False)
        # VᵀG V = Aᵀ diag(s) A with A = Rᵀ QᵀV
        a = right @ subspace.embed(self._q).T
        return np.asarray((a.T * singular) @ a)


def _check(share: float, floor: float) -> None:
    expect(0 < check_number("share", share) < 1, "0 < share < 1", share)
    expect(check_number("floor", floor) >= 0, "floor >= 0", floor)


class _ReleasedState:
    def __init__(self, configuration: Released, fit: Fit) -> None:
        self._fit, self._floor = fit, configuration.floor
        self._z = fit.noise_multiplier / math.sqrt(configuration.share)
        self._history = History(len(fit.start))
        self._squares = 0.0

    def update(self, step: Step) -> Metric:
        self._history.add(step.unprivate_mean)
        self._squares += step.clip**2
        delta = math.sqrt(2 * self._squares) / self._fit.records.divisor
        return _noisy_metric(
            self._history.root_in(step.subspace), self._z * delta, self._fit, self._floor
        )


class _SecondMomentState:
    """The sum is kept in the coordinates of the present subspace: Σ_s Σ_i (Vᵀg_i)(Vᵀg_i)ᵀ."""

    def __init__(self, configuration: ReleasedSecondMoment, fit: Fit) -> None:
        self._fit, self._floor = fit, configuration.floor
        self._z = fit.noise_multiplier / math.sqrt(configuration.share)
        self._sum = _CoordinateSum()
        self._squares = 0.0

    def update(self, step: Step) -> Metric:
        records = self._fit.records
        weights = records.weights(step.parameters, step.clip)
        moment = _second_moment(records.rows, weights, step.subspace)
        total = self._sum.add(moment, step.subspace)
        self._squares += step.clip**2
        delta, scale = math.sqrt(self._squares), math.sqrt(records.divisor)
        values, vectors = np.linalg.eigh(total)
        root = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
        return _noisy_metric(root / scale, self._z * delta / scale, self._fit, self._floor)


class _NoisyState:
    """Sum of u uᵀ and of the noise's own part, in the coordinates of the present subspace."""

    def __init__(self, configuration: FromNoisyGradients) -> None:
        self._configuration = configuration
        self._sums = _CoordinateSum()

    def update(self, step: Step) -> Metric:
        own = step.released_std**2 * np.eye(step.subspace.size)
        both = np.stack([np.outer(step.released, step.released), own])
        total, bias = self._sums.add(both, step.subspace)
        if self._configuration.debias:
            total = total - bias
        values, vectors = np.linalg.eigh(total)
        floor = self._configuration.floor * float(np.trace(bias)) / len(bias)
        return Metric(np.sqrt(np.maximum(values, floor)), vectors)


class _DiagonalState:
    """One sum of squares a coordinate, of coordinates that mean the same at every step."""

    def __init__(self, configuration: FromNoisyGradients) -> None:
        self._configuration = configuration
        self._sum: Array | float = 0.0
        self._bias = 0.0

    def update(self, step: Step) -> Metric:
        self._sum = self._sum + step.released**2
        self._bias += step.released_std**2
        total = self._sum - (self._bias if self._configuration.debias else 0.0)
        return Metric(np.sqrt(np.maximum(total, self._configuration.floor * self._bias)))


class _CoordinateSum:
    """A sum of k × k matrices, or of stacks of them, that goes along when the subspace turns."""

    def __init__(self) -> None:
        self._subspace: Subspace | None = None
        self._total: Array | float = 0.0

    def add(self, matrix: Array, subspace: Subspace) -> Array:
        """The sum so far, what came before projected onto this subspace."""
        if self._subspace is not None:
            turn = rotation(subspace, self._subspace)
            if turn is not None:
                self._total = turn @ self._total @ turn.T
        self._subspace, self._total = subspace, self._total + matrix
        return self._total


def _noisy_metric(root: Array, std: float, fit: Fit, floor: float) -> Metric:
    """root + GOE noise of standard deviation `std` in every direction, eigenvalues raised."""
    scale = std / math.sqrt(2)  # σ_B
    values, vectors = np.linalg.eigh(root + fit.noise.goe(len(root), scale))
    return Metric(np.maximum(values, floor * 2 * scale * math.sqrt(len(root))), vectors)


def _second_moment(rows: Rows, weights: Array, subspace: Subspace) -> Array:
    """Σ_i (Vᵀg_i)(Vᵀg_i)ᵀ of the clipped gradients g_i = w_i ⊗ x̄_i, (k, k)."""
    basis, outputs, width = subspace.basis, weights.shape[1], rows.width
    if subspace.copies > 1:
        projected = rows.margins(basis.T)
        embedded = (weights[:, :, None] * projected[:, None, :]).reshape(len(rows), -1)
    else:
        blocks = basis.reshape(outputs, width, -1)
        parts = (weights[:, [c]] * rows.margins(blocks[c].T) for c in range(outputs))
        embedded = np.sum(list(parts), axis=0)
    return np.asarray(embedded.T @ embedded)


def _check_size(subspace: Subspace) -> None:
    if subspace.size > LARGEST_MATRIX:
        raise ValueError(
            f"A full preconditioner in {subspace.size} dimensions would be a matrix of "
            f"{subspace.size}² numbers, and decomposed at every step: give a subspace "
            f"(PublicFeatures, PublicGradients or GivenBasis) of at most {LARGEST_MATRIX} "
            "dimensions, or preconditioner=FromNoisyGradients(diagonal=True)."
        )
