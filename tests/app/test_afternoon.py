"""The whole afternoon of a newcomer: own table, own model, nothing else in the folder."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from sklearn.datasets import load_breast_cancer

from dpspan.app.config import Config
from dpspan.app.run import train
from dpspan.model.networks import MLP
from helpers.digits import config, write_npz

MODEL = """\
from torch import nn

def network(inputs=12, width=8):
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, 2))
"""


def dpspan(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dpspan", *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def write_patients(folder: Path) -> int:
    """569 tumours, ten numbers and one text each; the last 169 may be seen by anybody."""
    data = load_breast_cancer()
    names = [name.replace(" ", "_") for name in data.feature_names[:10]]
    columns = [*names, "size", "benign"]
    for file, rows in (("patients.csv", slice(400)), ("released.csv", slice(400, None))):
        with (folder / file).open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(columns)
            for x, y in zip(data.data[rows, :10], data.target[rows], strict=True):
                writer.writerow([*x, "large" if x[0] > 15 else "small", y])
    return 400


def edit(path: Path, *changes: tuple[str, str]) -> None:
    """What a person does in an editor."""
    text = path.read_text()
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    path.write_text(text)


def test_from_a_table_to_a_report(tmp_path: Path) -> None:
    records = write_patients(tmp_path)
    (tmp_path / "clinic.py").write_text(MODEL)
    file = tmp_path / "config.yaml"

    said = dpspan(
        tmp_path, "init", "--data", "patients.csv", "--classes", 2, "--label", "benign",
        "--test", "released.csv", "--model", "clinic:network", "--epochs", 6, "--batch-size", 64,
    )  # fmt: skip
    assert "change what is marked CHECK, then: dpspan train config.yaml" in said.stderr
    assert file.read_text().count("# CHECK") == 3

    public = [list(map(float, row[:10])) for row in _rows(tmp_path / "released.csv")]
    scaling = ", ".join(f"{k}: {v}" for k, v in _typical(public).items())
    edit(
        file,
        ("label: benign", f"label: benign, categories: {{size: [small, large]}}, {scaling}"),
        ("test_is_public: false", "test_is_public: true"),
        ("# records: 10000", f"records: {records}"),
        ("delta: 1e-05", "delta: 1e-04\n  accountant: rdp"),  # quicker than pld
    )
    trained = json.loads(dpspan(tmp_path, "train", "config.yaml", "--json").stdout)
    assert trained["status"] == "finished"
    assert trained["metrics"]["test_accuracy"] > 0.85  # 77 % are benign

    run = tmp_path / "runs" / "first"
    certificate = json.loads((run / "certificate.json").read_text())
    assert certificate["private"]
    assert 2.99 < certificate["epsilon"] <= 3.0
    assert certificate["delta"] == 1e-4
    assert certificate["steps"] == trained["step"] == 6 * 6
    assert certificate["training"]["expected_batch_size"] == 64
    assert certificate["warnings"] == []
    weights = safetensors.torch.load_file(run / "model.safetensors")
    assert weights["0.weight"].shape == (8, 12)

    dpspan(tmp_path, "report", "runs/first")
    page = unescape((run / "report.html").read_text())
    for expected in (
        "ε = 3",
        f"{100 * trained['metrics']['test_accuracy']:.1f}",
        "What is guaranteed",
        "36 training steps, each on a random 0.16 of the records",
        "clinic:network",
        'id="plot-accuracy"',
    ):
        assert expected in page
    assert "unprivate" not in page.replace("# unprivate_metrics", "")


def _rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))[1:]


def _typical(rows: list[list[float]]) -> dict[str, Any]:
    """Mean and deviation of the rows that anybody may see; the two indicators as they are."""
    x = torch.tensor(rows)
    return {"mean": [*x.mean(0).tolist(), 0, 0], "std": [*x.std(0).tolist(), 1, 1]}


# -- weights with their class ---------------------------------------------------------------------


def pretrained(folder: Path, **changes: Any) -> Config:
    """A run that begins with weights from a file, and hardly moves them."""
    write_npz(folder)
    model = {
        "name": "checkpoint",
        "weights": str(folder / "weights.safetensors"),
        "factory": "dpspan.model.networks:MLP",
        "arguments": {"inputs": 64, "hidden": [], "classes": 10},
    }
    training = {
        "epochs": 1,
        "batch_size": 96,
        "optimizer": {"name": "sgd", "learning_rate": 1e-12},
    }
    budget = {"noise_multiplier": 1.0, "delta": 1e-5, "accountant": "rdp"}
    return config(folder, model={**model, **changes}, training=training, budget=budget)


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_training_begins_with_the_weights_given(tmp_path: Path, ending: str) -> None:
    weights = tmp_path / f"weights.{ending}"
    model = MLP(64, (), 10)
    state = {name: torch.rand_like(value) for name, value in model.state_dict().items()}
    (safetensors.torch.save_file if ending == "safetensors" else torch.save)(state, weights)
    assert train(pretrained(tmp_path, weights=str(weights))).status == "finished"
    after = safetensors.torch.load_file(tmp_path / "run" / "model.safetensors")
    assert after.keys() == state.keys()
    for name, value in state.items():
        torch.testing.assert_close(after[name], value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"There are no weights at .*weights\.pt"),
        (MLP(64, (8,), 10).state_dict(), "do not fit MLP"),
        (torch.ones(3), "Expected a state_dict in .*, got a Tensor"),
        ("P17 Jane Doe", r"Expected a state_dict in [^,]*, got a str\.$"),
        (MLP(64, (), 10), "holds no weights that can be read safely"),  # a pickled module
    ],
)
def test_weights_that_are_none(tmp_path: Path, content: Any, message: str) -> None:
    if content is not None:
        torch.save(content, tmp_path / "weights.pt")
    with pytest.raises((ValueError, OSError), match=message):
        train(pretrained(tmp_path, weights=str(tmp_path / "weights.pt")))
    assert not (tmp_path / "run" / "checkpoint.safetensors").exists()
