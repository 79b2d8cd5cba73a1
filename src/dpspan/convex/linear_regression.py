"""Private linear regression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils.validation import validate_data

from dpspan.accounting.ledger import Ledger
from dpspan.convex.arrays import Array, no_echo
from dpspan.convex.estimator import PrivateLinearModel
from dpspan.convex.learning import Table
from dpspan.convex.losses import Huber, Loss, Squared
from dpspan.convex.methods import Method
from dpspan.convex.scaling import Scaling
from dpspan.convex.schedules import ClipSchedule
from dpspan.support.checks import expect

LOSSES: Mapping[str, Loss] = {"squared": Squared(), "huber": Huber()}


class PrivateLinearRegression(RegressorMixin, PrivateLinearModel):  # type: ignore[misc]
    """Linear regression with (ε, δ)-differential privacy.

    `loss` is "squared", "huber" or an object such as `Huber(threshold=2.0)`. `target_bounds` (low,
    high), known in advance, cut the targets and put them between −1 and 1 for the fit, which
    then needs no other learning rate for other units. The other parameters are those of
    `PrivateLogisticRegression`, and so are the warnings: no scaler of private records before it in
    a pipeline, and every fit spends ε again.

    Examples:
        >>> import numpy as np
        >>> from dpspan.convex import PrivateLinearRegression
        >>> draw = np.random.default_rng(0)
        >>> X = draw.normal(size=(2000, 4))
        >>> y = 20 + 5 * X[:, 0]  # years, say
        >>> model = PrivateLinearRegression(epsilon=1.0, target_bounds=(0, 40), accountant="rdp")
        >>> model.fit(X, y).predict(X[:3]).shape
        (3,)
    """

    def __init__(
        self,
        *,
        epsilon: float = 1.0,
        delta: float = 1e-6,
        loss: str | Squared | Huber = "squared",
        target_bounds: tuple[float, float] | None = None,
        method: str | Method = "adagrad",
        clip: float | ClipSchedule = 1.0,
        scaling: str | Scaling | None = None,
        row_norm: float | None = None,
        start: str = "zero",
        records: int | None = None,
        fit_intercept: bool = True,
        accountant: str | None = None,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            epsilon=epsilon,
            delta=delta,
            method=method,
            clip=clip,
            scaling=scaling,
            row_norm=row_norm,
            start=start,
            records=records,
            fit_intercept=fit_intercept,
            accountant=accountant,
            random_state=random_state,
            verbose=verbose,
        )
        self.loss = loss
        self.target_bounds = target_bounds

    def fit(self, X: Any, y: Any, *, public: Any = None, ledger: Ledger | None = None) -> Self:
        """Fit to private records; see `PrivateLogisticRegression.fit`."""
        with no_echo():
            x, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64, y_numeric=True)
        middle, half = self._target_scale()
        given = self._public_rows(public)
        public_targets = None
        if given is not None and given[0].y is not None:
            with no_echo():
                numbers = np.asarray(given[0].y, dtype=float)
            if not np.isfinite(numbers).all():
                raise ValueError("Expected finite public targets, got NaN or infinity in them.")
            public_targets = self._targets(numbers, middle, half)
        private = Table(x=x, targets=self._targets(y, middle, half))
        learned = self._learn(self._loss(), private, given, public_targets, ledger)
        self.coef_ = learned.weights[0] * half
        self.intercept_ = float(learned.intercepts[0]) * half + middle
        return self

    def predict(self, X: Any) -> Array:
        """Predicted targets, (n,)."""
        return self._margins(X)[:, 0]

    def _loss(self) -> Loss:
        if isinstance(self.loss, Squared | Huber):
            return self.loss
        known = isinstance(self.loss, str) and self.loss in LOSSES
        expect(known, f"loss to be one of {list(LOSSES)}, Squared() or Huber(...)", self.loss)
        return LOSSES[self.loss]

    def _target_scale(self) -> tuple[float, float]:
        if self.target_bounds is None:
            return 0.0, 1.0
        low, high = (float(bound) for bound in self.target_bounds)
        expect(-np.inf < low < high < np.inf, "finite target_bounds, low < high", (low, high))
        return (low + high) / 2, (high - low) / 2

    def _targets(self, y: Array, middle: float, half: float) -> Array:
        with np.errstate(over="ignore"):  # a warning would be about private records
            targets = (np.asarray(y, dtype=float) - middle) / half
        return (targets if self.target_bounds is None else np.clip(targets, -1, 1))[:, None]
