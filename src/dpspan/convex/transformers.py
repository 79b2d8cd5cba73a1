"""A private scaler and imputer for scikit-learn's pipelines, and who else stands in one.

A pipeline fits its transformers to the records that a private estimator after them is to protect.
What these two keep has been paid for; of others the estimator's certificate says that it has not,
and so it does of a calibration, or whatever else fits the estimator and looks at records itself.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.compose import TransformedTargetRegressor
from sklearn.frozen import FrozenEstimator
from sklearn.pipeline import Pipeline
from sklearn.utils import get_tags
from sklearn.utils.validation import check_is_fitted, validate_data

from dpspan.accounting.events import pure_event
from dpspan.accounting.ledger import Ledger
from dpspan.accounting.questions import private_quantiles
from dpspan.convex.rows import Array, no_echo
from dpspan.support.checks import check_positive
from dpspan.support.processes import refuse_several_processes

# Once, or for each class or column of labels, on all records as they are. A bootstrap counts some
# twice; a calibration, a stack, a threshold, an elimination of features looks at them once more.
_KEEP_NOTHING = {
    *("ColumnTransformer", "FeatureUnion", "TransformedTargetRegressor", "SelectFromModel"),
    *("OneVsRestClassifier", "MultiOutputClassifier", "MultiOutputRegressor"),
    *("FixedThresholdClassifier", "VotingClassifier", "VotingRegressor"),
}


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateScaler(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Puts the middle 90 % of each feature between −1 and 1, and cuts what is beyond; gaps stay.

    `low` and `high` are public: a number, or one for each feature, between which to look. All
    quantiles together cost `epsilon`, on the `ledger` given to fit, or on the estimator's.
    """

    low: Any
    high: Any
    epsilon: float = 0.1
    _quantiles: ClassVar[tuple[float, ...]] = (0.05, 0.95)

    def fit(self, X: Any, y: Any = None, *, ledger: Ledger | None = None) -> Self:
        """Release the quantiles of private records."""
        refuse_several_processes()
        x = self._validated(X)
        bounds = np.broadcast_arrays(self.low, self.high, x[0])[:2]
        share, count = check_positive("epsilon", self.epsilon) / x.shape[1], len(self._quantiles)
        ledger = Ledger() if ledger is None else ledger
        ledger.reserve(pure_event(share / count), count * x.shape[1])
        self.quantiles_ = np.array([
            private_quantiles(each, self._quantiles, bounds=(a, b), epsilon=share, ledger=ledger)
            for each, a, b in zip(x.T, *bounds, strict=True)
        ]).T  # fmt: skip
        self.epsilon_, self.charged_to_ = float(self.epsilon), ledger.mark
        return self

    def transform(self, X: Any) -> Array:
        """The records, prepared by what was released."""
        check_is_fitted(self)
        return self._made(self._validated(X, reset=False))

    def _made(self, x: Array) -> Array:
        low, high = self.quantiles_
        width = np.where(low < high, high - low, 1.0)
        return np.asarray(np.clip((2 * x - low - high) / width, -1, 1))

    def _validated(self, X: Any, **how: Any) -> Array:
        how |= {"dtype": np.float64, "ensure_all_finite": "allow-nan"}
        with no_echo():
            return np.asarray(validate_data(self, X, **how))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.non_deterministic = True
        return tags


class PrivateImputer(PrivateScaler):
    """Fills the gaps (NaN) of each feature with its median; the rest as for `PrivateScaler`."""

    _quantiles = (0.5,)

    def _made(self, x: Array) -> Array:
        return np.where(np.isnan(x), self.quantiles_[0], x)


def fitted_before(estimator: Any) -> tuple[list[Any], list[Any]]:
    """What those that fit an estimator have fitted before, and who they are, but for pipelines.

    Of all that are on the stack, as nobody tells an estimator who fits it.
    """
    fitted, known = list[Any](), [estimator]
    frame: Any = sys._getframe()
    while frame is not None:
        caller, names, frame = frame.f_locals.get("self"), frame.f_locals, frame.f_back
        fits = isinstance(caller, BaseEstimator) or searches(caller)
        if not fits or any(caller is each for each in known):
            continue
        known.append(caller)
        if isinstance(caller, Pipeline):  # `step_idx`: of one before the last
            fitted += _fitted(caller.steps[: names.get("step_idx", -1)])
        elif isinstance(caller, TransformedTargetRegressor):
            fitted += _fitted([("", caller.transformer_)])
    return fitted, [each for each in known[1:] if not isinstance(each, Pipeline)]


def searches(caller: Any) -> bool:
    """Whether it is one of scikit-learn's searches, or of others'."""
    return hasattr(type(caller), "_run_search")


def keeps_nothing(caller: Any) -> bool:
    """Whether all that it keeps of records is what it fits: of others nobody knows."""
    kind = type(caller)
    return kind.__module__.startswith("sklearn.") and kind.__name__ in _KEEP_NOTHING


def _fitted(steps: Any) -> Iterator[Any]:
    """Also inside of pipelines, unions and transformers of columns; of frozen ones the paid."""
    for _, each, *_ in steps:
        if isinstance(each, FrozenEstimator):
            kept = _fitted([("", each.estimator)])
            yield from (one for one in kept if isinstance(one, PrivateScaler))
            continue
        inside = getattr(each, "transformers_", getattr(each, "transformer_list", ()))
        yield from _fitted(inside or getattr(each, "steps", ()))
        if not (inside or isinstance(each, str | Pipeline | None)) and get_tags(each).requires_fit:
            yield each
