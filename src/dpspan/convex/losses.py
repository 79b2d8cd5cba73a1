"""Losses of linear models as functions of the margins, and records under such a loss.

    M = X Wᵀ    margins, (n, c): one column for two classes or a number, c for c classes
    Y           targets, (n, c), as `one_hot` makes them from labels
    ℓ           the loss of each record, (n,)
    D = ∂ℓ/∂M   derivatives, (n, c): the gradient of record i in W is D_i ⊗ x_i, of norm ‖D_i‖·‖x_i‖

So nothing else of a loss is needed, and no gradient of a single record is ever built.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import special

from dpspan.convex.rows import Array, Rows
from dpspan.support.checks import check_number, expect


@dataclass(frozen=True, kw_only=True)
class Logistic:
    """Logistic loss: targets 0 or 1 in one column, or one-hot in c columns (softmax)."""

    def value(self, margins: Array, targets: Array) -> Array:
        if margins.shape[1] == 1:
            margins = np.hstack([np.zeros_like(margins), margins])
            targets = np.hstack([1 - targets, targets])
        return np.asarray(special.logsumexp(margins, axis=1) - (targets * margins).sum(1))

    def derivative(self, margins: Array, targets: Array) -> Array:
        one = margins.shape[1] == 1
        predicted: Array = special.expit(margins) if one else special.softmax(margins, axis=1)
        return predicted - targets


@dataclass(frozen=True, kw_only=True)
class SmoothedHinge:
    """Hinge loss, rounded off over `width` below the margin 1 (0: the hinge itself).

    Targets are ±1, in one column, or in c columns (one class against the rest, added up).
    """

    width: float = 0.5

    def __post_init__(self) -> None:
        expect(0 <= check_number("width", self.width) <= 2, "0 <= width <= 2", self.width)

    def value(self, margins: Array, targets: Array) -> Array:
        short = np.maximum(1 - targets * margins, 0.0)  # how far the margin falls short of 1
        rounded = special.huber(self.width, short) / self.width if self.width > 0 else short
        return np.asarray(rounded.sum(1))

    def derivative(self, margins: Array, targets: Array) -> Array:
        short = 1 - targets * margins
        slope = np.clip(short / self.width, 0, 1) if self.width > 0 else (short > 0).astype(float)
        return np.asarray(-targets * slope)


@dataclass(frozen=True, kw_only=True)
class Squared:
    """(m − y)²/2."""

    def value(self, margins: Array, targets: Array) -> Array:
        return np.asarray(((margins - targets) ** 2).sum(1) / 2)

    def derivative(self, margins: Array, targets: Array) -> Array:
        return margins - targets


@dataclass(frozen=True, kw_only=True)
class Huber:
    """Squared near the target, absolute beyond `threshold`: a bound on the derivative, smoothly."""

    threshold: float = 1.0

    def __post_init__(self) -> None:
        expect(check_number("threshold", self.threshold) > 0, "threshold > 0", self.threshold)

    def value(self, margins: Array, targets: Array) -> Array:
        return np.asarray(special.huber(self.threshold, margins - targets).sum(1))

    def derivative(self, margins: Array, targets: Array) -> Array:
        return np.clip(margins - targets, -self.threshold, self.threshold)


Loss: TypeAlias = Logistic | SmoothedHinge | Squared | Huber


def one_hot(codes: NDArray[np.intp], classes: int, *, low: float) -> Array:
    """Class codes as targets: 1 for the class, `low` for the others; two classes in one column."""
    targets = np.where(codes[:, None] == np.arange(classes), 1.0, low)
    return targets[:, 1:] if classes == 2 else targets


@dataclass(frozen=True, kw_only=True)
class Records:
    """Records and a loss, private or public: a problem in the weights W (c, width)."""

    rows: Rows
    targets: Array | None = None  # (n, c); public rows may have none
    loss: Loss

    def derivatives(self, parameters: Array) -> Array:
        """D at θ = W.ravel(), (n, c)."""
        return self.loss.derivative(*self._margins_and_targets(parameters))

    def losses(self, parameters: Array) -> Array:
        """ℓ at θ, (n,)."""
        return self.loss.value(*self._margins_and_targets(parameters))

    def _margins_and_targets(self, parameters: Array) -> tuple[Array, Array]:
        assert self.targets is not None  # see `required`
        return self.rows.margins(parameters.reshape(-1, self.rows.width)), self.targets


def required(public: Records | None, who: str, *, labels: bool = False) -> Records:
    """The public rows, or a ValueError naming who needs them."""
    if public is None:
        raise ValueError(
            f"{who} needs public rows: pass public=X_pub to fit, or choose a method without "
            "a public subspace, method='gd' for example."
        )
    if labels and public.targets is None:
        raise ValueError(
            f"{who} needs labels: pass public=(X_pub, y_pub) to fit, or take PublicFeatures."
        )
    return public
