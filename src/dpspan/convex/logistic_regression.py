"""Private logistic regression."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from dpspan.accounting.ledger import Ledger
from dpspan.convex.arrays import Array
from dpspan.convex.estimator import PrivateLinearClassifier
from dpspan.convex.losses import Logistic
from dpspan.convex.methods import Method
from dpspan.convex.scaling import Scaling
from dpspan.convex.schedules import ClipSchedule


class PrivateLogisticRegression(PrivateLinearClassifier):
    """Logistic regression (softmax for more than two classes) with (ε, δ)-differential privacy.

    `fit` spends `epsilon` at `delta` on the records it is given; `epsilon_` and `certificate_` say
    what was spent and how. `clip`, `scaling` and `row_norm` are public numbers, chosen without a
    look at the records. `records`, what sums are divided by, is by default the number of rows,
    which is then public, and so are the `classes`, by default those in `y`. A `random_state` fixes
    the noise: for tests only, and the certificate says that the fit is not private. The
    `accountant` is the ledger's if one is given to `fit`, else "pld" unless stated.

    A scikit-learn scaler before it in a pipeline would publish the private records' exact means:
    take `scaling`. Every fit spends ε again, each one of a grid search or cross-validation too.

    Examples:
        >>> import numpy as np
        >>> from dpspan.convex import PrivateLogisticRegression
        >>> draw = np.random.default_rng(0)
        >>> X = draw.normal(size=(2000, 4))
        >>> y = (X[:, 0] > 0).astype(int)
        >>> model = PrivateLogisticRegression(epsilon=1.0, delta=1e-6, classes=[0, 1], records=2000)
        >>> model = model.fit(X, y)
        >>> 0.999 <= model.epsilon_ <= 1.0
        True
        >>> model.certificate_["private"]
        True
    """

    def __init__(
        self,
        *,
        epsilon: float = 1.0,
        delta: float = 1e-6,
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
        self.classes = classes

    def fit(self, X: Any, y: Any, *, public: Any = None, ledger: Ledger | None = None) -> Self:
        """Fit to private records; `public` is X_pub, (X_pub, y_pub) or `PublicRows`.

        A `ledger` shares a budget with other releases from the same records, all in one process
        (n_jobs=1): it cannot be copied into others.
        """
        return self._fit_classes(X, y, public, ledger, Logistic(), self.classes, low=0.0)

    def predict_proba(self, X: Any) -> Array:
        """Probabilities of the classes, (n, c)."""
        margins = self._margins(X)
        if len(self.classes_) > 2:
            return np.asarray(special.softmax(margins, axis=1))
        one = special.expit(margins)
        return np.hstack([1 - one, one])

    def predict_log_proba(self, X: Any) -> Array:
        """Their logarithms."""
        margins = self._margins(X)
        if len(self.classes_) == 2:
            margins = np.hstack([np.zeros_like(margins), margins])
        return np.asarray(special.log_softmax(margins, axis=1))
