"""Whatever is given to whichever command, no message, traceback or file shows what data hold."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from dpspan.app.cli import app
from helpers.needs import extra

SECRETS = ("Xq7Jane", "Xq7Doe", "918273645", "Xq7-ward")  # neither words nor numbers of ours
RECORD = "Xq7Jane,918273645,Xq7-ward,1\n"
TABLE = "name,insurance,ward,ill\n" + RECORD * 3 + "Xq7Doe,5,Xq7-ward,0\n"


def parquet(path: Path) -> None:
    pyarrow = extra("pyarrow")
    from pyarrow import parquet as writer

    columns = {"a": ["Xq7Jane", "Xq7Doe"], "918273645": [1, 2], "ill": ["Xq7-ward", None]}
    writer.write_table(pyarrow.table(columns), path)


def as_text(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text)


MALFORMED: dict[str, Callable[[Path], Any]] = {
    "a table": as_text(TABLE),
    "a table without names": as_text(RECORD * 4),
    "semicolons": as_text(TABLE.replace(",", ";")),
    "a ragged table": as_text(TABLE + "Xq7Jane,918273645\n"),
    "open quotes": as_text(TABLE + '"Xq7Jane,918273645\n'),
    "other bytes": lambda path: path.write_bytes(TABLE.encode("utf-16")),
    "latin letters": lambda path: path.write_bytes("näme,ill\nXq7Jane,ö\n".encode("latin-1")),
    "nothing": as_text(""),
    "records in JSON": as_text(json.dumps([{"name": "Xq7Jane", "insurance": 918273645}])),
    "columns in JSON": as_text(json.dumps({"Xq7Jane": [918273645], "data": "Xq7Doe"})),
    "lines of JSON": as_text('{"name": "Xq7Jane"}\n{"name": "Xq7Doe"}\n'),
    "cut JSON": as_text('[{"name": "Xq7Jane", "insurance": 918273645'),
    "YAML": as_text("patients:\n  Xq7Jane: 918273645\n  Xq7Doe: {ward: Xq7-ward}\n"),
    "YAML twice": as_text("Xq7Jane: 918273645\nXq7Jane: 5\n"),
    "YAML with tags": as_text("data: !!int Xq7Jane\nmodel: &x [918273645, *Xq7Doe]\n"),
    "YAML like ours": as_text(
        "data: {classes: Xq7Jane, private: {format: csv, path: 918273645, Xq7Doe: 1}}\n"
        "model: {name: Xq7-ward}\nbudget: {epsilon: Xq7Jane, delta: 918273645}\n"
    ),
    "arrays": lambda path: np.savez(path.open("wb"), Xq7Jane=[918273645], x=["Xq7Doe"]),
    "objects": lambda path: np.savez(
        path.open("wb"), x=np.array([{"Xq7Jane": 918273645}], object), y=["Xq7Doe"]
    ),
    "weights": lambda path: torch.save({"Xq7Jane": torch.tensor([918273645])}, path),
    "a pickle": lambda path: torch.save(["Xq7Jane", 918273645], path),
    "columns": parquet,
}
COMMANDS: dict[str, list[str]] = {
    "train": ["train", "{}"],
    "choose": ["choose", "{}"],
    "rank": ["choose", "{}", "--unprivate-rank"],
    "compare": ["compare", "{}", "--out", "out"],
    "advise": ["advise", "{}"],
    "tune": ["tune", "{}", "--epsilon", "3"],
    "audit step": ["audit", "step", "{}"],
    "audit canaries": ["audit", "canaries", "{}"],
    "verify": ["verify", "{}"],
    "report": ["report", "{}"],
    "membership": ["audit", "membership", "{}"],
    "predict": ["predict", "{}", "good.csv"],
    "export": ["export", "{}"],
    "init": ["init", "--data", "{}", "--classes", "2"],
    "init with a label": ["init", "--data", "{}", "--classes", "2", "--label", "ill"],
    "init with a test": ["init", "--data", "good.csv", "--classes", "2", "--test", "{}"],
    "init with a dictionary": [
        "init", "--data", "good.csv", "--classes", "2", "--dictionary", "{}"
    ],
}  # fmt: skip
ENDINGS = {"train": ".yaml", "init": ".csv"}


def silent(arguments: list[str], *, hidden: tuple[str, ...] = SECRETS) -> Any:
    """Neither what is printed nor the traceback of the error, with its causes, shows a secret."""
    result = CliRunner().invoke(app, arguments)
    told = result.output
    if result.exception is not None:
        told += "".join(traceback.format_exception(result.exception))
    for secret in hidden:
        assert secret not in told, f"{arguments} shows {secret}: …{told[-2000:]}"
    return result


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.csv").write_text("a,ill\n" + "0.5,1\n" * 30)
    return tmp_path


@pytest.mark.parametrize("flaw", MALFORMED)
def test_in_place_of_a_file_that_a_command_reads(folder: Path, flaw: str) -> None:
    for command, arguments in COMMANDS.items():
        endings = (".csv", ".npz", ".parquet", ".txt") if "init" in command else (".yaml",)
        for ending in endings:
            path = folder / f"given{ending}"
            MALFORMED[flaw](path)
            result = silent([each.format(path) for each in arguments])
            made = folder / "config.yaml"
            if "init" not in command:
                assert result.exit_code == 1
            elif result.exit_code == 0:
                written, names = made.read_text(), (flaw, ending) == ("columns", ".parquet")
                assert names or not any(secret in written for secret in SECRETS), written
                made.unlink()


def test_the_causes_of_an_error_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def quoting(*_: Any) -> None:
        try:
            int(SECRETS[0])
        except ValueError:
            raise OSError("nothing to see") from None if hidden else KeyError(SECRETS[1])

    monkeypatch.setattr("dpspan.app.config.load_config", quoting)
    for hidden in (True, False):
        if hidden:
            silent(["train", __file__])
        else:
            with pytest.raises(AssertionError, match="shows Xq7Doe"):
                silent(["train", __file__])


@pytest.mark.parametrize("name", ["run.json", "ledger.json", "certificate.json", "config.yaml"])
@pytest.mark.parametrize(
    "flaw", ["a table", "records in JSON", "columns in JSON", "YAML", "arrays"]
)
def test_in_place_of_a_file_of_a_run(folder: Path, name: str, flaw: str) -> None:
    run = folder / "run"
    run.mkdir()
    (run / "model.safetensors").write_bytes(b"Xq7Jane")
    MALFORMED[flaw](run / name)
    for command in (["verify"], ["report"], ["audit", "membership"]):
        silent([*command, str(run)])


SOURCES: dict[str, dict[str, Any]] = {
    ".csv": {"format": "csv", "inputs": ["insurance", "ward"], "label": "ill"},
    ".parquet": {"format": "parquet", "inputs": ["a"], "label": "ill"},
    ".npz": {"format": "npz", "inputs": "x", "labels": "y"},
    ".idx": {"format": "idx"},
}
COLUMNS = {"insurance": {"kind": "numeric", "low": 0, "high": 9}, "ward": {"kind": "date"}}


def configuration(private: dict[str, Any], **data: Any) -> dict[str, Any]:
    return {
        "data": {"classes": 2, "private": private, **data},
        "model": {"name": "logistic"},
        "method": {"name": "dpsgd", "clip": 1.0},
        "budget": {"noise_multiplier": 1.0, "delta": 1e-5, "accountant": "rdp"},
        "training": {
            "epochs": 1,
            "batch_size": 2,
            "optimizer": {"name": "sgd", "learning_rate": 0.1},
        },
        "output": {"folder": "run"},
    }


@pytest.mark.filterwarnings("ignore:dpspan")
@pytest.mark.parametrize("ending", SOURCES)
@pytest.mark.parametrize("flaw", MALFORMED)
def test_in_place_of_data(folder: Path, flaw: str, ending: str) -> None:
    path = folder / f"given{ending}"
    MALFORMED[flaw](path)
    source = {**SOURCES[ending], "path": str(path)}
    plans: list[dict[str, Any]] = [{}]
    if "label" in source:
        plans.append({"preprocessing": {"insurance": COLUMNS["insurance"]}})
    for plan in plans:
        private = {k: v for k, v in source.items() if not plan or k != "inputs"}
        (folder / "c.yaml").write_text(yaml.safe_dump(configuration(private, **plan)))
        for command in (["train"], ["audit", "step"]):
            code = silent([*command, "c.yaml"]).exit_code
            assert code == (0 if plan and (flaw, ending) == ("a table", ".csv") else 1)
        silent(["--debug", "train", "c.yaml"])


ROWS = "".join(f"Xq7Jane{i},918273645{i},Xq7-ward,{i % 2}\n" for i in range(40))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": "name"}, "Expected labels from 0 to 1"),
        ({"inputs": ["ward"]}, "Expected numbers in column 'ward'"),
        ({"inputs": ["ward"], "categories": {"ward": ["a"]}}, "Expected one of"),
        ({"inputs": ["Insurance"]}, "has no column 'Insurance'"),
    ],
)
def test_values_that_do_not_fit(folder: Path, changes: dict[str, Any], message: str) -> None:
    (folder / "p.csv").write_text("name,insurance,ward,ill\n" + ROWS)
    source = {"format": "csv", "path": "p.csv", "inputs": ["insurance"], "label": "ill"} | changes
    (folder / "c.yaml").write_text(yaml.safe_dump(configuration(source)))
    said = silent(["train", "c.yaml"])
    assert message in said.stderr
    silent(["--debug", "train", "c.yaml"])


def test_labels_that_should_be_numbers(folder: Path) -> None:
    (folder / "p.csv").write_text("name,insurance,ward,ill\n" + ROWS)
    source = {"format": "csv", "path": "p.csv", "inputs": ["insurance"], "label": "name"}
    whole = configuration(source, classes=None, target={"low": 0, "high": 1})
    (folder / "c.yaml").write_text(yaml.safe_dump({**whole, "model": {"name": "linear"}}))
    for command in (["train"], ["audit", "step"], ["--debug", "train"]):
        said = silent([*command, "c.yaml"])
        assert said.exit_code == 1
    assert "Expected numbers as labels in p.csv, got something else at sample 0" in str(
        said.exception or said.stderr
    )


@pytest.mark.filterwarnings("ignore:dpspan")
def test_what_a_run_leaves(folder: Path) -> None:
    """Values that no list has, gaps and texts among numbers, of a run that goes well."""
    (folder / "p.csv").write_text("name,insurance,ward,ill\n" + ROWS + "Xq7Doe,Xq7Doe,,1\n")
    columns = {
        "name": {"kind": "id"},
        "insurance": {"kind": "numeric", "low": 0, "high": 1e12, "indicator": True},
        "ward": {"kind": "categorical", "values": ["north"]},
    }
    (folder / "p.csv").write_text((folder / "p.csv").read_text().replace("Xq7-ward,1", "north,1"))
    source = {"format": "csv", "path": "p.csv", "label": "ill"}
    whole = configuration(source, preprocessing=columns, unit="name")
    (folder / "c.yaml").write_text(yaml.safe_dump(whole))
    assert silent(["train", "c.yaml"]).exit_code == 0
    assert silent(["report", "run"]).exit_code == 0
    assert silent(["verify", "run"]).exit_code == 0
    for flaw, make in MALFORMED.items():
        make(folder / "new.csv")
        code = silent(["predict", "run", "new.csv"]).exit_code
        assert code == (0 if flaw == "a table" else 1)
    for file in (folder / "run").rglob("*"):
        for secret in SECRETS if file.is_file() else ():
            assert secret.encode() not in file.read_bytes(), file
