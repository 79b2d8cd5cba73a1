"""GEP and biased GEP: the paper's algorithm, its privacy, and what must not break it."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from dpspan import GEP, AutomaticClipping, BiasedGEP, RandomSubspace
from dpspan.gradients.layers.linear import Outer
from dpspan.gradients.layers.terms import Rows
from dpspan.gradients.operator import PerSampleGradients
from dpspan.mechanisms.base import EMBEDDING
from dpspan.mechanisms.noise import Noise
from dpspan.subspaces.sources import by_stage, grouped, ranks
from helpers.oracle import block_basis, clip_rows, gep
from helpers.subspaces import (
    METHODS,
    SETTING,
    flat,
    given,
    outers,
    rows,
    stepped,
    summed,
    un_noised,
)

S1, S2 = 1.5, 0.4


def matrices(n: int, m: int, p: int = 40, seed: int = 0, dtype: torch.dtype = torch.float64):
    """Private and public gradients with a falling spectrum in common, as real ones have."""
    g = torch.Generator().manual_seed(seed)
    scales = 0.7 ** torch.arange(p, dtype=torch.float64)
    mix = torch.linalg.qr(torch.randn(p, p, generator=g, dtype=torch.float64)).Q
    private = torch.randn(n, p, generator=g, dtype=torch.float64) * scales @ mix
    public = torch.randn(m, p, generator=g, dtype=torch.float64) * scales @ mix
    return private.to(dtype), public.to(dtype)


def columns(groups: int) -> list[Tensor]:
    return [torch.arange(40)] if groups == 1 else [torch.arange(16), torch.arange(16, 40)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("n", [0, 1, 30])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("rank", [4, 12, 20])  # below, at and above the rank of the public rows
def test_the_papers_algorithm(dtype: torch.dtype, n: int, groups: int, rank: int) -> None:
    private, public = matrices(n, 12, dtype=dtype)
    mechanism = given(GEP, rows(public, cut=16), rank, groups, clip=S1, residual_clip=S2)
    total = summed(mechanism, rows(private, cut=16))
    z = 1.3
    released = flat(stepped(mechanism, total, Noise(seed=5), z)).double()

    sizes = ranks({"a": torch.Size([16]), "b": torch.Size([24])}, [["a"], ["b"]], rank)
    basis = block_basis(public.double(), columns(groups), [rank] if groups == 1 else sizes)
    w, r = gep(private.double(), basis, S1, S2)
    # The same noise: the embedding's is drawn in the mechanism's own coordinates.
    noise, span = Noise(seed=5), mechanism.source.made[0]
    in_subspace = noise.normal(
        torch.zeros(span.dimensions, dtype=torch.float64), math.sqrt(2) * z * S1
    )
    outside = noise.normal(torch.zeros(40, dtype=dtype), math.sqrt(2) * z * S2)
    expected = w + r + flat(span.lift(in_subspace)).double() + outside.double()
    tolerance = 1e-8 if dtype == torch.float64 else 1e-4
    assert torch.linalg.vector_norm(released - expected) <= tolerance * expected.norm()
    assert released.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("n", [0, 1, 30])
def test_biased_gep_is_the_embedding_alone(dtype: torch.dtype, n: int) -> None:
    private, public = matrices(n, 12, dtype=dtype)
    mechanism = given(BiasedGEP, rows(public), 5, clip=S1)
    total = summed(mechanism, rows(private))
    basis = block_basis(public.double(), columns(1), [5])
    w, _ = gep(private.double(), basis, S1, S2)
    lifted = flat(mechanism.source.made[0].lift(total[EMBEDDING])).double()
    assert torch.linalg.vector_norm(lifted - w) <= 1e-4 * max(float(w.norm()), 1e-9)
    assert set(total) == {EMBEDDING}  # nothing in parameter space exists


def test_pieces_of_a_batch_add_up() -> None:
    private, public = matrices(20, 12)
    mechanism = given(GEP, rows(public), 6, clip=S1, residual_clip=S2)
    whole = summed(mechanism, rows(private))
    parts = [summed(mechanism, rows(piece)) for piece in private.split(7)]
    for name, value in whole.items():
        assert torch.allclose(value, sum(part[name] for part in parts), atol=1e-12)
    assert len(mechanism.source.made) == 1  # one subspace for all pieces of the step


# -- privacy ------------------------------------------------------------------------------------


def sensitivity(mechanism, row: Tensor, others: Tensor) -> tuple[float, float]:
    """How far one more sample moves the two sums, in units of their clips."""
    with_row = un_noised(mechanism, rows(torch.cat([others, row[None]])))
    without = un_noised(mechanism, rows(others))
    w, r = (float((x - y).norm()) for x, y in zip(with_row, without, strict=True))
    return w / S1, r / S2


ADVERSARIAL = {
    "huge": lambda g, h: g * 1e12,
    "huge along a public gradient": lambda g, h: h * 1e9,
    "a public gradient": lambda g, h: h,
    "almost a public gradient": lambda g, h: h + 1e-4 * g,
    "almost a public gradient, huge": lambda g, h: 1e6 * (h + 1e-6 * g),
    "tiny": lambda g, h: g * 1e-30,
    "zero": lambda g, h: torch.zeros_like(g),
    "one number": lambda g, h: torch.eye(len(g), dtype=g.dtype)[3] * 50,
    "NaN": lambda g, h: g.clone().index_fill_(0, torch.tensor([1]), math.nan),
    "Inf": lambda g, h: g.clone().index_fill_(0, torch.tensor([2]), math.inf),
    "the end of float32": lambda g, h: g.sign() * 3e38,
}


@pytest.mark.parametrize("name", ADVERSARIAL)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_one_sample_moves_the_sums_by_no_more_than_declared(dtype: torch.dtype, name: str) -> None:
    private, public = matrices(6, 12, dtype=dtype)
    mechanism = given(GEP, rows(public), 7, clip=S1, residual_clip=S2)
    row = ADVERSARIAL[name](private[0], public[1]).to(dtype)
    w, r = sensitivity(mechanism, row, private[:0])  # alone: nothing hides it
    assert math.isfinite(w)
    assert math.isfinite(r)
    assert w <= 1
    assert r <= 1
    w, r = sensitivity(mechanism, row, private)  # among others: up to the rounding of the sums
    assert max(w, r) <= 1 + 1e-5
    if name in ("NaN", "Inf"):
        assert (w, r) == (0, 0)


@settings(max_examples=60, deadline=None)
@for_all(seed=st.integers(0, 10**6), closeness=st.floats(0, 8), size=st.floats(-6, 6))
def test_residuals_of_rows_almost_in_the_span_are_clipped(
    seed: int, closeness: float, size: float
) -> None:
    """float32, where ‖g‖² − ‖Bg‖² would be off by more than the residual."""
    private, public = matrices(1, 12, seed=seed, dtype=torch.float32)
    row = 10**size * (public[3] + 10**-closeness * private[0])
    mechanism = given(GEP, rows(public), 12, clip=1e9, residual_clip=S2)
    _, r = sensitivity(mechanism, row, private[:0])
    assert r <= 1


def test_a_pair_reaches_its_joint_sensitivity() -> None:
    """Both parts long: √2 in units of the noise, so a smaller z would not cover it."""
    private, public = matrices(1, 12)
    mechanism = given(GEP, rows(public), 5, clip=S1, residual_clip=S2)
    w, r = sensitivity(mechanism, 1e6 * private[0], private[:0])
    assert math.hypot(w, r) == pytest.approx(math.sqrt(2), abs=1e-4)


@pytest.mark.parametrize("n", [0, 1, 400])
def test_biased_gep_has_noise_of_its_clip_in_the_subspace_and_none_outside(n: int) -> None:
    """On zeros, of a clip that is not 1: N(0, (z·S1)²) in each of k directions."""
    _, public = matrices(0, 12)
    z, k, draws = 1.1, 5, 2000
    mechanism = given(BiasedGEP, rows(public), k, clip=S1)
    noise, zeros = Noise(seed=4), rows(torch.zeros(n, 40, dtype=torch.float64))
    assert S1 != 1
    released = torch.stack(
        [flat(stepped(mechanism, summed(mechanism, zeros), noise, z)) for _ in range(draws)]
    )
    basis = block_basis(public, columns(1), [k])
    inside = released @ basis.T
    assert (released - inside @ basis).abs().max() < 1e-9
    variance = (z * S1) ** 2
    energy = inside.square().mean(0)
    assert (energy - variance).abs().max() < 5 * variance * math.sqrt(2 / draws)
    covariance = inside.T @ inside / draws - torch.diag(energy)
    assert covariance.abs().max() < 6 * variance / math.sqrt(draws)


def test_the_noise_has_its_variance_inside_and_outside() -> None:
    _, public = matrices(0, 12)
    z, k = 1.1, 5
    mechanism = given(GEP, rows(public), k, clip=S1, residual_clip=S2)
    noise = Noise(seed=3)
    empty = rows(public[:0])
    draws = 4000
    released = torch.stack(
        [flat(stepped(mechanism, summed(mechanism, empty), noise, z)) for _ in range(draws)]
    )
    basis = block_basis(public, columns(1), [k])
    inside = released @ basis.T
    outside = released - inside @ basis
    var1, var2 = 2 * (S1 * z) ** 2, 2 * (S2 * z) ** 2  # equal shares
    for values, count, variance in (
        (inside, k, var1 + var2),  # the residual's noise fills the whole space
        (outside, 40 - k, var2),
    ):
        energy = float(values.square().sum()) / (draws * count)
        spread = variance * math.sqrt(2 / (draws * count))
        assert abs(energy - variance) < 5 * spread
    # White inside and outside, and the two parts of a step know nothing of one another.
    for x in (inside, outside):
        covariance = x.T @ x / draws
        eigenvalues = torch.linalg.eigvalsh(covariance)[
            -min(x.shape[1], k if x is inside else 35) :
        ]
        ratio = math.sqrt(len(eigenvalues) / draws)
        assert eigenvalues.max() / eigenvalues.min() < ((1 + ratio) / (1 - ratio)) ** 2 * 1.2
    cross = inside.T @ outside / draws
    assert cross.abs().max() < 6 * math.sqrt((var1 + var2) * var2 / draws)
    steps = (released[1:] * released[:-1]).sum(1).mean()
    assert abs(steps) < 6 * math.sqrt((k * (var1 + var2) ** 2 + 35 * var2**2) / draws)


@pytest.mark.parametrize("n", [0, 1, 400])
def test_the_law_of_the_noise_does_not_depend_on_the_batch(n: int) -> None:
    _, public = matrices(0, 12)
    mechanism = given(GEP, rows(public), 5, clip=S1, residual_clip=S2)
    zeros = rows(torch.zeros(n, 40, dtype=torch.float64))
    one = flat(stepped(mechanism, summed(mechanism, zeros), Noise(seed=1), 1.0))
    empty = flat(stepped(mechanism, summed(mechanism, rows(public[:0])), Noise(seed=1), 1.0))
    assert torch.allclose(one, empty, atol=1e-12)


def test_without_clips_and_noise_gep_is_unbiased() -> None:
    private, public = matrices(20, 12)
    mechanism = given(GEP, rows(public), 5, clip=1e6, residual_clip=1e6)
    released = flat(stepped(mechanism, summed(mechanism, rows(private)), Noise(seed=0), 0.0))
    assert torch.allclose(released, private.sum(0), atol=1e-9)


def long_rows_in_the_span(n: int) -> tuple[Tensor, Tensor]:
    """Residuals of nothing but rounding, of gradients a million times longer than their clip."""
    g = torch.Generator().manual_seed(0)
    private = 1e3 * (1 + 0.1 * torch.randn(n, 64, generator=g))
    return private, torch.randn(100, 64, generator=g) + 1


def test_one_of_many_samples_moves_the_sum_by_no_more_than_declared() -> None:
    """Sums round in float32: what cancels in them must not be so long that this shows."""
    private, public = long_rows_in_the_span(4001)
    mechanism = given(GEP, rows(public), 64, clip=1.0, residual_clip=0.2)
    with_one, without = (un_noised(mechanism, rows(x))[1] for x in (private, private[:-1]))
    assert (with_one - without).norm() <= 0.2 * 1.1


def test_noise_is_not_swallowed_by_what_cancels() -> None:
    private, public = long_rows_in_the_span(4000)
    mechanism = given(GEP, rows(public), 64, clip=1.0, residual_clip=0.2)
    total = summed(mechanism, rows(private))
    released = flat(stepped(mechanism, dict(total), Noise(seed=0), 1.0))
    noiseless = flat(stepped(mechanism, dict(total), Noise(seed=0), 0.0))
    noise = Noise(seed=0)
    w = noise.normal(torch.zeros(64, dtype=torch.float64), math.sqrt(2))
    r = noise.normal(torch.zeros(64), math.sqrt(2) * 0.2)
    expected = flat(mechanism.source.made[0].lift(w)) + r
    difference = (released - noiseless).double()
    assert torch.allclose(difference, expected, atol=0.01)  # of a noise of 0.28


def test_what_is_measured_is_what_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU kept rows are packed: a private factor term must then count as rows as well."""

    def as_on_a_gpu(self: PerSampleGradients) -> tuple[str, ...]:
        kept = (n for n in self.shapes if isinstance(self.terms.get(n), Rows))
        return tuple(kept)

    monkeypatch.setattr(PerSampleGradients, "_together", property(as_on_a_gpu))
    g = torch.Generator().manual_seed(0)
    steps, d = 1000, 8
    a, b = torch.randn(1, steps, d, generator=g), torch.ones(1, steps, d)
    a[:, 0] *= 1e2
    a[:, -1] = -a[:, 0]  # long, and cancelling
    shapes = {"w": torch.Size((d, d)), "b": torch.Size((d,))}
    bias = torch.randn(4, d, generator=g)
    private = PerSampleGradients(shapes, {"w": [Outer(a, b)], "b": [Rows(bias[:1])]}, 1, like=bias)
    public = PerSampleGradients(
        shapes,
        {"w": [Rows(torch.randn(3, d, d, generator=g))], "b": [Rows(bias[1:])]},
        3,
        like=bias,
    )
    for groups in (1, 2):
        mechanism = given(GEP, public, 2, groups, clip=1e9, residual_clip=1e-3)
        _, r = un_noised(mechanism, private)
        assert r.norm() <= 1e-3


def test_a_rule_without_limit_cannot_spoil_the_sum() -> None:
    class ToTheSphere:
        def factor(self, norm: Tensor, clip: float) -> Tensor:
            return clip / norm

    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(9, 1, 30, generator=g), torch.randn(9, 1, 20, generator=g)
    tiny = outers(1e-30 * a[:1], 1e-30 * b[:1])
    mechanism = given(GEP, outers(a, b), 3, clip=1.0, clipping=ToTheSphere())
    total = summed(mechanism, tiny)
    assert all(value.isfinite().all() for value in total.values())


# -- degenerate public gradients ------------------------------------------------------------------


@pytest.mark.parametrize("base", METHODS.values())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["duplicates", "low rank", "all zero", "one"])
def test_degenerate_public_gradients_never_give_nan(base, dtype, kind: str) -> None:
    private, public = matrices(9, 12, dtype=dtype)
    public = {
        "duplicates": torch.cat([public[:4], public[:4], public[:4]]),
        "low rank": public[:, :1] * public[:1],
        "all zero": torch.zeros_like(public),
        "one": public[:1],
    }[kind]
    mechanism = given(base, rows(public), 10, clip=S1)
    total = summed(mechanism, rows(private))
    released = flat(stepped(mechanism, total, Noise(seed=0), 1.0))
    assert released.isfinite().all()
    rank = {"duplicates": 4, "low rank": 1, "all zero": 0, "one": 1}[kind]
    (part,) = mechanism.source.made[0].parts.values()
    assert part.rank == rank
    if rank:
        directions = torch.stack([flat(part.lift(e)) for e in torch.eye(part.dimensions)]).double()
        gram = directions @ directions.T
        identity = torch.diag((torch.arange(part.dimensions) < rank).double())
        assert torch.allclose(gram, identity, atol=1e-9 if dtype == torch.float64 else 1e-3)


def test_factors_and_rows_agree() -> None:
    """A linear layer's inner products from its factors, in float64, against its rows."""
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(30, 1, 80, generator=g), torch.randn(30, 1, 8, generator=g)
    public, private = outers(a[:12], b[:12]), outers(a[12:], b[12:])
    mechanism = given(GEP, public, 6, clip=S1, residual_clip=S2)
    w, r = un_noised(mechanism, private)
    (part,) = mechanism.source.made[0].parts.values()
    assert ("w",) in part.kernels  # the factors were used
    dense = (b.transpose(1, 2) @ a).flatten(1).double()
    basis = block_basis(dense[:12], [torch.arange(640)], [6])
    w_oracle, r_oracle = gep(dense[12:], basis, S1, S2)
    assert torch.allclose(flat(part.lift(w)).double(), w_oracle, atol=1e-5)
    assert torch.allclose(r, r_oracle, atol=1e-5)


@settings(max_examples=40, deadline=None)
@for_all(seed=st.integers(0, 10**6), closeness=st.floats(0, 8), steps=st.sampled_from([1, 3]))
def test_residuals_by_factors_are_clipped(seed: int, closeness: float, steps: int) -> None:
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(9, steps, 30, generator=g), torch.randn(9, steps, 20, generator=g)
    noise = 10**-closeness
    near = outers(a[:1] + noise * torch.randn(1, steps, 30, generator=g), b[:1])
    mechanism = given(GEP, outers(a, b), 9, clip=1e9, residual_clip=1e-3 * noise)
    _, r = un_noised(mechanism, near)
    assert r.norm() <= 1e-3 * noise


# -- configuration ------------------------------------------------------------------------------


def test_groups_and_their_ranks() -> None:
    shapes = {
        f"{s}.{i}.weight": torch.Size((s_size,))
        for s, s_size in (("one", 100), ("two", 400), ("head", 10))
        for i in range(2)
    }
    assert grouped(shapes, by_stage) == [
        ("one.0.weight", "one.1.weight"),
        ("two.0.weight", "two.1.weight"),
        ("head.0.weight", "head.1.weight"),
    ]
    for count in range(1, 7):
        groups = grouped(shapes, count)
        assert len(groups) == count
        assert [name for names in groups for name in names] == list(shapes)
    assert ranks(shapes, grouped(shapes, by_stage), 70) == [
        round(70 * x / (200**0.5 + 800**0.5 + 20**0.5)) for x in (200**0.5, 800**0.5, 20**0.5)
    ]
    assert sum(ranks(shapes, grouped(shapes, 5), 33)) == 33
    assert ranks(shapes, grouped(shapes, 6), 6) == [1] * 6
    lopsided = {name: torch.Size((10**6 if name == "a" else 1,)) for name in "abcd"}
    assert ranks(lopsided, grouped(lopsided, 4), 5) == [2, 1, 1, 1]
    with pytest.raises(ValueError, match="rank of at least 6, the groups, got 5"):
        ranks(shapes, grouped(shapes, 6), 5)
    with pytest.raises(ValueError, match="groups between 1 and 6"):
        grouped(shapes, 7)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "needs a subspace: pass public="),
        ({"public": torch.ones(3, 2)}, "rank to be an integer of at least 1"),
        ({"public": torch.ones(3, 2), "rank": 0}, "rank to be an integer of at least 1"),
        ({"public": torch.ones(3, 2), "rank": 2, "clip": -1.0}, "clip > 0"),
        ({"public": torch.ones(3, 2), "rank": 2, "residual_clip": 0.0}, "residual_clip > 0"),
        (
            {"public": torch.ones(3, 2), "rank": 2, "refresh": 0},
            "refresh to be an integer",
        ),
        ({"public": torch.ones(3, 2), "rank": 2, "public_labels": "guess"}, "random"),
        ({"subspace": RandomSubspace(rank=3), "rank": 4}, "one rank"),
        ({"subspace": RandomSubspace(rank=3), "groups": 2}, "has no groups"),
        (
            {"public": torch.ones(3, 2), "rank": 2, "groups": 0},
            "groups .* integer of at least 1",
        ),
        ({"public": torch.ones(3, 2), "rank": 2, "groups": "a"}, "by_stage"),
        (
            {"public": torch.ones(3, 2), "rank": 2, "seed": -1},
            "seed to be an integer",
        ),
    ],
)
def test_bad_configuration_is_refused(fields, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GEP(**fields)


def test_the_clip_is_given_once() -> None:
    method = GEP(public=torch.ones(3, 2), rank=2, clip=3.0)
    assert method.with_clip(3.0).clip_norm == 3.0
    assert method.residual_norm == pytest.approx(0.6)
    with pytest.raises(ValueError, match="Give one of the two"):
        method.with_clip(1.0)


def test_clipping_rules_work_on_both_parts() -> None:
    private, public = matrices(9, 12)
    rule = AutomaticClipping()
    mechanism = given(GEP, rows(public), 5, clip=S1, residual_clip=S2, clipping=rule)
    w, r = un_noised(mechanism, rows(private[:1] * 1e-3))
    basis = block_basis(public, columns(1), [5])
    expected = (private[:1] * 1e-3) @ basis.T
    expected = expected * S1 / (expected.norm() + rule.stability)
    assert float(w.norm()) == pytest.approx(float(expected.norm()), rel=1e-6)
    assert float(r.norm()) <= S2


def test_methods_compare_and_describe_themselves() -> None:
    x = torch.ones(3, 2)
    assert GEP(public=x, rank=2) == GEP(public=x.clone(), rank=2)
    assert GEP(public=x, rank=2) != GEP(public=x, rank=3)
    assert hash(GEP(public={"a": x}, rank=2)) == hash(GEP(public={"a": x}, rank=2))
    assert len(repr(GEP(public=torch.ones(1000, 2), rank=2))) < 1000

    class ByLetter:
        def __call__(self, name: str) -> str:
            return name[0]

    described = [GEP(public=x, rank=2, groups=ByLetter()).describe() for _ in range(2)]
    assert described[0] == described[1]  # or a checkpoint could not be recognised
    assert json.loads(json.dumps(described[0])) == described[0]


def test_clip_rows_of_the_oracle() -> None:
    x = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]], dtype=torch.float64)
    assert torch.allclose(clip_rows(x, 1.0).norm(dim=1), torch.tensor([1.0, 0.5, 0.0]).double())
    assert SETTING.max_physical_batch_size is None
