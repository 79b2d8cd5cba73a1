"""A start from labelled public rows: the weights that fit them best, at no cost in privacy."""

from __future__ import annotations

import numpy as np
from scipy import optimize

from dpspan.convex.arrays import Array, Features
from dpspan.convex.oracles import PublicSide
from dpspan.convex.rows import Rows

_PENALTIES = (1e-3, 1e-2, 1e-1, 1.0)
_FOLDS = 5


def public_start(public: PublicSide) -> Array:
    """Weights of the smallest loss on the public rows, under the ridge penalty they choose.

    Of a fixed list, the penalty whose fits to four fifths of the rows do best on the rest.
    """
    rows = public.require_rows("start='public'")
    if public.targets is None:
        raise ValueError("start='public' needs labels: pass public=(X_pub, y_pub) to fit.")
    fold = np.arange(len(rows)) % min(_FOLDS, max(len(rows), 2))
    lost = [
        sum(_held_out(public, rows, public.targets, penalty, fold == k) for k in np.unique(fold))
        for penalty in _PENALTIES
    ]
    best = _PENALTIES[int(np.argmin(lost))]
    return _minimum(public, rows.x, public.targets, best)


def _held_out(
    public: PublicSide,
    rows: Rows,
    targets: Array,
    penalty: float,
    held: np.ndarray[tuple[int], np.dtype[np.bool_]],
) -> float:
    """Loss on the held-out rows of a fit to the others."""
    if held.all():
        return 0.0
    weights = _minimum(public, rows.x[~held], targets[~held], penalty)
    margins = Rows(rows.x[held], intercept=rows.intercept).margins(
        weights.reshape(public.outputs, -1)
    )
    return float(public.loss.value(margins, targets[held]).sum())


def _minimum(public: PublicSide, x: Features, targets: Array, penalty: float) -> Array:
    rows, loss = Rows(x, intercept=public.require_rows("a fit").intercept), public.loss

    def objective(theta: Array) -> tuple[float, Array]:
        margins = rows.margins(theta.reshape(public.outputs, -1))
        gradient = rows.combine(loss.derivative(margins, targets)).ravel() / len(rows)
        value = float(loss.value(margins, targets).mean()) + penalty / 2 * float(theta @ theta)
        return value, gradient + penalty * theta

    found = optimize.minimize(objective, np.zeros(public.size), jac=True, method="L-BFGS-B")
    return np.asarray(found.x)
