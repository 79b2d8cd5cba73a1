"""`dpspan audit step`, `canaries` and `membership` as users meet them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from dpspan.app.cli import app
from dpspan.app.config import load_config
from dpspan.app.run import RunFolder
from dpspan.app.run.from_config import make_parts
from dpspan.app.run.rehearsal import Rehearsal
from dpspan.app.verification import verify
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
    assert "unprivate" not in outcome
    left = {file.name for file in (folder / "run").iterdir()}
    assert left == {".lock", "audit.json"}  # there is nothing to charge
    monkeypatch.setattr(Noise, "normal", lambda self, like, std: like.double() * 0)
    quiet = {"noise_multiplier": 40.0, "delta": 1e-5, "accountant": "rdp"}
    found = dpspan("audit", "canaries", written(folder, budget=quiet), code=1).stdout
    assert "MORE THAN DECLARED" in found
    assert "ε ≥" in found


def page(folder: Path) -> str:
    dpspan("report", folder / "run", "--out", folder / "report.html")
    return " ".join((folder / "report.html").read_text().split())


def test_both_bounds_are_on_the_certificate_and_the_report(folder: Path) -> None:
    path, run = written(folder), RunFolder(folder / "run")
    dpspan("train", path)
    document = json.loads(run.certificate.read_text())
    assert "audit" not in document
    before = page(folder)
    assert "Not audited. <code>dpspan audit canaries CONFIG</code> measures what ε is" in before
    assert "≥" not in before
    epsilon = document["epsilon"]
    assert f"≤ {epsilon:.3g}" in before
    dpspan("audit", "membership", folder / "run")  # in the same file, and not on the certificate
    outcome = json.loads(dpspan("audit", "canaries", path, "--canaries", 40, "--json").stdout)
    document = json.loads(run.certificate.read_text())
    assert document["audit"]["epsilon_at_least"] == outcome["epsilon"] <= epsilon
    assert document["audit"]["canaries"] == 40
    assert document["audit"]["confidence"] == 0.95
    assert "unprivate_auc" in json.loads(run.audit.read_text())
    assert verify(run.path).holds
    after = page(folder)
    assert 'id="plot-bounds"' in after
    assert f"≥ {outcome['epsilon']:.3g}" in after
    said = f"ε is at most {epsilon:.3g}, by the events on its ledger, and at least"
    assert f"{said} {outcome['epsilon']:.3g}, measured by 40 canaries" in after
    assert "Not audited" not in after
    assert "something is wrong" not in after
    assert "one record</b>" in after
    assert "unprivate_auc" not in after


def test_a_bound_above_the_promise_is_told(folder: Path) -> None:
    path, run = written(folder), RunFolder(folder / "run")
    dpspan("train", path)
    dpspan("audit", "canaries", path, "--canaries", 10)
    document = json.loads(run.certificate.read_text())
    document["audit"]["epsilon_at_least"] = 2 * document["epsilon"]
    run.certificate.write_text(json.dumps(document))
    assert "an audit measured more than ε" in dpspan("verify", run.path, code=1).stdout
    assert "That is more than was promised: something is wrong." in page(folder)


def test_an_audit_before_the_run_is_on_its_certificate_if_it_is_the_same_run(folder: Path) -> None:
    path, run = written(folder), RunFolder(folder / "run")
    dpspan("audit", "canaries", path, "--canaries", 10)
    dpspan("train", path)
    assert json.loads(run.certificate.read_text())["audit"]["canaries"] == 10
    other = {**settings(folder)["training"], "epochs": 1}
    dpspan("audit", "canaries", written(folder, training=other), "--canaries", 12)
    assert json.loads(run.certificate.read_text())["audit"]["canaries"] == 10
    assert json.loads(run.audit.read_text())["canaries"]["canaries"] == 12


def test_an_audit_with_less_noise_than_the_run_says_nothing_of_it(folder: Path) -> None:
    """A choice has cost some of ε, and an audit before it does not know how much."""
    data = settings(folder)["data"]
    public = {**data["public"], "other": {**data["public"]["optin"]}}
    sections = {
        "budget": {"epsilon": 4.0, "delta": 1e-5, "accountant": "rdp"},
        "method": {key: value for key, value in GEP.items() if key != "public"},
        "choose": {"epsilon": 1.0},
        "data": {**data, "public": public},
    }
    path, run = written(folder, **sections), RunFolder(folder / "run")
    dpspan("audit", "canaries", path, "--canaries", 10)
    dpspan("train", path)
    document = json.loads(run.certificate.read_text())
    assert "audit" not in document
    dpspan("audit", "canaries", path, "--canaries", 10)
    audit = json.loads(run.certificate.read_text())["audit"]
    assert audit["of"][1] == document["training"]["noise_multiplier"]


def test_canaries_see_no_private_record(folder: Path) -> None:
    config = load_config(written(folder))
    stood_in = []
    for _ in range(2):
        rehearsal = Rehearsal.from_config(config, RunFolder(folder / "run"), stand_ins=True)
        stood_in.append(rehearsal.task.private.tensors)
        with np.load(folder / "digits.npz") as file:
            arrays = {name: np.roll(file[name], 1, axis=0) for name in file}
        np.savez(folder / "digits.npz", **arrays)
    assert all(torch.equal(a, b) for a, b in zip(*stood_in, strict=True))
    like = make_parts(config).private.tensors
    assert [x.shape for x in stood_in[0]] == [x.shape for x in like]
    assert not torch.equal(stood_in[0][0], like[0])


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
