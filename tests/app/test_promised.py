"""What the docs promise of certificates and reports, whichever command made them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from dpspan.app.cli import app
from dpspan.app.comparison.results import ending
from dpspan.app.report.reading import read
from dpspan.app.run import train
from dpspan.app.verification import verify
from dpspan.audit import membership_inference
from helpers.digits import config, write_npz

NOISY = {"noise_multiplier": 1.0, "delta": 1e-5, "accountant": "rdp"}


def dpspan(*arguments: object) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration whose bounds are those of public rows, one of its test rows a private one."""
    monkeypatch.chdir(tmp_path)
    for name, rows, seed in (("private", 200, 0), ("public", 80, 1), ("test", 60, 2)):
        draw = np.random.default_rng(seed).normal(size=(rows, 2))
        lines = [[*row, int(row[0] > 0)] for row in draw]
        with Path(f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["a", "b", "ill"], *lines])
    twin = Path("private.csv").read_text().splitlines()[1]
    Path("test.csv").write_text(Path("test.csv").read_text() + twin + "\n")

    def source(name: str) -> dict[str, str]:
        return {"format": "csv", "path": f"{name}.csv", "label": "ill"}

    column = {"kind": "numeric", "origin": "public rows"}
    whole = {
        "data": {
            "classes": 2,
            "private": source("private"),
            "test": source("test"),
            "test_is_public": True,
            "equal_rows_allowed": True,
            "public": {"clinic": source("public")},
            "preprocessing": {"a": column, "b": column},
        },
        "model": {"name": "logistic"},
        "method": {"name": "dpsgd", "clip": 1.0},
        "budget": {"epsilon": 3.0, "delta": 1e-4, "accountant": "rdp"},
        "training": {
            "epochs": 2,
            "batch_size": 40,
            "optimizer": {"name": "sgd", "learning_rate": 0.1},
        },
        "evaluate": {"threshold": 0.6},
        "report": {"title": "A clinic"},
        "output": {"folder": "run"},
    }
    Path("c.yaml").write_text(yaml.safe_dump(whole))
    return tmp_path


@pytest.mark.parametrize("command", ["train", "compare", "tune"])
def test_certificates_tell_what_was_done_with_the_data(table: Path, command: str) -> None:
    more = {"train": (), "compare": ("--out", "run", "--seeds", 1), "tune": ("--tries", 2)}
    dpspan(command, "c.yaml", *more[command])
    run = table / "run"
    folder = run / "c" / "seed-0" if command == "compare" else run
    document = json.loads((folder / "certificate.json").read_text())
    details = {(each["name"], each["detail"]) for each in document["public"]}
    assert {("clinic", "bounds and values of columns"), ("test", "measured on")} <= details
    assert any("equal private or public ones" in warning for warning in document["warnings"])
    assert document["training"]["preprocessing"]["origins"] == {"public rows": ["a", "b"]}
    assert verify(folder).holds
    if command != "compare":
        assert json.loads((run / "evaluation.json").read_text())["threshold"] == 0.6
        assert json.loads((run / "about.json").read_text())["title"] == "A clinic"


def test_a_search_in_which_all_diverged_says_so(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpspan.app.run.training.Training.take_all_steps", lambda _: False)
    dpspan("tune", "c.yaml", "--tries", 2)
    facts = json.loads((table / "run" / "run.json").read_text())
    assert facts["status"] == "diverged"
    assert "lower the learning rate" in facts["diverged"]


def test_runs_that_share_a_name_only_are_not_averaged(tmp_path: Path) -> None:
    write_npz(tmp_path)
    for folder, epochs in (("one", 1), ("two", 2)):
        training = {"epochs": epochs, "batch_size": 200}
        output = {"folder": str(tmp_path / folder / "run")}
        made = config(tmp_path, budget=NOISY, output=output)
        train(made.model_copy(update={"training": made.training.model_copy(update=training)}))
    found = read([tmp_path / "one", tmp_path / "two"], include_unprivate=False)
    assert [len(runs) for runs in found.groups.values()] == [1, 1]
    assert [Path(name.split("(")[1][:-1]).parent.name for name in found.groups] == ["one", "two"]


def test_seeds_of_one_configuration_are_one_row(tmp_path: Path) -> None:
    write_npz(tmp_path)
    for seed in (0, 1):
        made = config(tmp_path, budget=NOISY, output={"folder": str(tmp_path / str(seed) / "run")})
        seeded = made.training.model_copy(update={"seed": seed})
        train(made.model_copy(update={"training": seeded}))
    found = read([tmp_path / "0", tmp_path / "1"], include_unprivate=False)
    assert {name: len(runs) for name, runs in found.groups.items()} == {"run": 2}


def test_a_run_that_was_stopped_does_not_look_finished() -> None:
    assert ending({"version": 2, "status": None, "diverged": None}) == "stopped"
    assert ending({"version": 2, "status": "finished", "diverged": None}) == "finished"
    assert ending({}) == "finished"  # 0.1 wrote it at the end only


@pytest.mark.filterwarnings("ignore:dpspan. columns of numbers enter")
def test_an_attack_on_numbers_goes_by_their_errors(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One logit's cross-entropy is nothing for every record: guessing, whatever leaks."""
    whole = yaml.safe_load(Path("c.yaml").read_text())
    whole["data"] = {
        "target": {"low": 0, "high": 1},
        **{name: whole["data"][name] for name in ("private", "test", "test_is_public")},
        "equal_rows_allowed": True,
    }
    for name in ("private", "test"):
        whole["data"][name]["inputs"] = ["a", "b"]
    whole["model"], whole["evaluate"] = {"name": "linear"}, {}
    Path("c.yaml").write_text(yaml.safe_dump(whole))
    dpspan("train", "c.yaml")
    asked = []

    def attack(*data: Any, **options: Any) -> Any:
        asked.append(options["criterion"])
        return membership_inference(*data, **options)

    monkeypatch.setattr("dpspan.audit.membership_inference", attack)
    dpspan("audit", "membership", "run")
    assert isinstance(asked[0], torch.nn.MSELoss)
    assert json.loads(Path("run/audit.json").read_text())["unprivate_auc"] != 0.5
