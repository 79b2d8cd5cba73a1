"""Thermometer features: cut points from public rows, or paid for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import sparse

import dpspan
from dpspan.accounting.promises import Budget
from dpspan.convex import PrivateLogisticRegression, PublicRows

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3000, 3))
Y = (np.abs(X[:, 0]) > 0.7).astype(int)  # nothing a linear model could see
PUBLIC = RNG.normal(size=(200, 3))


def fitted(
    cuts: Any, x: Any = X, public: Any = PUBLIC, epsilon: float = 1.0, **more: Any
) -> PrivateLogisticRegression:
    model = PrivateLogisticRegression(
        epsilon=epsilon, delta=1e-5, classes=[0, 1], records=3000, accountant="rdp", cuts=cuts
    )
    return model.fit(x, Y, public=public, **more)


def by_hand(x: np.ndarray, public: np.ndarray, count: int) -> np.ndarray:
    """Number by number: is it above the k-th of the public values, for the shares of `count`?"""
    columns = []
    for place in range(x.shape[1]):
        values = sorted(public[:, place].tolist())
        ranks = {int((len(values) - 1) * (share + 1) / (count + 1)) for share in range(count)}
        for point in sorted({values[rank] for rank in ranks}):
            if len(set(values)) > 2 and point < values[-1]:
                columns.append([float(number > point) for number in x[:, place]])
    return np.array(columns).T


@pytest.mark.parametrize("form", [np.asarray, sparse.csr_matrix, sparse.csr_array])
def test_every_number_is_compared_with_the_quantiles_of_public_rows(form) -> None:
    x, public = np.round(X[:50] * 2), np.round(PUBLIC * 2)  # with ties and zeros
    public[:, 1] = public[:, 1] > 0  # two values only: no cut point
    rows = PublicRows(x=form(public), equal_rows_allowed=True)
    model = fitted(5, x=form(np.round(X * 2)), public=rows)
    prepared = model.preparation_.apply(form(x))
    dense = prepared.toarray() if sparse.issparse(prepared) else prepared
    assert sparse.issparse(prepared) == (form is not np.asarray)
    np.testing.assert_array_equal(dense[:, :3], x)
    np.testing.assert_array_equal(dense[:, 3:], by_hand(x, public, 5))
    assert model.coef_.shape == (1, dense.shape[1])
    assert model.n_features_in_ == 3


def test_they_let_a_linear_model_bend() -> None:
    assert fitted(None).score(X, Y) < 0.6
    for cuts in (4, {0: [-0.7, 0.7]}):
        assert fitted(cuts).score(X, Y) > 0.8


def test_public_ones_cost_nothing_and_are_on_the_certificate() -> None:
    with_cuts, without = fitted(8).certificate_, fitted(None).certificate_
    assert with_cuts["training"]["cuts"] == 8
    assert "cuts" not in without["training"]
    assert with_cuts["events"] == without["events"]
    assert with_cuts["warnings"] == without["warnings"]


def test_no_private_number_moves_public_cut_points() -> None:
    other = X.copy()
    other[:, 0] *= 100
    first, second = (fitted(8, x=x).preparation_.cuts for x in (X, other))
    np.testing.assert_equal(first, second)


def test_private_ones_are_paid_on_the_ledger_of_the_fit() -> None:
    ledger = dpspan.Ledger(accountant="rdp", budget=Budget(epsilon=1.0, delta=1e-5))
    points = dpspan.private_quantiles(
        X[:, 0], [0.2, 0.4, 0.6, 0.8], bounds=(-3, 3), epsilon=0.2, ledger=ledger
    )
    model = fitted({0: points}, public=None, epsilon=0.8, ledger=ledger)
    assert model.score(X, Y) > 0.8
    assert 0.8 < model.epsilon_ == ledger.epsilon() <= 1.0
    assert [count for _, count in ledger.events] == [4, 30]
    document = model.certificate_
    assert document["training"]["cuts"] == {"0": list(points)}
    assert any("cut points were given" in warning for warning in document["warnings"])


@pytest.mark.parametrize(
    ("cuts", "more", "words"),
    [
        (8, {"public": None}, "pass public=X_pub"),
        (0, {}, "cuts"),
        ("all", {}, "cuts"),
        ({3: [0.0]}, {}, "cuts of columns 0 to 2"),
        ({0: [np.nan]}, {}, "finite"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_spent(cuts, more, words: str) -> None:
    ledger = dpspan.Ledger(accountant="rdp")
    with pytest.raises(ValueError, match=words):
        fitted(cuts, ledger=ledger, **more)
    assert ledger.events == ()
