"""`dpspan verify`: true certificates pass, and whatever was changed is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from typer.testing import CliRunner

import dpspan
from dpspan.accounting.certificate import certificate
from dpspan.accounting.events import pure_event, step_event
from dpspan.accounting.schema import certificate_schema, parse_certificate
from dpspan.app.cli import app
from dpspan.app.run import RunFolder, train
from dpspan.app.verification import verify
from helpers.digits import config, write_npz
from helpers.needs import extra

NOISY = {"noise_multiplier": 1.0, "delta": 1e-5, "accountant": "rdp"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    write_npz(folder)
    train(config(folder, budget=NOISY))
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> RunFolder:
    return RunFolder(shutil.copytree(trained, tmp_path / "run"))


def failing(path: Path) -> set[str]:
    return {check.name for check in verify(path).checks if check.holds is False}


def edit(path: Path, change: Callable[[Any], None]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_a_run_is_true_to_its_certificate(run: RunFolder) -> None:
    found = dpspan.verify(run.path)
    assert found.holds
    assert found.private
    names = ["ε", "statements", "events", "ledger", "weights", "configuration", "configuration"]
    assert [check.name for check in found.checks] == names
    assert all(check.holds for check in found.checks)
    alone = dpspan.verify(run.certificate)
    assert [check.name for check in alone.checks] == names[:3]


def test_what_was_noted_later_does_no_harm(run: RunFolder) -> None:
    run.warn("unprivate: somebody looked")
    assert verify(run.path).holds
    edit(run.certificate, lambda d: d["warnings"].clear())
    assert failing(run.path) == {"ledger"}


def less_noise(document: Any) -> None:
    entry = document["events"][0]
    entry["event"]["event"]["noise_multiplier"] = 0.5
    entry["text"] = entry["text"].replace("noise_multiplier=1.0", "noise_multiplier=0.5")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda d: d.update(epsilon=d["epsilon"] / 2), {"ε"}),
        (lambda d: d.update(epsilon=d["epsilon"] * 1.001), {"ε"}),
        (lambda d: d.update(delta=1e-4), {"ε"}),
        (lambda d: d.update(steps=3), {"statements"}),
        (lambda d: d.update(private=False), {"statements"}),
        (lambda d: d.update(budget={"epsilon": 1.0, "delta": 1e-5}), {"statements"}),
        (lambda d: d["events"][0].update(text="nothing"), {"statements"}),
        (lambda d: d.update(adjacency="add or remove one unit"), {"ledger"}),
        (lambda d: d["events"].clear(), {"ε", "statements", "events", "ledger"}),
        (less_noise, {"ε", "events", "ledger"}),
        (lambda d: d["training"].update(weights_sha256="0" * 64), {"weights"}),
        (lambda d: d["digests"].update(configuration="0" * 64), {"configuration"}),
    ],
)
def test_a_certificate_that_was_changed(run: RunFolder, change: Any, found: set[str]) -> None:
    edit(run.certificate, change)
    assert failing(run.path) == found


def noted(ledger: dpspan.Ledger) -> None:
    ledger.invalidate("noise was drawn from a fixed seed")
    ledger.declare_public("photographs", "0" * 64, 5)
    ledger.warn("the number of private records is disclosed: q is made of it")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda d: d.update(private=True, not_private_because=[]), {"ledger"}),
        (lambda d: d["public"].clear(), {"ledger"}),
        (lambda d: d["public"][0].update(sha256="1" * 64), {"ledger"}),
        (lambda d: d.update(discloses_number_of_records=False), {"statements"}),
        (lambda d: d.update(delta=0.1, epsilon=0.0), {"ε", "statements"}),
        (lambda d: d["budget"].update(delta=1e-12), {"statements"}),
    ],
)
def test_what_a_ledger_tells_is_not_left_out(tmp_path: Path, change: Any, found: set[str]) -> None:
    ledger, folder = dpspan.Ledger(budget=dpspan.Budget(epsilon=2.5, delta=1e-5)), tmp_path
    ledger.charge(step_event(1.0, 0.01), 1000)
    noted(ledger)
    RunFolder(folder).write_ledger(ledger)
    for delta in (1e-5, 1e-12):  # where ε is above 2.5, but not at the budget's δ
        path = dpspan.write_certificate(
            folder / "certificate.json", certificate(ledger, delta=delta, training={})
        )
        assert failing(folder) == set()
    path = dpspan.write_certificate(path, certificate(ledger, training={}))
    edit(path, change)
    assert failing(folder) == found


def test_files_that_were_changed(run: RunFolder) -> None:
    weights = safetensors.torch.load_file(run.model)
    weights["1.bias"][3] += 1e-6
    safetensors.torch.save_file(weights, run.model)
    assert failing(run.path) == {"weights"}
    run.config.write_text(run.config.read_text().replace("epochs: 2", "epochs: 3"))
    edit(run.ledger, lambda state: state["events"][0].update(count=9))
    assert failing(run.path) == {"weights", "configuration", "ledger"}


def test_weights_that_are_tied_are_found_again(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    training = {"weights_sha256": dpspan.accounting.certificate.weights_sha256(model.state_dict())}
    folder = RunFolder(tmp_path)
    folder.write_model(model)
    folder.write_certificate(certificate(dpspan.Ledger(), delta=1e-5, training=training))
    weights = next(check for check in verify(tmp_path).checks if check.name == "weights")
    assert weights.holds


def test_a_run_that_is_not_private_says_so(tmp_path: Path) -> None:
    ledger = dpspan.Ledger()
    ledger.invalidate("noise_multiplier is 0")
    path = dpspan.write_certificate(
        tmp_path / "c.json", certificate(ledger, delta=1e-5, training={})
    )
    assert verify(path).holds
    said = CliRunner().invoke(app, ["verify", str(path)])
    assert said.exit_code == 0
    assert "NOT PRIVATE" in said.stdout


def test_the_command(run: RunFolder) -> None:
    said = CliRunner().invoke(app, ["verify", str(run.path)])
    assert said.exit_code == 0
    assert said.stdout.count("agrees ") == 7
    edit(run.certificate, lambda d: d.update(epsilon=0.1))
    said = CliRunner().invoke(app, ["verify", str(run.path), "--json"])
    assert said.exit_code == 1
    assert json.loads(said.stdout)["holds"] is False
    shown = CliRunner().invoke(app, ["verify", str(run.path)])
    assert shown.exit_code == 1
    assert "DIFFERS       ε: 0.1 is stated" in shown.stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "is damaged: it is not JSON"),
        ("[]", "no certificate of dpspan .*: the document"),
        ("{}", "no certificate of dpspan .*: format: Field required"),
    ],
)
def test_what_is_no_certificate(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "certificate.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        verify(path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="There is no certificate at"):
        verify(tmp_path)
    assert "Expected the folder of a run" in CliRunner().invoke(app, ["verify"]).stderr


# -- the schema -----------------------------------------------------------------------------------


def test_the_published_schema_is_this_one() -> None:
    published = Path(__file__).parents[2] / "docs" / "certificate.schema.json"
    assert json.loads(published.read_text()) == certificate_schema()


def of_an_engine() -> dict[str, Any]:
    engine = dpspan.PrivacyEngine(accountant="rdp")
    model = nn.Linear(3, 2)
    records = torch.utils.data.TensorDataset(torch.randn(20, 3), torch.arange(20) % 2)
    engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(records, batch_size=5),
        noise_multiplier=1.0,
    )
    return engine.certificate(1e-5)


def of_a_table() -> dict[str, Any]:
    x, y = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 2
    model = dpspan.convex.PrivateLogisticRegression(
        epsilon=2.0, delta=1e-4, classes=[0, 1], records=60
    )
    return dict(model.fit(x, y).certificate_)


def of_many_kinds() -> dict[str, Any]:
    ledger = dpspan.Ledger(budget=dpspan.Budget(epsilon=9.0, delta=1e-5))
    ledger.charge(pure_event(0.5))
    ledger.charge(step_event(1.0, 0.1), 4)
    ledger.declare_public("a", "0" * 64, 5, "for nothing")
    return certificate(ledger, training={"method": "mine"})


def of_no_finite_epsilon() -> dict[str, Any]:
    ledger = dpspan.Ledger()
    ledger.charge(step_event(0.0, 0.1))
    return certificate(ledger, delta=1e-5, training={})


@pytest.mark.parametrize("make", [of_an_engine, of_a_table, of_many_kinds, of_no_finite_epsilon])
def test_every_certificate_is_as_the_schema_says(make: Any, tmp_path: Path) -> None:
    jsonschema = extra("jsonschema")
    validator = jsonschema.Draft202012Validator(certificate_schema())
    written = dpspan.write_certificate(tmp_path / "certificate.json", make())
    document = json.loads(written.read_text())
    validator.validate(document)
    assert verify(written).holds
    for key in ("epsilon", "events", "training"):
        broken = {name: value for name, value in document.items() if name != key}
        assert not validator.is_valid(broken)
        with pytest.raises(ValueError, match=key):
            parse_certificate(broken)
    assert not validator.is_valid({**document, "epsilon": -1})
    assert not validator.is_valid({**document, "version": 2})


def test_certificates_of_before_are_certificates_still() -> None:
    found = list((Path(__file__).parent / "folders-0.1").rglob("certificate.json"))
    assert len(found) > 3
    assert all(verify(path.parent).holds for path in found)
