"""Subspaces in coefficients against singular vectors of the gradient matrix in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import dpspan
from dpspan import Eigh, Lanczos, PowerIteration, RandomSubspace, Subspace
from dpspan.gradients import numerics
from dpspan.gradients import operator as gradients_module
from dpspan.gradients.layers import conv, embedding, linear, terms
from dpspan.gradients.layers.conv import Patches
from dpspan.gradients.layers.embedding import Lookup
from dpspan.gradients.layers.linear import Outer
from dpspan.gradients.layers.terms import Rows, Stack, Sum, Term
from dpspan.gradients.operator import PerSampleGradients
from dpspan.subspaces import residual as residual_module
from dpspan.subspaces import sources as anchors_module
from dpspan.subspaces.residual import Residual
from dpspan.subspaces.solvers import Basis, Solver
from dpspan.subspaces.sources import GroupedSubspace, RandomSpan
from dpspan.subspaces.subspace import stable_rank
from helpers.oracle import per_sample_matrix, top_directions
from helpers.problems import PROBLEMS, loss_per_sample, make
from helpers.subspaces import flat, rows

F32, F64 = torch.float32, torch.float64

# Gradients are kept as their cheapest form says, or everything as factors, parameter by parameter
# and a line at a time: the form of large models, on small ones. Residuals are kept, or too large.
FORMS = ["chosen", "factors", "chosen, not kept", "factors, not kept"]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if "factors" in request.param:
        keep_factors(monkeypatch)
    if "not kept" in request.param:
        monkeypatch.setattr(residual_module, "_KEPT_BYTES", 0)
    return request.param


def keep_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (linear, conv, embedding):
        monkeypatch.setattr(module, "compact", lambda term, *_: term)
    monkeypatch.setattr(gradients_module, "_SMALL", 0)
    monkeypatch.setattr(terms, "_CPU_LINES_BYTES", 1)


def samples(x: Tensor, n: int, seed: int = 0) -> Tensor:
    """So many samples like those of a problem, no two of them alike."""
    g = torch.Generator().manual_seed(seed)
    if not x.is_floating_point():
        return torch.randint(0, 11, (n, *x.shape[1:]), generator=g)
    again = x[torch.arange(n) % len(x)]
    return again + 0.5 * torch.randn(again.shape, generator=g, dtype=F64).to(x.dtype)


def gradients(model: nn.Module, x: Tensor, scale: float = 1.0) -> PerSampleGradients:
    return scaled(dpspan.per_sample_gradients(model, loss_per_sample, x), scale)


def scaled(J: PerSampleGradients, scale: float) -> PerSampleGradients:
    terms = {name: [term] for name, term in J.terms.items()}
    return PerSampleGradients(J.shapes, terms, J.samples, like=J.like, scale=scale)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float, scale: float = 0.0) -> None:
    """Equal up to a share of the largest entry (or of `scale`, where entries may cancel)."""
    assert actual.shape == expected.shape
    if expected.numel():
        largest = max(float(expected.abs().max()), scale, 1e-30)
        assert float((actual.double() - expected.double()).abs().max()) <= tolerance * largest


def exact_matrix(J: PerSampleGradients) -> Tensor:
    """The rows of J, from its own factors, in float64."""
    terms = {name: [term.double()] for name, term in J.terms.items()}
    return J.scale * PerSampleGradients(J.shapes, terms, J.samples, like=J.like.double()).matrix()


def directions(subspace: Subspace) -> Tensor:
    """B, (k, p) float64."""
    identity = torch.eye(subspace.dimensions, dtype=F64)
    return torch.stack([flat(subspace.lift(e)) for e in identity]).double()


def measured_norms(residual: Residual) -> Tensor:
    """The norms that bounds start from, (n,) float64."""
    return residual._squared_norms[0].sqrt()


def widest_gap(h: Tensor) -> int:
    """The rank at which the top directions are told apart best from the others."""
    values = torch.linalg.svdvals(h.double())
    values = values[values > 1e-9 * values[0]]
    return 1 + int((values[:-1] / values[1:]).argmax()) if len(values) > 1 else 1


# -- lines, blocks, pieces ------------------------------------------------------------------------


def by_lines(term: Term, shape: torch.Size, size: int) -> Tensor:
    lines = shape[0] if shape else 1
    width = shape.numel() // lines
    parts = [term.lines(i, min(i + size, lines), width) for i in range(0, lines, size)]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("name", PROBLEMS)
def test_lines_are_the_rows_in_pieces(name: str, form: str) -> None:
    model, x = make(name)
    J, H = gradients(model, x), gradients(model, samples(x, 2))
    for parameter, shape in J.shapes.items():
        for term in (J.term(parameter), Stack([J.term(parameter), H.term(parameter)])):
            whole = term.rows(0, term.samples)
            for size in (1, 2, 5):
                assert_close(by_lines(term, shape, size), whole, 1e-12)


def test_the_table_holds_every_kind_of_term(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the tests above and below mean what they say."""
    keep_factors(monkeypatch)
    kinds = {
        type(term)
        for name in ("mlp", "conv2d thin", "embedding", "tied embedding", "layer norm")
        for term in gradients(*make(name)).terms.values()
    }
    assert kinds == {Rows, Outer, Patches, Lookup, Sum}


@pytest.mark.parametrize("name", PROBLEMS)
def test_gram_by_blocks_of_lines(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = make(name)
    pieces = [samples(x, n, seed=n) for n in (3, 1, 2)]
    J = gradients(model, x, scale=2.0)
    H = PerSampleGradients.concatenate([gradients(model, piece, scale=0.5) for piece in pieces])
    j = 2.0 * per_sample_matrix(model, loss_per_sample, x)
    h = 0.5 * per_sample_matrix(model, loss_per_sample, torch.cat(pieces))
    assert_close(H.matrix(), h, 1e-10)
    for workspace in (1, 700):  # a line at a time, a few of them
        monkeypatch.setattr(terms, "_CPU_LINES_BYTES", workspace)
        assert_close(J.gram(H), j @ h.T, 1e-10)
        assert_close(H.gram(J), h @ j.T, 1e-10)
        assert_close(H.gram(H), h @ h.T, 1e-10)
    weights = torch.randn(6, dtype=F64)
    assert_close(flat(H.combine(weights)), weights @ h, 1e-10)
    assert_close(H.norms(), h.norm(dim=1), 1e-10)


SEQUENCES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "linear on long sequences (rows)": lambda x, length: x[:, :length],
    "linear on short sequences (ghost)": lambda x, length: x[:, :length],
    "embedding padding_idx": lambda x, length: x[:, :length],
    "embedding, large table": lambda x, length: x[:, :, :length],
    "tied embedding": lambda x, length: x[:, :length],
    "conv1d": lambda x, length: x[:, :, : length + 3],
    "conv1d deep, short (ghost)": lambda x, length: x[:, :, : length + 3],
    "layer norm": lambda x, length: x[:, :length],
    "reused linear on sequences": lambda x, length: x[:, :length],
    "transformer layer": lambda x, length: x[:, :length],
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_pieces_of_different_sequence_lengths(name: str, form: str) -> None:
    model, x = make(name)
    parts = [SEQUENCES[name](samples(x, 3, seed=length), length) for length in (1, 3, 2)]
    H = PerSampleGradients.concatenate([gradients(model, part) for part in parts])
    h = torch.cat([per_sample_matrix(model, loss_per_sample, part) for part in parts])
    assert_close(H.matrix(), h, 1e-10)
    assert_close(H.gram(H), h @ h.T, 1e-10)
    assert_close(H.norms(), h.norm(dim=1), 1e-10)
    J = gradients(model, x)
    j = per_sample_matrix(model, loss_per_sample, x)
    rank = widest_gap(h)
    subspace = Subspace.from_gradients(H, rank)
    _, residual = subspace.split(J)
    v = top_directions(h, rank)
    outside = j - j @ v.T @ v
    assert_close(measured_norms(residual), outside.norm(dim=1), 1e-7, scale=float(j.norm()))
    weights = torch.randn(len(x), dtype=F64)
    assert_close(flat(residual.combine(weights)), weights @ outside, 1e-8, scale=float(j.norm()))


def test_pieces_in_which_a_parameter_takes_no_part() -> None:
    """A piece without a term for it counts as zeros, on either side."""
    shapes = {"a": torch.Size((3, 4)), "b": torch.Size((600,))}
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(5, 3, 4, generator=g, dtype=F64), torch.randn(2, 600, generator=g, dtype=F64)
    like = torch.zeros(0, dtype=F64)
    first = PerSampleGradients(shapes, {"a": [Rows(a[:3])]}, 3, like=like)
    second = PerSampleGradients(shapes, {"a": [Rows(a[3:])], "b": [Rows(b)]}, 2, like=like)
    both = PerSampleGradients.concatenate([first, second])
    dense = torch.cat([a.flatten(1), torch.cat([torch.zeros(3, 600), b])], dim=1)
    assert torch.equal(both.matrix(), dense)
    assert_close(both.gram(both), dense @ dense.T, 1e-12)
    assert_close(first.gram(both), dense[:3] @ dense.T, 1e-12)
    for H, J in ((first, second), (second, first)):
        h, j = H.matrix(), J.matrix()
        v = top_directions(h, 2)
        embedding, residual = Subspace.from_gradients(H, 2).split(J)
        assert_close(embedding.norm(dim=1), (j @ v.T).norm(dim=1), 1e-9)
        assert_close(measured_norms(residual), (j - j @ v.T @ v).norm(dim=1), 1e-9)
        assert (residual.norm_bounds() >= measured_norms(residual)).all()


@pytest.mark.parametrize("n", [1, 2, 3, 7, 16])
def test_half_of_a_symmetric_product(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "_SYMMETRIC_BLOCK", 2)
    x = torch.randn(n, 9, generator=torch.Generator().manual_seed(n), dtype=F64)
    assert_close(numerics.square_product(x), x @ x.T, 1e-14)


@pytest.mark.parametrize("name", PROBLEMS)
def test_selecting_parameters_selects_columns(name: str) -> None:
    model, x = make(name)
    J = gradients(model, x, scale=3.0)
    oracle = 3.0 * per_sample_matrix(model, loss_per_sample, x)
    names, start = list(J.shapes)[::2], 0
    chosen = []
    for parameter, shape in J.shapes.items():
        if parameter in names:
            chosen.append(oracle[:, start : start + shape.numel()])
        start += shape.numel()
    columns = torch.cat(chosen, dim=1)
    part = J.select(names[::-1])  # in the model's order, whatever was asked
    assert list(part.shapes) == names
    assert_close(part.matrix(), columns, 1e-10)
    assert_close(part.norms(), columns.norm(dim=1), 1e-10)
    assert_close(part.gram(part), columns @ columns.T, 1e-10)
    weights = torch.randn(len(x), dtype=F64)
    assert_close(flat(part.combine(weights)), weights @ columns, 1e-10)
    assert J.select(list(J.shapes)) is J


def test_refused_pieces_and_names() -> None:
    model, x = make("mlp")
    J, other = gradients(model, x), gradients(*make("linear"))
    with pytest.raises(ValueError, match="same parameters, scaled alike"):
        PerSampleGradients.concatenate([J, other])
    with pytest.raises(ValueError, match="same parameters, scaled alike"):
        PerSampleGradients.concatenate([J, scaled(J, 2.0)])
    assert PerSampleGradients.concatenate([J]) is J
    with pytest.raises(ValueError, match=r"names of trainable parameters, got \['nothing'\]"):
        J.select(["0.weight", "nothing"])


# -- a subspace is what the singular vectors say --------------------------------------------------


def check_subspace(subspace: Subspace, J: PerSampleGradients, h: Tensor, j: Tensor, tol: float):
    """Every operation against the top singular vectors of h."""
    rank = subspace.rank
    v, b = top_directions(h, rank), directions(subspace)
    lengths = float(j.norm(dim=1).max())
    assert len(v) == rank
    live = (subspace.coefficients != 0).any(1).double()
    assert_close(b @ b.T, live.diag(), tol)
    assert_close(b @ v.T @ v, b, tol)  # as many directions, and all of them in the span
    # Inside
    embedding = subspace.embed(J)
    assert embedding.dtype == F64
    assert_close(embedding, j @ b.T, tol, lengths)
    assert_close(embedding @ b, j @ v.T @ v, tol, lengths)
    z = torch.linspace(-1, 2, subspace.dimensions, dtype=F64)
    assert_close(flat(subspace.lift(z)), z @ b, tol)
    vector = torch.randn(h.shape[1], dtype=F64, generator=torch.Generator().manual_seed(1))
    sizes = [shape.numel() for shape in J.shapes.values()]
    by_name = {
        name: part.view(shape).to(J.like)
        for (name, shape), part in zip(J.shapes.items(), vector.split(sizes), strict=True)
    }
    assert_close(subspace.embed_vector(by_name), b @ vector, tol)
    assert_close(flat(subspace.project(by_name)), vector @ v.T @ v, tol, float(vector.norm()))
    # Outside
    outside = j - j @ v.T @ v
    again, residual = subspace.split(J)
    assert torch.equal(again, embedding)
    assert_close(measured_norms(residual), outside.norm(dim=1), math.sqrt(tol) * 0.1, lengths)
    weights = torch.linspace(1, -2, len(j), dtype=F64)
    assert_close(flat(residual.combine(weights)), weights @ outside, tol, lengths)
    # Shares
    energy = (j @ v.T).square().sum(1) / j.square().sum(1).clamp(min=1e-300)
    assert_close(subspace.captured_energy(J), energy, tol, 1.0)


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_subspace_is_what_the_singular_vectors_say(name: str, form: str) -> None:
    model, x = make(name)
    public, private = samples(x, 5, seed=1), samples(x, 4, seed=2)
    H = PerSampleGradients.concatenate(
        [gradients(model, piece, scale=0.3) for piece in public.split([2, 3])]
    )
    J = gradients(model, private, scale=2.5)
    h = 0.3 * per_sample_matrix(model, loss_per_sample, public)
    j = 2.5 * per_sample_matrix(model, loss_per_sample, private)
    values = torch.linalg.svdvals(h).square()
    for rank in (widest_gap(h), 9):
        subspace = Subspace.from_gradients(H, rank)
        assert subspace.dimensions == min(rank, 5)
        real = int((values > 1e-13 * values[0]).sum())
        assert subspace.rank == min(rank, real)
        assert_close(subspace.eigenvalues[: len(values)], values, 1e-10)
        assert_close(stable_rank(subspace.eigenvalues), values.sum() / values[0], 1e-9)
        check_subspace(subspace, J, h, j, 1e-8)
    explicit = subspace.explicit()
    assert explicit.rank == subspace.rank
    assert explicit.gradients.samples == subspace.dimensions
    assert torch.equal(explicit.eigenvalues, subspace.eigenvalues)
    check_subspace(explicit, J, h, j, 1e-8)
    assert_close(explicit.embed(J), subspace.embed(J), 1e-10, float(j.norm()))
    other = Subspace.from_gradients(J, 2)
    for one in (subspace, explicit):
        check_drift(one, other)


def check_drift(subspace: Subspace, other: Subspace) -> None:
    """The mean of sin² of the angles between the spans, from bases in p dimensions."""
    v, u = directions(subspace), directions(other)
    fewest = min(subspace.rank, other.rank)
    expected = 1 - float((v @ u.T).square().sum()) / fewest
    assert float(subspace.drift(other)) == pytest.approx(expected, abs=1e-8)
    assert float(other.drift(subspace)) == pytest.approx(expected, abs=1e-8)
    assert float(subspace.drift(subspace)) == pytest.approx(0, abs=1e-8)
    assert 0 <= float(subspace.drift(other)) <= 1


class Pictures(nn.Module):
    """A convolution large enough that its gradients stay factors, norms and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.second, self.head = nn.Conv2d(16, 24, 3, stride=2), nn.Linear(24, 30)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.norm(self.first(x)).relu()).relu()
        return self.head(x.mean((2, 3)))


class Words(nn.Module):
    """An embedding larger than its gradients' factors, tied to the output."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tokens, self.norm, self.mix = nn.Embedding(90, 20), nn.LayerNorm(20), nn.Linear(20, 40)
        self.down, self.head = nn.Linear(40, 20), nn.Linear(20, 90, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.mix(self.norm(self.tokens(x))).tanh()).mean(1))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": lambda: (
        nn.Sequential(nn.Linear(40, 50), nn.ReLU(), nn.Linear(50, 10)),
        torch.randn(40, 40),
    ),
    "sequence": lambda: (
        nn.Sequential(nn.Linear(30, 50), nn.Linear(50, 9)),
        torch.randn(40, 3, 30),
    ),
    "pictures": lambda: (Pictures(), torch.randn(40, 3, 8, 8)),
    "words": lambda: (Words(tied=False), torch.randint(0, 90, (40, 4))),
    "tied words": lambda: (Words(tied=True), torch.randint(0, 90, (40, 4))),
}


def batches(name: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    """A model, 24 public samples and 16 private ones."""
    torch.manual_seed(len(name))
    model, x = MODELS[name]()
    x = x.to(dtype) if x.is_floating_point() else x
    return model.to(dtype), x[:24], x[24:]


@pytest.mark.parametrize("rank", [1, 6, 24])
@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models_whose_gradients_stay_factors(name: str, dtype: torch.dtype, rank: int) -> None:
    model, public, private = batches(name, dtype)
    H, J = gradients(model, public, scale=0.3), gradients(model, private, scale=16.0)
    h, j = exact_matrix(H), exact_matrix(J)
    tolerance = 1e-8 if dtype == F64 else 1e-4
    subspace = Subspace.from_gradients(H, rank)
    assert subspace.rank == rank
    if name == "words":  # what came from factors is known by its parameter
        assert ("tokens.weight",) in subspace.kernels
    values = torch.linalg.svdvals(h).square()
    assert_close(subspace.eigenvalues, values, tolerance)
    # How far rounding turns the directions depends on the gap; their span's distance to h does not.
    gap = float(values[rank - 1] / values[rank]) if rank < 24 else math.inf
    tolerance *= 1 + 1 / (gap - 1)
    check_subspace(subspace, J, h, j, tolerance)
    check_subspace(subspace.explicit(), J, h, j, tolerance)


def test_few_public_gradients_of_a_wide_model() -> None:
    subspace = Subspace.from_gradients(gradients(*make("mlp")), 100)
    assert (subspace.dimensions, subspace.rank) == (6, 6)


# -- residuals: certified, and tight --------------------------------------------------------------


def true_norms(residual: Residual) -> Tensor:
    """Of J − A H with the very factors and the very A, in float64."""
    j, h = exact_matrix(residual.gradients), exact_matrix(residual.anchors)
    return (j - residual.shares @ h).norm(dim=1)


def check_bounds(residual: Residual) -> None:
    bounds = residual.norm_bounds()
    if not residual._rows:  # rows that are kept are summed as they are: theirs is the norm
        assert (bounds >= true_norms(residual)).all()
    # What combine() sums of each sample, under a weight as clips give them.
    for i, bound in enumerate(bounds.tolist()):
        weights = torch.zeros(len(bounds), dtype=F64)
        weights[i] = 0.3 / max(bound, 1e-3)
        summed = float(flat(residual.combine(weights)).double().norm())
        assert summed <= float(weights[i]) * bound


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_residual_bounds_are_bounds_and_tight(name: str, dtype: torch.dtype, form: str) -> None:
    model, x = make(name, dtype)
    public, private = samples(x, 5, seed=1), samples(x, 2, seed=2)
    near = public[:3]
    if public.is_floating_point():
        near = near + 1e-4 * torch.randn_like(near)
    H = gradients(model, public, scale=0.5)
    J = gradients(model, torch.cat([private, near]), scale=3.0)
    whole = Subspace.from_gradients(H, 5)
    for subspace in (Subspace.from_gradients(H, 2), whole, whole.explicit()):
        _, residual = subspace.split(J)
        check_bounds(residual)
        norms = true_norms(residual)
        ordinary = norms > 0.1 * J.norms()
        assert (residual.norm_bounds() <= 1.01 * norms)[ordinary].all()
        # How much of a norm is lost when it cancels: by rows rounding, by factors its root.
        lost = 1e-4 if dtype == F32 else 1e-7
        assert_close(measured_norms(residual), norms, lost, float(J.norms().max()))


@pytest.mark.parametrize("name", MODELS)
def test_bounds_of_ordinary_gradients_are_within_a_hundredth(name: str) -> None:
    model, public, private = batches(name, F32)
    H, J = gradients(model, public), gradients(model, private)
    for rank in (5, 20):
        _, residual = Subspace.from_gradients(H, rank).split(J)
        norms = true_norms(residual)
        assert (norms > 0.1 * J.norms()).all()  # ordinary they are
        assert (residual.norm_bounds() >= norms).all()
        assert (residual.norm_bounds() <= 1.01 * norms).all()


def family(kind: str, n: int, g: torch.Generator) -> dict[str, Tensor]:
    """The numbers that gradients of a kind are made of, for n samples."""
    randn = lambda *shape: torch.randn(n, *shape, generator=g)  # noqa: E731
    return {
        "rows": {"values": randn(6, 7)},
        "outer": {"a": randn(1, 9), "b": randn(1, 5)},
        "sequence": {"a": randn(4, 9), "b": randn(4, 5)},
        "long sequence": {"a": randn(20, 3), "b": randn(20, 2)},
        "lookup": {"index": torch.randint(0, 7, (n, 3), generator=g), "b": randn(3, 4)},
        "patches": {"x": randn(2, 5, 5), "b": randn(3, 3, 3)},
    }[kind]


KINDS = ["rows", "outer", "sequence", "long sequence", "lookup", "patches"]


def of_family(kind: str, numbers: dict[str, Tensor], scale: float) -> PerSampleGradients:
    if kind == "rows":
        shape, term = (6, 7), Rows(numbers["values"])
    elif kind == "lookup":
        shape, term = (7, 4), Lookup(numbers["index"], numbers["b"], 7)
    elif kind == "patches":
        shape = (3, 2, 3, 3)
        geometry = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
        term = Patches(numbers["x"], numbers["b"], torch.Size(shape), **geometry)
    else:
        shape = (numbers["b"].shape[2], numbers["a"].shape[2])
        term = Outer(numbers["a"], numbers["b"])
    like = torch.zeros(0)
    return PerSampleGradients(
        {"w": torch.Size(shape)}, {"w": [term]}, term.samples, like=like, scale=scale
    )


@pytest.mark.parametrize("small", [0, 512], ids=["as factors", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_almost_in_the_span_have_bounds(
    kind: str, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32, where ‖g‖² − ‖Bg‖² would be off by more than the residual, in either direction."""
    monkeypatch.setattr(gradients_module, "_SMALL", small)
    short = []  # estimates below the truth: without them, a bound would not be needed

    @settings(max_examples=30, deadline=None, database=None, derandomize=True)
    @given(
        seed=st.integers(0, 10**6),
        closeness=st.floats(0, 8),
        size=st.floats(-16, 12),
        rank=st.sampled_from([1, 5, 9]),
        scale=st.sampled_from([1.0, 250.0]),
        explicit=st.booleans(),
    )
    def holds(
        seed: int, closeness: float, size: float, rank: int, scale: float, explicit: bool
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        public, other = family(kind, 9, g), family(kind, 9, g)
        near = {
            name: value
            if name == "index"
            else 10**size * (value + 10**-closeness * other[name])
            if name in ("b", "values")
            else value
            for name, value in public.items()
        }
        H, J = of_family(kind, public, 1.0), of_family(kind, near, scale)
        subspace = Subspace.from_gradients(H, rank)
        _, residual = (subspace.explicit() if explicit else subspace).split(J)
        check_bounds(residual)
        short.append(int((measured_norms(residual) < true_norms(residual)).sum()))

    holds()
    assert sum(short) > 0


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    cancelled=st.floats(0, 7),
    steps=st.integers(2, 6),
    shares=st.floats(-3, 3),
)
def test_bounds_hold_for_any_shares_and_sequences_that_cancel(
    seed: int, cancelled: float, steps: int, shares: float
) -> None:
    """Nothing is taken to be orthonormal, or a projection: J − A H for any A."""
    g = torch.Generator().manual_seed(seed)

    def cancelling(n: int) -> PerSampleGradients:
        a = torch.randn(n, 1, 30, generator=g).expand(n, steps, 30)
        a = a * (1 + 1e-4 * torch.randn(n, steps, 1, generator=g))
        b = torch.randn(n, steps, 25, generator=g)
        b[:, -1] = -b[:, :-1].sum(1) + 10**-cancelled * torch.randn(n, 25, generator=g)
        like, shape = torch.zeros(0), torch.Size((25, 30))
        return PerSampleGradients({"w": shape}, {"w": [Outer(a, b)]}, n, like=like)

    H, J = cancelling(4), cancelling(3)
    A = 10**shares * torch.randn(3, 4, generator=g, dtype=F64)
    A[0] = 0  # a row that nothing is taken off
    known = H.packs[("w",)].term.kernel(H.packs[("w",)].term)
    cross = J.packs[("w",)].term.kernel(H.packs[("w",)].term)
    ways: list[dict] = [{}]
    if known is not None and cross is not None:
        ways.append({("w",): (cross, known)})
    for kernels in ways:
        check_bounds(Residual(J, H, A, taken=torch.zeros(3), kernels=kernels))


@pytest.mark.parametrize("small", [0, 512], ids=["as factors", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_bounds_hold_where_what_is_taken_off_cancels(
    kind: str, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twin gradients with shares of 1000 and −1000: little is taken off, after much rounding."""
    monkeypatch.setattr(gradients_module, "_SMALL", small)
    short = 0
    for seed in range(10):
        g = torch.Generator().manual_seed(seed)
        public, private = family(kind, 6, g), family(kind, 3, g)
        for name, value in public.items():
            nudged = value if name == "index" else value * (1 + 1e-6 * torch.randn_like(value))
            public[name] = torch.cat([value, nudged])
        H, J = of_family(kind, public, 1.0), of_family(kind, private, 1e-3)
        A = 1000 * torch.randn(3, 6, generator=g, dtype=F64)
        shares = torch.cat([A, -A], dim=1)
        residual = Residual(J, H, shares, taken=torch.zeros(3), kernels={})
        check_bounds(residual)
        short += int((measured_norms(residual) < true_norms(residual)).sum())
    assert short > 0


def test_the_kernel_way_is_taken_and_cancels_in_float64() -> None:
    """For a public gradient itself float32 rows would leave 1e-7 of it, float64 products less."""
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(20, 1, 60, generator=g), torch.randn(20, 1, 50, generator=g)
    like, shape = torch.zeros(0), torch.Size((50, 60))
    H = PerSampleGradients({"w": shape}, {"w": [Outer(a, b)]}, 20, like=like)
    subspace = Subspace.from_gradients(H, 20)
    _, residual = subspace.split(H)
    assert set(residual.kernels) == {("w",)}
    assert (measured_norms(residual) <= 1e-6 * H.norms()).all()
    assert (residual._squared_norms[1].sqrt() <= 1e-4 * H.norms()).all()
    check_bounds(residual)


def test_weights_too_small_for_float32_drop_the_whole_residual() -> None:
    """A clip of 1e-25 for a residual of 1e18: what is left of g must go together with its part."""
    g = torch.Generator().manual_seed(0)
    public = torch.randn(6, 40, generator=g)
    J = rows(1e18 * (1e3 * public[1] + torch.randn(40, generator=g))[None])
    _, residual = Subspace.from_gradients(rows(public), 6).split(J)
    weight = 1e-25 / residual.norm_bounds()
    assert weight < torch.finfo(F32).tiny
    assert flat(residual.combine(weight)).double().norm() <= 1e-25


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["mlp", "conv2d grouped backward", "layer norm", "reused conv"])
def test_a_poisoned_sample_stays_alone(name: str, bad: float, form: str) -> None:
    model, x = make(name)
    H = gradients(model, samples(x, 5, seed=1))
    clean = samples(x, 4, seed=2)
    poisoned = clean.clone()
    poisoned[1] = bad
    kept = [0, 2, 3]
    subspace = Subspace.from_gradients(H, 3)
    w, residual = subspace.split(gradients(model, clean))
    w_bad, residual_bad = subspace.split(gradients(model, poisoned))
    assert not torch.isfinite(residual_bad.norm_bounds()[1])
    assert_close(w_bad[kept], w[kept], 1e-10)
    assert_close(residual_bad.norm_bounds()[kept], residual.norm_bounds()[kept], 1e-10)
    weights = torch.tensor([1.0, 0.0, 2.0, -1.0], dtype=F64)
    assert_close(flat(residual_bad.combine(weights)), flat(residual.combine(weights)), 1e-10)


# -- solvers --------------------------------------------------------------------------------------


def spectrum(m: int, ratio: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A Gram matrix whose eigenvalues fall by `ratio`, and its eigenvectors as rows."""
    g = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(m, m, generator=g, dtype=F64)).Q
    values = ratio ** torch.arange(m, dtype=F64)
    return 7.0 * (q * values) @ q.T, q.T


def sines(basis: Basis, gram: Tensor, vectors: Tensor) -> Tensor:
    """Sines of the angles between the found span and that of the given eigenvectors."""
    root = torch.linalg.cholesky(gram + 1e-14 * torch.eye(len(gram), dtype=F64))
    found = torch.linalg.qr(
        (basis.coefficients @ root).T
    ).Q.T  # H = root: any with this Gram matrix
    true = torch.linalg.qr((vectors @ root).T).Q.T
    cosines = torch.linalg.svdvals(found @ true.T).clamp(max=1)
    return (1 - cosines.square()).clamp(min=0).sqrt()


SOLVERS: list[Solver] = [Eigh(), Lanczos(), PowerIteration(), PowerIteration(iterations=3)]


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
@pytest.mark.parametrize("rank", [1, 4, 11, 12])
def test_solvers_find_the_top_eigenvectors(solver: Solver, rank: int) -> None:
    gram, vectors = spectrum(12, 0.6)
    basis = solver(gram, rank, floor=1e-12, previous=None)
    assert basis.coefficients.shape == (rank, 12)
    c = basis.coefficients
    assert_close(c @ gram @ c.T, torch.eye(rank, dtype=F64), 1e-10)
    assert float(sines(basis, gram, vectors[:rank]).max()) < 1e-5
    values = 7.0 * 0.6 ** torch.arange(12, dtype=F64)
    assert_close(basis.eigenvalues[:rank], values[:rank], 1e-10)
    assert (basis.eigenvalues.diff() <= 0).all()


@pytest.mark.parametrize("ratio", [0.3, 0.7])
def test_power_iteration_converges_from_any_start(ratio: float) -> None:
    """By the ratio λ_{k+1}/λ_k in each pass, from directions that know nothing of K."""
    gram, vectors = spectrum(12, ratio)
    c = torch.randn(4, 12, generator=torch.Generator().manual_seed(3), dtype=F64)
    errors = []
    for _ in range(12):
        basis = PowerIteration()(gram, 4, floor=1e-12, previous=c)
        c = basis.coefficients
        assert_close(c @ gram @ c.T, torch.eye(4, dtype=F64), 1e-10)
        errors.append(float(sines(basis, gram, vectors[:4]).max()))
    for earlier, later in zip(errors, errors[3:], strict=False):
        assert later <= max(earlier * ratio**3 * 3, 1e-6)
    assert errors[-1] < max(50 * ratio**12, 1e-6)
    start = torch.randn(4, 12, generator=torch.Generator().manual_seed(3), dtype=F64)
    at_once = PowerIteration(iterations=12)(gram, 4, floor=1e-12, previous=start)
    assert float(sines(at_once, gram, vectors[:4]).max()) < max(50 * ratio**12, 1e-6)


def test_power_iteration_starts_from_the_last_step() -> None:
    """K changes a little from step to step: one pass from the last directions keeps up."""
    gram, _ = spectrum(12, 0.5)
    drifted = gram + 0.01 * spectrum(12, 0.9, seed=1)[0]
    exact = Eigh()(drifted, 4, floor=1e-12, previous=None)
    top = torch.linalg.eigh(drifted).eigenvectors.flip(1).T[:4]
    old = Eigh()(gram, 4, floor=1e-12, previous=None)
    warm = PowerIteration()(drifted, 4, floor=1e-12, previous=old.coefficients)
    cold = torch.randn(4, 12, generator=torch.Generator().manual_seed(3), dtype=F64)
    cold_start = PowerIteration()(drifted, 4, floor=1e-12, previous=cold)
    by_warm, by_cold = (float(sines(b, drifted, top).max()) for b in (warm, cold_start))
    assert by_warm < 0.5 * float(sines(old, drifted, top).max())
    assert by_warm < 0.1 * by_cold
    assert_close(warm.eigenvalues, exact.eigenvalues[:4], 1e-2)


def test_a_subspace_starts_from_the_one_before() -> None:
    """Through the front door: the solver gets C of a subspace of the same size, and no other."""
    seen: list[Tensor | None] = []

    class Spy:
        def __call__(
            self, gram: Tensor, rank: int, *, floor: float, previous: Tensor | None
        ) -> Basis:
            seen.append(previous)
            return Eigh()(gram, rank, floor=floor, previous=previous)

    H = gradients(*make("mlp"))
    first = Subspace.from_gradients(H, 3, solver=Spy())
    Subspace.from_gradients(H, 3, solver=Spy(), previous=first.coefficients)
    Subspace.from_gradients(H, 4, solver=Spy(), previous=first.coefficients)  # another rank
    assert seen[0] is None
    assert seen[1] is first.coefficients
    assert seen[2] is None


@settings(max_examples=60, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    seed=st.integers(0, 10**6),
    rank=st.integers(0, 8),
    before=st.integers(1, 12),
    size=st.floats(-20, 20),
    ratio=st.floats(0.05, 1),
)
def test_power_iteration_on_a_deficient_gram_matrix(
    seed: int, rank: int, before: int, size: float, ratio: float
) -> None:
    """Whatever rank K has and had: finite, and no direction longer than one."""
    g = torch.Generator().manual_seed(seed)
    old = torch.randn(12, before, generator=g, dtype=F64)
    h = torch.randn(12, rank, generator=g, dtype=F64) * ratio ** torch.arange(rank, dtype=F64)
    gram = 10**size * h @ h.T
    c = Eigh()(old @ old.T, 8, floor=1e-12, previous=None).coefficients
    for _ in range(4):
        c = PowerIteration()(gram, 8, floor=1e-12, previous=c).coefficients
        assert c.isfinite().all()
        products = c @ gram @ c.T
        assert products.diagonal().max() <= 1 + 1e-8
        # Those just above the floor need not be eigenvectors, and so not quite orthogonal.
        assert torch.linalg.eigvalsh(products).max() <= 2


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
def test_solvers_on_deficient_gram_matrices(solver: Solver) -> None:
    g = torch.Generator().manual_seed(0)
    for rank in (0, 1, 3):
        h = torch.randn(12, rank, generator=g, dtype=F64)
        basis = solver(h @ h.T, 5, floor=1e-12, previous=None)
        assert basis.coefficients.isfinite().all()
        assert int((basis.coefficients != 0).any(1).sum()) == rank
        inside = basis.coefficients @ h
        assert_close(inside @ inside.T, (torch.arange(5) < rank).double().diag(), 1e-9)


@pytest.mark.parametrize("solver", [Eigh(), Lanczos()], ids=repr)
def test_eigenvalues_below_the_floor_are_no_directions(solver: Solver) -> None:
    gram, _ = spectrum(12, 0.1)
    for floor, kept in ((1e-12, 6), (0.9e-4, 5), (1.1e-4, 4), (0.5, 1), (1.5, 0)):
        c = solver(gram, 6, floor=7.0 * floor, previous=None).coefficients
        assert (c[:kept] != 0).any(1).all()
        assert not c[kept:].any()


def test_the_floor_is_above_rounding_and_below_directions() -> None:
    """Of float32 rows in 6 dimensions, 6 directions are real; the others come from rounding."""
    g = torch.Generator().manual_seed(0)
    for dtype in (F64, F32):
        thin = torch.randn(200, 6, generator=g).to(dtype) @ torch.randn(6, 500, generator=g).to(
            dtype
        )
        assert Subspace.from_gradients(rows(thin), 50).rank == 6
        falling = torch.randn(200, 500, generator=g).to(dtype) * 0.95 ** torch.arange(500)
        assert Subspace.from_gradients(rows(falling), 50).rank == 50


@pytest.mark.parametrize("solver", [Eigh(), Lanczos(), PowerIteration()], ids=repr)
def test_a_common_direction_hides_no_others(solver: Solver) -> None:
    """The largest eigenvalue is then m times a gradient's length; rounding does not grow so."""
    g = torch.Generator().manual_seed(0)
    common = 30 * torch.randn(500, generator=g)
    thin = common + torch.randn(200, 6, generator=g) @ torch.randn(6, 500, generator=g)
    wide = common + torch.randn(200, 500, generator=g)
    for gradients, rank in ((thin, 7), (wide, 150)):
        first = Subspace.from_gradients(rows(gradients), 150, solver=solver)
        then = Subspace.from_gradients(
            rows(gradients), 150, solver=solver, previous=first.coefficients
        )
        assert first.rank == then.rank == rank
        for subspace in (first, then):
            b = subspace.coefficients @ gradients.double()
            found = torch.linalg.eigvalsh(b @ b.T)[-rank:]
            assert float((found - 1).abs().max()) < 0.05  # floor/λ: orthonormal but for rounding


@pytest.mark.parametrize("solver", [Eigh(), Lanczos(), PowerIteration()], ids=repr)
def test_a_direction_just_above_the_floor_has_length_one(solver: Solver) -> None:
    gram, _ = spectrum(12, 0.1)  # eigenvalues 7·10⁰, 7·10⁻¹, …
    first = Eigh()(gram, 6, floor=0.0, previous=None)
    c = solver(gram, 6, floor=0.99 * 7e-4, previous=first.coefficients).coefficients
    lengths = (c @ gram @ c.T).diagonal()
    assert_close(lengths, torch.tensor([1.0] * 5 + [0.0], dtype=F64), 1e-9)


def test_power_iteration_regains_directions() -> None:
    """K of rank 2 at first (a head that starts at zero, say), of full rank later."""
    g = torch.Generator().manual_seed(0)
    thin = torch.randn(12, 2, generator=g, dtype=F64)
    gram, vectors = spectrum(12, 0.5)
    c = PowerIteration()(thin @ thin.T, 4, floor=1e-12, previous=None).coefficients
    for _ in range(20):
        basis = PowerIteration()(gram, 4, floor=1e-12, previous=c)
        c = basis.coefficients
    assert (c != 0).any(1).all()
    assert float(sines(basis, gram, vectors[:4]).max()) < 1e-4


def test_lanczos_gives_the_same_directions_in_every_process() -> None:
    """Embeddings of several processes are added up: a sign that differs would cancel them."""
    gram, _ = spectrum(12, 0.6)
    first, *others = (Lanczos()(gram, 5, floor=1e-12, previous=None) for _ in range(6))
    assert all(torch.equal(first.coefficients, other.coefficients) for other in others)


@pytest.mark.parametrize("kind", ["in pairs", "in all"])
def test_lanczos_where_gradients_cancel(kind: str) -> None:
    """g and −g, as two labels of one sample give them; or any that add up to nothing."""
    gram = torch.linspace(1, 2, 6, dtype=F64).diag()
    gram = torch.cat([torch.cat([gram, -gram]), torch.cat([-gram, gram])], dim=1)
    if kind == "in all":
        gram = torch.eye(12, dtype=F64) - 1 / 12
    exact = Eigh()(gram, 4, floor=1e-12, previous=None)
    found = Lanczos()(gram, 4, floor=1e-12, previous=None)
    assert_close(found.eigenvalues, exact.eigenvalues[:4], 1e-9)
    c = found.coefficients
    assert_close(c @ gram @ c.T, torch.eye(4, dtype=F64), 1e-9)


def test_lanczos_sees_gradients_that_share_nothing_with_the_longest() -> None:
    """As those of an embedding do for other tokens: two blocks, the top direction in the second."""
    g = torch.Generator().manual_seed(0)
    scattered = torch.randn(40, 60, generator=g, dtype=F64)
    alike = torch.randn(60, generator=g, dtype=F64) + 0.1 * torch.randn(
        40, 60, generator=g, dtype=F64
    )
    alike = 5 * alike / alike.norm(dim=1, keepdim=True)  # the others are about 7.7 long
    gram = torch.block_diag(scattered @ scattered.T, alike @ alike.T)
    exact = Eigh()(gram, 3, floor=1e-12, previous=None)
    found = Lanczos()(gram, 3, floor=1e-12, previous=None)
    assert_close(found.eigenvalues, exact.eigenvalues[:3], 1e-9)


def test_iterations_are_counted() -> None:
    with pytest.raises(ValueError, match="iterations to be an integer of at least 1, got 0"):
        PowerIteration(iterations=0)


# -- random directions ----------------------------------------------------------------------------


def drawn(span: GroupedSubspace) -> Tensor:
    (part,) = span.parts.values()
    return directions(part)


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
def test_random_directions_are_orthonormal(dtype: torch.dtype) -> None:
    model = nn.Linear(9, 7).to(dtype)
    span = RandomSpan(model, RandomSubspace(rank=12)).span(0, products=1.0)
    assert span.dimensions == 12
    b = drawn(span)
    assert_close(b @ b.T, torch.eye(12, dtype=F64), 1e-10 if dtype == F64 else 1e-5)
    # No direction is preferred: the mean squared entry of B is 1/p, column by column.
    many = torch.cat(
        [
            drawn(RandomSpan(model, RandomSubspace(rank=12, seed=s)).span(0, products=1.0))
            for s in range(40)
        ]
    )
    energy = many.square().mean(0) * 70
    # Entries of a random unit vector have a squared entry of variance about 2/p².
    assert (energy - 1).abs().max() < 5 * math.sqrt(2 / len(many))


def test_random_directions_stay_or_are_drawn_anew() -> None:
    model = nn.Linear(9, 7)
    how = {"products": 1.0}
    fixed, fresh = (
        RandomSpan(model, RandomSubspace(rank=4, redraw=redraw, seed=5)) for redraw in (False, True)
    )
    assert fixed.public == ()
    assert fixed.span(3, **how) is fixed.span(0, **how)
    first, second = drawn(fresh.span(0, **how)), drawn(fresh.span(1, **how))
    assert torch.linalg.svdvals(first @ second.T).max() < 0.95
    # By the seed and the number alone: the same in another process, and after a checkpoint.
    again = RandomSpan(model, RandomSubspace(rank=4, redraw=True, seed=5))
    assert torch.equal(drawn(again.span(1, **how)), second)
    other = RandomSpan(model, RandomSubspace(rank=4, redraw=True, seed=6))
    assert not torch.allclose(drawn(other.span(1, **how)), second)


def test_fixed_random_directions_do_not_depend_on_when_they_are_asked_for() -> None:
    """A run that is resumed, or that starts with plain DP-SGD, asks later."""
    how = {"products": 1.0}
    early, late = (RandomSpan(nn.Linear(9, 7), RandomSubspace(rank=4, seed=5)) for _ in range(2))
    assert torch.equal(drawn(early.span(0, **how)), drawn(late.span(3, **how)))


def test_random_directions_cover_what_is_trained() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    span = RandomSpan(model, RandomSubspace(rank=3)).span(0, products=1.0)
    assert list(span.parts) == [("1.weight", "1.bias")]


def test_refused_random_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(9, 7)
    with pytest.raises(ValueError, match="rank of at most 70, the parameters, got 71"):
        RandomSpan(model, RandomSubspace(rank=71))
    for rank in (0, 2.5, "3"):
        with pytest.raises(ValueError, match=rf"rank to be an integer of at least 1, got {rank!r}"):
            RandomSubspace(rank=rank)
    monkeypatch.setattr(anchors_module, "_CPU_BASIS_BYTES", 70 * 4)  # four times that is allowed
    RandomSpan(model, RandomSubspace(rank=4))
    with pytest.raises(
        ValueError, match=r"5 random directions for 70 parameters would take 0\.0 GiB"
    ):
        RandomSpan(model, RandomSubspace(rank=5))


# -- edges ----------------------------------------------------------------------------------------


def test_gradients_of_zero_have_no_energy_and_no_embedding() -> None:
    H = rows(torch.randn(5, 30, generator=torch.Generator().manual_seed(0)))
    subspace = Subspace.from_gradients(H, 3)
    nothing = rows(torch.zeros(2, 30))
    assert torch.equal(subspace.captured_energy(nothing), torch.zeros(2, dtype=F64))
    assert not subspace.embed(nothing).any()
    none = rows(torch.zeros(0, 30))
    embedding, residual = subspace.split(none)
    assert embedding.shape == (0, 3)
    assert residual.norm_bounds().shape == (0,)
    assert not flat(residual.combine(torch.zeros(0))).any()


def test_the_energy_of_tiny_gradients() -> None:
    h = torch.randn(5, 30, generator=torch.Generator().manual_seed(0), dtype=F64)
    subspace = Subspace.from_gradients(rows(h), 5)
    tiny = subspace.captured_energy(rows(1e-25 * h))
    assert_close(tiny, torch.ones(5, dtype=F64), 1e-6)


def test_the_order_of_parameters_does_not_matter() -> None:
    g = torch.Generator().manual_seed(0)
    subspace = Subspace.from_gradients(rows(torch.randn(5, 30, generator=g)), 3)
    J = rows(torch.randn(4, 30, generator=g))
    shapes = dict(reversed(J.shapes.items()))
    terms = {name: [term] for name, term in J.terms.items()}
    turned = PerSampleGradients(shapes, terms, 4, like=J.like)
    (w, residual), (w_turned, residual_turned) = subspace.split(J), subspace.split(turned)
    assert_close(w_turned, w, 1e-5)
    assert_close(measured_norms(residual_turned), measured_norms(residual), 1e-5)


def test_public_gradients_of_zero_span_nothing() -> None:
    zero = Subspace.from_gradients(rows(torch.zeros(5, 30)), 3)
    assert (zero.rank, zero.dimensions) == (0, 3)
    assert float(stable_rank(zero.eigenvalues)) == 0
    J = rows(torch.randn(4, 30, generator=torch.Generator().manual_seed(0)))
    for subspace in (zero, zero.explicit()):
        embedding, residual = subspace.split(J)
        assert not embedding.any()
        assert_close(measured_norms(residual), J.norms(), 1e-6)
        assert not flat(subspace.lift(torch.ones(3))).any()
        assert float(subspace.drift(subspace)) == 1  # nothing is shared


def test_one_public_gradient() -> None:
    g = torch.randn(1, 30, generator=torch.Generator().manual_seed(0), dtype=F64)
    subspace = Subspace.from_gradients(rows(g), 7)
    assert (subspace.rank, subspace.dimensions) == (1, 1)
    assert_close(directions(subspace).abs(), g.abs() / g.norm(), 1e-12)


def test_repeated_public_gradients_count_once() -> None:
    g = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    repeated = Subspace.from_gradients(rows(torch.cat([g, g, g])), 9)
    v = top_directions(g, 4)
    for subspace in (repeated, repeated.explicit()):
        assert (subspace.rank, subspace.dimensions) == (4, 9)
        b = directions(subspace)
        assert_close(b.T @ b, v.T @ v, 1e-4)
        assert float(subspace.drift(repeated)) == pytest.approx(0, abs=1e-5)


def test_refused_subspaces() -> None:
    model, x = make("mlp")
    H = gradients(model, x)
    for rank in (0, -1, 2.0):
        with pytest.raises(ValueError, match=rf"rank to be an integer of at least 1, got {rank}"):
            Subspace.from_gradients(H, rank)
    with pytest.raises(ValueError, match="at least one gradient to span a subspace, got none"):
        Subspace.from_gradients(gradients(model, x[:0]), 3)
    subspace = Subspace.from_gradients(H, 3)
    with pytest.raises(ValueError, match=r"vector of length 3, got 'shape \(4,\)'"):
        subspace.lift(torch.ones(4))
    other = gradients(*make("linear"))
    for operation in (subspace.embed, subspace.split, subspace.captured_energy):
        with pytest.raises(
            ValueError, match="gradients of the parameters that the subspace is made of"
        ):
            operation(other)
    with pytest.raises(ValueError, match="vector over the parameters that the subspace is made of"):
        subspace.embed_vector({"0.weight": torch.zeros(7, 5)})
    with pytest.raises(ValueError, match="vector over the parameters that the subspace is made of"):
        subspace.project(dict(other.combine(torch.ones(6))))
    with pytest.raises(ValueError, match="same parameters"):
        subspace.drift(Subspace.from_gradients(other, 3))
