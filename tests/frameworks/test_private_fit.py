"""What frameworks share: what is missing is named, and numbers say by their names what they are."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from dpspan.frameworks.private_fit import Privacy, PrivateFit
from helpers.training import N, data, network


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("transformers", "transformers"),
        ("transformers", "accelerate"),
        ("accelerate", "accelerate"),
        ("lightning", "pytorch_lightning"),
    ],
)
def test_the_extra_is_named(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"dpspan.frameworks.{name}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'dpspan\[{name}\]'"):
        importlib.import_module(f"dpspan.frameworks.{name}")


def test_names_of_numbers() -> None:
    quiet = Privacy(epsilon=1.0, delta=1e-5)
    open_ = Privacy(epsilon=1.0, delta=1e-5, eval_is_public=True, unprivate_metrics=True)
    for privacy in (quiet, open_):
        assert privacy.logged_as("learning_rate", evaluating=False) == "learning_rate"
    assert quiet.logged_as("loss", evaluating=False) is None
    assert quiet.logged_as("loss", evaluating=True) == "unprivate_loss"
    assert open_.logged_as("loss", evaluating=False) == "unprivate_loss"
    assert open_.logged_as("loss", evaluating=True) == "loss"


def fit(folder: Path, **changes: Any) -> PrivateFit:
    model = network()
    given = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": DataLoader(data(), batch_size=10),
        "physical": 4,
        "steps": lambda in_an_epoch: 2 * in_an_epoch,
    }
    promise = {"epsilon": 3.0, "delta": 1e-4, "accountant": "rdp"}
    return PrivateFit.begun(Privacy(**promise, **changes), folder, **given)


def test_one_process_at_a_time_and_none_after_an_error(tmp_path: Path) -> None:
    first = fit(tmp_path)
    with pytest.raises(RuntimeError, match="Another process is training"):
        fit(tmp_path)
    first.close()
    first.close()
    fit(tmp_path).close()


def test_a_stated_number_of_records_is_not_told(tmp_path: Path) -> None:
    run = fit(tmp_path, records=50)
    assert run.engine.plan.sampling.sample_rate == 0.2
    assert run.engine.plan.expected_batch_size == 10
    assert not run.engine.ledger.discloses_records
    run.close()
    assert json.loads((tmp_path / "ledger.json").read_text())["events"] == []


def test_units_are_passed_on(tmp_path: Path) -> None:
    run = fit(tmp_path, unit=[place // 4 for place in range(N)], records_per_unit=3)
    assert run.engine.plan.sampling.sample_rate == 1.0  # ten units, a batch of ten
    for batch, _ in run.pieces():
        assert len(batch[0]) == 3  # one unit a piece, of at most four records
    assert run.engine.plan.describe()["records_per_unit"] == 3
    assert run.engine.ledger.unit == "unit"
    run.close()


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="one of several processes"):
        fit(tmp_path)


def test_pieces_are_those_of_one_batch_after_the_other(tmp_path: Path) -> None:
    run = fit(tmp_path)
    assert (run.steps_per_epoch, run.left_of_epoch) == (N // 10, N // 10)
    for step in range(2 * run.steps_per_epoch):
        assert run.affordable
        batches = []
        for (x, y), last in run.pieces():
            assert 1 <= len(x) <= 4
            batches.append(last)
            loss = torch.nn.functional.cross_entropy(run.engine._run._module(x), y)  # type: ignore[union-attr]
            loss.backward()
            run.add_piece()  # of the last piece it is the step
        assert batches == [False] * (len(batches) - 1) + [True]
        assert run.engine.ledger.steps == step + 1
        assert json.loads((tmp_path / "ledger.json").read_text())["steps"] == step + 1
    assert not run.affordable
    run.close()
