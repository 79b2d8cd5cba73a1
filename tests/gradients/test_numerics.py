"""The precision in use is noticed, and the bounds follow it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dpspan.gradients.layers.linear import Outer, ghost_norms
from dpspan.gradients.numerics import Arithmetic, bounds, plain_arithmetic, squared_norms
from dpspan.gradients.operator import PerSampleGradients


@pytest.fixture(autouse=True)
def _default_precision() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("setting", "rounding"), [("highest", 0.0), ("high", 2.0**-11), ("medium", 2.0**-8)]
)
def test_reduced_precision_is_noticed(setting: str, rounding: float) -> None:
    torch.set_float32_matmul_precision(setting)
    assert Arithmetic.of(torch.zeros(1)).factor == rounding
    assert Arithmetic.of(torch.zeros(1, dtype=torch.float64)).factor == 0.0


def test_bounds_grow_with_the_rounding_in_use() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(4, 3, 20), torch.randn(4, 3, 30)
    bounds = []
    for setting in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(setting)
        J = PerSampleGradients({"w": torch.Size((30, 20))}, {"w": [Outer(a, b)]}, 4, like=a)
        bounds.append(J.norm_bounds())
    assert (bounds[0] < bounds[1]).all()
    assert (bounds[1] < bounds[2]).all()
    exactly = Outer(a.double(), b.double()).rows(0, 4).norm(dim=1)
    assert (bounds[0] < exactly * 1.002).all()


@pytest.mark.parametrize("size", [1, 255, 256, 257, 10_000])
def test_squared_norms_keep_their_error_bound(size: int) -> None:
    torch.manual_seed(size)
    rows = torch.randn(3, size) * torch.logspace(-3, 3, size)
    expected = rows.double().square().sum(1)
    error = ((squared_norms(rows) - expected).abs() / expected).max()
    assert float(error) <= Arithmetic.of(rows).norm


def test_exact_switches_autograd_and_autocast_off() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        with plain_arithmetic():
            product = x @ x
        assert product.dtype == torch.float32
        assert not product.requires_grad
        assert (x @ x).dtype == torch.bfloat16


@pytest.mark.parametrize("steps", [1, 3])
def test_ghost_norms_of_several_layers_bound_each_of_them(steps: int) -> None:
    """Layers too large to be packed as rows, of different widths, all at once."""
    g = torch.Generator().manual_seed(0)
    widths = ((40, 30), (700, 20), (40, 30))
    terms = [
        Outer(torch.randn(5, steps, a, generator=g), torch.randn(5, steps, b, generator=g))
        for a, b in widths
    ]
    for term, found in zip(terms, ghost_norms(terms, Arithmetic.of(terms[0].a)), strict=True):
        exact = term.double().rows(0, 5).square().sum(1)
        assert torch.allclose(found.value, exact, rtol=1e-4)
        bound = bounds(
            found.value[None],
            found.magnitude[None],
            torch.tensor([found[2:]], dtype=torch.float64),
        )[0]
        assert (bound >= exact).all()
