"""`dpspan audit step`, `canaries` and `membership` as users meet them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dpspan.app.cli import app
from dpspan.app.run import RunFolder
from dpspan.engine.sampling import PoissonDraw
from dpspan.mechanisms.noise import Noise
from helpers.digits import settings, write_npz

NOISY = {"noise_multiplier": 2.0, "delta": 1e-5, "accountant": "rdp"}
GEP = {"name": "gep", "clip": 1.0, "residual_clip": 0.2, "rank": 8, "public": "optin"}


def dpspan(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_npz(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(folder: Path, **sections: Any) -> Path:
    path = folder / "c.yaml"
    path.write_text(yaml.safe_dump(settings(folder, **{"budget": NOISY, **sections})))
    return path


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"method": GEP},
        {
            "method": {key: value for key, value in GEP.items() if key != "public"},
            "choose": {"epsilon": 0.1},
        },
    ],
    ids=["dpsgd", "gep", "yet to be chosen"],
)
def test_a_step_before_the_first_run(folder: Path, sections: dict[str, Any]) -> None:
    if "choose" in sections:
        data = settings(folder)["data"]
        public = {**data["public"], "other": {**data["public"]["optin"]}}
        sections = {**sections, "data": {**data, "public": public}}
    path, run = written(folder, **sections), RunFolder(folder / "run")
    result = dpspan("audit", "step", path)
    assert "Nothing was found. That proves nothing" in result.stdout
    assert "FAIL" not in result.stdout
    note = "unprivate: an audit of the step was made on private records before the training"
    assert json.loads(run.ledger.read_text())["warnings"] == [note]
    assert not run.choice.exists()
    if not sections:
        dpspan("train", path)  # begins as if nothing had been
        certificate = json.loads(run.certificate.read_text())
        assert certificate["warnings"].count(note) == 1
        assert certificate["private"] is True


def test_a_step_with_a_finding(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    normal = Noise.normal
    monkeypatch.setattr(Noise, "normal", lambda self, like, std: 0.9 * normal(self, like, std))
    path = written(folder)
    assert "Do not train with this" in dpspan("audit", "step", path, code=1).stdout
    outcome = json.loads(dpspan("audit", "step", path, "--json", code=1).stdout)
    assert outcome["passed"] is False
    failed = {check["part"] for check in outcome["checks"] if not check["passed"]}
    assert failed == {"noise", "sensitivity"}


def test_a_step_whose_batches_are_shuffled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shuffled(self: Any, generator: Any) -> Any:
        import torch

        order = torch.from_numpy(generator.permutation(self.records))
        yield from order.chunk(self.steps_per_epoch)

    monkeypatch.setattr(PoissonDraw, "epoch", shuffled)
    assert "FAIL sampler" in dpspan("audit", "step", written(folder), code=1).stdout


def test_canaries_in_a_rehearsal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(folder)
    outcome = json.loads(dpspan("audit", "canaries", path, "--canaries", 40, "--json").stdout)
    assert outcome["passed"] is True
    assert outcome["epsilon"] <= outcome["declared"]
    assert outcome["canaries"] == 40
    note = "unprivate: a rehearsal with canaries was made on private records"
    assert note in json.loads((folder / "run" / "ledger.json").read_text())["warnings"]
    assert not (folder / "run" / "model.safetensors").exists()
    monkeypatch.setattr(Noise, "normal", lambda self, like, std: like.double() * 0)
    quiet = {"noise_multiplier": 40.0, "delta": 1e-5, "accountant": "rdp"}
    found = dpspan("audit", "canaries", written(folder, budget=quiet), code=1).stdout
    assert "MORE THAN DECLARED" in found
    assert "ε ≥" in found


@pytest.mark.parametrize("which", ["step", "canaries"])
def test_units_of_several_records_are_refused(folder: Path, which: str) -> None:
    path = written(folder, data={**settings(folder)["data"], "unit": "person"})
    refused = dpspan("audit", which, path, code=1)
    assert "Error: An audit takes each record for its own unit" in refused.stderr


def test_the_old_form_warns(folder: Path) -> None:
    dpspan("train", written(folder))
    new = dpspan("audit", "membership", folder / "run")
    assert "now `dpspan audit membership RUN`" not in new.stderr
    old = dpspan("audit", folder / "run")
    assert "Note: `dpspan audit RUN` is now `dpspan audit membership RUN`" in old.stderr
    assert old.stdout == new.stdout
    assert json.loads(dpspan("audit", "--json", folder / "run").stdout)["private"] is False
    hushed = dpspan("-q", "audit", "membership", folder / "run")
    assert hushed.stderr == ""
