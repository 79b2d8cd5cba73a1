"""Subspaces and the public oracles that find them."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import linalg, sparse

from dpspan.convex.fitting import PrivateRecords
from dpspan.convex.losses import Logistic, Records, one_hot
from dpspan.convex.rows import Rows
from dpspan.convex.subspaces import (
    PublicFeatures,
    PublicGradients,
    Span,
    Whole,
    WholeSpace,
)
from helpers.convex_oracle import gradients

RNG = np.random.default_rng


def public(classes: int = 2, m: int = 20, p: int = 12, *, kind=np.asarray) -> Records:
    rng = RNG(0)
    rows = Rows(kind(rng.standard_normal((m, p)) * 0.8 ** np.arange(p)), intercept=True)
    targets = one_hot(rng.integers(classes, size=m), classes, low=0.0)
    return Records(loss=Logistic(), rows=rows, targets=targets)


def size_of(side: Records) -> int:
    return side.rows.width * np.shape(side.targets)[1]


def explicit(span: Span) -> np.ndarray:
    return np.kron(np.eye(span.copies), span.basis)


@pytest.mark.parametrize("copies", [1, 3])
def test_embed_and_lift_are_the_matrix(copies: int) -> None:
    rng = RNG(1)
    span = Span(rng.standard_normal((12, 4)), copies=copies)
    v = explicit(span)
    np.testing.assert_allclose(v.T @ v, np.eye(4 * copies), atol=1e-12)
    vectors, u = rng.standard_normal((12 * copies, 5)), rng.standard_normal(4 * copies)
    np.testing.assert_allclose(span.embed(vectors), v.T @ vectors, atol=1e-12)
    np.testing.assert_allclose(span.embed(vectors[:, 0]), v.T @ vectors[:, 0], atol=1e-12)
    np.testing.assert_allclose(span.lift(u), v @ u, atol=1e-12)


@pytest.mark.parametrize("condition", [1.0, 1e8, 1e16, 1e30])
def test_embedding_never_lengthens(condition: float) -> None:
    rng = RNG(2)
    basis = rng.standard_normal((60, 10)) * np.geomspace(1, condition, 10)
    basis[:, 3] = basis[:, 2]  # a basis that is none
    span = Span(basis)
    assert np.linalg.norm(span.basis, ord=2) <= 1.0
    inside = span.lift(rng.standard_normal(10))
    assert np.linalg.norm(span.embed(inside)) <= np.linalg.norm(inside)


def test_the_whole_space() -> None:
    whole, v = Whole(5), RNG(0).standard_normal(5)
    assert whole.size == 5
    np.testing.assert_array_equal(whole.embed(v), v)
    np.testing.assert_array_equal(whole.lift(v), v)
    np.testing.assert_array_equal(whole.basis, np.eye(5))
    found = WholeSpace().find(None, np.zeros(13))
    assert isinstance(found, Whole)
    assert found.size == 13


@pytest.mark.parametrize("kind", [np.asarray, sparse.csr_matrix, sparse.csr_array])
@pytest.mark.parametrize("rank", [3, 13, 50])
def test_public_features_are_the_principal_directions(kind, rank: int) -> None:
    side = public(kind=kind)
    span = PublicFeatures(rank=rank).find(side, np.zeros(size_of(side)))
    x = np.asarray(public().rows.x)
    top = np.linalg.svd(np.hstack([x, np.ones((len(x), 1))]))[2][:rank]
    assert span.size == len(top) == min(rank, 13)
    assert np.cos(linalg.subspace_angles(span.basis, top.T)).min() > 1 - 1e-10


def test_gradients_of_linear_models_lie_in_the_span_of_their_rows() -> None:
    side = public(classes=3, m=5)
    span = PublicFeatures(rank=5).find(side, np.zeros(size_of(side)))
    assert span.size == 15
    records = PrivateRecords(rows=side.rows, targets=side.targets, loss=side.loss, divisor=5)
    theta = RNG(4).standard_normal(size_of(side))
    for g in gradients(records, theta):
        np.testing.assert_allclose(span.lift(span.embed(g)), g, atol=1e-10)


@pytest.mark.parametrize("classes", [2, 3])
def test_public_gradients_are_the_top_directions_at_the_weights(classes: int) -> None:
    side = public(classes=classes)
    oracle = PublicGradients(rank=4)
    records = PrivateRecords(rows=side.rows, targets=side.targets, loss=side.loss, divisor=1)
    for step in range(2):
        theta = RNG(step).standard_normal(size_of(side))
        span = oracle.find(side, theta)
        top = np.linalg.svd(gradients(records, theta))[2][:4]
        assert np.cos(linalg.subspace_angles(span.basis, top.T)).min() > 1 - 1e-8


def test_refusals() -> None:
    side = public()
    unlabelled = Records(loss=Logistic(), rows=side.rows)
    zeros = Records(loss=Logistic(), rows=Rows(np.zeros((4, 3)), intercept=False))
    with pytest.raises(ValueError, match="PublicFeatures needs public rows: pass public=X_pub"):
        PublicFeatures().find(None, np.zeros(13))
    with pytest.raises(ValueError, match=r"needs labels: pass public=\(X_pub, y_pub\)"):
        PublicGradients().find(unlabelled, np.zeros(13))
    with pytest.raises(ValueError, match="are all zero"):
        PublicFeatures().find(zeros, np.zeros(3))
    with pytest.raises(ValueError, match="rank to be an integer of at least 1, got 0"):
        PublicFeatures(rank=0)
