"""Public rows: their digest, copies among private records, and a start from them."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse
from sklearn.linear_model import Ridge

from dpspan.convex import public_rows
from dpspan.convex.losses import Logistic, Records, Squared
from dpspan.convex.public_rows import (
    PublicRows,
    digest,
    public_start,
    refuse_overlap,
    without_public,
)
from dpspan.convex.rows import Rows

FORMS = [np.asarray, sparse.csr_matrix, sparse.csr_array]


def table(n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, 4)) * (rng.random((n, 4)) < 0.7)


@pytest.mark.parametrize("form", FORMS)
def test_the_digest_is_of_the_content(form) -> None:
    x, y = table(6, 0), np.array([0, 1, 0, 1, 1, 0])
    assert digest(form(x), y) == digest(x, y)
    other = x.copy()
    other[5, 0] += 1e-12
    wider = np.hstack([x, np.zeros((6, 1))])
    digests = {digest(x, y), digest(other, y), digest(x, None), digest(x, 1 - y), digest(wider, y)}
    assert len(digests) == 5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("public_form", FORMS)
@pytest.mark.parametrize("piece", [4, 8192])
def test_copies_are_refused_in_any_form(form, public_form, piece, monkeypatch) -> None:
    monkeypatch.setattr(public_rows, "_PIECE", piece)
    private, public = table(30, 0), table(5, 1)
    refuse_overlap(public_form(public), form(private), "survey")
    public[3] = private[17].astype(np.float32)  # a copy by way of float32
    with pytest.raises(
        ValueError,
        match=r"1 of the 5 public rows 'survey' .*e\.g\. public row 3.*do not publish it",
    ):
        refuse_overlap(public_form(public), form(private), "survey")
    kept = without_public(form(private), public_form(public))
    assert sorted(set(range(30)) - set(kept)) == [17]


def test_rows_of_other_places_are_no_copies() -> None:
    refuse_overlap(np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]]), "other")
    with pytest.raises(ValueError, match="also occur"):
        refuse_overlap(np.array([[0.0, 1.0]]), np.array([[-0.0, 1.0]]), "minus zero")


def test_forms_of_public_rows() -> None:
    x, y = table(3, 0), np.arange(3)
    own = PublicRows(x=x, y=y)
    assert PublicRows.of(own) is own
    assert PublicRows.of((x, y)).y is y
    assert PublicRows.of(x).y is None
    with pytest.raises(ValueError, match=r"X_pub or \(X_pub, y_pub\), got a tuple of 3"):
        PublicRows.of((x, y, y))


def test_the_start_is_a_ridge_fit_with_the_penalty_of_a_validation() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 4))
    y = x @ [1.0, -2.0, 0.5, 0.0] + 0.1 * rng.standard_normal(40)
    side = Records(loss=Squared(), rows=Rows(x, intercept=False), targets=y[:, None])
    ridge = Ridge(alpha=1e-3 * 40, fit_intercept=False).fit(x, y)  # little noise: least penalty
    np.testing.assert_allclose(public_start(side), ridge.coef_, atol=1e-4)
    targets = 5 * rng.standard_normal((40, 1))
    noise = Records(loss=Squared(), rows=Rows(x, intercept=False), targets=targets)
    strong = Ridge(alpha=40.0, fit_intercept=False).fit(x, targets[:, 0])
    np.testing.assert_allclose(public_start(noise), strong.coef_, atol=1e-4)


def test_a_start_needs_labelled_rows() -> None:
    with pytest.raises(ValueError, match="start='public' needs public rows"):
        public_start(None)
    rows = Rows(table(5, 0), intercept=False)
    with pytest.raises(ValueError, match=r"needs labels: pass public=\(X_pub, y_pub\)"):
        public_start(Records(loss=Logistic(), rows=rows))
