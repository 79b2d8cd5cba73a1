"""Private scalers and imputers in pipelines, and what their neighbours cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.compose import ColumnTransformer
from sklearn.frozen import FrozenEstimator
from sklearn.impute import SimpleImputer
from sklearn.pipeline import FeatureUnion, make_pipeline
from sklearn.preprocessing import FunctionTransformer, Normalizer, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from dpspan import Budget, BudgetExceeded, Ledger
from dpspan.accounting.events import pure_event
from dpspan.convex import PrivateImputer, PrivateLogisticRegression, PrivateScaler

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


def test_those_that_keep_nothing_are_no_harm() -> None:
    x, y = records()
    public = StandardScaler().fit(np.nan_to_num(records(100)[0]))
    steps = ("passthrough", FunctionTransformer(np.nan_to_num), Normalizer())
    pipeline = make_pipeline(*steps, FrozenEstimator(public), logistic()).fit(x, y)
    assert pipeline[-1].certificate_["private"]


def test_texts_are_not_shown() -> None:
    with pytest.raises(ValueError, match="got text among them") as caught:
        PrivateScaler(**WIDE).fit([["SECRET"], ["1"]])
    assert "SECRET" not in str(caught.value)
