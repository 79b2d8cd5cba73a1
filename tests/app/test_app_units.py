"""`unit:` in a configuration: a column of ids, splits that divide nobody, and what is said."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import dpspan
from dpspan.app.cli import app
from dpspan.app.comparison import compare
from dpspan.app.comparison.search import Try
from dpspan.app.comparison.tuning import RowSearch
from dpspan.app.config import load_config, parse_config
from dpspan.app.data import Npz
from dpspan.app.report import render
from dpspan.app.run import train
from dpspan.app.run.from_config import make_parts
from dpspan.app.run.task import Contender, Task
from dpspan.app.run.training import Training
from dpspan.app.tables import Csv

SIZES = [1, 9, 2, 4, 1, 3, 7, 2, 5, 6]


def write(path: Path, ids: list[str], seed: int = 0) -> Path:
    numbers = np.random.default_rng(seed).normal(size=(len(ids), 2)).round(6)
    rows = [f"{i},{a},{b},{int(a > 0)}" for i, (a, b) in zip(ids, numbers, strict=True)]
    path.write_text("\n".join(["patient_id,a,b,ill", *rows]) + "\n")
    return path


def ids_of(sizes: list[int], name: str = "p") -> list[str]:
    return [f"{name}{unit}" for unit, size in enumerate(sizes) for _ in range(size)]


def source(path: Path) -> dict[str, Any]:
    return {"format": "csv", "path": str(path), "inputs": ["a", "b"], "label": "ill"}


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    private = write(tmp_path / "private.csv", ids_of(SIZES))
    return {
        "data": {"classes": 2, "private": source(private), "unit": "patient_id"},
        "model": {"name": "logistic"},
        "method": {"name": "dpsgd", "clip": 1.0},
        "budget": {"noise_multiplier": 2.0, "delta": 1e-3, "accountant": "rdp"},
        "training": {
            "epochs": 2,
            "batch_size": 5,
            "optimizer": {"name": "sgd", "learning_rate": 0.5},
            "device": "cpu",
        },
        "output": {"folder": str(tmp_path / "run")},
    }


def config(settings: dict[str, Any], **data: Any) -> Any:
    return parse_config(yaml.safe_dump({**settings, "data": {**settings["data"], **data}}))


@pytest.mark.filterwarnings("ignore:dpspan. columns of numbers")
def test_training_certifies_and_reports_units(settings: dict[str, Any], tmp_path: Path) -> None:
    result = train(config(settings, records_per_unit=3))
    document = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert document["adjacency"] == "add or remove one unit: every record of one id"
    assert document["training"]["records_per_unit"] == 3
    assert document["training"]["sampling"].startswith("PoissonDraw(sample_rate=0.5")
    assert document["epsilon"] == result.epsilon
    page = render([tmp_path / "run"], tmp_path / "report.html").read_text()
    for words in (
        "knows every unit but one",
        "adding or removing one unit",
        "a step uses at most 3 of them",
        "each unit is in a batch with probability 0.5",
        "the number of units is a secret",
    ):
        assert words in page
    again = train(config(settings, records_per_unit=3), resume=True)
    assert again.epsilon == result.epsilon
    with pytest.raises(ValueError, match="holds a run with other settings"):
        train(config(settings, records_per_unit=4), resume=True)
    with pytest.raises(ValueError, match="holds a run with other settings"):
        train(config(settings, unit=None), resume=True)


def test_a_stated_number_is_of_units(settings: dict[str, Any]) -> None:
    parts = make_parts(config(settings, records=20))
    assert parts.private.count == len(SIZES)
    task = dpspan.app.run.from_config.task_of(config(settings, records=20), parts.private, None)
    assert (task.sample_rate, task.drawn, task.protects) == (0.25, 10, "unit")


def test_a_configuration_without_units_is_written_down_as_before(settings: dict[str, Any]) -> None:
    assert "unit" not in config(settings, unit=None).fixed()["data"]
    assert config(settings).fixed()["data"]["records_per_unit"] == 16


@pytest.mark.parametrize("where", ["public", "test"])
def test_a_unit_is_on_one_side_only(settings: dict[str, Any], tmp_path: Path, where: str) -> None:
    other = write(tmp_path / "other.csv", ["q0", "q1", "p3", "p3", "p9"], seed=1)
    if where == "public":
        with pytest.raises(ValueError, match=r"2 units of data.public.extra also occur"):
            make_parts(config(settings, public={"extra": source(other)}))
        return
    with pytest.raises(ValueError, match=r"2 units of data.test also occur in the private data"):
        make_parts(config(settings, test=source(other), test_is_public=True))
    with pytest.warns(UserWarning, match="they say nothing about new units"):
        make_parts(config(settings, test=source(other)))
    make_parts(config(settings, test=source(write(other, ["q0", "q1"], seed=1))))


@pytest.mark.parametrize("theirs", [("7.0", "9.0"), (7.0, 9.0), (" 7", "9")])
def test_an_id_may_be_spelt_as_a_fraction(
    settings: dict[str, Any], tmp_path: Path, theirs: tuple[Any, ...]
) -> None:
    """As gaps beside whole numbers make of them."""
    private, other = tmp_path / "private.npz", tmp_path / "other.npz"
    x, y = np.random.default_rng(0).normal(size=(6, 2)), np.arange(6) % 2
    np.savez(private, x=x[:4], y=y[:4], patient_id=[7, 7, 8, 8])
    np.savez(other, x=x[4:], y=y[4:], patient_id=theirs)
    files = [{"format": "npz", "path": str(path)} for path in (private, other)]
    with pytest.raises(ValueError, match=r"1 units of data.public.extra also occur"):
        make_parts(config(settings, private=files[0], public={"extra": files[1]}))


def test_ids_of_every_format(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", ["p0", " p0 ", "p1"])
    assert Csv(path=path, inputs=("a",)).ids("patient_id") == ["p0", "p0", "p1"]
    assert Csv(path=path, inputs=("a",)).ids("person") is None
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), y=np.zeros(3), who=np.array([7, 7, 8]))
    assert Npz(path=tmp_path / "a.npz").ids("who").tolist() == [7, 7, 8]
    assert Npz(path=tmp_path / "a.npz").ids("person") is None


def test_columns_that_are_no_ids_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.unit to be a column .* which has none 'person'"):
        make_parts(config(settings, unit="person"))
    with pytest.raises(ValueError, match="not among the inputs"):
        config(settings, unit="a")
    write(tmp_path / "private.csv", ["p0", "", "p1"])
    with pytest.raises(ValueError, match=r"Record 1 has no id in data.unit"):
        make_parts(config(settings))


def task(**changes: Any) -> Task:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(sum(SIZES), 3, generator=g)
    records = TensorDataset(x, (x[:, 0] > 0).long())
    settings = {
        "model": lambda: torch.nn.Linear(3, 2),
        "private": records,
        "test": TensorDataset(torch.randn(20, 3, generator=g), torch.arange(20) % 2),
        "batch_size": 5,
        "epochs": 2,
        "budget": dpspan.Budget(epsilon=3.0, delta=1e-2),
        "accountant": "rdp",
        "test_is_public": True,
        "unit": ids_of(SIZES),
    }
    return Task(**{**settings, **changes})


CONTENDER = Contender(name="DP-SGD", method=dpspan.DPSGD(clip=1.0), learning_rate=0.5)


def test_a_search_holds_whole_units_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Task] = []
    prepare = Training.prepare

    def noted(self: Training, *args: Any, **options: Any) -> None:
        seen.append(self.task)
        prepare(self, *args, **options)

    monkeypatch.setattr(Training, "prepare", noted)
    search = dpspan.app.comparison.Search(tries=3, finalists=1, seeds=1)
    row = RowSearch(search=search, task=task(), contender=CONTENDER, row=tmp_path)
    row.make(Try(rate=0.5, share=1.0, seed=0))
    [split] = seen
    ids = ids_of(SIZES)
    private, test = ({ids[i] for i in part.indices} for part in (split.private, split.test))
    assert len(test) == 2
    assert private | test == set(ids)
    assert not private & test
    assert split.drawn == 8
    assert split.units.sizes.tolist() == [SIZES[int(each[1:])] for each in _in_order(split, ids)]


def _in_order(split: Task, ids: list[str]) -> list[str]:
    return list(dict.fromkeys(ids[i] for i in split.private.indices))


def test_a_comparison_is_of_units(tmp_path: Path) -> None:
    comparison = compare(task(), [CONTENDER], out=tmp_path, seeds=(0,))
    whole = json.loads((tmp_path / "certificate.json").read_text())
    assert whole["adjacency"].startswith("add or remove one unit")
    assert whole["epsilon"] == comparison.epsilon_together
    with pytest.raises(ValueError, match="other settings"):
        compare(task(records_per_unit=2), [CONTENDER], out=tmp_path, seeds=(0,))
    assert dataclasses.replace(task(), unit=None).protects == "record"


@pytest.mark.parametrize(
    ("name", "likely"),
    [
        ("patient_id", True),
        ("ID", True),
        ("userId", True),
        ("customer-uuid", True),
        ("Subject", True),
        ("grid", False),
        ("valid", False),
        ("idle", False),
        ("width", False),
    ],
)
def test_init_asks_whose_a_column_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, likely: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "private.csv", ids_of(SIZES))
    path.write_text(path.read_text().replace("patient_id", name, 1))
    arguments = ["init", "--data", "private.csv", "--classes", "2", "--force"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    text = Path("config.yaml").read_text()
    assert (f"# CHECK: {name} looks like an id" in text) == likely
    assert load_config("config.yaml").data.unit is None
    if likely:
        result = CliRunner().invoke(app, [*arguments, "--interactive"], input="y\n")
        assert result.exit_code == 0, result.output
        data = load_config("config.yaml").data
        assert data.unit == name
        assert name not in data.private.inputs
        assert "p0" not in result.output + text  # names only
