"""The `features` section: a run behind a frozen layer of public patches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import yaml
from typer.testing import CliRunner

from dpspan.app.cli.app import app
from dpspan.app.config.sections import PatchesSection
from dpspan.app.run import Progress, RunFolder, train
from dpspan.app.run.from_config import make_parts
from dpspan.public.patches import PatchFeatures
from helpers.digits import config, settings, write_npz

NOISY = {"noise_multiplier": 1.0, "delta": 1e-5, "accountant": "rdp"}
PATCHES = {
    "name": "patches", "public": "optin", "filters": 20, "size": [3], "mirror": False,
    "directions": 40,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_npz(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def certificate(run: RunFolder) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run.certificate.read_text())
    return found


def test_the_section_has_the_layers_defaults(folder: Path) -> None:
    section = PatchesSection(public="optin")
    defaults = PatchFeatures.learn.__func__.__kwdefaults__  # type: ignore[attr-defined]
    mine = section.model_dump(exclude={"name", "public"})
    assert mine == {name: defaults[name] for name in mine}
    assert set(defaults) - set(mine) == {"seed", "device", "progress"}
    assert section.settings == {**mine, "size": list(section.size)}


def test_a_run_trains_what_follows_the_layer(folder: Path) -> None:
    result = train(config(folder, features=PATCHES, budget=NOISY))
    assert result.status == "finished"
    run = RunFolder(folder / "run")
    weights = safetensors.torch.load_file(run.model)
    assert weights["1.weight"].shape == (10, 40)
    public = {record["detail"]: record for record in certificate(run)["public"]}
    names = {detail: record["name"] for detail, record in public.items()}
    assert names == {"PatchFeatures": "optin", "measured on": "test"}
    record = public["PatchFeatures"]
    parts = make_parts(config(folder, features=PATCHES, budget=NOISY), run, goes_on=True)
    assert record["sha256"] == parts.layer.public.digest
    # What is in the folder is the whole model.
    plain = make_parts(config(folder, budget=NOISY))
    layer = PatchFeatures.load(run.features)
    outputs = layer(plain.test.tensors[0]) @ weights["1.weight"].T + weights["1.bias"]
    right = (outputs.argmax(1) == plain.test.tensors[1]).float().mean()
    assert float(right) == pytest.approx(result.metrics["test_accuracy"], abs=0.02)
    assert torch.allclose(layer(plain.test.tensors[0]), parts.test.tensors[0], atol=1e-5)


@pytest.mark.parametrize(
    "method",
    [{"name": "gep", "public": "optin", "rank": 8}, {"name": "mirror", "public": "optin"}],
    ids=["gep", "mirror"],
)
def test_methods_and_warm_starts_see_the_features_too(folder: Path, method: dict[str, Any]) -> None:
    warm = {"public": "optin", "max_epochs": 2}
    chosen = config(folder, features=PATCHES, budget=NOISY, method=method, warm_start=warm)
    assert train(chosen).status == "finished"
    found = certificate(RunFolder(folder / "run"))["public"]
    records = [record for record in found if record["detail"] != "measured on"]
    details = [record["detail"] for record in records]
    assert any("warm start" in detail for detail in details)
    assert any("PatchFeatures" in detail for detail in details)
    assert len({record["sha256"] for record in records}) == 1  # the images', not their features'


def test_a_run_goes_on_with_its_own_layer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = config(folder, features=PATCHES, budget=NOISY)
    assert train(chosen, stop=lambda: True).status == "stopped"

    def elsewhere(*args: object, **kwargs: object) -> None:
        raise AssertionError("learnt again, on a machine that may round otherwise")

    monkeypatch.setattr(PatchFeatures, "learn", elsewhere)
    assert train(chosen, resume=True).status == "finished"


def test_a_layer_that_was_lost_is_missed(folder: Path) -> None:
    chosen = config(folder, features=PATCHES, budget=NOISY)
    train(chosen, stop=lambda: True)
    (folder / "run" / "features.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"features.safetensors is missing"):
        train(chosen, resume=True)


def test_another_layer_is_another_run(folder: Path) -> None:
    chosen = config(folder, features=PATCHES, budget=NOISY)
    train(chosen, stop=lambda: True)
    other = config(folder, features={**PATCHES, "filters": 21}, budget=NOISY)
    with pytest.raises(ValueError, match="other settings than the section `features`"):
        train(other, resume=True)
    run, public = RunFolder(folder / "run"), make_parts(config(folder, budget=NOISY)).public
    other = PatchesSection(**{**PATCHES, "power": 0.9})
    PatchFeatures.learn(public["optin"], **other.settings).save(run.features)
    with pytest.raises(ValueError, match="learnt with other settings"):
        train(chosen, resume=True)
    layer = PatchFeatures.learn(public["optin"], **PatchesSection(**PATCHES).settings)
    layer.basis.neg_()  # as another machine might find it
    layer.save(run.features)
    with pytest.raises(ValueError, match="is not the layer that the run"):
        train(chosen, resume=True)


def test_a_run_without_a_layer_keeps_none_of_an_earlier_one(folder: Path) -> None:
    chosen = config(folder, features=PATCHES, budget=NOISY)
    with pytest.raises(KeyboardInterrupt):
        train(chosen, watch=_interrupted)
    run = RunFolder(folder / "run")
    assert run.features.exists()
    assert train(config(folder, budget=NOISY)).status == "finished"
    assert not run.features.exists()


def _interrupted(progress: Progress) -> None:
    if progress.step == 1:  # of which nothing was written
        raise KeyboardInterrupt


def test_copies_of_public_images_among_the_records_are_refused(folder: Path) -> None:
    with np.load(folder / "digits.npz") as file:
        np.savez(folder / "leak.npz", x=file["x_train"][:50], y=file["y_train"][:50])
    data: Any = settings(folder)["data"]
    leak = {"format": "npz", "path": str(folder / "leak.npz"), "inputs": "x", "labels": "y"}
    data = {**data, "public": {"optin": leak}}
    with pytest.raises(ValueError, match="also occur in the private data"):
        train(config(folder, data=data, features=PATCHES, budget=NOISY))


def test_the_public_data_must_be_there(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"features.public.*data.public \(optin\), got 'scans'"):
        config(folder, features={**PATCHES, "public": "scans"})


def test_images_may_be_too_small(folder: Path) -> None:
    with pytest.raises(ValueError, match="two images of 10 × 10 pixels"):
        train(config(folder, features={"name": "patches", "public": "optin"}, budget=NOISY))


def test_vectors_have_no_patches(folder: Path) -> None:
    with np.load(folder / "digits.npz") as file:
        flat = {name: a.reshape(len(a), -1) if a.ndim == 3 else a for name, a in file.items()}
    np.savez(folder / "digits.npz", **flat)
    with pytest.raises(ValueError, match="to be images of one shape"):
        train(config(folder, features=PATCHES, budget=NOISY))


def test_a_choice_is_of_what_the_layer_sees(folder: Path) -> None:
    data: Any = settings(folder)["data"]
    other = {**data["public"]["optin"], "inputs": "x_other", "labels": "y_other"}
    data = {**data, "public": {**data["public"], "tested": other}}
    sections = {
        "data": data,
        "features": PATCHES,
        "method": {"name": "gep", "rank": 4},
        "choose": {"epsilon": 0.5, "rank": 2, "samples": 20},
    }
    budget = {"epsilon": 4.0, "delta": 1e-5, "accountant": "rdp"}
    assert train(config(folder, budget=budget, **sections)).status == "finished"
    run = RunFolder(folder / "run")
    assert "features" in json.loads(run.choice.read_text())["asked"]
    plain = make_parts(config(folder, data=data, budget=NOISY)).public
    known = {each.digest for each in plain.values()}
    used = [r for r in certificate(run)["public"] if "public gradients" in r["detail"]]
    assert {record["sha256"] for record in used} <= known


class TestCommands:
    def dpspan(self, *arguments: object, code: int = 0) -> Any:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == code, result.output
        return result

    def written(self, folder: Path, name: str = "c.yaml", **sections: Any) -> Path:
        path = folder / name
        whole = settings(folder, **{"budget": NOISY, "features": PATCHES, **sections})
        path.write_text(yaml.safe_dump(whole))
        return path

    def test_audit_and_report(self, folder: Path) -> None:
        self.dpspan("train", self.written(folder))
        attack = json.loads(self.dpspan("audit", folder / "run", "--json").stdout)
        assert 0.3 < attack["unprivate_success_rate"] < 0.7
        self.dpspan("report", folder / "run")
        assert "PatchFeatures" in (folder / "run" / "report.html").read_text()
        (folder / "run" / "features.safetensors").unlink()
        assert "is missing" in self.dpspan("audit", folder / "run", code=1).stderr

    def test_compare(self, folder: Path) -> None:
        budget = {"epsilon": 4.0, "delta": 1e-5, "accountant": "rdp"}
        one = self.written(folder, "one.yaml", budget=budget)
        two = self.written(folder, "two.yaml", budget=budget, method={"name": "rgp", "rank": 2})
        done = self.dpspan("compare", one, two, "--out", "both", "--seeds", 1, "--json")
        assert {row["name"] for row in json.loads(done.stdout)["rows"]} >= {"one", "two"}
        assert (folder / "both" / "features.safetensors").exists()
        found = json.loads((folder / "both" / "one" / "seed-0" / "certificate.json").read_text())
        assert "PatchFeatures" in {record["detail"] for record in found["public"]}
        (path,) = (folder / "both").glob("public*/seed-0/certificate.json")
        free = json.loads(path.read_text())
        assert "PatchFeatures" in {record["detail"] for record in free["public"]}
        other = self.written(folder, "three.yaml", budget=budget, features=None)
        refused = self.dpspan("compare", one, other, "--out", "more", code=1)
        assert "same `features`" in refused.stderr

    def test_a_comparison_keeps_its_layer(self, folder: Path) -> None:
        budget = {"epsilon": 4.0, "delta": 1e-5, "accountant": "rdp"}
        one = self.written(folder, "one.yaml", budget=budget)
        self.dpspan("compare", one, "--out", "both", "--seeds", 1)
        self.written(folder, "one.yaml", budget=budget, features={**PATCHES, "power": 0.9})
        refused = self.dpspan("compare", one, "--out", "both", "--seeds", 2, code=1)
        assert "learnt with other settings" in refused.stderr
        self.written(folder, "one.yaml", budget=budget)
        (folder / "both" / "features.safetensors").unlink()
        refused = self.dpspan("compare", one, "--out", "both", "--seeds", 2, code=1)
        assert "features.safetensors is missing" in refused.stderr

    def test_compare_leaves_the_folder_of_a_run_alone(self, folder: Path) -> None:
        self.dpspan("train", self.written(folder, features=None))
        budget = {"epsilon": 4.0, "delta": 1e-5, "accountant": "rdp"}
        one = self.written(folder, "one.yaml", budget=budget)
        refused = self.dpspan("compare", one, "--out", "run", code=1)
        assert "holds a run" in refused.stderr
        assert not (folder / "run" / "features.safetensors").exists()

    def test_advise_says_that_it_cannot(self, folder: Path) -> None:
        refused = self.dpspan("advise", self.written(folder), "--records", 400, code=1)
        assert "does not know the `features` section" in refused.stderr
