"""A method from outside the library, as docs/design.md tells to write one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpspan
from dpspan.gradients.operator import PerSampleGradients
from dpspan.mechanisms.base import Setting
from dpspan.mechanisms.noise import Noise

PAGE = Path(__file__).parents[2] / "docs" / "design.md"


@pytest.fixture(scope="module")
def smoothed() -> Iterator[Any]:
    recipe = PAGE.read_text().split("### A method")[1].split("```python\n")[1].split("```")[0]
    module: Any = ModuleType("outside")
    sys.modules["outside"] = module  # where dataclasses look for it
    exec(compile(recipe, str(PAGE), "exec"), vars(module))
    yield module.SmoothedDPSGD
    del sys.modules["outside"]


def gradients(model: nn.Module, x: torch.Tensor) -> PerSampleGradients:
    return dpspan.per_sample_gradients(model, lambda m, x: m(x).square().sum(1), x)


def test_its_steps_are_averages_of_what_dpsgd_releases(smoothed: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    mechanism = smoothed(clip=0.5, memory=0.75).bind(Setting(model=model))
    plain = dpspan.DPSGD(clip=0.5).bind(Setting(model=model))
    noise, plain_noise = Noise(1), Noise(1)
    average = None
    for _ in range(3):
        J = gradients(model, torch.randn(6, 4).double())
        mechanism.prepare()
        found = mechanism.gradient(mechanism.release(mechanism.clipped_sum(J), noise, 1.3))
        released = plain.release(plain.clipped_sum(J), plain_noise, 1.3)["weight"]
        average = released if average is None else 0.75 * average + 0.25 * released
        assert torch.allclose(found["weight"], average, atol=1e-12)


def test_it_trains_in_the_engine_and_resumes(smoothed: Any, tmp_path: Path) -> None:
    x = torch.randn(40, 4)
    y = (x[:, 0] > 0).long()

    def made() -> Any:
        torch.manual_seed(1)
        model, engine = nn.Linear(4, 2), dpspan.PrivacyEngine(accountant="rdp", debug_seed=3)
        return engine, *engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=8),
            noise_multiplier=1.0,
            method=smoothed(),
            max_grad_norm=2.0,
        )

    engine, model, optimizer, loader = made()
    for a, b in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(a), b).backward()
        optimizer.step()
    assert engine.ledger.steps == 5
    training = engine.certificate(delta=1e-5)["training"]
    assert (training["method"], training["clip"], training["memory"]) == ("SmoothedDPSGD", 2.0, 0.9)
    engine.save_checkpoint(tmp_path / "run.ckpt", module=model, optimizer=optimizer)
    other, again, optimizer, _ = made()
    other.load_checkpoint(tmp_path / "run.ckpt", module=again, optimizer=optimizer)
    mine, theirs = (e._running().mechanism.state_dict()["average"] for e in (engine, other))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
