"""A hospital's table, with all that real ones have: `init`, then `train`, and no editor."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from benchmarks.real_tables import write_hospital
from typer.testing import CliRunner

from dpspan.app.cli import app
from dpspan.app.config import load_config
from dpspan.app.dictionary import read_dictionary
from dpspan.app.preprocessing import Preprocessing
from dpspan.app.run.columns import frozen_columns
from helpers.needs import extra


def dpspan(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def hospital(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_hospital(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


BEGIN = ("init", "--data", "patients.csv", "--classes", "malignant,benign", "--label", "diagnosis")


def test_from_a_hospital_s_table_to_a_model(hospital: Path) -> None:
    dpspan(
        *BEGIN, "--dictionary", "dictionary.csv", "--test", "test.csv", "--test-is-public",
        "--model", "logistic", "--records", 455, "--delta", 1e-4, "--unit", "patient_id",
    )  # fmt: skip
    config = load_config("config.yaml")
    assert config.data.unit == "patient_id"
    assert config.data.preprocessing["patient_id"].kind == "id"
    said = dpspan("train", "config.yaml", "--json")
    done = json.loads(said.stdout)
    assert done["status"] == "finished"
    assert done["metrics"]["test_accuracy"] > 0.88  # 63 % are benign
    run = hospital / "runs" / "first"
    kept = Preprocessing.of_document(json.loads((run / "preprocessing.json").read_text()))
    assert kept.feature_names[0] == "admitted"
    assert kept.feature_names[-3:] == ["ward=north", "ward=south", "ward other"]
    document = json.loads((run / "certificate.json").read_text())
    assert document["private"]
    assert 2.99 < document["epsilon"] <= 3.0
    (origin,) = document["training"]["preprocessing"]["origins"].items()
    assert (origin[0], len(origin[1])) == ("data dictionary", 32)
    (hospital / "new.csv").write_text("\n".join(_without_label(hospital / "test.csv")))
    predicted = dpspan("predict", run, "new.csv", "--out", "out.csv", "--id", "patient_id")
    with (hospital / "out.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    with (hospital / "test.csv").open(newline="") as stream:
        truth = [row["diagnosis"] for row in csv.DictReader(stream)]
    right = np.mean([label in row.values() for row, label in zip(rows, truth, strict=True)])
    assert right == pytest.approx(done["metrics"]["test_accuracy"])
    assert "SECRET" not in predicted.output + (hospital / "out.csv").read_text()
    dpspan("report", run)
    dpspan("export", run, "--to", "safetensors", "--out", "published")
    published = hospital / "published"
    described = (run / "preprocessing.json").read_bytes()
    assert (published / "preprocessing.json").read_bytes() == described
    for file in [*run.iterdir(), *published.iterdir(), hospital / "config.yaml"]:
        assert b"SECRET" not in file.read_bytes()
    assert "SECRET" not in said.output


def _without_label(path: Path) -> list[str]:
    return [line.rpartition(",")[0] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_delimiters_are_told_by_the_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delimiter: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_hospital(tmp_path, delimiter)
    dpspan(*BEGIN, "--dictionary", "dictionary.csv")
    assert load_config("config.yaml").data.private.delimiter == delimiter
    dpspan(*BEGIN, "--out", "plain.yaml")
    plain = load_config("plain.yaml").data
    assert plain.private.delimiter == delimiter
    assert "patient_id" not in plain.private.inputs  # an id would be learnt by heart


def test_bounds_that_the_dictionary_lacks_come_from_public_rows(hospital: Path) -> None:
    lines = (hospital / "dictionary.csv").read_text().splitlines()
    names = [",".join(line.split(",")[:2]) for line in lines]
    (hospital / "names.csv").write_text("\n".join(names))
    dpspan(*BEGIN, "--dictionary", "names.csv", "--public", "test.csv", "--model", "logistic")
    columns = load_config("config.yaml").data.preprocessing
    assert {column.origin for column in columns.values() if column.kind == "numeric"} == {
        "public rows"
    }
    made = frozen_columns(load_config("config.yaml"))
    assert made is not None
    assert made.columns["ward"].model_dump()["values"] == ("SECRET ward", "north", "south")


def test_every_problem_is_told_at_once(hospital: Path) -> None:
    lines = (hospital / "dictionary.csv").read_text().splitlines()
    lines[2] = "admitted,date,2024-12-31,2024-01-01,,"
    lines[3] = "mean radius,SECRET,,,,"
    lines[4] = "mean texture,numeric,few,40,,"
    lines[5] = "mean perimeter,numeric,1,,,"
    (hospital / "bad.csv").write_text("\n".join(lines))
    (hospital / "config.yaml").write_text("")
    said = dpspan(*BEGIN[:-1], "SECRET", "--dictionary", "bad.csv", "--test", "none.csv", code=1)
    for expected in (
        "config.yaml exists already",
        "Expected --label to be one of the 35 columns of patients.csv",
        "There is nothing at none.csv",
        "bad.csv:3: Expected the lower bound below the upper one",
        "bad.csv:4: Expected 'kind' to be one of 'numeric', 'date', 'categorical', 'drop', 'id'.",
        "bad.csv:5: Input should be a valid number",
        "bad.csv:6: Expected `low` and `high`, or neither",
    ):
        assert expected in said.stderr
    assert "SECRET" not in said.stderr.replace("SECRET'", "")


def test_values_of_a_dictionary_may_stand_apart(tmp_path: Path) -> None:
    """Cells of a table are stripped: ' no' would never be found there."""
    (tmp_path / "d.csv").write_text("name,type,values\nsmoker,categorical,yes | no\n")
    assert read_dictionary(tmp_path / "d.csv")["smoker"]["values"] == ["yes", "no"]


def test_a_dictionary_and_a_table_that_differ(hospital: Path) -> None:
    lines = (hospital / "dictionary.csv").read_text().splitlines()
    lines[1] = lines[1].replace("patient_id", "case")
    (hospital / "other.csv").write_text("\n".join(lines))
    said = dpspan(*BEGIN, "--dictionary", "other.csv", code=1).stderr
    assert "other.csv describes columns that are not there: case." in said
    (hospital / "other.csv").write_text("\n".join([lines[0], *lines[2:-3]]))
    said = dpspan(*BEGIN, "--dictionary", "other.csv", code=1).stderr
    assert "other.csv lacks input columns number 33, 34: add them, as `drop`" in said
    swapped = dpspan(*BEGIN, "--dictionary", "patients.csv", code=1).stderr
    assert "Expected columns `name` and `type` in the dictionary patients.csv." in swapped


def test_a_paid_release_from_a_dictionary(hospital: Path) -> None:
    lines = (hospital / "dictionary.csv").read_text().splitlines()
    lines = [lines[0] + ",epsilon", *(f"{line}," for line in lines[1:])]
    lines = [line + "0.01" if line.startswith("mean area") else line for line in lines]
    (hospital / "dictionary.csv").write_text("\n".join(lines))
    options = ("--model", "logistic", "--epochs", 2, "--dictionary", "dictionary.csv")
    dpspan(*BEGIN, *options, "--delta", 1e-4)
    assert load_config("config.yaml").data.preprocessing["mean area"].epsilon == 0.01
    dpspan("train", "config.yaml")
    run = hospital / "runs" / "first"
    document = json.loads((run / "certificate.json").read_text())
    assert document["training"]["preprocessing"]["origins"]["paid release"] == ["mean area"]
    assert document["events"][0]["count"] == 3
    assert document["epsilon"] <= 3.0


def test_parquet_with_gaps_and_days(hospital: Path) -> None:
    reader, writer = extra("pyarrow.csv"), extra("pyarrow.parquet")
    writer.write_table(reader.read_csv(hospital / "test.csv"), hospital / "test.parquet")
    from dpspan.app.tables import Csv, Parquet

    dpspan(*BEGIN, "--dictionary", "dictionary.csv")
    plan = yaml.safe_load((hospital / "config.yaml").read_text())["data"]["preprocessing"]
    made = Preprocessing.model_validate({"columns": plan}, strict=False)
    text = Csv(path=Path("test.csv"), label="diagnosis").prepared(made)[0]
    typed = Parquet(path=Path("test.parquet"), label="diagnosis").prepared(made)[0]
    np.testing.assert_allclose(typed, text, atol=1e-6)
