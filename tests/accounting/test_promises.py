"""Promises that are hardly any: one answer wherever ε and δ are given."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

from dpspan import DPSGD, Budget, Contender, Ledger, PrivacyEngine, Task, calibrate, compare
from dpspan.accounting.certificate import certificate
from dpspan.accounting.events import step_event
from dpspan.accounting.promises import weaknesses
from dpspan.app.cli import app
from dpspan.app.config import load_config
from dpspan.app.run import train as run_training
from dpspan.convex import PrivateLogisticRegression
from helpers.training import data, network, private_with_epsilon, setup, train

LARGE = "is large: publishing every record with that probability would keep the promise"
NOTHING = "an ε above 10 promises next to nothing"
Documents = list[dict[str, Any]]


def engine(epsilon: float, delta: float, folder: Path) -> Documents:
    made = PrivacyEngine(accountant="rdp")
    run = private_with_epsilon(made, epochs=1, target_epsilon=epsilon, target_delta=delta)
    train(*run)
    return [made.certificate()]


def estimator(epsilon: float, delta: float, folder: Path) -> Documents:
    x = np.random.default_rng(0).normal(size=(40, 2))
    model = PrivateLogisticRegression(epsilon=epsilon, delta=delta, classes=[0, 1])
    return [model.fit(x, np.arange(40) % 2).certificate_]


def comparison(epsilon: float, delta: float, folder: Path) -> Documents:
    task = Task(
        model=network,
        private=data(),
        test=data(20),
        batch_size=10,
        epochs=1,
        budget=Budget(epsilon=epsilon, delta=delta),
        accountant="rdp",
    )
    plain = Contender(name="DP-SGD", method=DPSGD(clip=1.0), learning_rate=0.5)
    compare(task, [plain], out=folder, seeds=(0,))
    return [json.loads(path.read_text()) for path in folder.rglob("certificate.json")]


def configuration(epsilon: float, delta: float, folder: Path) -> Path:
    x = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
    np.savez(folder / "private.npz", x=x, y=np.arange(40) % 2)
    whole = {
        "data": {
            "classes": 2,
            "private": {"format": "npz", "path": str(folder / "private.npz")},
        },
        "model": {"name": "logistic"},
        "method": {"name": "dpsgd", "clip": 1.0},
        "budget": {"epsilon": epsilon, "delta": delta, "accountant": "rdp"},
        "training": {
            "epochs": 1,
            "batch_size": 10,
            "optimizer": {"name": "sgd", "learning_rate": 0.5},
        },
        "output": {"folder": str(folder / "run")},
    }
    (folder / "c.yaml").write_text(yaml.safe_dump(whole))
    return folder / "c.yaml"


def run(epsilon: float, delta: float, folder: Path) -> Documents:
    run_training(load_config(configuration(epsilon, delta, folder)))
    return [json.loads((folder / "run" / "certificate.json").read_text())]


def command(epsilon: float, delta: float, folder: Path) -> Documents:
    """Nothing is certified by `dpspan account`: what it says is all."""
    arguments = ("--sample-rate", 0.1, "--epochs", 1, "--epsilon", epsilon, "--delta", delta)
    arguments = ("account", *arguments, "--accountant", "rdp")
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exit_code:
        raise ValueError(result.stderr)
    for note in result.stderr.splitlines():
        warnings.warn(note.replace("Note: ", "dpspan: "), stacklevel=2)
    return []


DOORS: dict[str, Callable[[float, float, Path], Documents]] = {
    "engine": engine,
    "estimator": estimator,
    "comparison": comparison,
    "run": run,
    "command": command,
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("delta", [0.1, 0.5])
def test_no_promise_at_all_is_refused(tmp_path: Path, door: str, delta: float) -> None:
    with pytest.raises(ValueError, match=r"Expected .*below 0\.1"):
        DOORS[door](1.0, delta, tmp_path)
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("epsilon", "delta", "sentence"), [(2.0, 0.02, LARGE), (50.0, 1e-5, NOTHING)]
)
def test_hardly_a_promise_is_said_and_certified(
    tmp_path: Path, door: str, epsilon: float, delta: float, sentence: str
) -> None:
    with pytest.warns(UserWarning, match=sentence):
        documents = DOORS[door](epsilon, delta, tmp_path)
    assert documents or door == "command"
    for document in documents:
        (told,) = [w for w in document["warnings"] if LARGE in w or NOTHING in w]
        assert sentence in told


@pytest.mark.parametrize("door", DOORS)
def test_nothing_is_said_of_an_ordinary_one(tmp_path: Path, door: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        documents = DOORS[door](3.0, 1e-5, tmp_path)
    for document in documents:
        assert not [w for w in document["warnings"] if LARGE in w or NOTHING in w]


def test_the_number_of_records_counts_where_it_is_public() -> None:
    """1e-3 is no δ for 2,000 records. Where their number is a secret, nothing may depend on it."""
    x = torch.randn(2000, 6)
    arguments = {"data_loader": DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=500)}

    def private(**more: Any) -> list[str]:
        made = PrivacyEngine(accountant="rdp")
        model = network()
        made.make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            target_epsilon=1.0,
            target_delta=1e-3,
            epochs=1,
            **arguments,
            **more,
        )
        return made.certificate()["warnings"]

    with pytest.warns(UserWarning, match=LARGE):
        assert any(LARGE in warning for warning in private())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        told = private(sample_rate=0.25, expected_batch_size=500)
    assert not any(LARGE in warning for warning in told)
    assert len(weaknesses(1.0, 1e-3)) == 0
    assert len(weaknesses(1.0, 1e-3, 999)) == 0
    assert len(weaknesses(1.0, 1e-3, 1000)) == 1
    assert len(weaknesses(None, 0.0011)) == 1
    assert len(weaknesses(10.0, 1e-3)) == 0


def test_a_ledger_answers_but_a_certificate_promises() -> None:
    ledger = Ledger(accountant="rdp")
    ledger.charge(step_event(1.0, 0.1))
    assert 0 <= ledger.epsilon(0.5) < ledger.epsilon(1e-5)
    with pytest.raises(ValueError, match=r"Expected delta below 0\.1 .* number of records"):
        certificate(ledger, delta=0.5, training={})
    with pytest.raises(ValueError, match=r"Expected target_delta below 0\.1"):
        calibrate(1.0, 0.5, 0.1, 10)


def test_a_run_without_a_target_is_weighed_by_what_it_spent() -> None:
    engine, *run = setup(PrivacyEngine(accountant="rdp"), noise_multiplier=0.2)
    assert not [w for w in engine.certificate(1e-5)["warnings"] if NOTHING in w]
    train(*run)
    assert [w for w in engine.certificate(1e-5)["warnings"] if NOTHING in w]
