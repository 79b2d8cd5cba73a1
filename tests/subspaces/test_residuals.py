"""No residual is summed as longer than its bound, over very many hard ones."""

from __future__ import annotations

import pytest
import torch

from dpspan.gradients import numerics
from dpspan.subspaces import residual
from helpers.residual_cases import violations


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "not kept"])
@pytest.mark.parametrize("kind", ["rows", "factors"])
def test_no_residual_is_longer_than_its_bound(
    kind: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kept:
        monkeypatch.setattr(residual, "_KEPT_BYTES", 0)
    found = [violations(seed, 20, "cpu", kind) for seed in range(20)]
    assert sum(count for count, _ in found) == 0
    assert max(worst for _, worst in found) > 0.99  # and the bounds are reached


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "not kept"])
@pytest.mark.parametrize("kind", ["rows", "factors"])
def test_a_hundred_thousand_residuals(
    kind: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kept:
        monkeypatch.setattr(residual, "_KEPT_BYTES", 0)
    found = [violations(seed, 50, "cpu", kind) for seed in range(500)]
    assert sum(count for count, _ in found) == 0


def test_the_fuzz_finds_a_bound_that_is_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound of the exact norm alone, without what rounding adds, is exceeded."""
    monkeypatch.setattr(residual, "_KEPT_BYTES", 0)
    monkeypatch.setattr(residual, "_CANCELLATION", 0.0)
    monkeypatch.setattr(numerics.Arithmetic, "product", lambda self, terms: 0.0)
    monkeypatch.setattr(numerics.Arithmetic, "norm", 0.0)
    monkeypatch.setattr(numerics.Arithmetic, "summand", 0.0)
    assert sum(violations(seed, 20, "cpu", "rows")[0] for seed in range(20)) > 0


@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_products_are_precise_whatever_torch_is_set_to(setting: str) -> None:
    g = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(*size, generator=g) for size in ((30, 500), (500, 20), (30, 20)))

    def set_to() -> tuple[str, str | None]:  # torch 2.6 has but one setting
        backend = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
        return torch.get_float32_matmul_precision(), backend

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        settings = set_to()
        found = numerics.product(a, b), numerics.product(a, b, off=c), numerics.square_product(a)
        after = set_to()
    finally:
        torch.set_float32_matmul_precision(before)
    assert settings == after
    x, y, z = a.double(), b.double(), c.double()
    for value, exact in zip(found, (x @ y, z - x @ y, x @ x.T), strict=True):
        # Against the longest dot product: 502 units of rounding at the very most.
        assert float((value - exact).abs().max()) <= 502 * 2.0**-24 * 500


@pytest.mark.parametrize("together", [1, 3, 100])
def test_products_of_halves_are_as_precise(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    """The way that a GPU takes under TF32, in blocks of terms; here its factors are not rounded."""
    monkeypatch.setattr(numerics, "_splits", lambda x, arithmetic: True)
    monkeypatch.setattr(numerics, "_EXACT_TERMS", 64)
    monkeypatch.setattr(numerics, "_SPLIT_FROM", 0)
    monkeypatch.setattr(numerics, "_PRODUCTS", together * 900)  # blocks of the largest product
    g = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(*size, generator=g) for size in ((30, 500), (500, 20), (30, 20)))
    x, y, z = a.double(), b.double(), c.double()
    found = numerics.product(a, b), numerics.product(a, b, off=c), numerics.square_product(a)
    for value, exact in zip(found, (x @ y, z - x @ y, x @ x.T), strict=True):
        assert float((value - exact).norm() / exact.norm()) < 2e-6


def test_halves_add_up_and_the_first_is_a_tf32_number() -> None:
    x = (
        torch.randn(1000, generator=torch.Generator().manual_seed(0))
        * 10.0 ** torch.arange(-30, 30).repeat(17)[:1000]
    )
    high, low = numerics._halves(x)
    assert torch.equal(high + low, x)
    assert not (high.view(torch.int32) & 0x1FFF).any()
    assert (low.abs() <= 2.0**-10 * x.abs()).all()
    for bad in (float("nan"), float("inf"), -float("inf")):
        assert not torch.isfinite(sum(numerics._halves(torch.tensor([bad]))))
