"""Every operation of PerSampleGradients against one-sample-at-a-time autograd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import dpspan
from dpspan.gradients.layers.conv import Patches, conv_terms
from dpspan.gradients.layers.linear import Outer
from dpspan.gradients.numerics import Arithmetic, bounds
from dpspan.gradients.operator import PerSampleGradients
from helpers.oracle import per_sample_matrix
from helpers.problems import PROBLEMS, loss_per_sample, make

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


def flat(parts: dict[str, Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts.values()])


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.shape == expected.shape
    if expected.numel() == 0:
        return
    scale = expected.abs().max().clamp(min=1e-30).double()
    error = float((actual.double() - expected.double()).abs().max() / scale)
    assert error <= TOLERANCE[dtype]


def both(model: nn.Module, x: Tensor) -> tuple[PerSampleGradients, Tensor]:
    oracle = per_sample_matrix(model, loss_per_sample, x)
    return dpspan.per_sample_gradients(model, loss_per_sample, x), oracle


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_operations_agree_with_the_oracle(name: str, dtype: torch.dtype) -> None:
    model, x = make(name, dtype)
    J, oracle = both(model, x)
    exact = oracle.double()
    assert_close(J.matrix(), oracle, dtype)
    assert_close(J.norms(), exact.norm(dim=1), dtype)
    weights = torch.randn(len(x))
    assert_close(flat(J.combine(weights)), weights.to(dtype) @ oracle, dtype)
    assert_close(J.gram(J), exact @ exact.T, dtype)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", PROBLEMS)
def test_gram_with_another_batch_and_by_group(name: str) -> None:
    model, x = make(name)
    other = x[torch.randperm(len(x))][: max(1, len(x) - 2)]
    J, oracle = both(model, x)
    H, oracle_other = both(model, other)
    assert_close(J.gram(H), oracle @ oracle_other.T, torch.float64)
    names = list(J.shapes)
    groups = [names[: len(names) // 2], names[len(names) // 2 :]]
    parts = torch.stack([J.select(group).gram(H.select(group)) for group in groups])
    assert parts.shape == (2, J.samples, H.samples)
    assert_close(parts.sum(0), oracle @ oracle_other.T, torch.float64)
    column, expected = 0, torch.zeros(2, J.samples, H.samples, dtype=torch.float64)
    for g, group in enumerate(groups):
        for parameter in group:
            size = J.shapes[parameter].numel()
            block = slice(column, column + size)
            expected[g] += oracle[:, block] @ oracle_other[:, block].T
            column += size
    assert_close(parts, expected, torch.float64)


@pytest.mark.parametrize("name", PROBLEMS)
def test_compress_gives_the_projected_rows(name: str) -> None:
    model, x = make(name)
    J, oracle = both(model, x)
    matrices = {n: s for n, s in J.shapes.items() if len(s) >= 2}
    carriers = {
        n: (
            torch.randn(s[0], 2, dtype=torch.float64),
            torch.randn(2, s[1:].numel(), dtype=torch.float64),
        )
        for n, s in matrices.items()
    }
    small = J.compress(carriers)
    expected, column = [], 0
    for parameter, shape in J.shapes.items():
        rows = oracle[:, column : column + shape.numel()]
        column += shape.numel()
        if parameter in carriers:
            left, right = carriers[parameter]
            G = rows.view(-1, shape[0], shape[1:].numel())
            expected += [(G @ right.T).flatten(1), (left.T @ G).flatten(1)]
        else:
            expected.append(rows)
    assert_close(small.matrix(), torch.cat(expected, dim=1), torch.float64)
    assert_close(small.norms(), torch.cat(expected, dim=1).norm(dim=1), torch.float64)


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_norm_bounds_are_bounds_and_tight(name: str, dtype: torch.dtype) -> None:
    model, x = make(name, dtype)
    J, _ = both(model, x)
    exact = per_sample_matrix(
        model.double(), loss_per_sample, x.double() if x.is_floating_point() else x
    ).norm(dim=1)
    # The float32 factors differ from the float64 gradient by the forward pass's own rounding;
    # a float64 run of the same factors is the vector that is summed.
    slack = 1e-5 if dtype == torch.float32 else 1e-12
    assert (J.norm_bounds() >= exact * (1 - slack)).all()
    assert (J.norm_bounds() <= exact * (1 + 3e-3) + 1e-30).all()


@settings(max_examples=60, deadline=None)
@given(
    samples=st.integers(0, 4),
    lead=st.lists(st.integers(1, 3), max_size=2),
    d_in=st.integers(1, 9),
    d_out=st.integers(1, 9),
    bias=st.booleans(),
)
def test_linear_of_any_shape(
    samples: int, lead: list[int], d_in: int, d_out: int, bias: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(d_in, d_out, bias=bias).double()
    check_everything(model, torch.randn(samples, *lead, d_in, dtype=torch.float64))


@settings(max_examples=80, deadline=None)
@given(
    dims=st.integers(1, 3),
    samples=st.integers(0, 3),
    groups=st.integers(1, 2),
    per_group=st.sampled_from([1, 2, 8]),
    outputs=st.integers(1, 3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    mode=st.sampled_from(["zeros", "reflect", "replicate", "circular"]),
    extra=st.integers(0, 2),
)
def test_convolution_of_any_geometry(
    dims: int,
    samples: int,
    groups: int,
    per_group: int,
    outputs: int,
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    mode: str,
    extra: int,
) -> None:
    torch.manual_seed(0)
    kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
    model = kind(
        groups * per_group,
        groups * outputs,
        kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        padding_mode=mode,
    ).double()
    size = dilation * (kernel - 1) + 1 + extra + padding
    if samples == 0 and mode != "zeros":
        return  # torch's own padding refuses empty batches in these modes
    x = torch.randn(samples, groups * per_group, *([size] * dims), dtype=torch.float64)
    check_everything(model, x)
    if samples:  # which of these ways is taken depends on the device and the sizes
        grad = torch.randn_like(model(x))
        weight = dict(conv_terms(model, x, grad))["weight"]
        assert isinstance(weight, Patches)
        rows = weight.rows(0, samples)
        assert_close(weight._sliding_rows(weight.x, weight.b), rows, torch.float64)
        assert_close(weight._unfolded_rows(weight.x, weight.b), rows, torch.float64)
        if groups == 1:
            G = rows.unflatten(1, (outputs, -1))
            left, right = torch.randn(outputs, 2).double(), torch.randn(2, G.shape[2]).double()
            for found in (
                weight.compress(left, right),
                weight._compressed(weight.x, weight.b, left, right),
            ):
                assert_close(found[0], G @ right.T, torch.float64)
                assert_close(found[1], left.T @ G, torch.float64)


@settings(max_examples=60, deadline=None)
@given(
    samples=st.integers(0, 4),
    lead=st.lists(st.integers(1, 4), max_size=2),
    entries=st.integers(1, 30),
    width=st.integers(1, 5),
    padding=st.booleans(),
)
def test_embedding_of_any_shape(
    samples: int, lead: list[int], entries: int, width: int, padding: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Embedding(entries, width, padding_idx=0 if padding else None).double()
    check_everything(model, torch.randint(0, entries, (samples, *lead)))


@settings(max_examples=60, deadline=None)
@given(
    samples=st.integers(1, 4),
    lead=st.lists(st.integers(1, 3), max_size=2),
    groups=st.integers(1, 3),
    per_group=st.integers(1, 3),
    size=st.integers(2, 4),
)
def test_norms_of_any_shape(
    samples: int, lead: list[int], groups: int, per_group: int, size: int
) -> None:
    torch.manual_seed(0)
    channels = groups * per_group
    image = torch.randn(samples, channels, *lead, size, dtype=torch.float64)
    sequence = torch.randn(samples, *lead, channels, size, dtype=torch.float64)
    for model, x in (
        (nn.GroupNorm(groups, channels), image),
        (nn.LayerNorm(size), sequence),
        (nn.LayerNorm((channels, size)), sequence),
        (nn.RMSNorm(size), sequence),
        (nn.InstanceNorm1d(channels, affine=True), image.flatten(2)),
    ):
        model = model.double()
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        check_everything(model, x)


def check_everything(model: nn.Module, x: Tensor) -> None:
    J, oracle = both(model, x)
    assert_close(J.matrix(), oracle, torch.float64)
    assert_close(J.norms(), oracle.norm(dim=1), torch.float64)
    weights = torch.randn(len(x), dtype=torch.float64)
    assert_close(flat(J.combine(weights)), weights @ oracle, torch.float64)
    assert_close(J.gram(J), oracle @ oracle.T, torch.float64)


def test_no_samples_and_no_terms() -> None:
    J = PerSampleGradients({"w": torch.Size((2, 3))}, {}, 0, like=torch.zeros(1))
    assert J.norms().shape == (0,)
    assert J.matrix().shape == (0, 6)
    assert torch.equal(J.combine(torch.zeros(0))["w"], torch.zeros(2, 3))
    assert J.gram(J).shape == (0, 0)


def test_scale_multiplies_everything() -> None:
    model, x = make("mlp")
    oracle = 3.0 * per_sample_matrix(model, loss_per_sample, x)
    with dpspan.Capture(model) as capture:
        capture.expect(len(x), scale=3.0)
        loss_per_sample(model, x).sum().backward()
        J = capture.collect()
    weights = torch.randn(len(x), dtype=torch.float64)
    assert_close(J.matrix(), oracle, torch.float64)
    assert_close(J.norms(), oracle.norm(dim=1), torch.float64)
    assert_close(flat(J.combine(weights)), weights @ oracle, torch.float64)
    assert_close(J.gram(J), oracle @ oracle.T, torch.float64)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        "conv1d",
        "conv1d deep, short (ghost)",
        "layer norm",
        "linear on short sequences (ghost)",
    ],
)
def test_weight_zero_keeps_a_poisoned_sample_out(name: str, bad: float) -> None:
    model, x = make(name)
    clean = flat(
        dpspan.per_sample_gradients(model, loss_per_sample, x[1:]).combine(torch.ones(len(x) - 1))
    )
    x = x.clone()
    x[0] = bad
    J = dpspan.per_sample_gradients(model, loss_per_sample, x)
    assert not torch.isfinite(J.norm_bounds()[0])
    assert torch.isfinite(J.norm_bounds()[1:]).all()
    weights = torch.ones(len(x))
    weights[0] = 0
    assert_close(flat(J.combine(weights)), clean, torch.float64)


def test_ghost_norms_bound_sequences_that_cancel() -> None:
    """Σ_t b_t ⊗ a_t nearly zero, made of large terms: float32 loses the norm, never the bound."""
    torch.manual_seed(0)
    lost = 0
    for trial in range(50):
        a = torch.randn(8, 1, 40).expand(8, 6, 40) * (1 + 10.0**-4 * torch.randn(8, 6, 1))
        b = torch.randn(8, 6, 60)
        b[:, -1] = -b[:, :-1].sum(1) + 10.0 ** (-trial / 8) * torch.randn(8, 60)
        term = Outer(a, b)
        exact = Outer(a.double(), b.double()).rows(0, 8).square().sum(1)
        squared = term.squared_norms(Arithmetic.of(a))
        errors = torch.tensor([squared[2:]], dtype=torch.float64)
        assert (bounds(squared.value[None], squared.magnitude[None], errors)[0] >= exact).all()
        lost += int((squared.value < exact).sum())
    assert lost > 50  # the plain estimate is often too small: the bound is needed


def test_errors_name_the_thing() -> None:
    model, x = make("mlp")
    J = dpspan.per_sample_gradients(model, loss_per_sample, x)
    with pytest.raises(ValueError, match=r"one weight per sample, shape \(6,\)"):
        J.combine(torch.ones(5))
    with pytest.raises(ValueError, match=r"trainable parameters, got \['nothing'\]"):
        J.select(["nothing"])
    other, _ = make("linear")
    H = dpspan.per_sample_gradients(other, loss_per_sample, x)
    with pytest.raises(ValueError, match="same parameters"):
        J.gram(H)
    with pytest.raises(ValueError, match=r"\(7, r\) and \(r, 5\) for '0.weight'"):
        J.compress({"0.weight": (torch.ones(7, 2), torch.ones(3, 5))})
    with pytest.raises(ValueError, match=r"got \['nothing'\]"):
        J.compress({"nothing": (torch.ones(7, 2), torch.ones(2, 5))})
    with pytest.raises(ValueError, match="one loss per sample"):
        dpspan.per_sample_gradients(model, lambda m, x: m(x).sum(), x)
    with pytest.raises(ValueError, match="same first dimension"):
        dpspan.per_sample_gradients(model, lambda m, x, y: m(x).sum(1), x, x[:2])
