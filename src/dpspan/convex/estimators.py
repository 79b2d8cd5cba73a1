"""Private linear models as scikit-learn estimators; a fit ends in weights and a certificate."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, Self

import numpy as np
from dp_accounting import GaussianDpEvent
from numpy.typing import ArrayLike, NDArray
from scipy import special
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, is_regressor
from sklearn.utils import check_array, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from dpspan.accounting.calibration import calibrate_event
from dpspan.accounting.certificate import certificate
from dpspan.accounting.events import pure_event
from dpspan.accounting.ledger import (
    RECORDS_TOLD,
    SETTINGS_SEARCHED,
    UNITS_TOLD,
    ZERO_OUT,
    Ledger,
)
from dpspan.accounting.promises import Budget, check_promised_delta, warn_of_weaknesses, weaknesses
from dpspan.convex.fitting import ClipSchedule, Fit, GaussianNoise, PrivateRecords, schedule_of
from dpspan.convex.losses import Huber, Logistic, Loss, Records, SmoothedHinge, Squared, one_hot
from dpspan.convex.methods import Method, method_of
from dpspan.convex.public_rows import PublicRows, digest, public_start, refuse_overlap
from dpspan.convex.rows import Array, Rows, no_echo
from dpspan.convex.scaling import Cuts, Preparation, Scaling, cut_points, scaling_of
from dpspan.convex.transformers import PrivateScaler, fitted_before, keeps_nothing, searches
from dpspan.support.checks import check_count, check_number, expect
from dpspan.support.processes import refuse_several_processes
from dpspan.support.secure import SECURE
from dpspan.support.units import Units

_LABELS_READ = (
    "The set of class labels was read from the records and taken to be public: state it in advance "
    "by classes=[...] if it is not."
)
LOSSES: Mapping[str, Loss] = {"squared": Squared(), "huber": Huber()}


@dataclass(frozen=True)
class Task:
    """What is learned: labels to targets (n, c), and weights W (c, p) and constants b (c,) back."""

    loss: Loss
    targets_of: Callable[[NDArray[Any], str], Array]  # of labels, and where they come from
    fitted: Callable[[Array, Array], dict[str, Any]]  # scikit-learn's attributes of the model
    warnings: tuple[str, ...] = ()  # for the certificate


# The dataclasses write the explicit __init__ that scikit-learn's get_params and clone read.
@dataclass(kw_only=True, eq=False, repr=False)
class PrivateLinearModel(BaseEstimator):  # type: ignore[misc]
    """The parameters and the fit that all estimators share; not for use by itself."""

    epsilon: float = 1.0
    delta: float = 1e-6
    method: str | Method = "adagrad"
    clip: float | ClipSchedule = 1.0
    scaling: str | Scaling | None = None
    row_norm: float | None = None
    cuts: Cuts = None
    start: str = "zero"
    records: int | None = None
    fit_intercept: bool = True
    accountant: str | None = None
    noise_multiplier: float | None = None
    random_state: Any = None
    secure_mode: bool = False

    def fit(
        self,
        X: Any,
        y: Any,
        *,
        public: Any = None,
        ledger: Ledger | None = None,
        groups: Any = None,
    ) -> Self:
        """Fit to private records; `public` is X_pub, (X_pub, y_pub) or `PublicRows`.

        `groups` holds one id a record, if a person may have several: the mean gradient of all
        records of one id is clipped, the guarantee is for all of them together, and `records`
        counts ids.

        Everything is checked before the first release. A `ledger` shares a budget with other
        releases from the same records, all in one process (n_jobs=1): it cannot be copied into
        others.
        """
        refuse_several_processes()
        x, y = self._validated(X, y, y_numeric=is_regressor(self))
        task = self._task(y)
        targets = task.targets_of(y, "y")
        public = self._public_rows(public, task)
        method, clip = method_of(self.method), schedule_of(self.clip)
        scaling = scaling_of(self.scaling)
        units, count = None, len(targets)
        if groups is not None:
            units = Units.of(groups, count, records=count, name="groups")
            count = len(units)
        divisor, what = self._checked_divisor(count), "record" if units is None else "unit"
        warn_of_weaknesses(self.epsilon, self.delta, divisor, unit=what)
        if public is not None and not public.equal_rows_allowed:
            refuse_overlap(public.x, x, public.name)

        seen = None if public is None else public.x
        preparation = Preparation() if scaling is None else scaling.prepare(seen)
        points = cut_points(self.cuts, x.shape[1], seen)
        preparation = replace(preparation, row_norm=self.row_norm, cuts=points)
        rows = Rows(preparation.apply(x), intercept=bool(self.fit_intercept), units=units)
        records = PrivateRecords(rows=rows, targets=targets, loss=task.loss, divisor=divisor)
        known = None if public is None else _known(public, preparation, records)
        zero = np.zeros(targets.shape[1] * rows.width)
        ledger = self._opened(ledger)
        ledger.protect(what)
        z = self.noise_multiplier
        if z is None:
            z = _calibrated(self.epsilon, self.delta, method.steps, ledger.accountant)
        fit = Fit(
            records=records,
            public=known,
            clip=clip,
            noise_multiplier=z,
            ledger=ledger,
            noise=GaussianNoise(self._seed(), secure=self.secure_mode),
            start=public_start(known) if self.start == "public" else zero,
        )
        ledger.reserve(GaussianDpEvent(z), method.steps)
        self._declare(ledger, divisor, task, public)
        weights = method.minimise(fit).reshape(-1, rows.width)
        coef, constant = np.split(weights, [rows.x.shape[1]], axis=1)  # one column, or none
        epsilon, document = ledger.epsilon(self.delta), self._certificate(fit, method, scaling)
        self.preparation_, self.epsilon_, self.certificate_ = preparation, epsilon, document
        for name, value in task.fitted(coef, constant.sum(1)).items():
            setattr(self, name, value)
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _task(self, y: NDArray[Any]) -> Task:
        raise NotImplementedError

    def _validated(self, *data: Any, **how: Any) -> Any:
        with no_echo():
            return validate_data(self, *data, accept_sparse="csr", dtype=np.float64, **how)

    def _margins(self, X: Any) -> Array:
        """X̄ Wᵀ for new records, (n, c)."""
        check_is_fitted(self)
        x = self._validated(X, reset=False)
        coef = np.atleast_2d(self.coef_)
        return np.asarray(self.preparation_.apply(x) @ coef.T + self.intercept_)

    def _public_rows(self, given: Any, task: Task) -> PublicRows | None:
        """The public rows with their features checked and targets in place of labels."""
        if given is None:
            return None
        rows = PublicRows.of(given)
        with no_echo():
            x = check_array(rows.x, accept_sparse="csr", dtype=np.float64, input_name="public")
        same = f"public rows of {self.n_features_in_} features, like the private records"
        expect(x.shape[1] == self.n_features_in_, same, x.shape[1])
        if rows.y is None:
            return replace(rows, x=x)
        if np.shape(rows.y) != (x.shape[0],):
            raise ValueError(
                f"Expected one label for each of the {x.shape[0]} public rows, got an array of "
                f"shape {np.shape(rows.y)}."
            )
        return replace(rows, x=x, y=task.targets_of(np.asarray(rows.y), "the public labels"))

    def _checked_divisor(self, count: int) -> int:
        """What sums are divided by; with it all that is not checked elsewhere."""
        expect(0 < check_number("epsilon", self.epsilon) < np.inf, "0 < epsilon", self.epsilon)
        check_promised_delta("delta", self.delta)
        starts = ["zero", "public"]
        expect(self.start in starts, f"start to be one of {starts}", self.start)
        if self.row_norm is not None:
            expect(check_number("row_norm", self.row_norm) > 0, "row_norm > 0", self.row_norm)
        return count if self.records is None else check_count("records", self.records)

    def _seed(self) -> int | None:
        given = self.random_state
        none = "no random_state, which says what to draw, beside secure_mode"
        expect(not self.secure_mode or given is None, none, given)
        return None if given is None else int(check_random_state(given).randint(2**31))

    def _opened(self, ledger: Ledger | None) -> Ledger:
        """With the price of what was fitted before, or a word that nothing pays for it."""
        before, around = fitted_before(self)
        paid = [each for each in before if isinstance(each, PrivateScaler)]
        if ledger is None:
            epsilon = self.epsilon + sum(each.epsilon_ for each in paid)
            budget = Budget(epsilon=epsilon, delta=self.delta)
            ledger = Ledger(accountant=self.accountant or "pld", budget=budget)
        for each in paid:
            ledger.protect("record")
            if each.charged_to_ != ledger.mark:
                ledger.charge(pure_event(each.epsilon_))
        for name in sorted({type(each).__name__ for each in before if each not in paid}):
            told = f"a {name} was fitted to the private records before, and nothing pays for that"
            cure = "take PrivateScaler or PrivateImputer, or fit it to public rows and freeze it"
            warnings.warn(f"dpspan: not private: {told}: {cure} (FrozenEstimator).", stacklevel=3)
            ledger.invalidate(told)
        for each in around:
            name, uncounted = type(each).__name__, "no fits on other ledgers"
            if searches(each):
                told = f"{SETTINGS_SEARCHED} by {name}; ε counts no scores and {uncounted}"
            else:
                told = f"a {name} fitted the estimator; ε counts {uncounted}"
            ledger.warn(told)
            if not (searches(each) or keeps_nothing(each)):
                ledger.invalidate(f"a {name} keeps of private records what nothing pays for")
                told = f"not private: {told}, nor what a {name} keeps of records: fit without it"
            warnings.warn(f"dpspan: {told}.", stacklevel=3)
        same, theirs = self.accountant in (None, ledger.accountant), repr(ledger.accountant)
        cure = "Leave it out where you give a ledger."
        expect(same, f"accountant {theirs}, as the ledger has it", self.accountant, cure)
        return ledger

    def _declare(self, ledger: Ledger, divisor: int, task: Task, public: PublicRows | None) -> None:
        """What the ledger has to know, from which other certificates may be made too."""
        if isinstance(self.cuts, Mapping):
            ledger.warn("cut points were given: they are taken to be public, or paid for here")
        if self.random_state is not None:
            ledger.invalidate("noise was drawn from a fixed random_state")
        if self.records is None:
            told = RECORDS_TOLD if ledger.unit == "record" else UNITS_TOLD
            ledger.warn(
                f"{told}: a fit divides by it, {divisor}, and its guarantee is for "
                f"{ZERO_OUT.format(ledger.unit)}. Give a public number by records= (data.records "
                "of a configuration) if it is a secret"
            )
        ledger.warn(*weaknesses(None, self.delta, divisor, unit=ledger.unit), *task.warnings)
        if public is not None:
            detail = "without labels" if public.y is None else "with labels"
            detail += ", equal private rows allowed" if public.equal_rows_allowed else ""
            count = int(public.x.shape[0])
            ledger.declare_public(public.name, digest(public.x, public.y), count, detail)

    def _certificate(self, fit: Fit, method: Method, scaling: Scaling | None) -> dict[str, Any]:
        training = {
            "kind": "convex, full batch",
            "method": configuration(method),
            "loss": repr(fit.records.loss),
            "clip": configuration(fit.clip),
            "scaling": {"name": "NoScaling"} if scaling is None else configuration(scaling),
            "row_norm": configuration(self.row_norm),
            **({} if self.cuts is None else {"cuts": configuration(self.cuts)}),
            "intercept": bool(self.fit_intercept),
            "start": self.start,
            "divisor": fit.records.divisor,
            "noise_multiplier": fit.noise_multiplier,
            **({"noise": SECURE} if self.secure_mode else {}),
        }
        if fit.ledger.unit == "unit":
            training |= {"unit": "all records of one id", "records_per_unit": "all"}
        return certificate(fit.ledger, delta=self.delta, training=training)


def _known(public: PublicRows, preparation: Preparation, private: Records) -> Records:
    """The public rows, prepared like the private ones."""
    rows = Rows(preparation.apply(public.x), intercept=private.rows.intercept)
    endless = int((~np.isfinite(rows.norm_bounds)).sum())
    cure = "Take them out of public, or bound the features by scaling=FeatureBounds(...)."
    expect(endless == 0, "no public rows of infinite length once scaled", endless, cure)
    return Records(rows=rows, targets=public.y, loss=private.loss)


def configuration(setting: Any) -> Any:
    """A setting as the certificate shows it: an object by its name and fields, plain numbers."""
    if is_dataclass(setting):
        values = {one.name: configuration(getattr(setting, one.name)) for one in fields(setting)}
        return {"name": type(setting).__name__, **values}
    return None if setting is None else np.asarray(setting).tolist()


@lru_cache(maxsize=256)  # a function of four numbers that takes half a second
def _calibrated(epsilon: float, delta: float, steps: int, accountant: str) -> float:
    budget = Budget(epsilon=epsilon, delta=delta)
    return calibrate_event(GaussianDpEvent, steps, budget, accountant=accountant)


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateLinearClassifier(ClassifierMixin, PrivateLinearModel):  # type: ignore[misc]
    """Labels to targets and back; not for use by itself."""

    classes: ArrayLike | None = None

    def _classification(self, y: NDArray[Any], loss: Loss, *, low: float) -> Task:
        """Targets are 1 for a record's class, `low` for the others."""
        check_classification_targets(y)
        known = np.unique(y if self.classes is None else np.asarray(self.classes))
        cure = "Give all that can occur by classes=[...]."
        expect(len(known) > 1, "more than 1 class", len(known), cure)

        def targets_of(labels: NDArray[Any], where: str) -> Array:
            codes = np.searchsorted(known, labels).clip(max=len(known) - 1)
            strange = int((known[codes] != labels).sum())
            if strange:
                raise ValueError(
                    f"{strange} labels in {where} are not among the classes: give all classes by "
                    "classes=[...]. This message depends on private data: do not publish it."
                )
            return one_hot(codes, len(known), low=low)

        return Task(
            loss,
            targets_of,
            lambda w, b: {"classes_": known, "coef_": w, "intercept_": b},
            warnings=(_LABELS_READ,) if self.classes is None else (),
        )

    def decision_function(self, X: Any) -> Array:
        """Signed distances, (n,) for two classes and (n, c) for more."""
        margins = self._margins(X)
        return margins[:, 0] if len(self.classes_) == 2 else margins

    def predict(self, X: Any) -> NDArray[Any]:
        """The class of the largest margin."""
        scores = self.decision_function(X)
        codes = (scores > 0).astype(np.intp) if scores.ndim == 1 else scores.argmax(1)
        return np.asarray(self.classes_[codes])


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateLogisticRegression(PrivateLinearClassifier):
    """Logistic regression (softmax for more than two classes) with (ε, δ)-differential privacy.

    `fit` spends `epsilon` at `delta` on the records it is given; `epsilon_` and `certificate_` say
    what was spent and how. `clip`, `scaling` and `row_norm` are public numbers, chosen without a
    look at the records. `cuts=8` adds to each feature whether it exceeds eight quantiles of the
    public rows, so that its effect may bend; {column: points} has other cut points. `records`, what
    sums are divided by, is by default the number of rows, which is then public, and so are the
    `classes`, by default those in `y`. A `random_state` fixes the noise: for tests only, and the
    certificate says that the fit is not private. The `accountant` is the ledger's if one is given
    to `fit`, else "pld" unless stated. A `noise_multiplier`, z of a step, is taken as it is;
    `epsilon` stays the most that it may cost, unless a ledger is given, whose budget decides.

    A scikit-learn scaler before it in a pipeline would publish the private records' exact means:
    take `scaling`. Every fit spends ε again, each one of a grid search or cross-validation too.
    """

    def _task(self, y: NDArray[Any]) -> Task:
        return self._classification(y, Logistic(), low=0.0)

    def predict_proba(self, X: Any) -> Array:
        """Probabilities of the classes, (n, c)."""
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: Any) -> Array:
        margins = self._margins(X)
        if len(self.classes_) == 2:
            margins = np.hstack([np.zeros_like(margins), margins])
        return np.asarray(special.log_softmax(margins, axis=1))


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateLinearSVC(PrivateLinearClassifier):
    """A linear support vector classifier with (ε, δ)-differential privacy.

    `smoothing` rounds the hinge off over that width (0: the hinge itself). More than two classes
    are learned one against the rest, all in one vector under one clip. The other parameters are
    those of `PrivateLogisticRegression`, and so are the warnings: no scaler of private records
    before it in a pipeline, and every fit spends ε again.
    """

    smoothing: float = 0.5

    def _task(self, y: NDArray[Any]) -> Task:
        return self._classification(y, SmoothedHinge(width=self.smoothing), low=-1.0)


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateLinearRegression(RegressorMixin, PrivateLinearModel):  # type: ignore[misc]
    """Linear regression with (ε, δ)-differential privacy.

    `loss` is "squared", "huber" or an object such as `Huber(threshold=2.0)`. `target_bounds` (low,
    high), known in advance, cut the targets and put them between −1 and 1 for the fit, which
    then needs no other learning rate for other units. The other parameters are those of
    `PrivateLogisticRegression`, and so are the warnings: no scaler of private records before it in
    a pipeline, and every fit spends ε again.
    """

    loss: str | Squared | Huber = "squared"
    target_bounds: tuple[float, float] | None = None

    def predict(self, X: Any) -> Array:
        """Predicted targets, (n,)."""
        return self._margins(X)[:, 0]

    def _task(self, y: NDArray[Any]) -> Task:
        loss: Any = LOSSES.get(self.loss) if isinstance(self.loss, str) else self.loss
        known = isinstance(loss, Squared | Huber)
        expect(known, f"loss to be one of {list(LOSSES)}, Squared() or Huber(...)", self.loss)
        middle, half = 0.0, 1.0
        if self.target_bounds is not None:
            pair = np.shape(self.target_bounds) == (2,)
            expect(pair, "target_bounds to be None or (low, high)", self.target_bounds)
            low, high = (check_number("a target bound", bound) for bound in self.target_bounds)
            expect(-np.inf < low < high < np.inf, "finite target_bounds, low < high", (low, high))
            middle, half = (low + high) / 2, (high - low) / 2

        def targets_of(numbers: NDArray[Any], where: str) -> Array:
            with no_echo():
                numbers = np.asarray(numbers, dtype=float)
            if not np.isfinite(numbers).all():  # of the private ones validate_data saw to it
                raise ValueError("Expected finite public targets, got NaN or infinity in them.")
            with np.errstate(over="ignore"):  # a warning would be about private records
                targets = (numbers - middle) / half
            return (targets if self.target_bounds is None else np.clip(targets, -1, 1))[:, None]

        return Task(
            loss,
            targets_of,
            lambda w, b: {"coef_": w[0] * half, "intercept_": b.item() * half + middle},
        )
