"""Kernels of our own against torch in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import dpspan
from dpspan.gradients.layers import conv_terms
from dpspan.gradients.layers.conv import Patches
from dpspan.gradients.layers.terms import Rows, weighted_sum

pytestmark = pytest.mark.gpu

CONVOLUTIONS = {
    "plain": (nn.Conv2d(5, 7, 3), (9, 11)),
    "padded": (nn.Conv2d(16, 64, 3, padding=1), (32, 32)),
    "stride": (nn.Conv2d(33, 130, 3, stride=2, padding=1), (16, 16)),
    "dilation": (nn.Conv2d(8, 16, (3, 2), dilation=(2, 3), padding=(1, 2)), (12, 10)),
    "one by one": (nn.Conv2d(64, 128, 1, stride=2), (8, 8)),
    "wide": (nn.Conv2d(128, 256, 3, padding=1), (8, 8)),
    "reflected": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (7, 7)),
    "one dimension": (nn.Conv1d(6, 20, 5, padding=2), (40,)),
    "three dimensions": (nn.Conv3d(3, 9, 3, padding=1), (6, 5, 7)),
    "groups": (nn.Conv2d(8, 16, 3, groups=2), (9, 9)),
}


@pytest.fixture(autouse=True)
def _tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def term(name: str, n: int = 37) -> Patches:
    module, size = CONVOLUTIONS[name]
    torch.manual_seed(0)
    module = module.cuda()
    x = torch.randn(n, module.in_channels, *size, device="cuda")
    grad = torch.randn_like(module(x))
    found = dict(conv_terms(module, x, grad))["weight"]
    assert isinstance(found, Patches)
    return found


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_rows_of_convolutions(name: str) -> None:
    patches = term(name)
    kept = patches.compact(patches.samples)
    assert isinstance(kept, Rows)
    exact = patches.double().rows(0, patches.samples)
    error = (kept.values.double() - exact).norm(dim=1)
    assert (error < 2.0**-9 * patches.magnitudes().sqrt()).all()
    assert error.norm() < 2e-3 * exact.norm()
    assert not torch.equal(kept.values, exact.float())  # TF32 is what was asked for


@pytest.mark.parametrize("name", [name for name in CONVOLUTIONS if name != "groups"])
def test_images_of_convolutions_in_carriers(name: str) -> None:
    patches = term(name)
    d_out, d_in = patches.weight[0], patches.weight[1:].numel()
    left = torch.randn(d_out, 3, device="cuda")
    right = torch.randn(3, d_in, device="cuda")
    found = patches.compress(left, right)
    exact = patches.double().compress(left.double(), right.double())
    for one, other in zip(found, exact, strict=True):
        assert (one.double() - other).norm() < 3e-3 * other.norm()


def test_a_sample_that_is_not_finite_stays_alone() -> None:
    patches = term("padded")
    x = patches.x.clone()
    x[3, 2, 5, 5] = torch.nan
    kept, clean = (replace(patches, x=each).compact(patches.samples) for each in (x, patches.x))
    assert isinstance(kept, Rows)
    assert isinstance(clean, Rows)
    others = [i for i in range(patches.samples) if i != 3]
    assert torch.equal(kept.values[others], clean.values[others])
    assert kept.values[3].isnan().any()


def sums(rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    used = weights != 0
    exact = weights[used].double() @ rows[used].double()
    return weighted_sum(rows, weights, ~used), exact


@pytest.mark.parametrize(("n", "width"), [(1, 1), (5, 130), (300, 4097), (1000, 64)])
def test_weighted_sums_leave_out_rows_of_weight_zero(n: int, width: int) -> None:
    torch.manual_seed(0)
    rows = torch.randn(n, width, device="cuda")
    weights = torch.rand(n, device="cuda") + 0.5
    weights[1::3] = 0.0
    rows[1::3] = torch.nan
    rows[4::6] = torch.inf
    weights[4::6] = 0.0
    found, exact = sums(rows, weights)
    assert torch.allclose(found.double(), exact, atol=1e-5 * n**0.5)


def test_weighted_sums_of_part_of_a_matrix() -> None:
    whole = torch.randn(50, 300, device="cuda")
    found, exact = sums(whole[:, 7:133], torch.rand(50, device="cuda"))
    assert torch.allclose(found.double(), exact, atol=1e-4)


def test_a_sum_is_no_longer_than_its_bound() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3)).cuda()
    x = torch.randn(20, 3, 16, 16, device="cuda")
    J = dpspan.per_sample_gradients(model, lambda m, x: m(x).sin().flatten(1).sum(1), x)
    bounds = J.norm_bounds()
    for i in range(20):
        alone = torch.zeros(20, device="cuda")
        alone[i] = 1
        total = torch.cat([part.flatten() for part in J.combine(alone).values()])
        assert total.double().norm() <= bounds[i]
        assert total.double().norm() >= 0.99 * bounds[i]
