"""Noisy AdaGrad with a released second moment of single gradients, in place of the mean's.

It does not vanish at the optimum, where the mean gradient does: more signal for its noise. On the
five tables that did not pay.

Formal guarantee: a record moves (Σ_s Σ_i g_i g_iᵀ)^{1/2} by at most √(ΣC_s²) in Frobenius norm, by
Powers and Størmer; the rest is as for `Released`.
"""

from __future__ import annotations

import math

import numpy as np

from dpspan.convex import Released
from dpspan.convex.fitting import Fit
from dpspan.convex.preconditioners import CoordinateSum, Root, Step
from dpspan.convex.rows import Array, Rows
from dpspan.convex.subspaces import Subspace


class ReleasedSecondMoment(Released):
    """(Σ_s Σ_i g_i g_iᵀ/n)^{1/2} of the records' own clipped gradients, plus σ_B·GOE."""

    def root(self, fit: Fit) -> tuple[Root, float]:
        sums, records, scale = CoordinateSum(), fit.records, math.sqrt(fit.records.divisor)
        if records.rows.units is not None:
            raise ValueError("The second moment is that of single records: leave groups= out.")

        def root(step: Step) -> Array:
            weights = records.weights(step.theta, step.clip)
            moment = second_moment(records.rows, weights, step.subspace)
            values, vectors = np.linalg.eigh(sums.add(moment, step.subspace))
            return np.asarray((vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T / scale)

        return root, 1 / scale


def second_moment(rows: Rows, weights: Array, subspace: Subspace) -> Array:
    """Σ_i (Vᵀg_i)(Vᵀg_i)ᵀ of the clipped gradients g_i = w_i ⊗ x̄_i, (k, k)."""
    if subspace.copies > 1:
        projected = rows.margins(subspace.basis.T)
        embedded = np.hstack([column[:, None] * projected for column in weights.T])
    else:
        blocks = subspace.basis.reshape(weights.shape[1], rows.width, -1)
        pairs = zip(weights.T, blocks, strict=True)
        embedded = sum(column[:, None] * rows.margins(block.T) for column, block in pairs)
    return np.asarray(embedded.T @ embedded)
