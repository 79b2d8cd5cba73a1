"""Private convex learning as its papers write it: one gradient a record, p × p matrices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import sparse

from dpspan.convex.fitting import GaussianNoise
from dpspan.convex.losses import Records
from dpspan.convex.subspaces import Span, SubspaceOracle


@dataclass(frozen=True, eq=False)
class GivenBasis(SubspaceOracle):
    """The span of given columns, for every step."""

    basis: np.ndarray

    def find(self, public: Records | None, weights: np.ndarray) -> Span:
        return Span(self.basis)


class ScriptedNoise(GaussianNoise):
    """Noise that remembers what it drew, or that is silent, with what it was asked for."""

    def __init__(self, seed: int | None, *, silent: bool = False) -> None:
        super().__init__(seed)
        self.silent = silent
        self.vectors: list[np.ndarray] = []
        self.matrices: list[np.ndarray] = []
        self.stds: list[float] = []
        self.scales: list[float] = []

    def normal(self, size: int, std: float) -> np.ndarray:
        drawn = super().normal(size, 0.0 if self.silent else std)
        self.vectors.append(drawn)
        self.stds.append(std)
        return drawn

    def goe(self, size: int, scale: float) -> np.ndarray:
        drawn = super().goe(size, 0.0 if self.silent else scale)
        self.matrices.append(drawn)
        self.scales.append(scale)
        return drawn


def dense(x) -> np.ndarray:
    return x.toarray() if sparse.issparse(x) else np.asarray(x)


def gradients(records, theta: np.ndarray) -> np.ndarray:
    """One gradient a record, (n, P), by outer products."""
    x = dense(records.rows.x)
    if records.rows.intercept:
        x = np.hstack([x, np.ones((len(x), 1))])
    targets = records.targets
    margins = x @ theta.reshape(targets.shape[1], -1).T
    d = records.loss.derivative(margins, targets)
    return np.stack([np.outer(d[i], x[i]).ravel() for i in range(len(x))])


def clipped_mean(records, theta: np.ndarray, clip: float) -> np.ndarray:
    """(1/n) Σ clip(g, C), record by record."""
    total = np.zeros(len(theta))
    for g in gradients(records, theta):
        total += g * min(1.0, clip / max(np.linalg.norm(g), 1e-300))
    return total / records.divisor


def root(matrix: np.ndarray) -> np.ndarray:
    """The root of a symmetric matrix without negative eigenvalues."""
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T


def raised(h: np.ndarray, v: np.ndarray, floor: float) -> np.ndarray:
    """H with its eigenvalues inside the span of V raised to `floor`; p × p."""
    outside = np.eye(len(h)) - v @ v.T
    far = 1e2 * np.abs(h).max() * len(h)
    values, vectors = np.linalg.eigh(h + far * outside)
    inside = values < far / 2
    lifted = np.where(inside, np.maximum(values, floor), 0.0)
    return (vectors * lifted) @ vectors.T


def in_ball(y: np.ndarray, h: np.ndarray, radius: float) -> np.ndarray:
    """argmin (θ − y)ᵀH(θ − y) over ‖θ‖ ≤ radius, by bisection for the multiplier."""
    if np.linalg.norm(y) <= radius:
        return y
    low, high = 0.0, 1.0

    def at(mu: float) -> np.ndarray:
        return np.linalg.solve(h + mu * np.eye(len(h)), h @ y)

    while np.linalg.norm(at(high)) > radius:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.linalg.norm(at(middle)) > radius else (low, middle)
    return at(high)


def noisy_adagrad(
    fit, bases, noise: ScriptedNoise, *, steps, learning_rate, floor, z_B, radius=None
) -> np.ndarray:
    """Algorithm 1 in p × p, with full noise whose part in the subspace is what `noise` drew.

    What the noise does outside of the subspace is random here, and must not matter.
    """
    rng = np.random.default_rng(99)
    theta, means, iterates, squares = fit.start, [], [], 0.0
    for t, v in enumerate(bases, start=1):
        p, k = v.shape
        clip = fit.clip.at(t)
        m = clipped_mean(fit.records, theta, clip)
        means.append(m)
        squares += clip**2
        outside = np.eye(p) - v @ v.T
        b = v @ noise.vectors[t - 1] + outside @ rng.standard_normal(p)
        a = rng.standard_normal((p, p))
        inside = v @ v.T
        big = v @ noise.matrices[t - 1] @ v.T + (a + a.T - inside @ (a + a.T) @ inside)
        edge = 2 * z_B * np.sqrt(squares) / fit.records.divisor * np.sqrt(k)
        # (Σ m mᵀ)^{1/2}, by singular values: the root of the sum has only half of the digits.
        _, singular, right = np.linalg.svd(np.stack(means), full_matrices=False)
        g = (right.T * singular) @ right
        h = raised(inside @ (g + big) @ inside, v, floor * edge)
        y = theta - learning_rate * np.linalg.pinv(h, rcond=1e-11, hermitian=True) @ (m + b)
        theta = y if radius is None else in_ball(y, h, radius)
        iterates.append(theta)
    return np.mean(iterates, axis=0)
