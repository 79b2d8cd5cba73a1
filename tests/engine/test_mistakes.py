"""Mistakes that people make with their files and models, as the command line answers them."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from dpspan.app.cli import app
from dpspan.app.config import Config
from dpspan.app.run.from_config import make_parts

NAMES = ("a", "b", "c", "label")
SCALING = {"mean": [10.0, 20.0, 30.0], "std": [2.0, 3.0, 4.0]}


def rows(count: int, seed: int) -> np.ndarray:
    """Numbers of three columns, and a label of two."""
    random = np.random.default_rng(seed)
    x = random.normal((10, 20, 30), (2, 3, 4), (count, 3)).round(3)
    return np.column_stack([x, np.arange(count) % 2])


def write(path: Path, table: np.ndarray) -> None:
    lines = [",".join(NAMES), *(",".join(f"{v:g}" for v in row) for row in table)]
    path.write_text("\n".join(lines) + "\n")


def table(name: str, **changes: Any) -> dict[str, Any]:
    fields = {"format": "csv", "path": f"{name}.csv", "inputs": list(NAMES[:3]), "label": "label"}
    return {**fields, **SCALING, **changes}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, count in (("private", 80), ("public", 30), ("test", 20)):
        write(tmp_path / f"{name}.csv", rows(count, count))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settings(**changes: Any) -> dict[str, Any]:
    whole: dict[str, Any] = {
        "data": {
            "classes": 2,
            "private": table("private"),
            "public": {"extra": table("public")},
            "test": table("test"),
            "test_is_public": True,
        },
        "model": {"name": "logistic"},
        "method": {"name": "dpsgd", "clip": 1.0},
        "budget": {"noise_multiplier": 1.0, "delta": 1e-5, "accountant": "rdp"},
        "training": {
            "epochs": 1,
            "batch_size": 20,
            "optimizer": {"name": "sgd", "learning_rate": 0.5},
        },
        "output": {"folder": "run"},
    }
    for at, value in changes.items():
        *above, last = at.split("__")
        section = whole
        for name in above:
            section = section[name]
        section[last] = value
    return whole


def written(**changes: Any) -> str:
    Path("c.yaml").write_text(yaml.safe_dump(settings(**changes)))
    return "c.yaml"


def said(*arguments: str, code: int = 1) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.stderr
    return result.stderr


# -- private records where they do not belong ----------------------------------------------------

GEP = {"name": "gep", "clip": 1.0, "rank": 2}
COMMANDS = {
    "train": (("train", "c.yaml"), {"warm_start": {"public": "extra"}}),
    "compare": (("compare", "c.yaml", "--out", "both"), {"budget__epsilon": 3.0}),
    "choose": (("choose", "c.yaml"), {"method": GEP, "choose": {"epsilon": 1.0, "rank": 2}}),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "scaling",
    [SCALING, {"mean": 0.0, "std": 1.0}, {**SCALING, "std": [2.0, 3.0, 4.0000001]}],
    ids=["same", "none", "nearly"],
)
@pytest.mark.filterwarnings("ignore:dpspan")
def test_private_records_as_public_data(
    folder: Path, command: str, scaling: dict[str, Any]
) -> None:
    shutil.copy("private.csv", "copy.csv")
    arguments, changes = COMMANDS[command]
    public = {"extra": table("copy", **scaling), "other": table("public")}
    whole = settings(**{"data__public": public, **changes})
    if "epsilon" in whole["budget"]:
        del whole["budget"]["noise_multiplier"]
    Path("c.yaml").write_text(yaml.safe_dump(whole))
    error = said(*arguments)
    assert "80 of the 80 samples of data.public.extra also occur in the private data" in error
    assert "remove them from the private data" in error
    assert "do not publish it" in error
    assert not Path("run/ledger.json").exists()
    assert not list(Path().rglob("*.safetensors"))


def test_the_private_file_itself(folder: Path) -> None:
    config = written(data__public={"extra": table("private", mean=0.0, std=1.0)})
    for command in ("train", "choose", "advise"):
        assert "c.yaml:" in said(command, config)
        assert "These are the records of data.private itself" in said(command, config)
    assert "data.test: These are" in said("train", written(data__test=table("private")))


@pytest.mark.filterwarnings("ignore:dpspan")
def test_private_records_as_test_data(folder: Path) -> None:
    mixed = np.vstack([rows(20, 20), rows(80, 80)[5:8]])
    write(folder / "mixed.csv", mixed)
    for scaling in (SCALING, {"mean": 0.0, "std": 1.0}):
        error = said("train", written(data__test=table("mixed", **scaling)))
        assert "3 of the 23 samples of data.test also occur in the private data" in error
        assert "e.g. sample 20" in error
        assert "leave test_is_public out" in error
        assert not Path("run").exists() or not list(Path("run").glob("*.json*"))


def test_private_records_as_test_data_that_are_not_shown(folder: Path) -> None:
    write(folder / "mixed.csv", rows(80, 80)[:10])
    config = Config.model_validate(
        settings(data__test=table("mixed"), data__test_is_public=False), strict=False
    )
    with pytest.warns(
        UserWarning, match=r"10 of the 10 samples of data\.test .* an audit must not"
    ):
        make_parts(config)


# -- numbers that do not fit ---------------------------------------------------------------------


@pytest.mark.parametrize("part", ["data__public", "data__test"])
def test_other_scaling_than_that_of_the_private_data(folder: Path, part: str) -> None:
    plain = table("public" if part == "data__public" else "test", mean=0.0, std=1.0)
    config = Config.model_validate(
        settings(**{part: {"extra": plain} if part == "data__public" else plain})
    )
    with pytest.warns(UserWarning, match=r"differ in scale, mean or std.*the same constants"):
        make_parts(config)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"epsilon": 3.0, "delta": 0.05}, r"δ = 0\.05 is large"),
        ({"epsilon": 1e9, "delta": 1e-5}, "an ε above 10 promises next to nothing"),
    ],
)
def test_promises_that_are_hardly_any(folder: Path, budget: Any, message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        make_parts(Config.model_validate(settings(budget=budget)))


def test_nothing_is_said_of_a_good_configuration(
    folder: Path, recwarn: pytest.WarningsRecorder
) -> None:
    make_parts(Config.model_validate(settings()))
    assert not list(recwarn)


# -- models --------------------------------------------------------------------------------------

NETS = """\
import torch
from torch import nn

def one(): return nn.Linear(3, 1)
def wrong(): return nn.Linear(4, 2)
def norm(): return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
def frozen(): return nn.Linear(3, 2).requires_grad_(False)

class Extra(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(3, 2), torch.zeros(1)
    def forward(self, x):
        self.seen = x.detach().clone()
        return self.layer(x)
    def get_extra_state(self):
        return self.seen
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one", "Expected the model to give 2 numbers for a sample, one for each of data.classes"),
        ("wrong", "The model cannot take samples of shape (3,)"),
        ("norm", "in a configuration `fix: true` below `model`"),
        ("frozen", "parameters are all frozen"),
        ("Extra", "its get_extra_state puts into state_dict"),
    ],
)
def test_models_that_cannot_be_trained(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    module = f"nets_{folder.parent.name}_{folder.name}".replace("-", "_")
    (folder / f"{module}.py").write_text(NETS)
    config = written(model={"name": "factory", "factory": f"{module}:{name}"})
    error = said("train", config)
    assert message in error
    assert ".." not in error
    assert not Path("run/checkpoint.safetensors").exists()


# -- files ---------------------------------------------------------------------------------------


def test_all_files_of_a_run_may_be_read_by_the_same_people(folder: Path) -> None:
    said("train", written(), code=0)
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode)
        for path in Path("run").iterdir()
        if path.name != ".lock"
    }
    assert {"model.safetensors", "checkpoint.safetensors", "certificate.json"} <= set(modes)
    assert len(set(modes.values())) == 1, modes


def test_a_truncated_checkpoint(folder: Path) -> None:
    config = written()
    said("train", config, code=0)
    checkpoint = Path("run/checkpoint.safetensors")
    checkpoint.write_bytes(checkpoint.read_bytes()[:200])
    error = said("train", config, "--resume")
    assert "Restore it from a copy, or remove it and train anew" in error
    assert "what was spent stays spent" in error


def test_tables_that_cannot_be_read(folder: Path) -> None:
    Path("latin.csv").write_bytes("größe,label\n1,0\n".encode("latin-1"))
    (folder / "folder.csv").mkdir()
    init = ("init", "--classes", "2", "--data")
    for error in (
        said(*init, "latin.csv"),
        said("train", written(data__private=table("latin"))),
    ):
        assert "latin.csv is not a readable CSV file: its text is not in UTF-8" in error
    for error in (
        said(*init, "folder.csv"),
        said("train", written(data__private=table("folder"))),
    ):
        assert "folder.csv is not a readable CSV file: Is a directory." in error
    Path("empty.csv").write_text("")
    assert "no column 'a', 'b', 'c', 'label' among its 0." in said(
        "train", written(data__private=table("empty"))
    )
    assert ".." not in said("train", written(data__private=table("empty")))
