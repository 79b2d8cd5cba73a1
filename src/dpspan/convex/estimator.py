"""What the estimators share: scikit-learn's side of a private fit."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_array, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from dpspan.accounting.ledger import Ledger
from dpspan.convex.arrays import Array, Features, no_echo
from dpspan.convex.learning import Learned, Settings, Table, learn
from dpspan.convex.losses import Loss, one_hot
from dpspan.convex.methods import Method, method_of
from dpspan.convex.public_rows import PublicRows
from dpspan.convex.scaling import Scaling, scaling_of
from dpspan.convex.schedules import ClipSchedule, schedule_of

_LABELS_READ = (
    "The set of class labels was read from the records and taken to be public: state it in advance "
    "by classes=[...] if it is not."
)


class PrivateLinearModel(BaseEstimator):  # type: ignore[misc]
    """Parameters and checks that all estimators have; not for use by itself."""

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
        records: int | None = None,
        fit_intercept: bool = True,
        accountant: str | None = None,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.method = method
        self.clip = clip
        self.scaling = scaling
        self.row_norm = row_norm
        self.start = start
        self.records = records
        self.fit_intercept = fit_intercept
        self.accountant = accountant
        self.random_state = random_state
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _settings(self, loss: Loss, outputs: int) -> Settings:
        seed = None
        if self.random_state is not None:
            seed = int(check_random_state(self.random_state).randint(2**31))
        return Settings(
            epsilon=self.epsilon,
            delta=self.delta,
            method=method_of(self.method),
            clip=schedule_of(self.clip),
            loss=loss,
            outputs=outputs,
            scaling=scaling_of(self.scaling),
            row_norm=self.row_norm,
            start=self.start,
            records=self.records,
            intercept=bool(self.fit_intercept),
            accountant=self.accountant,
            seed=seed,
            verbose=bool(self.verbose),
        )

    def _public_rows(self, given: Any) -> tuple[PublicRows, Features] | None:
        """The public rows with their features checked, or None."""
        if given is None:
            return None
        rows = PublicRows.of(given)
        with no_echo():
            x = check_array(rows.x, accept_sparse="csr", dtype=np.float64, input_name="public")
        if x.shape[1] != self.n_features_in_:
            raise ValueError(
                f"Expected public rows of {self.n_features_in_} features, like the private "
                f"records, got {x.shape[1]}."
            )
        if rows.y is not None and np.shape(rows.y) != (x.shape[0],):
            raise ValueError(
                f"Expected one label for each of the {x.shape[0]} public rows, got an array of "
                f"shape {np.shape(rows.y)}."
            )
        return rows, x

    def _learn(
        self,
        loss: Loss,
        private: Table,
        public: tuple[PublicRows, Features] | None,
        public_targets: Array | None,
        ledger: Ledger | None,
    ) -> Learned:
        """Fit, and keep what scikit-learn's users look for."""
        assert private.targets is not None
        table = None
        if public is not None:
            rows, x = public
            detail = "with labels" if public_targets is not None else "without labels"
            detail += ", equal private rows allowed" if rows.equal_rows_allowed else ""
            table = Table(
                x=x,
                targets=public_targets,
                name=rows.name,
                detail=detail,
                equal_rows_allowed=rows.equal_rows_allowed,
            )
        learned = learn(self._settings(loss, private.targets.shape[1]), private, table, ledger)
        self.preparation_ = learned.preparation
        self.epsilon_ = learned.epsilon
        self.certificate_ = learned.certificate
        return learned

    def _margins(self, X: Any) -> Array:
        """X̄ Wᵀ for new records, (n, c)."""
        check_is_fitted(self)
        with no_echo():
            x = validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False)
        coef = np.atleast_2d(self.coef_)
        return np.asarray(self.preparation_.apply(x) @ coef.T + self.intercept_)


class PrivateLinearClassifier(ClassifierMixin, PrivateLinearModel):  # type: ignore[misc]
    """Labels to targets and back; not for use by itself."""

    def _fit_classes(
        self,
        X: Any,
        y: Any,
        public: Any,
        ledger: Ledger | None,
        loss: Loss,
        classes: ArrayLike | None,
        low: float,
    ) -> Self:
        with no_echo():
            x, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64)
        check_classification_targets(y)
        given = self._public_rows(public)
        known = np.unique(y if classes is None else np.asarray(classes))
        if len(known) < 2:
            raise ValueError(
                f"Expected at least two classes, got {len(known)} class: give all that can occur "
                "by classes=[...]."
            )
        targets = one_hot(_codes(y, known, "y"), len(known), low=low)
        public_targets = None
        if given is not None and given[0].y is not None:
            codes = _codes(np.asarray(given[0].y), known, "the public labels")
            public_targets = one_hot(codes, len(known), low=low)
        detail = "" if classes is not None else _LABELS_READ
        private = Table(x=x, targets=targets, detail=detail)
        learned = self._learn(loss, private, given, public_targets, ledger)
        self.classes_ = known
        self.coef_, self.intercept_ = learned.weights, learned.intercepts
        return self

    def decision_function(self, X: Any) -> Array:
        """Signed distances, (n,) for two classes and (n, c) for more."""
        margins = self._margins(X)
        return margins[:, 0] if len(self.classes_) == 2 else margins

    def predict(self, X: Any) -> NDArray[Any]:
        """The class of the largest margin."""
        scores = self.decision_function(X)
        codes = (scores > 0).astype(np.intp) if scores.ndim == 1 else scores.argmax(1)
        labels: NDArray[Any] = self.classes_[codes]
        return labels


def _codes(labels: NDArray[Any], classes: NDArray[Any], what: str) -> NDArray[np.intp]:
    """The place of each label among the classes."""
    places = np.searchsorted(classes, labels).clip(max=len(classes) - 1)
    strange = classes[places] != labels
    if strange.any():
        raise ValueError(
            f"{int(strange.sum())} labels in {what} are none of the classes: give all classes by "
            "classes=[...]. This message depends on private data: do not publish it."
        )
    return np.asarray(places, dtype=np.intp)
