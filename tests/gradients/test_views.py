"""Several augmented views of each record: their mean gradient is what is clipped."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpspan import DPSGD, RGP, Capture, CaptureError, PrivacyEngine, UnsupportedModule
from dpspan.accounting.events import step_event
from helpers.oracle import per_sample_matrix
from helpers.problems import PROBLEMS, loss_per_sample, make

VIEWS = 3


@pytest.mark.parametrize("name", PROBLEMS)
def test_views_of_a_record_add_up(name: str) -> None:
    """For every layer: the rows of a record's views, one after the other, summed."""
    model, x = make(name)
    n = len(x) // 2
    x = x[: 2 * n]
    expected = per_sample_matrix(model, loss_per_sample, x).unflatten(0, (n, 2)).sum(1)
    with Capture(model) as capture:
        capture.expect(n, views=2)
        loss_per_sample(model, x).sum().backward()
        J = capture.collect()
    assert J.samples == n
    assert torch.allclose(J.matrix(), expected, atol=1e-9)
    assert torch.allclose(J.norms(), expected.norm(dim=1), rtol=1e-9)
    assert bool((J.norm_bounds() >= expected.norm(dim=1) * (1 - 1e-12)).all())
    weights = torch.randn(n, dtype=expected.dtype)
    combined = torch.cat([part.flatten() for part in J.combine(weights).values()])
    assert torch.allclose(combined, weights @ expected, atol=1e-9)


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("views", [1, 2])
def test_records_of_a_unit_are_averaged(name: str, views: int) -> None:
    """For every layer: units of other numbers of records, whose gradients' mean is the row."""
    model, x = make(name)
    records = len(x) // views
    if not records:
        pytest.skip("a problem of one row has no two views")
    x, counts = x[: records * views], (records - records // 2 - 1, 1, records // 2)
    counts = tuple(count for count in counts if count > 0)
    alone = per_sample_matrix(model, loss_per_sample, x).unflatten(0, (records, views)).sum(1)
    expected = torch.stack([part.mean(0) for part in alone.split(counts)])
    with Capture(model) as capture:
        capture.expect(records, views=views, units=counts)
        loss_per_sample(model, x).sum().backward()
        J = capture.collect()
    assert J.samples == len(counts)
    assert torch.allclose(J.matrix(), expected, atol=1e-9)
    assert torch.allclose(J.norms(), expected.norm(dim=1), rtol=1e-9)
    assert bool((J.norm_bounds() >= expected.norm(dim=1) * (1 - 1e-12)).all())
    weights = torch.randn(len(counts), dtype=expected.dtype)
    combined = torch.cat([part.flatten() for part in J.combine(weights).values()])
    assert torch.allclose(combined, weights @ expected, atol=1e-9)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 25, 3)
    )


def records(n: int = 12) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(n, VIEWS, 1, 5, 5, generator=g), torch.arange(n) % 3


def run(
    model: nn.Module, x: Tensor, y: Tensor, *, views: int = VIEWS, **changes: Any
) -> tuple[PrivacyEngine, Any]:
    engine = PrivacyEngine(debug_seed=0)
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
        criterion=nn.CrossEntropyLoss(),
        views=views,
        **{"noise_multiplier": 1e-9, "sample_rate": 1.0, "method": DPSGD(clip=0.05), **changes},
    )
    criterion = nn.CrossEntropyLoss()
    for batch, labels in itertools.islice(loader, changes.get("max_physical_batch_size") and 3):
        optimizer.zero_grad()
        criterion(model(batch.flatten(0, 1)), labels.repeat_interleave(VIEWS)).backward()
        optimizer.step()
    return engine, model


def clipped_mean(model: nn.Module, x: Tensor, y: Tensor, clip: float) -> Tensor:
    """One record at a time: the mean gradient of its views, clipped."""
    total = torch.zeros(sum(p.numel() for p in model.parameters()))
    for views, label in zip(x, y, strict=True):
        loss = nn.functional.cross_entropy(model(views), label.repeat(VIEWS))
        parts = torch.autograd.grad(loss, list(model.parameters()))
        gradient = torch.cat([part.flatten() for part in parts])
        total += gradient * min(1.0, clip / float(gradient.norm()))
    return total / len(x)


@pytest.mark.parametrize("physical", [None, 5])
def test_a_step_is_that_of_the_clipped_means(physical: int | None) -> None:
    x, y = records()
    expected = clipped_mean(network(), x, y, 0.05)
    model = network()
    before = nn.utils.parameters_to_vector(model.parameters())
    run(model, x, y, max_physical_batch_size=physical)
    moved = before - nn.utils.parameters_to_vector(model.parameters())
    assert torch.allclose(moved, expected, rtol=1e-4, atol=1e-7)


def test_one_record_with_huge_views_moves_the_sum_by_the_clip() -> None:
    x, y = records()
    huge = x.clone()
    huge[0] *= 1e6
    huge[1, 0] = torch.nan
    steps = []
    for data in (x, huge):
        model = network()
        before = nn.utils.parameters_to_vector(model.parameters())
        run(model, data, y)
        steps.append(before - nn.utils.parameters_to_vector(model.parameters()))
    assert torch.isfinite(steps[1]).all()
    assert float((steps[0] - steps[1]).detach().norm()) <= (2 * 0.05 + 0.05) / len(x) * 1.001


def test_other_methods_and_empty_batches() -> None:
    x, y = records()
    method = RGP(rank=1, clip=0.05)
    engine, model = run(network(), x, y, method=method, noise_multiplier=1.0, sample_rate=0.01)
    assert engine.ledger.steps == 100
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert engine.certificate(1e-5)["training"]["views"] == VIEWS


def test_epsilon_does_not_depend_on_views() -> None:
    x, y = records()
    plain = PrivacyEngine()
    plain.ledger.charge(step_event(1.0, 0.5), 2)
    engine, _ = run(network(), x, y, noise_multiplier=1.0, sample_rate=0.5)
    assert engine.get_epsilon(1e-5) == plain.get_epsilon(1e-5)


def test_a_batch_without_its_views_is_an_error() -> None:
    x, y = records()
    with pytest.raises(CaptureError, match="saw 36 samples, the batch has 24"):
        run(network(), x, y, views=2)
    with pytest.raises(ValueError, match="views"):
        run(network(), x, y, views=0)


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x - x.mean(0))


def test_a_model_that_mixes_records_is_found() -> None:
    with pytest.raises(UnsupportedModule, match="mixes samples"):
        run(Mixing(), *records())
