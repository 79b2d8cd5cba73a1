"""How many private records there are: said where it was used, and nowhere if it was not."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

from dpspan import DPSGD, Budget, Contender, PrivacyEngine, Task, choose_public, compare
from dpspan.accounting.ledger import Ledger
from dpspan.app.cli import app
from helpers.training import data, network, setup, train

RECORDS = 1237
TOLD = "the number of private records is disclosed"


def count_in(text: str) -> bool:
    """The number by itself; its digits may well occur in a weight."""
    return re.search(rf"(?<![\d.]){RECORDS}(?![\d])", text) is not None


# -- the engine ----------------------------------------------------------------------------------

PUBLIC = {"sample_rate": 0.05, "expected_batch_size": 60.0}
FROM_THE_DATA = [
    {},
    {"expected_batch_size": 60.0},
    {"poisson_sampling": False},
]


def books(records: int, **arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    engine = PrivacyEngine(accountant="rdp")
    loader = DataLoader(data(records), batch_size=62)
    _, *run = setup(engine, data_loader=loader, **arguments)
    train(*run)
    state = engine.state_dict()
    state["ledger"].pop("saved_by")
    document = engine.certificate(1e-5)
    document.pop("created")
    document["training"].pop("weights_sha256")  # of noise
    return document, state


@pytest.mark.parametrize("sampling", [True, False])
def test_public_numbers_leave_no_trace_of_the_count(
    sampling: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    document, state = books(RECORDS, poisson_sampling=sampling, **PUBLIC)
    assert (document, state) == books(RECORDS + 1, poisson_sampling=sampling, **PUBLIC)
    assert document["discloses_number_of_records"] is False
    assert not any(TOLD in warning for warning in document["warnings"])
    assert not count_in(json.dumps([document, state]) + caplog.text)


@pytest.mark.parametrize("arguments", FROM_THE_DATA)
def test_what_comes_from_the_data_is_said_to(arguments: dict[str, Any]) -> None:
    document, state = books(RECORDS, **arguments)
    assert document["discloses_number_of_records"] is True
    (told,) = [warning for warning in document["warnings"] if warning.startswith(TOLD)]
    assert "give sample_rate= and expected_batch_size=" in told
    assert told in state["ledger"]["warnings"]  # other certificates are made from it


def test_a_batch_size_is_public_beside_a_given_rate() -> None:
    """Not the smaller of batch size and count, which would be the count here."""
    document, state = books(41, sample_rate=0.5)
    assert document["training"]["expected_batch_size"] == 62
    assert (document, state) == books(42, sample_rate=0.5)


def test_a_choice_tells_nothing_of_the_count() -> None:
    def state(records: int) -> dict[str, Any]:
        ledger = Ledger()
        public = {"a": data(9).tensors[0] + 1, "b": data(9).tensors[0] - 1}
        for rate in (1.0, 0.5):
            choose_public(
                network(), nn.CrossEntropyLoss(), data(records), public,
                ledger=ledger, rank=2, sample_rate=rate,
            )  # fmt: skip
        assert not ledger.discloses_records
        return {**ledger.state_dict(), "saved_by": ""}

    assert state(40) == state(41)


# -- folders -------------------------------------------------------------------------------------


def written(folder: Path, **more: Any) -> str:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(RECORDS + 50, 3)).astype(np.float32)
    y = (x.sum(1) > 0).astype(np.int64)
    np.savez(folder / "private.npz", x=x[:RECORDS], y=y[:RECORDS])
    np.savez(folder / "test.npz", x=x[RECORDS:], y=y[RECORDS:])
    config = {
        "data": {
            "classes": 2,
            "private": {"format": "npz", "path": str(folder / "private.npz")},
            "test": {"format": "npz", "path": str(folder / "test.npz")},
            "test_is_public": True,
            **more,
        },
        "model": {"name": "logistic"},
        "method": {"name": "dpsgd", "clip": 1.0},
        "budget": {"epsilon": 3.0, "delta": 1e-5, "accountant": "rdp"},
        "training": {
            "epochs": 1,
            "batch_size": 300,
            "optimizer": {"name": "sgd", "learning_rate": 0.5},
        },
        "output": {"folder": str(folder / "run")},
    }
    (folder / "c.yaml").write_text(yaml.safe_dump(config))
    return str(folder / "c.yaml")


def dpspan(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("command", ["train", "compare"])
@pytest.mark.parametrize("stated", [True, False])
def test_folders(tmp_path: Path, command: str, stated: bool) -> None:
    config = written(tmp_path, **({"records": 1200} if stated else {}))
    out = tmp_path / "run"
    arguments = ("--out", out, "--seeds", 1) if command == "compare" else ()
    said = dpspan(command, config, *arguments)
    said += dpspan("report", out)
    page = (out / "report.html").read_text()
    certificates = [json.loads(path.read_text()) for path in out.rglob("certificate.json")]
    assert certificates
    for document in certificates:
        assert document["discloses_number_of_records"] is not stated
    assert (TOLD in page) is not stated
    assert ("it can be read off the settings" in page) is not stated
    if stated:
        for path in out.rglob("*"):
            if path.is_file() and path.name != "comparison.png":
                assert not count_in(path.read_bytes().decode("latin-1")), path
        assert not count_in(said)


def test_a_comparison_from_python(tmp_path: Path) -> None:
    for records in (None, 40):
        task = Task(
            model=network,
            private=data(),
            test=TensorDataset(*(tensor[:20] for tensor in data(60).tensors)),
            batch_size=10,
            epochs=1,
            budget=Budget(epsilon=3.0, delta=1e-5),
            records=records,
            accountant="rdp",
        )
        plain = Contender(name="DP-SGD", method=DPSGD(clip=1.0), learning_rate=0.5)
        out = tmp_path / str(records)
        compare(task, [plain], out=out, seeds=(0,))
        document = json.loads((out / "certificate.json").read_text())
        assert document["discloses_number_of_records"] is (records is None)
