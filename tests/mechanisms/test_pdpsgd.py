"""Projected DP-SGD: the paper's algorithm, its privacy, and when the subspace is computed."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from dpspan import DPSGD, PDPSGD, AutomaticClipping, RandomSubspace, per_sample_gradients
from dpspan.gradients.layers.terms import Rows
from dpspan.gradients.operator import PerSampleGradients
from dpspan.mechanisms import Setting
from dpspan.mechanisms.base import EMBEDDING
from dpspan.mechanisms.noise import Noise
from dpspan.subspaces.sources import GroupedSubspace, ranks
from helpers.oracle import block_basis, clip_rows, pdpsgd, per_sample_matrix, top_directions
from helpers.subspaces import METHODS, flat, given, rows, stepped, summed, un_noised

CLIP = 1.5
P = 40
F32, F64 = torch.float32, torch.float64


def matrices(n: int, m: int, seed: int = 0, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor]:
    """Private and public gradients with a falling spectrum in common, as real ones have."""
    g = torch.Generator().manual_seed(seed)
    scales = 0.7 ** torch.arange(P, dtype=F64)
    mix = torch.linalg.qr(torch.randn(P, P, generator=g, dtype=F64)).Q
    private = torch.randn(n, P, generator=g, dtype=F64) * scales @ mix
    public = torch.randn(m, P, generator=g, dtype=F64) * scales @ mix
    return private.to(dtype), public.to(dtype)


def columns(groups: int) -> list[Tensor]:
    return [torch.arange(P)] if groups == 1 else [torch.arange(16), torch.arange(16, P)]


def projected(mechanism: Any, gradients: PerSampleGradients, noise: Noise, z: float) -> Tensor:
    return flat(stepped(mechanism, summed(mechanism, gradients), noise, z)).double()


# -- the paper's algorithm ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@pytest.mark.parametrize("n", [0, 1, 30])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("rank", [4, 12, 20])  # below, at and above the rank of the public rows
def test_the_papers_algorithm(dtype: torch.dtype, n: int, groups: int, rank: int) -> None:
    private, public = matrices(n, 12, dtype=dtype)
    mechanism = given(PDPSGD, rows(public, cut=16), rank, groups, clip=CLIP)
    z = 1.3
    released = projected(mechanism, rows(private, cut=16), Noise(seed=5), z)

    sizes = ranks({"a": torch.Size([16]), "b": torch.Size([24])}, [["a"], ["b"]], rank)
    basis = block_basis(public.double(), columns(groups), [rank] if groups == 1 else sizes)
    # The same noise, k numbers of it, in the mechanism's own coordinates.
    span = mechanism.source.made[0]
    noise = Noise(seed=5).normal(torch.zeros(span.dimensions, dtype=F64), z * CLIP)
    expected = pdpsgd(private.double(), basis, CLIP) + flat(span.lift(noise)).double()
    tolerance = 1e-8 if dtype == F64 else 1e-4
    assert float((released - expected).norm()) <= tolerance * float(expected.norm())
    # Without noise there is nothing but the oracle.
    quiet = projected(mechanism, rows(private, cut=16), Noise(seed=5), 0.0)
    silent = pdpsgd(private.double(), basis, CLIP)
    assert float((quiet - silent).norm()) <= tolerance * max(float(silent.norm()), 1e-9)


def test_only_k_numbers_are_summed() -> None:
    private, public = matrices(9, 12)
    total = summed(given(PDPSGD, rows(public), 5, clip=CLIP), rows(private))
    assert {name: value.shape for name, value in total.items()} == {EMBEDDING: (5,)}


def test_clips_come_before_the_projection() -> None:
    """Of a gradient of length 10·C mostly outside, only a tenth of what is inside is left."""
    _, public = matrices(0, 3)
    basis = block_basis(public, columns(1), [3])
    outside = torch.linalg.svd(basis, full_matrices=True).Vh[-1]
    row = CLIP * (basis[0] + math.sqrt(99) * outside)
    released = projected(given(PDPSGD, rows(public), 3, clip=CLIP), rows(row[None]), Noise(0), 0.0)
    assert float(released.norm()) == pytest.approx(CLIP / 10, rel=1e-9)


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
def test_public_gradients_of_lower_rank(dtype: torch.dtype) -> None:
    private, public = matrices(20, 12, dtype=dtype)
    public = public[torch.arange(12) % 5]  # five gradients, repeated
    mechanism = given(PDPSGD, rows(public), 8, clip=CLIP)
    released = projected(mechanism, rows(private), Noise(seed=0), 0.0)
    expected = pdpsgd(private.double(), top_directions(public[:5], 5), CLIP)
    assert float((released - expected).norm()) <= 1e-4 * float(expected.norm())
    noisy = projected(mechanism, rows(private), Noise(seed=0), 1.0)
    basis = top_directions(public[:5], 5)
    assert float((noisy - noisy @ basis.T @ basis).norm()) <= 1e-4 * float(noisy.norm())


def test_pieces_of_a_batch_add_up() -> None:
    private, public = matrices(20, 12)
    mechanism = given(PDPSGD, rows(public), 6, clip=CLIP)
    (whole,) = summed(mechanism, rows(private)).values()
    parts = [summed(mechanism, rows(piece)) for piece in private.split(7)]
    assert torch.allclose(whole, sum(part[EMBEDDING] for part in parts), atol=1e-12)
    assert len(mechanism.source.made) == 1  # one subspace for all pieces of the step


def test_another_rule_for_clip_factors() -> None:
    private, public = matrices(9, 12)
    rule = AutomaticClipping()
    mechanism = given(PDPSGD, rows(public), 5, clip=CLIP, clipping=rule)
    released = projected(mechanism, rows(private), Noise(seed=0), 0.0)
    norms = private.norm(dim=1, keepdim=True)
    basis = block_basis(public, columns(1), [5])
    expected = (private * CLIP / (norms + rule.stability)).sum(0) @ basis.T @ basis
    assert torch.allclose(released, expected, atol=1e-9)


# -- when the subspace is computed ----------------------------------------------------------------


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def labelled(n: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 5, generator=g, dtype=F64), torch.randint(3, (n,), generator=g)


def bound(model: nn.Module, public: Any, **fields: Any) -> Any:
    method = PDPSGD(public=public, rank=4, clip=CLIP, public_labels="real", **fields)
    return method.bind(Setting(model=model, criterion=nn.CrossEntropyLoss(), steps_per_epoch=4))


def move(model: nn.Module, step: int) -> None:
    """Other weights, far enough for another subspace."""
    g = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=g, dtype=F64))


@pytest.mark.parametrize("refresh", [1, 5])
def test_the_subspace_is_that_of_the_last_refresh(refresh: int) -> None:
    model, public, private = network(), labelled(12, 1), labelled(9, 2)
    mechanism = bound(model, public, refresh=refresh)
    basis, drifts = None, []
    for step in range(2 * refresh + 2):
        if step % refresh == 0:
            last, basis = basis, top_directions(per_sample_matrix(model, losses, *public), 4)
            drifts += [] if last is None else [4 - float((last @ basis.T).square().sum())]
        g = per_sample_matrix(model, losses, *private)
        J = per_sample_gradients(model, losses, *private)
        released = projected(mechanism, J, Noise(seed=0), 0.0)
        assert torch.allclose(released, pdpsgd(g, basis, CLIP), atol=1e-9), step
        move(model, step)
    assert min(drifts) > 0.1  # the oracle's subspaces differ, so the mechanism's did too


@pytest.mark.parametrize("fields", [{"start": 8}, {"start_epoch": 2}], ids=str)
def test_plain_dpsgd_before_the_start(fields: dict[str, int]) -> None:
    """Sums and noise exactly those of DPSGD; then the subspace, with its own count of refreshes."""
    model, public, private = network(), labelled(12, 1), labelled(9, 2)
    mechanism = bound(model, public, refresh=3, **fields)
    plain = DPSGD(clip=CLIP).bind(Setting(model=model))
    noise, plain_noise = Noise(seed=4), Noise(seed=4)
    for step in range(8):
        J = per_sample_gradients(model, losses, *private)
        total, plain_total = summed(mechanism, J), summed(plain, J)
        assert torch.equal(flat(total), flat(plain_total))
        assert total.keys() == plain_total.keys()
        released = stepped(mechanism, total, noise, 1.1)
        expected = stepped(plain, plain_total, plain_noise, 1.1)
        assert released.keys() == expected.keys()
        assert torch.equal(flat(released), flat(expected))
        assert mechanism._span is None  # no public gradient was computed
        move(model, step)
    basis = top_directions(per_sample_matrix(model, losses, *public), 4)
    g, J = (f(model, losses, *private) for f in (per_sample_matrix, per_sample_gradients))
    assert torch.allclose(projected(mechanism, J, noise, 0.0), pdpsgd(g, basis, CLIP), atol=1e-9)
    move(model, 8)  # the ninth step is a refresh
    basis = top_directions(per_sample_matrix(model, losses, *public), 4)
    g, J = (f(model, losses, *private) for f in (per_sample_matrix, per_sample_gradients))
    assert torch.allclose(projected(mechanism, J, noise, 0.0), pdpsgd(g, basis, CLIP), atol=1e-9)


def test_a_saved_step_goes_on_before_or_after_the_start() -> None:
    model, public, private = network(), labelled(12, 1), labelled(9, 2)
    mechanism = bound(model, public, start=2)
    J = per_sample_gradients(model, losses, *private)
    names = []
    for _ in range(3):
        again = bound(model, public, start=2)
        again.load_state_dict(json.loads(json.dumps(mechanism.state_dict())))
        names.append(set(summed(again, J)))
        projected(mechanism, J, Noise(seed=0), 1.0)
    assert names == [set(J.shapes), set(J.shapes), {EMBEDDING}]
    with pytest.raises(ValueError, match="saved with other public data"):
        bound(model, labelled(12, 3), start=2).load_state_dict(mechanism.state_dict())
    with pytest.raises(ValueError, match="state with step and public"):
        mechanism.load_state_dict({"step": 3})


@pytest.mark.parametrize("redraw", [False, True])
def test_random_directions(redraw: bool) -> None:
    """RPDP-SGD: the oracle with the random directions, which the weights do not move."""
    model, private = network(), labelled(9, 2)
    random = RandomSubspace(rank=7, redraw=redraw, seed=3)
    mechanism = PDPSGD(subspace=random, clip=CLIP, refresh=2).bind(Setting(model=model))
    assert mechanism.public == ()
    bases = []
    for step in range(4):
        g, J = (f(model, losses, *private) for f in (per_sample_matrix, per_sample_gradients))
        released = projected(mechanism, J, Noise(seed=0), 0.0)
        (part,) = mechanism._span.parts.values()
        basis = torch.stack([flat(part.lift(e)) for e in torch.eye(7)])
        assert torch.allclose(basis @ basis.T, torch.eye(7, dtype=F64), atol=1e-9)
        assert torch.allclose(released, pdpsgd(g, basis, CLIP), atol=1e-9)
        bases.append(basis)
        move(model, step)
    assert torch.equal(bases[0], bases[1])
    assert torch.equal(bases[0], bases[2]) is not redraw


# -- privacy --------------------------------------------------------------------------------------


def stretched(mechanism: Any, factor: float | Tensor) -> Any:
    """The mechanism with a basis of `factor` times its length, or mixed by a matrix."""
    orthonormal = mechanism.source.span

    def span(refresh: int, **how: int) -> GroupedSubspace:
        made = orthonormal(refresh, **how)
        for part in made.parts.values():
            c = part.coefficients
            part.coefficients = factor @ c if isinstance(factor, Tensor) else factor * c
        return made

    mechanism.source.span = span
    return mechanism


def moved(mechanism: Any, row: Tensor, others: Tensor) -> tuple[float, float]:
    """How far one more sample moves the sums."""
    with_row = un_noised(mechanism, rows(torch.cat([others, row[None]])))
    without = un_noised(mechanism, rows(others))
    w, r = (float((x - y).norm()) for x, y in zip(with_row, without, strict=True))
    return w, r


ADVERSARIAL = {
    "huge": lambda g, h: g * 1e12,
    "huge along a public gradient": lambda g, h: h * 1e9,
    "a public gradient": lambda g, h: h,
    "almost a public gradient, huge": lambda g, h: 1e6 * (h + 1e-6 * g),
    "tiny": lambda g, h: g * 1e-30,
    "zero": lambda g, h: torch.zeros_like(g),
    "one number": lambda g, h: torch.eye(len(g), dtype=g.dtype)[3] * 50,
    "NaN": lambda g, h: g.clone().index_fill_(0, torch.tensor([1]), math.nan),
    "Inf": lambda g, h: g.clone().index_fill_(0, torch.tensor([2]), math.inf),
    "the end of float32": lambda g, h: g.sign() * 3e38,
}


@pytest.mark.parametrize("factor", [1.0, 3.0, 0.01, 1e9])
@pytest.mark.parametrize("name", ADVERSARIAL)
@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
def test_one_sample_moves_the_sum_by_at_most_the_clip(
    dtype: torch.dtype, name: str, factor: float
) -> None:
    """Whatever the basis is: privacy does not rest on orthonormal rows."""
    private, public = matrices(6, 12, dtype=dtype)
    mechanism = stretched(given(PDPSGD, rows(public), 7, clip=CLIP), factor)
    row = ADVERSARIAL[name](private[0], public[1]).to(dtype)
    alone, _ = moved(mechanism, row, private[:0])
    assert alone <= CLIP
    among, _ = moved(mechanism, row, private)  # the others' rounding depends on the batch's shape
    assert among <= CLIP * (1 + 1e-5)
    if name in ("NaN", "Inf"):
        assert (alone, among) == (0, 0)


@pytest.mark.parametrize("base", METHODS.values(), ids=METHODS)
@settings(max_examples=40, deadline=None)
@for_all(
    seed=st.integers(0, 10**6),
    size=st.floats(-20, 20),
    closeness=st.floats(0, 8),
    stretch=st.floats(-3, 6),
    mixed=st.booleans(),
    dtype=st.sampled_from([F32, F64]),
)
def test_no_basis_breaks_the_clip(
    base: type,
    seed: int,
    size: float,
    closeness: float,
    stretch: float,
    mixed: bool,
    dtype: torch.dtype,
) -> None:
    """Every method, and C of any size, its rows anything but orthonormal."""
    private, public = matrices(1, 12, seed=seed, dtype=dtype)
    g = torch.Generator().manual_seed(seed)
    factor = 10**stretch * (torch.randn(7, 7, generator=g, dtype=F64) if mixed else 1.0)
    fields = {"residual_clip": 0.4} if base.__name__ == "GEP" else {}
    mechanism = stretched(given(base, rows(public), 7, clip=CLIP, **fields), factor)
    row = (10**size * (public[3].double() + 10**-closeness * private[0].double())).to(dtype)
    w, r = moved(mechanism, row, private[:0])
    assert w <= CLIP
    assert r <= 0.4


def test_the_clip_is_reached() -> None:
    """A long gradient inside counts with its full clip, so a smaller noise would not cover it."""
    _, public = matrices(0, 12)
    mechanism = given(PDPSGD, rows(public), 12, clip=CLIP)
    w, _ = moved(mechanism, 1e6 * public[0], public[:0])
    assert w == pytest.approx(CLIP, rel=1e-9)


def test_a_stretched_basis_does_not_stretch_the_noise_in_the_sum() -> None:
    """The noise is for what is summed, so it is added before the basis has its say."""
    _, public = matrices(0, 12)
    empty = rows(public[:0])
    plain = projected(given(PDPSGD, rows(public), 5, clip=CLIP), empty, Noise(seed=1), 2.0)
    three = stretched(given(PDPSGD, rows(public), 5, clip=CLIP), 3.0)
    assert torch.allclose(projected(three, empty, Noise(seed=1), 2.0), 3 * plain, atol=1e-9)


@pytest.mark.parametrize("n", [0, 1, 400])
def test_the_law_of_the_noise(n: int) -> None:
    """(zC)² in each of k directions, nothing outside, white, and new in every step."""
    _, public = matrices(0, 12)
    z, k, draws = 1.1, 5, 2000
    mechanism = given(PDPSGD, rows(public), k, clip=CLIP, refresh=draws)
    noise = Noise(seed=3)
    zeros = rows(torch.zeros(n, P, dtype=F64))
    released = torch.stack([projected(mechanism, zeros, noise, z) for _ in range(draws)])
    basis = block_basis(public, columns(1), [k])
    inside = released @ basis.T
    assert (released - inside @ basis).abs().max() < 1e-10
    variance = (z * CLIP) ** 2
    # A mean of `draws` squares of normals spreads by √(2/draws), a mean of products by √(1/draws).
    covariance = inside.T @ inside / draws / variance
    assert (covariance.diagonal() - 1).abs().max() < 5 * math.sqrt(2 / draws)
    assert (covariance - covariance.diagonal().diag()).abs().max() < 5 / math.sqrt(draws)
    assert inside.mean(0).abs().max() < 5 * math.sqrt(variance / draws)
    after = inside[1:].T @ inside[:-1] / draws / variance  # of one step with the step before
    assert after.abs().max() < 5 / math.sqrt(draws)


def test_the_noise_is_the_same_for_every_batch() -> None:
    _, public = matrices(0, 12)
    results = []
    for n in (0, 1, 400):
        mechanism = given(PDPSGD, rows(public), 5, clip=CLIP)
        zeros = rows(torch.zeros(n, P, dtype=F64))
        results.append(projected(mechanism, zeros, Noise(seed=1), 1.0))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("base", METHODS.values(), ids=METHODS)
def test_how_a_subspace_is_written_does_not_tell_the_size_of_the_batch(base: type) -> None:
    """From the same noise the same numbers, to the last bit: what is released has nothing else."""
    model = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 10))
    public = torch.randn(60, 30, generator=torch.Generator().manual_seed(0))
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    released = []
    for n in (0, 1, 400):
        setting = Setting(model=model, criterion=nn.CrossEntropyLoss())
        mechanism = base(public=public, rank=5, clip=CLIP).bind(setting)
        terms = {name: [Rows(torch.zeros(n, *shape))] for name, shape in shapes.items()}
        zeros = PerSampleGradients(shapes, terms, n, like=torch.zeros(0))
        released.append(projected(mechanism, zeros, Noise(seed=1), 1.0))
    assert torch.equal(released[0], released[1])
    assert torch.equal(released[0], released[2])


# -- configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"public": None}, "PDPSGD needs a subspace: pass public="),
        ({"subspace": RandomSubspace(rank=3)}, "PDPSGD needs a subspace"),
        ({"rank": None}, "rank to be an integer of at least 1, got None"),
        ({"start": -1}, "start to be an integer of at least 0, got -1"),
        ({"start_epoch": 1.5}, r"start_epoch to be an integer of at least 0, got 1\.5"),
        ({"start": 3, "start_epoch": 1}, r"start \(in steps\) or start_epoch, got both"),
        ({"refresh": 0}, "refresh to be an integer of at least 1, got 0"),
        ({"public_samples": 0}, "public_samples to be an integer of at least 1, got 0"),
        ({"diagnose": -1}, "diagnose to be an integer of at least 0, got -1"),
        ({"clip": math.inf}, "clip > 0 and finite, got inf"),
    ],
)
def test_refused_configurations(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PDPSGD(**{"public": torch.ones(3, 2), "rank": 2, **fields})


def test_descriptions_are_plain_and_complete() -> None:
    method = PDPSGD(public=torch.ones(3, 2), rank=2, clip=3.0, refresh=4, start_epoch=2)
    description = method.describe()
    assert json.loads(json.dumps(description)) == description
    expected = {"method": "PDPSGD", "rank": 2, "clip": 3.0, "refresh": 4, "start_epoch": 2}
    assert description.items() >= {**expected, "start": 0, "subspace": "public gradients"}.items()
    assert method.with_clip(3.0) == method
    with pytest.raises(ValueError, match=r"clip=3\.0 in PDPSGD and max_grad_norm=1\.0"):
        method.with_clip(1.0)
    random = PDPSGD(subspace=RandomSubspace(rank=9, seed=2)).with_clip(0.5).describe()
    assert random["rank"] == 9
    assert random["clip"] == 0.5
    assert "seed=2" in random["subspace"]
    assert random["public_labels"] is None


def test_notes_begin_with_the_subspace() -> None:
    _, public = matrices(0, 12)
    mechanism = given(PDPSGD, rows(public), 5, clip=CLIP, start=2, diagnose=1)
    for _ in range(4):
        projected(mechanism, rows(public[:0]), Noise(seed=0), 2.0)
    notes = json.loads(json.dumps(mechanism.diagnostics()))
    assert [note["step"] for note in notes] == [2, 3]
    assert notes[0]["noise_energy"] == {"embedding": pytest.approx(5 * (2.0 * CLIP) ** 2)}
    assert notes[0]["rank"] == [5]
    assert len(notes[0]["eigenvalues"][0]) == 12
    energy = notes[0]["released_energy"]
    assert energy["embedding"] == pytest.approx(energy["gradient"])  # of an orthonormal basis
    assert notes[1]["drift"] == [pytest.approx(0, abs=1e-9)]


def test_the_oracle_by_hand() -> None:
    g = torch.tensor([[3.0, 4.0, 0.0], [0.3, 0.0, 0.4]], dtype=F64)
    basis = torch.tensor([[1.0, 0.0, 0.0]], dtype=F64)
    assert torch.allclose(pdpsgd(g, basis, 1.0), torch.tensor([0.9, 0.0, 0.0], dtype=F64))
    assert torch.allclose(clip_rows(g, 1.0)[1], g[1])
