"""accelerate's loop, private: the same loop, the same training without noise."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import dpspan
from dpspan.mechanisms.noise import Noise
from helpers.needs import extra
from helpers.training import N, data, network, weights

accelerate: Any = extra("accelerate")

from dpspan.frameworks.accelerate import Privacy, prepare  # noqa: E402

PRIVACY = Privacy(epsilon=8.0, delta=1e-3, accountant="rdp", method=dpspan.DPSGD(clip=1e6))
CRITERION = nn.CrossEntropyLoss()


@pytest.fixture
def noiseless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Noise, "normal", lambda _, like, std: torch.zeros_like(like).double())


@pytest.fixture(autouse=True)
def _one_accelerator_a_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """accelerate keeps its state for the process; transformers 4 sets its variables."""
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    forget()
    yield
    forget()


def forget() -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def parts(batch: int = N) -> tuple[Any, ...]:
    model = network().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    records = [(x.double(), y) for x, y in data()]
    return model, optimizer, DataLoader(records, batch_size=batch), scheduler


def train(accelerator: Any, ready: Any, epochs: int) -> Tensor:
    model, optimizer, loader, scheduler = ready
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(CRITERION(model(x), y))
                optimizer.step()
                scheduler.step()
    return weights(model)


def private(folder: Path, batch: int = N, epochs: int = 3, **options: Any) -> tuple[Any, Any]:
    accelerator = accelerate.Accelerator(cpu=True, project_dir=str(folder))
    ready = prepare(accelerator, *parts(batch), privacy=PRIVACY, epochs=epochs, **options)
    return accelerator, ready


@pytest.mark.usefixtures("noiseless")
@pytest.mark.parametrize("physical", [None, 7])
def test_all_records_without_noise_and_clip_are_the_plain_loop(
    tmp_path: Path, physical: int | None
) -> None:
    plain = accelerate.Accelerator(cpu=True)
    expected = train(plain, plain.prepare(*parts()), 3)
    accelerator, ready = private(tmp_path, physical=physical)
    found = train(accelerator, ready, 3)
    loader, scheduler = ready[2:]
    assert len(loader) == 1
    assert loader.engine.ledger.steps == 3
    assert scheduler.get_last_lr() == [0.5**4]  # a step a batch, whatever its pieces
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("noiseless")
def test_a_saved_run_goes_on(tmp_path: Path) -> None:
    accelerator, ready = private(tmp_path / "whole")
    expected = train(accelerator, ready, 3)
    accelerator, ready = private(tmp_path / "part")
    train(accelerator, ready, 2)
    before = torch.get_rng_state()
    accelerator.save_state(str(tmp_path / "part" / "saved"))
    path = tmp_path / "part" / "saved" / "random_states_0.pkl"
    saved = torch.load(path, weights_only=False)["torch_manual_seed"]
    assert not torch.equal(saved, before)
    train(accelerator, ready, 1)  # which the saved state does not have
    with pytest.raises(RuntimeError, match="resume_from"):
        accelerator.load_state(str(tmp_path / "part" / "saved"))
    ready[2].close()
    with pytest.raises(ValueError, match="tells of a private run"):
        private(tmp_path / "part")
    accelerator, ready = private(tmp_path / "part", resume_from=tmp_path / "part" / "saved")
    assert ready[2].engine.ledger.steps == 3  # one of them was lost
    assert ready[3].get_last_lr() == [0.5**3]
    before = weights(ready[0]).clone()
    with pytest.warns(UserWarning, match="the budget is spent"):
        train(accelerator, ready, 1)
    torch.testing.assert_close(weights(ready[0]), before, rtol=0, atol=0)
    assert json.loads((tmp_path / "part" / "ledger.json").read_text())["steps"] == 3
    ready[2].engine.ledger.budget = None
    train(accelerator, ready, 1)
    torch.testing.assert_close(weights(ready[0]), expected, rtol=1e-9, atol=1e-12)


def test_an_epoch_that_the_budget_ends_gives_random_numbers_back(tmp_path: Path) -> None:
    accelerator, ready = private(tmp_path, batch=10, epochs=1)
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    ready[2].engine.ledger.budget = dpspan.Budget(epsilon=5.0, delta=1e-3)
    with pytest.warns(UserWarning, match="the budget is spent"):
        train(accelerator, ready, 1)
    assert 0 < ready[2].engine.ledger.steps < 4
    assert torch.equal(torch.rand(1), expected)


def test_what_cannot_be_private_is_refused(tmp_path: Path) -> None:
    folder = str(tmp_path)

    def refused(message: str, **options: Any) -> None:
        accelerator = accelerate.Accelerator(cpu=True, **{"project_dir": folder, **options})
        with pytest.raises(ValueError, match=message):
            prepare(accelerator, *parts(), privacy=PRIVACY, epochs=1)

    refused("give the Accelerator a project_dir", project_dir=None)
    refused("`physical` what fits", gradient_accumulation_steps=2)
    accelerator = accelerate.Accelerator(cpu=True, project_dir=folder)
    model, optimizer, loader, _ = parts()
    with pytest.raises(ValueError, match="prepared already"):
        prepare(
            accelerator, model, accelerator.prepare(optimizer), loader, privacy=PRIVACY, epochs=1
        )
    accelerator, _ = private(tmp_path)
    with pytest.raises(RuntimeError, match="leave clip_grad_norm_"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)


def test_bfloat16_trains_and_float16_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = accelerate.Accelerator(
        cpu=True, project_dir=str(tmp_path), mixed_precision="bf16"
    )
    seen = []
    ready = prepare(accelerator, *parts(), privacy=PRIVACY, epochs=1)
    ready[0].register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    ready[0][0].register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    train(accelerator, ready, 1)
    assert True in seen
    assert ready[2].engine.ledger.steps == 1
    monkeypatch.setattr(type(accelerator), "mixed_precision", "fp16")
    with pytest.raises(ValueError, match="mixed_precision='bf16'"):
        prepare(accelerator, *parts(), privacy=PRIVACY, epochs=1)


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = accelerate.Accelerator(cpu=True, project_dir=str(tmp_path))
    several = accelerate.utils.DistributedType.MULTI_CPU
    monkeypatch.setattr(type(accelerator), "distributed_type", several)
    with pytest.raises(ValueError, match="several processes"):
        prepare(accelerator, *parts(), privacy=PRIVACY, epochs=1)


def test_made_private_before_by_the_engine_itself(tmp_path: Path) -> None:
    """Also without `dpspan.frameworks`; batches then stay where the loader puts them."""
    model, optimizer, loader, _ = parts(10)
    engine = dpspan.PrivacyEngine()
    made = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0
    )
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*made)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    train(accelerator, (model, optimizer, loader, scheduler), 1)
    assert engine.ledger.steps == 4
