"""Subspace oracles: where gradients lie, by public knowledge.

    Everything       no subspace: noise in all dimensions
    PublicFeatures   span of public rows: gradients of linear models are multiples of the rows
    PublicGradients  top directions of the public rows' gradients at the present weights
    GivenBasis       columns that you give

and a start from labelled public rows. They see public rows and released weights, so what they
return costs no privacy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from scipy import linalg, optimize

from dpspan.convex.arrays import Array, Features
from dpspan.convex.losses import Loss
from dpspan.convex.public_rows import digest
from dpspan.convex.rows import Rows
from dpspan.convex.subspace import Span, Subspace, Whole
from dpspan.support.checks import check_count

_NEGLIGIBLE = 1e-12  # share of the largest eigenvalue below which a direction is rounding
_PENALTIES, _FOLDS = (1e-3, 1e-2, 1e-1, 1.0), 5  # of a start


@dataclass(frozen=True, kw_only=True)
class PublicSide:
    """What is public about a problem: its shape, its loss and maybe some rows with targets."""

    outputs: int  # c
    width: int  # weights of an output, the constant column among them
    loss: Loss
    rows: Rows | None = None
    targets: Array | None = None

    @property
    def size(self) -> int:
        """How many parameters there are."""
        return self.outputs * self.width

    def require_rows(self, who: str) -> Rows:
        """The public rows, or a ValueError naming who needs them."""
        if self.rows is None:
            raise ValueError(
                f"{who} needs public rows: pass public=X_pub to fit, or choose a method without "
                "a public subspace, method='gd' for example."
            )
        return self.rows


Tracker = Callable[[Array], Subspace]
"""The subspace for a step at these (released) weights; the same object while it stays."""


class SubspaceOracle(Protocol):
    """Configuration of where noise is drawn; frozen and public."""

    def start(self, public: PublicSide) -> Tracker:
        """The subspaces of one fit."""

    def turns_within(self, steps: int) -> bool:
        """Whether the subspace may change in that many steps."""

    def describe(self) -> dict[str, Any]:
        """The configuration, for the certificate."""


@dataclass(frozen=True, kw_only=True)
class Everything:
    """The whole space."""

    def start(self, public: PublicSide) -> Tracker:
        whole = Whole(public.size)
        return lambda weights: whole

    def turns_within(self, steps: int) -> bool:
        return False

    def describe(self) -> dict[str, Any]:
        return {"name": "Everything"}


@dataclass(frozen=True, kw_only=True)
class PublicFeatures:
    """The top `rank` principal directions of the public rows, for each output."""

    rank: int = 50

    def __post_init__(self) -> None:
        check_count("rank", self.rank)

    def start(self, public: PublicSide) -> Tracker:
        rows = public.require_rows("PublicFeatures")
        basis = _top_directions(rows, np.ones((len(rows), 1)), self.rank)
        span = Span(basis, copies=public.outputs)
        return lambda weights: span

    def turns_within(self, steps: int) -> bool:
        return False

    def describe(self) -> dict[str, Any]:
        return {"name": "PublicFeatures", "rank": self.rank}


@dataclass(frozen=True, kw_only=True)
class PublicGradients:
    """The top `rank` directions of the gradients of labelled public rows, every `refresh` steps."""

    rank: int = 50
    refresh: int = 1

    def __post_init__(self) -> None:
        check_count("rank", self.rank)
        check_count("refresh", self.refresh)

    def start(self, public: PublicSide) -> Tracker:
        rows = public.require_rows("PublicGradients")
        if public.targets is None:
            raise ValueError(
                "PublicGradients needs targets for the public rows: pass public=(X_pub, y_pub) to "
                "fit, or take PublicFeatures."
            )
        targets, calls = public.targets, 0
        span: Span | None = None

        def track(weights: Array) -> Subspace:
            nonlocal span, calls
            if span is None or calls % self.refresh == 0:
                margins = rows.margins(weights.reshape(public.outputs, public.width))
                derivatives = public.loss.derivative(margins, targets)
                span = Span(_top_directions(rows, derivatives, self.rank))
            calls += 1
            return span

        return track

    def turns_within(self, steps: int) -> bool:
        return steps > self.refresh

    def describe(self) -> dict[str, Any]:
        return {"name": "PublicGradients", "rank": self.rank, "refresh": self.refresh}


@dataclass(frozen=True, kw_only=True, eq=False)
class GivenBasis:
    """Columns that span the subspace: (width, k) for every output, or (c·width, k) for all.

    The width counts the constant column, which comes last.
    """

    basis: Array

    def start(self, public: PublicSide) -> Tracker:
        basis = np.asarray(self.basis, dtype=float)
        lengths = {public.width: public.outputs, public.size: 1}
        if basis.ndim != 2 or len(basis) not in lengths or basis.shape[1] > len(basis):
            raise ValueError(
                f"Expected a basis of shape ({public.width}, k) or ({public.size}, k), one row a "
                f"weight and the constant column last, got shape {basis.shape}."
            )
        if basis.shape[1] == 0:
            raise ValueError(
                "Expected a basis of at least one column, got none: nothing would be learned."
            )
        if not np.isfinite(basis).all():
            raise ValueError("Expected a finite basis, got NaN or infinity in it.")
        span = Span(basis, copies=lengths[len(basis)])
        return lambda weights: span

    def turns_within(self, steps: int) -> bool:
        return False

    def describe(self) -> dict[str, Any]:
        basis = np.asarray(self.basis, dtype=float)
        return {"name": "GivenBasis", "shape": list(basis.shape), "digest": digest(basis, None)}


def _top_directions(rows: Rows, derivatives: Array, rank: int) -> Array:
    """Top right singular vectors of the rows D_i ⊗ x̄_i, (c·width, k), by their Gram matrix.

    ⟨D_i ⊗ x_i, D_j ⊗ x_j⟩ = ⟨D_i, D_j⟩⟨x_i, x_j⟩: as large as there are public rows, whatever p.
    """
    inner = rows.x @ rows.x.T
    gram = np.asarray(inner.todense() if hasattr(inner, "todense") else inner) + rows.intercept
    gram = gram * (derivatives @ derivatives.T)
    m = len(gram)
    values, vectors = linalg.eigh(gram, subset_by_index=(max(m - rank, 0), m - 1))
    kept = values > _NEGLIGIBLE * max(values[-1], 0.0)
    if not kept.any():
        raise ValueError(
            "The public gradients are all zero, so they span no subspace: give other public rows."
        )
    coefficients = (vectors / np.sqrt(np.where(kept, values, 1.0)))[:, kept][:, ::-1]
    columns = [rows.combine(derivatives * column[:, None]).ravel() for column in coefficients.T]
    return np.stack(columns, axis=1)


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
