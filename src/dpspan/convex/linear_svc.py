"""A private linear support vector classifier."""

from __future__ import annotations

from typing import Any, Self

from numpy.typing import ArrayLike

from dpspan.accounting.ledger import Ledger
from dpspan.convex.estimator import PrivateLinearClassifier
from dpspan.convex.losses import SmoothedHinge
from dpspan.convex.methods import Method
from dpspan.convex.scaling import Scaling
from dpspan.convex.schedules import ClipSchedule


class PrivateLinearSVC(PrivateLinearClassifier):
    """A linear support vector classifier with (ε, δ)-differential privacy.

    `smoothing` rounds the hinge off over that width (0: the hinge itself). More than two classes
    are learned one against the rest, all in one vector under one clip. The other parameters are
    those of `PrivateLogisticRegression`, and so are the warnings: no scaler of private records
    before it in a pipeline, and every fit spends ε again.

    Examples:
        >>> import numpy as np
        >>> from dpspan.convex import PrivateLinearSVC
        >>> draw = np.random.default_rng(0)
        >>> X = draw.normal(size=(2000, 4))
        >>> y = (X[:, 0] > 0).astype(int)
        >>> model = PrivateLinearSVC(epsilon=1.0, accountant="rdp").fit(X, y)
        >>> model.predict(X[:3]).shape
        (3,)
    """

    def __init__(
        self,
        *,
        epsilon: float = 1.0,
        delta: float = 1e-6,
        smoothing: float = 0.5,
        method: str | Method = "adagrad",
        clip: float | ClipSchedule = 1.0,
        scaling: str | Scaling | None = None,
        row_norm: float | None = None,
        start: str = "zero",
        classes: ArrayLike | None = None,
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
        self.smoothing = smoothing
        self.classes = classes

    def fit(self, X: Any, y: Any, *, public: Any = None, ledger: Ledger | None = None) -> Self:
        """Fit to private records; see `PrivateLogisticRegression.fit`."""
        loss = SmoothedHinge(width=self.smoothing)
        return self._fit_classes(X, y, public, ledger, loss, self.classes, low=-1.0)
