"""Private scalers and imputers in pipelines, and what their neighbours cost."""

from __future__ import annotations

import traceback
from typing import Any

import numpy as np
import pytest
from sklearn.base import BaseEstimator
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.ensemble import VotingClassifier, VotingRegressor
from sklearn.feature_selection import RFE, SelectFromModel
from sklearn.frozen import FrozenEstimator
from sklearn.impute import SimpleImputer
from sklearn.model_selection import GridSearchCV
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import FeatureUnion, make_pipeline
from sklearn.preprocessing import FunctionTransformer, Normalizer, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from dpspan import Budget, BudgetExceeded, Ledger
from dpspan.accounting.events import pure_event
from dpspan.convex import (
    PrivateImputer,
    PrivateLinearRegression,
    PrivateLogisticRegression,
    PrivateScaler,
)

WIDE: dict[str, Any] = {"low": -50.0, "high": 50.0}


@parametrize_with_checks([PrivateScaler(**WIDE), PrivateImputer(**WIDE)])
def test_scikit_learns_checks(estimator, check, monkeypatch) -> None:
    monkeypatch.setenv("SCIPY_ARRAY_API", "1")
    check(estimator)


def records(n: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    x = draw.normal([60.0, 5.0, 0.1], [10.0, 2.0, 0.02], size=(n, 3))
    y = (x[:, 0] + draw.normal(size=n) > 60).astype(int)
    x[draw.random((n, 3)) < 0.05] = np.nan
    return x, y


BOUNDS: dict[str, Any] = {"low": [0, 0, 0], "high": [120, 20, 1]}


def logistic() -> PrivateLogisticRegression:
    return PrivateLogisticRegression(
        epsilon=1.0, delta=1e-5, records=2000, classes=[0, 1], accountant="rdp"
    )


def test_what_they_make_of_records() -> None:
    x, _ = records()
    scaler = PrivateScaler(**BOUNDS, epsilon=30.0).fit(x)
    exact = np.nanquantile(x, [0.05, 0.95], axis=0)
    np.testing.assert_allclose(scaler.quantiles_, exact, rtol=0.05, atol=0.003)
    made, (low, high) = scaler.transform(x), scaler.quantiles_
    expected = np.clip((x - (low + high) / 2) / ((high - low) / 2), -1, 1)
    np.testing.assert_allclose(made, expected)  # gaps are gaps
    filled = PrivateImputer(low=-1, high=1).fit(made).transform(made)
    assert np.isfinite(filled).all()
    np.testing.assert_array_equal(filled[~np.isnan(made)], made[~np.isnan(made)])


def test_a_feature_that_is_always_the_same() -> None:
    made = PrivateScaler(low=0, high=10, epsilon=1e3).fit_transform(np.full((500, 1), 5.0))
    np.testing.assert_array_equal(made, 0.0)


def test_releases_are_charged_before_they_are_drawn() -> None:
    x, _ = records()
    ledger = Ledger()
    PrivateScaler(**BOUNDS, epsilon=0.3).fit(x, ledger=ledger)
    assert ledger.events == ((pure_event(0.3 / 3 / 2), 6),)
    poor = Ledger(budget=Budget(epsilon=0.2, delta=1e-5))
    with pytest.raises(BudgetExceeded):
        PrivateScaler(**BOUNDS, epsilon=0.3).fit(x, ledger=poor)
    assert poor.steps == 0


def test_a_pipeline_s_certificate_has_all_of_it() -> None:
    x, y = records()
    pipeline = make_pipeline(
        PrivateScaler(**BOUNDS, epsilon=0.2), PrivateImputer(low=-1, high=1), logistic()
    )
    pipeline.fit(x, y)
    document = pipeline[-1].certificate_
    assert document["private"]
    assert [event["count"] for event in document["events"][:2]] == [1, 1]
    assert 1.0 < document["epsilon"] <= 1.3
    assert pipeline.score(np.nan_to_num(x), y) > 0.85


def test_a_shared_ledger_is_charged_once() -> None:
    x, y = records()
    ledger = Ledger(accountant="rdp", budget=Budget(epsilon=1.3, delta=1e-5))
    model = logistic().set_params(accountant=None)
    pipeline = make_pipeline(PrivateScaler(**BOUNDS, epsilon=0.2), PrivateImputer(**WIDE), model)
    names = ("privatescaler", "privateimputer", "privatelogisticregression")
    pipeline.fit(x, y, **{f"{name}__ledger": ledger for name in names})
    first, steps = model.certificate_["events"]
    assert (first["count"], first["count"] + steps["count"]) == (6 + 3, ledger.steps)


@pytest.mark.parametrize(
    ("before", "named"),
    [
        ([StandardScaler()], ["StandardScaler"]),
        ([SimpleImputer(), PrivateScaler(**BOUNDS)], ["SimpleImputer"]),
        ([make_pipeline(SimpleImputer(), StandardScaler())], ["SimpleImputer", "StandardScaler"]),
        ([FeatureUnion([("a", SimpleImputer())])], ["SimpleImputer"]),
        ([ColumnTransformer([("a", SimpleImputer(), [0, 1])])], ["SimpleImputer"]),
    ],
)
def test_others_are_told_to_be_unpaid(before: list[Any], named: list[str]) -> None:
    x, y = records()
    pipeline = make_pipeline(*before, FunctionTransformer(np.nan_to_num), logistic())
    with pytest.warns(UserWarning, match="not private: a .* was fitted") as caught:
        pipeline.fit(x, y)
    assert len([w for w in caught if "not private" in str(w.message)]) == len(named)
    document = pipeline[-1].certificate_
    assert not document["private"]
    assert [reason.split()[1] for reason in document["not_private_because"]] == named


@pytest.mark.filterwarnings("ignore:dpspan")
@pytest.mark.parametrize(
    ("step", "inside"),
    [
        (lambda: make_pipeline(PrivateScaler(**BOUNDS), logistic()), lambda last: last[-1]),
        (lambda: OneVsRestClassifier(logistic()), lambda last: last.estimators_[0]),
        (lambda: SelectFromModel(logistic()), lambda last: last.estimator_),
        (
            lambda: GridSearchCV(logistic(), {"clip": [0.5, 1.0]}, cv=2),
            lambda last: last.best_estimator_,
        ),
    ],
)
@pytest.mark.parametrize("after", [[], [Normalizer(), logistic()]])
def test_an_estimator_may_stand_inside_of_a_step(step: Any, inside: Any, after: list[Any]) -> None:
    x, y = records()
    last = step()
    if after and not hasattr(last, "transform"):
        after = []
    make_pipeline(SimpleImputer(), StandardScaler(), last, *after).fit(x, y)
    document = inside(last).certificate_
    assert not document["private"]
    found = {reason.split()[1] for reason in document["not_private_because"]}
    assert found == {"SimpleImputer", "StandardScaler"}


def regression() -> PrivateLinearRegression:
    return PrivateLinearRegression(epsilon=1.0, delta=1e-5, records=200, accountant="rdp")


@pytest.mark.parametrize(
    ("fits", "inside", "named"),
    [
        (
            lambda: TransformedTargetRegressor(regression(), transformer=StandardScaler()),
            lambda last: last.regressor_,
            "StandardScaler",
        ),
        (
            lambda: CalibratedClassifierCV(logistic(), cv=2),
            lambda last: last.calibrated_classifiers_[0].estimator,
            "CalibratedClassifierCV",
        ),
        (lambda: RFE(logistic()), lambda last: last.estimator_, "RFE"),
        (
            lambda: CalibratedClassifierCV(make_pipeline(Normalizer(), logistic()), cv=2),
            lambda last: last.calibrated_classifiers_[0].estimator[-1],
            "CalibratedClassifierCV",
        ),
        (lambda: Wrapper(logistic()), lambda last: last.model, "Wrapper"),
    ],
)
def test_who_looks_at_private_records_beside_an_estimator_is_told(
    fits: Any, inside: Any, named: str
) -> None:
    x, y = records(200)
    with pytest.warns(UserWarning, match=f"not private: .*{named}"):
        last = fits().fit(np.nan_to_num(x), y)
    document = inside(last).certificate_
    assert not document["private"]
    assert [reason.split()[1] for reason in document["not_private_because"]] == [named]


class Wrapper(BaseEstimator):
    """Somebody's own, of which nobody knows what it keeps."""

    def __init__(self, model: Any = None) -> None:
        self.model = model

    def fit(self, x: Any, y: Any) -> Wrapper:
        self.model.fit(x, y)
        return self


@pytest.mark.parametrize(
    ("fits", "inside"),
    [
        (lambda: OneVsRestClassifier(logistic()), lambda last: last.estimators_[0]),
        (lambda: SelectFromModel(logistic()), lambda last: last.estimator_),
        (lambda: VotingClassifier([("one", logistic())]), lambda last: last.estimators_[0]),
        (lambda: VotingRegressor([("one", regression())]), lambda last: last.estimators_[0]),
        (
            lambda: TransformedTargetRegressor(regression(), func=np.sqrt, inverse_func=np.square),
            lambda last: last.regressor_,
        ),
    ],
)
def test_who_keeps_nothing_is_told_and_does_no_harm(fits: Any, inside: Any) -> None:
    x, y = records(200)
    with pytest.warns(UserWarning, match="fitted the estimator; ε counts no fits on other ledgers"):
        last = fits().fit(np.nan_to_num(x), y)
    document = inside(last).certificate_
    assert document["private"]
    assert any(each.startswith(f"a {type(last).__name__} ") for each in document["warnings"])


@pytest.mark.filterwarnings("ignore:dpspan")
def test_a_search_around_or_after_a_scaler() -> None:
    x, y = records()
    scaler, found = PrivateScaler(**BOUNDS, epsilon=0.4), {"clip": [0.5, 1.0]}
    filled = FunctionTransformer(np.nan_to_num)
    within = make_pipeline(scaler, filled, GridSearchCV(logistic(), found, cv=2)).fit(x, y)
    around = {f"privatelogisticregression__{name}": each for name, each in found.items()}
    search = GridSearchCV(make_pipeline(scaler, filled, logistic()), around, cv=2).fit(x, y)
    for fitted in within[-1].best_estimator_, search.best_estimator_[-1]:
        document = fitted.certificate_
        assert document["private"]
        assert 1.2 < document["epsilon"] <= 1.4  # the scaler is paid for
        assert document["search"].endswith("although there was one: see the warnings")
        assert any("searched by GridSearchCV" in warning for warning in document["warnings"])


def test_a_search_is_told_on_the_console() -> None:
    x, y = records(200)
    with pytest.warns(UserWarning, match=r"dpspan: unprivate: settings were searched by GridS"):
        GridSearchCV(logistic(), {"clip": [0.5, 1.0]}, cv=2).fit(np.nan_to_num(x), y)


@pytest.mark.filterwarnings("ignore:dpspan")
@pytest.mark.parametrize("wrapped", [lambda scaler: scaler, make_pipeline])
def test_a_frozen_private_scaler_is_paid_for(wrapped: Any) -> None:
    x, y = records()
    scaler = wrapped(PrivateScaler(**BOUNDS, epsilon=0.4)).fit(x)
    steps = FrozenEstimator(scaler), FunctionTransformer(np.nan_to_num), logistic()
    assert 1.2 < make_pipeline(*steps).fit(x, y)[-1].certificate_["epsilon"] <= 1.4


def test_a_scaler_s_price_is_not_one_for_units() -> None:
    x, y = records(200)
    owners, model, ledger = np.arange(200) // 2, logistic(), Ledger(accountant="rdp")
    model.fit(np.nan_to_num(x), y, groups=owners, ledger=ledger)
    steps = PrivateScaler(**BOUNDS), PrivateImputer(**WIDE), model
    shared = {"groups": owners, "ledger": ledger}
    with pytest.raises(ValueError, match="cannot be added to it"):
        make_pipeline(*steps).fit(
            x, y, **{f"privatelogisticregression__{name}": each for name, each in shared.items()}
        )


def test_those_that_keep_nothing_are_no_harm() -> None:
    x, y = records()
    public = make_pipeline(SimpleImputer(), StandardScaler()).fit(records(100)[0])
    steps = ("passthrough", FunctionTransformer(np.nan_to_num), Normalizer())
    pipeline = make_pipeline(*steps, FrozenEstimator(public), logistic()).fit(x, y)
    assert pipeline[-1].certificate_["private"]


@pytest.mark.parametrize("kind", [PrivateScaler, PrivateImputer])
def test_one_of_several_processes_is_refused(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    ledger = Ledger()
    with pytest.raises(RuntimeError, match="one of several processes"):
        kind(**WIDE).fit(records()[0], ledger=ledger)
    assert ledger.steps == 0


@pytest.mark.parametrize("made", [logistic, lambda: PrivateScaler(**WIDE)])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.full(30, 4711.25), "Expected 2D array, got 1D .* Reshape your data"),
        (4711.25, "Expected 2D array, got scalar .* Reshape your data"),
        (np.full((30, 2), 4711.25 + 1j), "Complex data not supported"),
    ],
)
def test_data_of_no_table_s_form_are_not_shown(made: Any, data: Any, message: str) -> None:
    x, y = np.zeros((40, 2)), np.arange(40) % 2
    fitted = made().fit(x, y)
    for use in (made().fit, getattr(fitted, "predict", None) or fitted.transform):
        with pytest.raises(ValueError, match=message) as caught:
            use(data, *([y] if use.__name__ == "fit" else []))
        assert "4711" not in "".join(traceback.format_exception(caught.value))


def test_texts_are_not_shown() -> None:
    with pytest.raises(ValueError, match="got text among them") as caught:
        PrivateScaler(**WIDE).fit([["SECRET"], ["1"]])
    assert "SECRET" not in str(caught.value)
