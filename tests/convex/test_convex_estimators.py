"""The estimators: scikit-learn's checks, privacy, certificates, and bad input."""

from __future__ import annotations

import json
import math
import pickle
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from experiments.second_moment import ReleasedSecondMoment
from scipy import sparse
from sklearn.base import clone
from sklearn.datasets import load_digits, make_classification, make_regression
from sklearn.model_selection import cross_val_score
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from dpspan import Budget, BudgetExceeded, Ledger, write_certificate
from dpspan.convex import (
    Envelope,
    FeatureBounds,
    FromNoisyGradients,
    GradientDescent,
    Huber,
    NoisyAdaGrad,
    PrivateLinearRegression,
    PrivateLinearSVC,
    PrivateLogisticRegression,
    PublicFeatures,
    PublicGradients,
    PublicRows,
    PublicScaling,
    Released,
    WholeSpace,
)
from dpspan.convex.fitting import GaussianNoise
from dpspan.convex.methods import METHODS
from helpers.convex_oracle import GivenBasis

ESTIMATORS = [PrivateLogisticRegression, PrivateLinearSVC, PrivateLinearRegression]
QUICK: dict[str, Any] = {"accountant": "rdp"}  # a hundredth of a second instead of half a one


@parametrize_with_checks([kind(**QUICK) for kind in ESTIMATORS])
def test_scikit_learns_checks(estimator, check, monkeypatch) -> None:
    """All of them, no exceptions: noise is fixed by random_state, at the default ε = 1."""
    monkeypatch.setenv("SCIPY_ARRAY_API", "1")  # or those of array API dispatch would be skipped
    check(estimator)


def table(n: int = 2000, classes: int = 2, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    x, y = make_classification(
        n_samples=n,
        n_features=12,
        n_informative=6,
        n_classes=classes,
        class_sep=2.0,
        random_state=seed,
    )
    return x, y


@pytest.fixture(scope="module")
def fitted() -> PrivateLogisticRegression:
    x, y = table()
    return PrivateLogisticRegression(epsilon=2.0).fit(x[100:], y[100:], public=x[:100])


# -- learning -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ESTIMATORS[:2])
@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("form", [np.asarray, sparse.csr_matrix, sparse.csr_array])
def test_classes_are_learned(kind, classes: int, form) -> None:
    x, y = table(classes=classes)
    labels = np.array(["apple", "bear", "cat", "dog"])[y]
    model = kind(epsilon=8.0, random_state=0, **QUICK).fit(form(x[:1500]), labels[:1500])
    majority = np.unique(labels, return_counts=True)[1].max() / len(labels)
    assert model.score(form(x[1500:]), labels[1500:]) > majority + 0.25
    assert model.coef_.shape == (1 if classes == 2 else classes, 12)
    assert model.decision_function(form(x)).shape == ((2000,) if classes == 2 else (2000, 4))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns(name: str) -> None:
    x, y = table()
    model = PrivateLogisticRegression(epsilon=8.0, method=name, random_state=1, **QUICK)
    model.fit(x[100:1500], y[100:1500], public=x[:100])
    assert model.score(x[1500:], y[1500:]) > 0.8


def test_probabilities() -> None:
    for classes in (2, 3):
        x, y = table(classes=classes)
        model = PrivateLogisticRegression(epsilon=8.0, **QUICK).fit(x, y)
        p = model.predict_proba(x)
        np.testing.assert_allclose(p.sum(1), 1)
        np.testing.assert_allclose(np.exp(model.predict_log_proba(x)), p, atol=1e-12)
        np.testing.assert_array_equal(model.classes_[p.argmax(1)], model.predict(x))


@pytest.mark.parametrize("loss", ["squared", "huber", Huber(threshold=0.3)])
@pytest.mark.parametrize("shift", [0.0, 500.0])
def test_numbers_are_learned(loss, shift: float) -> None:
    x, y = make_regression(n_samples=2000, n_features=5, noise=5.0, random_state=0)
    y = y + shift
    model = PrivateLinearRegression(
        epsilon=8.0, loss=loss, target_bounds=(shift - 300, shift + 300), random_state=0, **QUICK
    ).fit(x[:1500], y[:1500])
    assert model.score(x[1500:], y[1500:]) > 0.8
    np.testing.assert_allclose(model.predict(x), x @ model.coef_ + model.intercept_)


def test_dense_and_sparse_are_the_same_fit() -> None:
    x, y = table(500)
    models = [
        PrivateLogisticRegression(random_state=3, scaling=PublicScaling(center=False), **QUICK).fit(
            form(x[50:]), y[50:], public=form(x[:50])
        )
        for form in (np.asarray, sparse.csr_matrix)
    ]
    np.testing.assert_allclose(models[0].coef_, models[1].coef_, atol=1e-10)


def test_a_public_start_needs_no_private_step_to_be_good() -> None:
    x, y = load_digits(return_X_y=True)
    model = PrivateLogisticRegression(
        epsilon=0.05,
        method=GradientDescent(steps=1, learning_rate=1e-6),
        start="public",
        scaling=FeatureBounds(low=0, high=16),
        **QUICK,
    ).fit(x[300:], y[300:], public=(x[:300], y[:300]))
    assert model.score(x[300:], y[300:]) > 0.8


def test_scaling_goes_with_the_model() -> None:
    x, y = table()
    wide = x * 10.0 ** np.arange(-6, 6) + 100
    plain = PrivateLogisticRegression(random_state=0, scaling="public", **QUICK)
    score = clone(plain).fit(x[100:], y[100:], public=x[:100]).score(x, y)
    scaled = clone(plain).fit(wide[100:], y[100:], public=wide[:100])
    assert scaled.score(wide, y) == pytest.approx(score, abs=0.02)


# -- privacy --------------------------------------------------------------------------------------


def test_epsilon_is_spent_and_never_exceeded(fitted) -> None:
    assert 1.998 <= fitted.epsilon_ <= 2.0
    document = fitted.certificate_
    assert document["private"] is True
    assert document["delta"] == 1e-6
    assert document["steps"] == METHODS["adagrad"].steps
    assert document["training"]["divisor"] == 1900
    assert document["training"]["method"]["name"] == "NoisyAdaGrad"
    assert document["public"][0]["count"] == 100
    assert any("records is disclosed: a fit divides by it, 1900" in w for w in document["warnings"])
    assert document["discloses_number_of_records"] is True
    assert document["adjacency"].startswith("one record counted or not")
    assert any("set of class labels was read" in w for w in document["warnings"])


def test_the_certificate_is_a_document(fitted, tmp_path) -> None:
    path = write_certificate(tmp_path / "certificate.json", fitted.certificate_)
    assert json.loads(path.read_text()) == fitted.certificate_
    assert pickle.loads(pickle.dumps(fitted)).certificate_ == fitted.certificate_


def test_a_model_that_0_1_has_pickled_is_read(fitted) -> None:
    stored = pickle.dumps(fitted, protocol=0)  # where names end with their line
    stored = stored.replace(b"convex.estimators\n", b"convex.logistic_regression\n")
    with pytest.warns(DeprecationWarning, match=r"has moved to dpspan\.convex\.estimators"):
        read = pickle.loads(stored)
    np.testing.assert_array_equal(read.coef_, fitted.coef_)


def test_a_ledger_that_holds_a_fit_with_fixed_n_promises_no_more_than_that() -> None:
    x, y = table(300)
    ledger = Ledger(accountant="rdp")
    for records in (None, 250):
        model = PrivateLogisticRegression(records=records, **QUICK).fit(x, y, ledger=ledger)
        assert model.certificate_["adjacency"].startswith("one record counted or not")
    assert Ledger.from_state(ledger.state_dict()).adjacency == ledger.adjacency


def test_what_is_stated_in_advance_is_no_warning() -> None:
    x, y = table(300)
    model = PrivateLogisticRegression(classes=[0, 1], records=250, **QUICK).fit(x, y)
    assert model.certificate_["warnings"] == []
    assert model.certificate_["discloses_number_of_records"] is False
    assert model.certificate_["training"]["divisor"] == 250
    assert model.certificate_["adjacency"] == "add or remove one record"
    assert "300" not in json.dumps(model.certificate_)


def test_the_same_multiplier_gives_the_same_epsilon_whatever_the_method() -> None:
    x, y = table(300)
    found = {
        PrivateLogisticRegression(method=method, **QUICK)
        .fit(x[50:], y[50:], public=x[:50])
        .epsilon_
        for method in METHODS.values()
    }
    assert len(found) == 1


ALL = {
    **METHODS,
    "second moment": NoisyAdaGrad(
        subspace=PublicFeatures(rank=5), preconditioner=ReleasedSecondMoment(share=0.3)
    ),
    "turning second moment": NoisyAdaGrad(
        subspace=PublicGradients(rank=5), preconditioner=ReleasedSecondMoment()
    ),
    "turning": NoisyAdaGrad(subspace=PublicGradients(rank=5), preconditioner=Released(share=0.2)),
}


@pytest.mark.parametrize("name", ALL)
def test_noise_is_as_large_as_the_ledger_says(name: str, monkeypatch) -> None:
    """Of the gradient and of a released preconditioner: 1/z² = 1/z_b² + 1/z_B² is spent."""
    stds: list[float] = []
    scales: list[float] = []

    def normal(self, size: int, std: float) -> np.ndarray:
        stds.append(std)
        return np.zeros(size)

    def goe(self, size: int, scale: float) -> np.ndarray:
        scales.append(scale)
        return np.zeros((size, size))

    monkeypatch.setattr(GaussianNoise, "normal", normal)
    monkeypatch.setattr(GaussianNoise, "goe", goe)
    x, y = table(350)
    ledger = Ledger()
    method = replace(ALL[name], steps=5)  # type: ignore[type-var]
    model = PrivateLogisticRegression(method=method, clip=0.3)
    model.fit(x[50:], y[50:], public=(x[:50], y[:50]), ledger=ledger)
    ((event, count),) = ledger.events
    assert count == 5
    assert isinstance(event, GaussianDpEvent)
    z = event.noise_multiplier
    assert 0.999 <= ledger.epsilon(1e-6) <= 1.0
    preconditioner = getattr(method, "preconditioner", None)
    share = 0.0 if preconditioner is None else preconditioner.share
    assert stds == [pytest.approx(z / math.sqrt(1 - share) * 0.3 / 300)] * 5
    delta = {
        Released: math.sqrt(2) * 0.3 / 300,
        ReleasedSecondMoment: 0.3 / math.sqrt(300),
    }.get(type(preconditioner))
    expected = []
    if delta is not None:
        z_B = z / math.sqrt(share)
        expected = [z_B * delta * math.sqrt(t) / math.sqrt(2) for t in range(1, 6)]
    assert scales == pytest.approx(expected)


def test_noise_is_fresh_unless_fixed() -> None:
    x, y = table(300)
    one, other = (PrivateLogisticRegression(**QUICK).fit(x, y) for _ in range(2))
    assert not np.array_equal(one.coef_, other.coef_)
    np.random.seed(0)  # the global seed changes nothing
    third = PrivateLogisticRegression(**QUICK).fit(x, y)
    np.random.seed(0)
    fourth = PrivateLogisticRegression(**QUICK).fit(x, y)
    assert not np.array_equal(third.coef_, fourth.coef_)
    fixed = [PrivateLogisticRegression(random_state=4, **QUICK).fit(x, y) for _ in range(2)]
    # But for rounding, which may depend on where in memory an array begins.
    np.testing.assert_allclose(fixed[0].coef_, fixed[1].coef_, rtol=1e-9, atol=1e-12)
    for document in (m.certificate_ for m in fixed):
        assert document["private"] is False
        assert document["not_private_because"] == ["noise was drawn from a fixed random_state"]


def test_a_shared_ledger_adds_up_and_refuses() -> None:
    x, y = table(300)
    ledger = Ledger(accountant="rdp", budget=Budget(epsilon=2.0, delta=1e-6))
    model = PrivateLogisticRegression(epsilon=1.0)
    first = clone(model).fit(x, y, ledger=ledger).epsilon_
    second = clone(model).fit(x, y, ledger=ledger).epsilon_
    assert first < second <= 2.0
    spent = ledger.events
    with pytest.raises(BudgetExceeded):
        clone(model).set_params(epsilon=1.5).fit(x, y, ledger=ledger)
    assert ledger.events == spent  # refused before the first step


def test_one_record_moves_a_noiseless_fit_by_little(monkeypatch) -> None:
    """Through all of the estimator: one step of descent moves by at most η·C/n."""
    monkeypatch.setattr(GaussianNoise, "normal", lambda self, size, std: np.zeros(size))
    x, y = table(300)
    x[0] = 1e9
    rng = np.random.default_rng(0)
    for kind in ESTIMATORS:
        for subspace in (WholeSpace(), GivenBasis(rng.standard_normal((13, 4)))):
            method = GradientDescent(steps=1, learning_rate=1.0, subspace=subspace)
            weights = []
            for first in (0, 1):
                model = kind(method=method, clip=0.5, records=300, **QUICK).fit(
                    x[first:], y[first:]
                )
                weights.append(np.append(model.coef_, model.intercept_))
            moved = float(np.linalg.norm(weights[0] - weights[1]))
            assert moved <= 0.5 / 300 * (1 + 1e-9)
            assert moved > 0.1 * 0.5 / 300


def too_long(x: np.ndarray) -> dict[str, Any]:
    """Private tables whose last row has no finite length: as it is, in pieces, after scaling."""
    pieces = sparse.vstack([sparse.csr_matrix(x), sparse.csr_matrix(([0.0], ([0], [0])), (1, 12))])
    data = np.concatenate([pieces.data[: pieces.indptr[-2]], [1.7e308, 1.7e308]])
    indices = np.concatenate([pieces.indices[: pieces.indptr[-2]], [0, 0]])
    pointers = np.append(pieces.indptr[:-1], pieces.indptr[-2] + 2)
    return {
        "huge": np.vstack([x, np.full((1, 12), 1.7e308)]),
        "long": np.vstack([x, np.full((1, 12), 1e200)]),
        "in pieces": sparse.csr_matrix((data, indices, pointers), shape=(len(x) + 1, 12)),
    }


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("row", ["huge", "long", "in pieces"])
def test_a_row_without_a_finite_length_leaves_no_trace(name: str, row: str) -> None:
    """0·Inf is NaN: one such record would be visible in every weight."""
    x, y = table(250)
    bad = too_long(x[50:])[row]
    open_rows = {"public": (x[:50], y[:50])}
    if sparse.issparse(bad):
        open_rows = {"public": (sparse.csr_matrix(x[:50]), y[:50])}
    method = replace(ALL[name], steps=3)  # type: ignore[type-var]
    model = PrivateLogisticRegression(method=method, records=200, random_state=1, **QUICK)
    labels = np.append(y[50:], 1)
    found = clone(model).fit(bad, labels, **open_rows)
    without = clone(model).fit(bad[:-1], labels[:-1], **open_rows)
    np.testing.assert_allclose(found.coef_, without.coef_, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found.intercept_, without.intercept_, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.parametrize("row_norm", [None, 1.0])
def test_a_row_that_overflows_when_scaled_is_finite_news(kind, row_norm: float | None) -> None:
    x, y = table(250)
    x = x * 1e-10
    x[-1] = 1e300
    scaling = PublicScaling(limit=math.inf)
    model = kind(
        method="gd", scaling=scaling, row_norm=row_norm, records=200, random_state=1, **QUICK
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning would be about private records
        found = model.fit(x[50:], y[50:], public=x[:50])
    assert np.isfinite(found.coef_).all()


def test_public_rows_have_a_finite_length() -> None:
    x, y = table(100)
    x[3] = 1e200
    for public in (x[:10], (x[:10], y[:10])):
        with pytest.raises(ValueError, match=r"of infinite length once scaled, got 1\. Take"):
            PrivateLogisticRegression(**QUICK).fit(x[10:], y[10:], public=public)


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (NoisyAdaGrad(preconditioner=Released()), "give a subspace .* or preconditioner="),
        (
            NoisyAdaGrad(preconditioner=FromNoisyGradients(diagonal=False)),
            "give a subspace .* or preconditioner=",
        ),
        (
            NoisyAdaGrad(
                subspace=PublicGradients(rank=3), preconditioner=FromNoisyGradients(diagonal=True)
            ),
            "the subspace changes between steps",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_it_is_charged(method, message: str) -> None:
    x, y = np.random.default_rng(0).standard_normal((60, 4000)), np.arange(60) % 2
    ledger = Ledger(accountant="rdp")
    with pytest.raises(ValueError, match=message):
        PrivateLogisticRegression(method=method, row_norm=1.0).fit(
            x[20:], y[20:], public=(x[:20], y[:20]), ledger=ledger
        )
    assert ledger.steps == 0


def test_a_clip_that_leaves_no_room_for_noise_is_refused_before_it_is_charged() -> None:
    """Squares of the clips make the noise: below 1e-162 they would be zero, and so would it be."""
    x, y = table(100)
    for clip in (1e-170, 1e200, Envelope(start=1.0, decay=300.0)):
        ledger = Ledger(accountant="rdp")
        with pytest.raises(ValueError, match=r"clips between 1e-100 and 1e\+100"):
            PrivateLogisticRegression(clip=clip).fit(x, y, ledger=ledger)
        assert ledger.steps == 0


@pytest.mark.parametrize("clip", [1, np.int64(1), np.float32(1), np.float64(1)])
def test_a_clip_is_any_kind_of_number(clip: Any) -> None:
    x, y = table(100)
    model = PrivateLogisticRegression(clip=clip, **QUICK).fit(x, y)
    assert json.loads(json.dumps(model.certificate_["training"]["clip"]))["clip"] == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_public_targets_are_finite(bad: float) -> None:
    x, y = table(100)
    targets = np.where(np.arange(50) == 3, bad, y[:50])
    with pytest.raises(ValueError, match="Expected finite public targets"):
        PrivateLinearRegression(**QUICK).fit(x[50:], y[50:], public=(x[:50], targets))


def test_a_ledger_has_its_own_accountant() -> None:
    x, y = table(100)
    ledger = Ledger(accountant="rdp")
    with pytest.raises(ValueError, match=r"accountant 'rdp', as the ledger has it, got 'pld'"):
        PrivateLogisticRegression(accountant="pld").fit(x, y, ledger=ledger)
    assert ledger.steps == 0
    PrivateLogisticRegression().fit(x, y, ledger=ledger)
    assert ledger.steps == 30


@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_refused(kind, bad: float) -> None:
    x, y = table(100)
    x[3, 4] = bad
    with pytest.raises(ValueError, match=r"contains (NaN|infinity)"):
        kind(**QUICK).fit(x, y)
    good, _ = table(100)
    with pytest.raises(ValueError, match=r"(?i)(input|public).*contains (NaN|infinity)"):
        kind(**QUICK).fit(good, y, public=x[:10])
    if kind is PrivateLinearRegression:
        with pytest.raises(ValueError, match=r"contains (NaN|infinity)"):
            kind(**QUICK).fit(good, np.where(np.arange(100) == 3, bad, y))


def test_shapes_are_checked() -> None:
    x, y = table(100)
    model = PrivateLogisticRegression(**QUICK)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        model.fit(x, y[:50])
    with pytest.raises(ValueError, match=r"Expected public rows of 12 features.*got 5"):
        model.fit(x, y, public=x[:10, :5])
    with pytest.raises(ValueError, match="one label for each of the 10 public rows"):
        model.fit(x[10:], y[10:], public=(x[:10], y[:9]))
    model.fit(x, y)
    with pytest.raises(ValueError, match="expecting 12 features"):
        model.predict(x[:, :5])


@pytest.mark.parametrize("kind", ESTIMATORS[:2])
def test_one_class_only(kind) -> None:
    x, _ = table(100)
    with pytest.raises(ValueError, match="more than 1 class, got 1"):
        kind(**QUICK).fit(x, np.zeros(100))
    model = kind(classes=[0, 1], **QUICK).fit(x, np.zeros(100))  # known: learned all the same
    assert list(model.classes_) == [0, 1]


def test_labels_outside_of_the_classes() -> None:
    x, y = table(100, classes=3)
    with pytest.raises(ValueError, match="labels in y are not among the classes"):
        PrivateLogisticRegression(classes=[0, 1], **QUICK).fit(x, y)
    with pytest.raises(ValueError, match="the public labels are not among the classes"):
        PrivateLogisticRegression(**QUICK).fit(x[5:], y[5:], public=(x[:5], np.full(5, 9)))


def test_public_rows_that_are_private() -> None:
    x, y = table(100)
    model = PrivateLogisticRegression(scaling="public", **QUICK)
    with pytest.raises(ValueError, match="10 of the 10 public rows 'public' also occur"):
        model.fit(x, y, public=x[:10])
    model.fit(x, y, public=PublicRows(x=x[:10], equal_rows_allowed=True))
    assert "equal private rows allowed" in model.certificate_["public"][0]["detail"]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"clip": "auto"}, "inferred from private records"),
        ({"clip": None}, "inferred from private records"),
        ({"clip": [1.0]}, "inferred from private records"),
        ({"clip": True}, "clip to be a number, got True"),
        ({"scaling": "standard"}, "would release them without noise"),
        ({"scaling": StandardScaler()}, "would release them without noise"),
        ({"scaling": StandardScaler}, "would release them without noise"),
        ({"scaling": "public"}, "PublicScaling needs public rows: pass public=X_pub to fit"),
        ({"method": "projected"}, "PublicFeatures needs public rows"),
        ({"start": "public"}, "start='public' needs public rows"),
        ({"start": "warm"}, "start to be one of"),
        ({"delta": 0.1}, r"Expected delta below 0\.1 .*, got 0\.1"),
        ({"delta": 0.0}, "0 < delta < 1"),
        ({"epsilon": 0.0}, "0 < epsilon"),
        ({"epsilon": math.nan}, "epsilon to be a number"),
        ({"row_norm": 0.0}, "row_norm > 0"),
        ({"records": 0}, "records to be an integer of at least 1"),
        ({"method": "sgd"}, "Expected method to be one of"),
        ({"accountant": "moments"}, "accountant to be one of"),
    ],
)
def test_refused_parameters(parameters: dict[str, Any], message: str) -> None:
    x, y = table(100)
    for kind in ESTIMATORS:
        with pytest.raises(ValueError, match=message):
            kind(**{**QUICK, **parameters}).fit(x, y)


def test_refused_losses_and_bounds() -> None:
    x, y = table(100)
    with pytest.raises(ValueError, match="loss to be one of"):
        PrivateLinearRegression(loss="absolute", **QUICK).fit(x, y)
    with pytest.raises(ValueError, match="finite target_bounds, low < high"):
        PrivateLinearRegression(target_bounds=(1, 1), **QUICK).fit(x, y)
    bad: Any
    for bad in (5, (1, 2, 3), "12"):
        with pytest.raises(ValueError, match=r"target_bounds to be None or \(low, high\)"):
            PrivateLinearRegression(target_bounds=bad, **QUICK).fit(x, y)
    with pytest.raises(ValueError, match="a target bound to be a number"):
        PrivateLinearRegression(target_bounds=(math.nan, 1.0), **QUICK).fit(x, y)
    with pytest.raises(ValueError, match="0 <= width <= 2"):
        PrivateLinearSVC(smoothing=3, **QUICK).fit(x, y)


# -- scikit-learn's ways --------------------------------------------------------------------------


def test_parameters_and_tools() -> None:
    model = PrivateLogisticRegression(method=NoisyAdaGrad(subspace=PublicFeatures(rank=3)))
    assert clone(model).get_params() == model.get_params()
    x, y = table(300)
    scores = cross_val_score(PrivateLogisticRegression(epsilon=5.0, **QUICK), x, y, cv=3)
    assert scores.shape == (3,)


def test_a_shared_ledger_stays_in_one_process() -> None:
    """Charged in copies it would refuse nothing; a refusal is NaN unless scikit-learn is told."""
    x, y = table(300)
    model = PrivateLogisticRegression(epsilon=1.0)
    ledger = Ledger(accountant="rdp", budget=Budget(epsilon=1.5, delta=1e-6))
    with pytest.raises(BudgetExceeded):
        cross_val_score(model, x, y, cv=3, params={"ledger": ledger}, error_score="raise")
    assert 0 < ledger.epsilon() <= 1.5
    with pytest.raises((TypeError, pickle.PicklingError)):
        cross_val_score(model, x, y, cv=3, n_jobs=2, params={"ledger": ledger})


# -- units ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_groups_are_protected_as_one(kind: Any) -> None:
    x, y = table(400)
    groups = [f"patient {place // 4}" for place in range(400)]
    model = kind(**QUICK).fit(x, y, groups=groups)
    document = model.certificate_
    assert document["adjacency"].startswith("one unit counted or not")
    assert document["training"]["divisor"] == 100
    assert document["training"]["records_per_unit"] == "all"
    assert any(w.startswith("the number of private units is") for w in document["warnings"])
    stated = kind(**QUICK, records=120).fit(x, y, groups=groups).certificate_
    assert stated["adjacency"] == "add or remove one unit: every record of one id"
    plain = kind(**QUICK, records=120).fit(x, y).certificate_
    assert plain["adjacency"] == "add or remove one record"
    assert document["epsilon"] == plain["epsilon"]  # of the same steps; for what, differs


@pytest.mark.parametrize("method", METHODS)
def test_groups_of_one_are_records(method: str) -> None:
    x, y = table(300)
    public = table(80, seed=1)
    settings = {**QUICK, "method": method, "random_state": 0, "start": "public"}
    plain, groups = (
        PrivateLogisticRegression(**settings).fit(x, y, public=public, groups=each)
        for each in (None, range(300))
    )
    np.testing.assert_allclose(plain.coef_, groups.coef_, rtol=1e-6)


def test_delta_and_ledgers_of_groups() -> None:
    x, y = table(400)
    groups = np.arange(400) // 4
    with pytest.warns(UserWarning, match="every unit with that probability"):
        PrivateLogisticRegression(**QUICK, delta=2e-2).fit(x, y, groups=groups)
    ledger = Ledger(accountant="rdp")
    PrivateLogisticRegression().fit(x, y, ledger=ledger, groups=groups)
    with pytest.raises(ValueError, match="about each unit"):
        PrivateLogisticRegression().fit(x, y, ledger=ledger)
    for wrong, message in (
        (groups[:-1], "one id in groups for each of the 400 records, got 399"),
        ([None] * 400, "Record 0 has no id in groups"),
    ):
        with pytest.raises(ValueError, match=message):
            PrivateLogisticRegression().fit(x, y, groups=wrong)
