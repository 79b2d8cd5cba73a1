"""On a GPU: the same numbers, no waiting inside a step, and bounds that hold under TF32."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpspan
from dpspan.gradients import numerics
from dpspan.gradients.layers.linear import Outer
from dpspan.gradients.operator import PerSampleGradients
from dpspan.mechanisms import Setting
from dpspan.mechanisms.noise import Noise
from dpspan.model.networks import PaperCNN, ResNet20
from helpers.oracle import per_sample_matrix
from helpers.problems import PROBLEMS, loss_per_sample, make
from helpers.residual_cases import violations
from helpers.subspaces import stepped, summed
from helpers.tails import check_tails, tails

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _plain_arithmetic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("dpspan.model.guard._RARELY", 2**40)  # checks at random steps wait
    convolutions = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    # vmap runs no backward pass of the fused attention kernels
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield
    torch.backends.cudnn.allow_tf32 = convolutions
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_default_device("cpu")


@pytest.mark.parametrize("name", PROBLEMS)
def test_operations_agree_with_the_oracle(name: str) -> None:
    model, x = make(name)
    torch.set_default_device("cuda")  # some of the models make their own positions
    model, x = model.cuda(), x.cuda()
    oracle = per_sample_matrix(model, loss_per_sample, x)
    J = dpspan.per_sample_gradients(model, loss_per_sample, x)
    weights = torch.randn(len(x), dtype=oracle.dtype)
    assert torch.allclose(J.matrix(), oracle, atol=1e-9)
    assert torch.allclose(J.norms(), oracle.norm(dim=1), rtol=1e-9)
    assert torch.allclose(J.gram(J), oracle @ oracle.T, atol=1e-8)
    combined = torch.cat([part.flatten() for part in J.combine(weights).values()])
    assert torch.allclose(combined, weights @ oracle, atol=1e-9)


@pytest.mark.parametrize("tf32", [False, True])
def test_bounds_cover_what_is_summed(tf32: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    for trial in range(40):
        a = torch.randn(8, 1, 96).expand(8, 3, 96) * (1 + 1e-3 * torch.randn(8, 3, 1))
        b = torch.randn(8, 3, 64)
        b[:, -1] = -b[:, :-1].sum(1) + 10.0 ** (-trial / 10) * torch.randn(8, 64)
        J = PerSampleGradients({"w": torch.Size((64, 96))}, {"w": [Outer(a, b)]}, 8, like=a)
        bounds = J.norm_bounds()
        for i in range(8):
            alone = torch.zeros(8)
            alone[i] = 1
            assert J.combine(alone)["w"].double().norm() <= bounds[i]


def test_a_step_never_waits_for_the_gpu() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(300, 3, 32, 32), torch.randint(0, 10, (300,))
    model = ResNet20().cuda()
    model, optimizer, loader = dpspan.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=60),
        noise_multiplier=1.0,
        max_physical_batch_size=40,
    )
    train_without_waiting(model, optimizer, loader)


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_gep_agrees_with_the_cpu(tf32: bool, groups: int) -> None:
    """The same sums from both; on a GPU kept rows are packed, and products may be in TF32."""
    x, y, public = torch.randn(20, 1, 28, 28), torch.arange(20) % 10, torch.randn(30, 1, 28, 28)
    sums = []
    torch.backends.cuda.matmul.allow_tf32 = tf32
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = PaperCNN().to(device)
        setting = Setting(model=model, criterion=nn.CrossEntropyLoss())
        method = dpspan.GEP(public=public, rank=12, groups=groups, clip=1.0, residual_clip=0.3)
        mechanism = method.bind(setting)
        batch = x.to(device), y.to(device)
        total = summed(mechanism, dpspan.per_sample_gradients(model, losses, *batch))
        released = stepped(mechanism, total, Noise(seed=0), 0.0)
        sums.append(torch.cat([v.flatten().cpu() for v in released.values()]))
    assert (sums[0] - sums[1]).norm() <= (2e-2 if tf32 else 2e-3) * sums[0].norm()


def test_a_gep_step_does_not_wait_for_the_gpu() -> None:
    data = TensorDataset(torch.randn(400, 1, 28, 28), torch.arange(400) % 10)
    model = PaperCNN().cuda()
    model, optimizer, loader = dpspan.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        data_loader=DataLoader(data, batch_size=40),
        criterion=None,
        method=dpspan.GEP(
            public=torch.randn(60, 1, 28, 28),
            public_loss=lambda model, inputs: model(inputs).logsumexp(1),
            rank=20,
            solver=dpspan.PowerIteration(),
        ),
        noise_multiplier=1.0,
    )
    train_without_waiting(model, optimizer, loader)


@pytest.mark.parametrize(
    "method",
    [
        dpspan.RGP(rank=4, clip=1.0),
        dpspan.MirrorDescent(
            public=(torch.randn(40, 3, 32, 32), torch.arange(40) % 10),
            mixing=dpspan.ConstantMixing(share=0.5),
            clip=1.0,
        ),
    ],
    ids=lambda method: type(method).__name__,
)
def test_a_step_of_other_methods_never_waits_for_the_gpu(method: Any) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(300, 3, 32, 32), torch.randint(0, 10, (300,))
    model = ResNet20().cuda()
    model, optimizer, loader = dpspan.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=60),
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=1.0,
        method=method,
    )
    train_without_waiting(model, optimizer, loader)


def losses(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def train_without_waiting(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    """An epoch in which, between batches that are checked, any wait for the GPU is an error."""
    for number, (images, labels) in enumerate(loader, start=1):
        batch = images.cuda(), labels.cuda()
        checked = number < 4 or number.bit_count() == 1  # 1, 2, 4, 8, … and the first of a shape
        checked |= len(images) in images.shape[1:]  # may be taken for the batch: looked at, too
        torch.cuda.set_sync_debug_mode("default" if checked else "error")
        try:
            nn.CrossEntropyLoss()(model(batch[0]), batch[1]).backward()
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "not kept"])
@pytest.mark.parametrize("kind", ["rows", "factors"])
@pytest.mark.parametrize("tf32", [False, True])
def test_no_residual_is_longer_than_its_bound(
    tf32: bool, kind: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kept:
        monkeypatch.setattr("dpspan.subspaces.residual._KEPT_SHARE", 0.0)
    torch.backends.cuda.matmul.allow_tf32 = tf32
    found = [violations(seed, 50, "cuda", kind) for seed in range(250)]  # 10⁵ cases in all
    assert sum(count for count, _ in found) == 0


@pytest.mark.parametrize("split", [True, False])
def test_products_are_precise_under_tf32(monkeypatch: pytest.MonkeyPatch, split: bool) -> None:
    monkeypatch.setattr(numerics, "_SPLIT_FROM", 0 if split else math.inf)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    a, b, c = torch.randn(300, 2000), torch.randn(2000, 700), torch.randn(300, 700)
    found = numerics.product(a, b), numerics.product(a, b, off=c), numerics.square_product(a)
    assert torch.backends.cuda.matmul.allow_tf32
    x, y, z = a.double(), b.double(), c.double()
    rounded = float((a @ b - x @ y).norm() / (x @ y).norm())
    for value, exact in zip(found, (x @ y, z - x @ y, x @ x.T), strict=True):
        error = float((value - exact).norm() / exact.norm())
        assert error < 2e-6
        assert rounded > 50 * error
    with numerics.ieee(a):
        assert float((a @ b - x @ y).norm() / (x @ y).norm()) < 2e-6


def test_sums_of_one_sign_are_not_rounded_down_under_tf32() -> None:
    """Tensor cores round towards zero: 37,000 terms lose 3·10⁻⁴ of their sum if added in one go."""
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    a, b = torch.rand(1000, 36_864) + 0.5, torch.rand(36_864, 2000) + 0.5
    exact, square = a.double() @ b.double(), a.double() @ a.double().T
    assert float((1 - (a @ b) / exact).mean()) > 1e-4
    assert float((1 - numerics.product(a, b) / exact).abs().max()) < 3e-5
    assert float((1 - numerics.square_product(a) / square).abs().max()) < 3e-5


def test_the_noise_of_a_gpu_has_the_tails_of_a_normal_law() -> None:
    """2·10⁹ draws, two-sided."""
    noise, like, total = Noise(seed=0), torch.empty(50_000_000, device="cuda"), 2_000_000_000
    check_tails(tails(lambda count: noise.normal(like, 1.0), total, len(like)), total)


def test_dropout_on_a_gpu_is_fresh_whatever_was_seeded() -> None:
    def mask() -> torch.Tensor:
        torch.manual_seed(0)
        torch.cuda.manual_seed_all(0)
        engine, model = dpspan.PrivacyEngine(accountant="rdp"), nn.Linear(4, 2).cuda()
        *_, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4),
            noise_multiplier=1.0,
        )
        torch.cuda.manual_seed_all(0)
        for _ in loader:
            return nn.functional.dropout(torch.ones(200, device="cuda"))
        raise AssertionError

    first = mask()
    state = torch.cuda.get_rng_state()
    assert not torch.equal(first, mask())
    assert torch.equal(torch.cuda.get_rng_state(), state)
