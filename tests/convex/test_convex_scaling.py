"""Scaling by public numbers only, record by record."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import sparse

from dpspan.convex.scaling import FeatureBounds, Preparation, PublicScaling, scaling_of


def table(n: int = 40) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.standard_normal((n, 5)) * [1, 10, 100, 0.1, 1] + [0, 5, -300, 0, 0]


def test_public_scaling_standardises_the_public_rows() -> None:
    public = table()
    prepared = PublicScaling(limit=100.0).prepare(public).apply(public)
    np.testing.assert_allclose(prepared.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(prepared.std(0), 1)


@pytest.mark.parametrize("form", [np.asarray, sparse.csr_matrix, sparse.csr_array])
@pytest.mark.parametrize("deviation", [0.5, 519.0])
def test_a_small_spread_around_a_large_mean_is_seen(form, deviation: float) -> None:
    """A column of times: mean 1.7e9, and E[x²] − mean² would have no digit left."""
    public = 1.7e9 + deviation * np.random.default_rng(0).standard_normal((500, 2))
    public[:, 1] = 1.7e9 + 0.1  # constant, but not a number of few digits
    scale = PublicScaling(center=False).prepare(form(public)).scale
    np.testing.assert_allclose(scale, [public[:, 0].std(), 1.0], rtol=1e-6)


def test_entries_in_pieces_count_once_for_the_spread() -> None:
    pieces = sparse.csr_matrix(([2.0, 2.0, 1.0], [0, 0, 1], [0, 3, 3]), shape=(2, 2))
    scale = PublicScaling(center=False).prepare(pieces).scale
    np.testing.assert_allclose(scale, pieces.toarray().std(0))


def test_what_public_rows_rarely_show_does_not_grow() -> None:
    public = np.zeros((100, 3))
    public[0, 0] = 1.0  # seen once
    private = np.array([[1.0, 1e9, -1e9]])
    np.testing.assert_array_equal(
        PublicScaling(limit=3.0).prepare(public).apply(private), [[3.0, 3.0, -3.0]]
    )


def test_bounds() -> None:
    prepare = FeatureBounds(low=[0, -10], high=[100, 10]).prepare(None)
    np.testing.assert_allclose(
        prepare.apply(np.array([[0.0, 0.0], [100.0, 5.0], [1e6, -1e6]])),
        [[-1, 0], [1, 0.5], [1, -1]],
    )
    one = FeatureBounds(low=-1, high=1).prepare(None)
    np.testing.assert_array_equal(one.apply(np.array([[0.5, 7.0]])), [[0.5, 1.0]])
    kept = FeatureBounds(low=0, high=4, center=False).prepare(None)
    np.testing.assert_allclose(kept.apply(np.array([[0.0, 1.0, 8.0]])), [[0, 0.25, 1]])


@pytest.mark.parametrize(
    "scaling",
    [None, PublicScaling(center=False), FeatureBounds(low=0, high=2, center=False)],
)
@pytest.mark.parametrize("row_norm", [None, 0.5])
def test_sparse_and_dense_agree(scaling, row_norm: float | None) -> None:
    x = table() * (np.random.default_rng(1).random((40, 5)) < 0.5)
    for kind in (sparse.csr_matrix, sparse.csr_array):
        before = kind(x)
        dense, stored = (
            Preparation() if scaling is None else scaling.prepare(form) for form in (x, before)
        )
        by_dense = replace(dense, row_norm=row_norm).apply(x)
        prepared = replace(stored, row_norm=row_norm).apply(before)
        assert sparse.issparse(prepared)
        np.testing.assert_allclose(prepared.toarray(), by_dense, rtol=1e-9)
        np.testing.assert_array_equal(before.toarray(), x)  # left as it was


def test_entries_in_pieces_are_one_entry() -> None:
    pieces = sparse.csr_matrix(([2.0, 2.0, 1.0], [0, 0, 1], [0, 3]), shape=(1, 2))
    prepared = FeatureBounds(low=0, high=3, center=False).prepare(None).apply(pieces)
    np.testing.assert_allclose(prepared.toarray(), [[1.0, 1 / 3]])


def test_rows_end_within_the_norm_and_do_not_depend_on_each_other() -> None:
    x = table() * 10.0 ** np.arange(-20, 20)[:, None]
    prepare = replace(PublicScaling().prepare(table(30)), row_norm=1.5)
    together = prepare.apply(x)
    assert (np.linalg.norm(together, axis=1) <= 1.5 * (1 + 1e-15)).all()
    alone = np.vstack([prepare.apply(row[None]) for row in x])
    # A row's length is a sum of as many squares as it has features: that many roundings, and a few.
    np.testing.assert_allclose(together, alone, rtol=(x.shape[1] + 16) * 2**-53)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"'standard'\. Scaling by the mean, range or norm"):
        scaling_of("standard")
    with pytest.raises(ValueError, match=r"Expected scaling to be None, 'public' or"):
        scaling_of("none")
    with pytest.raises(ValueError, match="needs public rows: pass public=X_pub to fit"):
        PublicScaling().prepare(None)
    with pytest.raises(ValueError, match="would fill a sparse matrix: give center=False"):
        PublicScaling().prepare(table()).apply(sparse.csr_matrix(table()))
    with pytest.raises(ValueError, match="Expected finite bounds with low < high"):
        FeatureBounds(low=1, high=1).prepare(None)
    with pytest.raises(ValueError, match=r"Expected limit > 0, got 0\."):
        PublicScaling(limit=0)


def test_what_0_1_has_pickled_has_no_cut_points() -> None:
    old = FeatureBounds(low=0, high=4).prepare(None)
    del vars(old)["cuts"]
    np.testing.assert_array_equal(old.apply(np.array([[0.0, 4.0]])), [[-1.0, 1.0]])
