"""Thermometer features: cut points from public rows, or paid for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import sparse

import dpspan
from dpspan.accounting.events import pure_event
from dpspan.accounting.promises import Budget
from dpspan.convex import PrivateCuts, PrivateLogisticRegression, PublicCuts, PublicRows
from dpspan.convex.cuts import CutPoints

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3000, 3))
Y = (np.abs(X[:, 0]) > 0.7).astype(int)  # nothing a linear model could see
PUBLIC = RNG.normal(size=(200, 3))


def fitted(cuts: Any, x: Any = X, public: Any = PUBLIC, **more: Any) -> PrivateLogisticRegression:
    model = PrivateLogisticRegression(
        epsilon=1.0, delta=1e-5, classes=[0, 1], records=3000, accountant="rdp", cuts=cuts
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
    model = fitted(PublicCuts(count=5), x=form(np.round(X * 2)), public=rows)
    prepared = model.preparation_.apply(form(x))
    dense = prepared.toarray() if sparse.issparse(prepared) else prepared
    assert sparse.issparse(prepared) == (form is not np.asarray)
    np.testing.assert_array_equal(dense[:, :3], x)
    np.testing.assert_array_equal(dense[:, 3:], by_hand(x, public, 5))
    assert model.coef_.shape == (1, dense.shape[1])
    assert model.n_features_in_ == 3


def test_they_let_a_linear_model_bend() -> None:
    assert fitted(None).score(X, Y) < 0.6
    for cuts in (4, PublicCuts(count=4), PrivateCuts(epsilon=0.3, bounds={0: (-3, 3)}, count=4)):
        assert fitted(cuts).score(X, Y) > 0.8


def test_public_ones_cost_nothing_and_are_on_the_certificate() -> None:
    with_cuts, without = fitted(8).certificate_, fitted(None).certificate_
    assert with_cuts["training"]["cuts"] == {"name": "PublicCuts", "count": 8}
    assert "cuts" not in without["training"]
    assert with_cuts["events"] == without["events"]


def test_no_private_number_moves_public_cut_points() -> None:
    other = X.copy()
    other[:, 0] *= 100
    first, second = (fitted(8, x=x).preparation_.cuts for x in (X, other))
    np.testing.assert_array_equal(first.points, second.points)


def test_private_ones_are_paid_out_of_the_budget_of_the_fit() -> None:
    cuts = PrivateCuts(epsilon=0.2, bounds={0: (-3, 3), 2: (-3, 3)}, count=4)
    model = fitted(cuts)
    ledger = dpspan.Ledger(accountant="rdp", budget=Budget(epsilon=1.0, delta=1e-5))
    shared = fitted(cuts, ledger=ledger)
    assert 0.99 < model.epsilon_ <= 1.0
    assert ledger.events[0] == (pure_event(0.2 / 8), 8)
    assert ledger.epsilon() == pytest.approx(shared.epsilon_)
    noise = "noise_multiplier"
    assert model.certificate_["training"][noise] > fitted(None).certificate_["training"][noise]
    assert model.certificate_["training"]["cuts"]["bounds"] == {"0": [-3, 3], "2": [-3, 3]}


def test_private_ones_are_near_the_quantiles() -> None:
    cuts = fitted(PrivateCuts(epsilon=0.9, bounds={1: (-4, 4)}, count=3)).preparation_.cuts
    assert set(cuts.columns) == {1}
    # 0.3-DP each over 1,001 points: the score is off by more than 2·ln(1001/1e-9)/0.3 = 185
    # records of 3,000 with a probability of at most 1e-9 each, and ranks by as many.
    below = [(X[:, 1] < point).mean() for point in cuts.points]
    np.testing.assert_allclose(below, [0.25, 0.5, 0.75], atol=185 / 3000 + 0.01)


@pytest.mark.parametrize(
    ("cuts", "more", "words"),
    [
        (8, {"public": None}, "public=X_pub"),
        (0, {}, "cuts"),
        (True, {}, "cuts to be None"),
        ("all", {}, "cuts to be None"),
        (PrivateCuts(epsilon=0.1, bounds={3: (0, 1)}), {}, "bounds of columns 0 to 2"),
        (PrivateCuts(epsilon=0.1, bounds={0: (0, 1)}), {"groups": np.arange(3000)}, "groups="),
        (PrivateCuts(epsilon=2.0, bounds={0: (0, 1)}), {}, "epsilon of cuts below 1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_spent(cuts, more, words: str) -> None:
    ledger = dpspan.Ledger(accountant="rdp")
    with pytest.raises(ValueError, match=words):
        fitted(cuts, ledger=ledger, **more)
    assert ledger.events == ()


def test_bounds_are_needed() -> None:
    with pytest.raises(ValueError, match="bounds of at least one column"):
        PrivateCuts(epsilon=0.1, bounds={})
    assert len(CutPoints().points) == 0
