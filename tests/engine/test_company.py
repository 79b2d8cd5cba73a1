"""What a record counts does not depend on which others are in its batch, not even by rounding.

Each case has gradients whose terms nearly cancel, so that bounds of different forms (rows, factors,
kernels) are far apart, and a number of records at which the cheaper form changes.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import dpspan
from dpspan.engine.private_step import PrivateRun
from dpspan.support.errors import CaptureError

ROUNDING = 1e-3  # of C


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """The sums of each step, as they are before the noise."""
    found: list[dict[str, Tensor]] = []
    release = PrivateRun._release

    def spied(self: PrivateRun, total: dict[str, Tensor]) -> Any:
        found.append({name: value.double().clone() for name, value in total.items()})
        return release(self, total)

    monkeypatch.setattr(PrivateRun, "_release", spied)
    return found


def step(model: nn.Module, x: Tensor, loss: Any, **options: Any) -> None:
    """One step of all records, with next to no noise."""
    engine = dpspan.PrivacyEngine(accountant="rdp")
    given: dict[str, Any] = {"method": dpspan.DPSGD(clip=1.0), "loss_reduction": "sum", **options}
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(x), batch_size=60),
        noise_multiplier=1e-6,
        sample_rate=1.0,
        expected_batch_size=60.0,
        **given,
    )
    for (inputs,) in loader:
        loss(model(inputs)).backward()
        optimizer.step()
        break


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> float:
    return float(sum((after[n] - before[n]).square().sum() for n in before) ** 0.5)


def alternating(size: int, rest: float) -> Tensor:
    """Signs that add up to `rest`."""
    signs = torch.ones(size, size)
    signs.view(-1)[1::2] = -1
    signs.view(-1)[0] += rest
    return signs


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rows_of_a_convolution_are_kept_by_public_numbers(released: list[Any]) -> None:
    """Of 4,608 weights 455 rows are 8 MiB, which is what a CPU keeps."""
    big = 100.0
    signs = alternating(6, 1 / (big * (16 * 9 * 32) ** 0.5))  # gradients about 1 long
    for records in (455, 456):
        torch.manual_seed(0)
        model, x = nn.Conv2d(16, 32, 3, bias=False), torch.full((records, 16, 8, 8), big)
        step(model, x, lambda outputs: (outputs * signs).sum())
    assert moved(*released) < 1 + ROUNDING


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_inner_products_take_a_form_by_public_numbers(released: list[Any]) -> None:
    """GEP's residual has another bound by kernels, which were cheaper up to 60 records."""
    draw = torch.Generator().manual_seed(0)
    base = torch.linalg.qr(torch.randn(16, 16, generator=draw))[0]
    weights = nn.functional.normalize(torch.randn(2, 80, generator=draw))
    public = (torch.randn(30, 4, generator=draw) @ base[:4]).view(30, 2, 8)

    def losses(outputs: Tensor) -> Tensor:
        return (outputs * weights).sum((1, 2))

    method = dpspan.GEP(
        public=public,
        rank=4,
        clip=1.0,
        residual_clip=1.0,
        public_loss=lambda model, x: losses(model(x)),
    )
    for records in range(57, 64):
        torch.manual_seed(0)
        x = (1e4 * base[0] + 0.99 * base[7]).view(1, 2, 8).repeat(records, 1, 1)
        model = nn.Linear(8, 80, bias=False)
        step(model, x, lambda outputs: losses(outputs).sum(), method=method)
    for before, after in pairwise(released):
        assert moved(before, after) < 2**0.5 + ROUNDING  # both parts by one clip each


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("width", [40, 400])  # rows, and factors
def test_a_large_unit_of_zero_gradient_moves_nobody(released: list[Any], width: int) -> None:
    direction = nn.functional.normalize(torch.ones(width), dim=0)
    big = 100.0
    outputs = torch.tensor([1.0, -1.0, 1.0, -1.0 + 0.99 / big])[:, None] * direction
    x = (big * direction).expand(50, 4, width)
    for more in (0, 16):
        torch.manual_seed(0)
        step(
            nn.Linear(width, width, bias=False),
            torch.cat([x, torch.zeros(more, 4, width)]),
            lambda found: (found * outputs).sum((1, 2)).mean(),
            unit=[*range(50), *[50] * more],
            loss_reduction="mean",
        )
    assert moved(*released) < 0.01  # 1/n is rounded, and what nearly cancels shows it


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_finite_does_not_depend_on_the_size_of_a_mean(released: list[Any]) -> None:
    """A mean over 11 shows gradients of which a mean over 10 shows infinities."""
    for size in torch.logspace(18.5, 20.5, 41).tolist():
        released.clear()
        for records in (10, 11):
            model, x = nn.Linear(4, 2, bias=False), torch.zeros(records, 4)
            nn.init.zeros_(model.weight)
            x[:, 0] = size
            step(model, x, lambda outputs: outputs[:, 0].mean(), loss_reduction="mean")
        assert moved(*released) < 1 + ROUNDING, size


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("how", ["bf16", "fp16", "autocast", "loss inside"])
def test_a_mean_in_half_precision_is_not_rounded_for_all_alike(
    released: list[Any], how: str
) -> None:
    """1/n in half precision is off by up to 2⁻⁹, in the gradients of all n records alike."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(how, torch.float32)
    base = 0.1 * torch.randn(1, 8, generator=torch.Generator().manual_seed(3))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4, dtype=dtype)
            self.criterion = nn.CrossEntropyLoss()

        def forward(self, x: Tensor) -> Any:
            outputs = self.layer(x)
            return self.loss(outputs.float()) if how == "loss inside" else outputs

        def loss(self, outputs: Tensor) -> Tensor:
            return self.criterion(outputs, torch.zeros(len(outputs)).long())

    def loss(outputs: Tensor) -> Tensor:
        return outputs if how == "loss inside" else model.loss(outputs)

    for records in range(1024, 1032):
        model = Model()
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        with torch.autocast("cpu", torch.bfloat16, enabled=how in ("autocast", "loss inside")):
            step(model, base.expand(records, 8).to(dtype), loss, loss_reduction="mean")
    assert max(moved(*pair) for pair in pairwise(released)) < 1 + 0.01


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_mean_in_half_precision_comes_by_way_of_the_outputs() -> None:
    class Parts(nn.Sequential):
        pass

    model = Parts(nn.Linear(4, 3), nn.Linear(3, 2)).bfloat16()
    with pytest.raises(CaptureError, match="used outside of a call of the model itself"):
        step(
            model,
            torch.randn(9, 4).bfloat16(),
            lambda _: model[1](model[0](torch.ones(9, 4).bfloat16())).mean(),
            loss_reduction="mean",
        )


class Halves(nn.Module):
    """Runs in half precision in several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(8, 8), nn.Linear(8, 8), how
        if how == "frozen part":
            self.last.bfloat16().requires_grad_(False)

    def forward(self, x: Tensor, *, again: bool = False) -> Any:
        if self.how == "calls itself" and not again:
            return self(x, again=True)
        x = self.first(x)
        if self.how == "checkpoint":
            return checkpoint(self.last, x, use_reentrant=True)
        found = self.last(x.to(self.last.weight.dtype)).float()
        return found.log_softmax(1) if self.how == "in place" else found


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("how", ["checkpoint", "frozen part", "calls itself", "in place"])
def test_half_precision_inside_of_a_model_scales_a_mean_once(released: list[Any], how: str) -> None:
    def loss(outputs: Tensor) -> Tensor:
        in_place = how == "in place" and len(outputs) > 1
        changed = outputs.mul_(2.0) if in_place else outputs * 2
        return changed.float().square().sum(1).mean()

    x = torch.randn(1, 8, generator=torch.Generator().manual_seed(3))
    method, lengths = dpspan.DPSGD(clip=1e6), []
    for records, reduction in (8, "mean"), (9, "mean"), (1, "sum"):
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=how != "frozen part"):
            given: Any = {"loss_reduction": reduction, "method": method}
            step(
                Halves(how),
                x.repeat(records, 1),
                loss,
                **given,
            )
        total = sum(float(v.square().sum()) for v in released[-1].values())
        lengths.append(total**0.5 / records)
    assert lengths == pytest.approx([lengths[-1]] * 3, rel=1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("how", ["given its outputs", "given of a layer", "mixed", "mixed again"])
def test_gradients_that_would_be_multiplied_twice_or_never_are_refused(how: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    half = partial(torch.autocast, "cpu", torch.bfloat16)

    def loss(outputs: Tensor) -> Tensor:
        x = torch.ones(len(outputs), 8)
        x = {"given its outputs": outputs, "given of a layer": model[0](x)}.get(how, x)
        with half(enabled=how != "mixed"):
            return (outputs.float() + model(x).float()).square().mean()

    refused = pytest.raises(CaptureError, match="all calls of the model for a batch")
    with refused, half(enabled=how != "mixed again"):
        step(model, torch.randn(9, 8), loss, loss_reduction="mean")
