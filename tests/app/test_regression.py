"""Labels that are numbers: a table of them, `init`, `train`, `predict`, errors in their units."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes
from typer.testing import CliRunner

from dpspan.app.cli import app
from dpspan.app.config import ConfigError, load_config, parse_config
from dpspan.app.data import Npz, Target, load
from dpspan.app.run.evaluation import errors
from dpspan.app.tables import Csv
from dpspan.app.trained import load_run
from helpers.needs import extra

LOW, HIGH = 0.0, 350.0  # of a score of disease


def dpspan(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def clinic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """442 patients, each four times with other rounding: enough for a private fit to learn from."""
    monkeypatch.chdir(tmp_path)
    data, draw = load_diabetes(), np.random.default_rng(0)
    names = ["sex" if name == "sex" else f"{name}_level" for name in data.feature_names]
    for file, rows, copies in (("train.csv", slice(342), 4), ("test.csv", slice(342, None), 1)):
        with (tmp_path / file).open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow([*names, "progress"])
            for _ in range(copies):
                jitter = draw.normal(scale=1e-4, size=data.data[rows].shape)
                for x, y in zip(10 * (data.data[rows] + jitter), data.target[rows], strict=True):
                    writer.writerow([*x.round(5), y])
    lines = ["name,type,low,high", *(f"{name},numeric,-1.5,1.5" for name in names)]
    (tmp_path / "dictionary.csv").write_text("\n".join(lines))
    return tmp_path


BEGIN = (
    "init", "--data", "train.csv", "--dictionary", "dictionary.csv", "--test", "test.csv",
    "--test-is-public", "--label", "progress", "--target", f"{LOW:g},{HIGH:g}",
    "--records", 1368, "--delta", 1e-5,
)  # fmt: skip


def test_from_a_table_of_numbers_to_predictions(clinic: Path) -> None:
    dpspan(*BEGIN, "--model", "linear")
    assert load_config("config.yaml").data.labels == Target(low=LOW, high=HIGH)
    done = json.loads(dpspan("train", "config.yaml", "--json").stdout)
    run, found = clinic / "runs" / "first", done["evaluation"]["test_results"]["all"]
    assert "test_accuracy" not in done["metrics"]
    assert "threshold" not in done["evaluation"]
    truth = np.array([float(row[-1]) for row in rows("test.csv")])
    assert found["root_mean_squared_error"] < 0.9 * truth.std()  # the mean alone would have 1.0
    dpspan("predict", run, "test.csv", "--out", "out.csv")
    predicted = np.array([float(row[1]) for row in rows("out.csv")])
    assert (clinic / "out.csv").read_text().startswith("row,prediction\n")
    assert found["mean_absolute_error"] == pytest.approx(np.abs(predicted - truth).mean(), 1e-4)
    trained = load_run(run)
    assert "a number" in repr(trained)
    np.testing.assert_allclose(trained.predict("test.csv"), predicted, rtol=1e-5)
    with pytest.raises(ValueError, match=r"Expected a classifier: this run has data\.target"):
        trained.predict_proba("test.csv")
    shown = dpspan("report", run) and (run / "report.html").read_text()
    assert "root mean squared error" in shown
    assert "calibration" not in shown[shown.index('id="results"') :][:800]
    dpspan("export", run, "--to", "safetensors")
    card = (run / "export" / "MODEL_CARD.md").read_text()
    assert "predicts a number between 0.0 and 350.0" in card


def rows(path: str) -> list[list[str]]:
    with Path(path).open(newline="") as file:
        return list(csv.reader(file))[1:]


STEPWISE = ("--model", "mlp", "--batch-size", 128, "--epochs")


def test_a_network_learns_numbers_step_by_step(clinic: Path) -> None:
    dpspan(*BEGIN, *STEPWISE, 20, "--epsilon", 8)
    done = json.loads(dpspan("train", "config.yaml", "--json").stdout)
    assert done["evaluation"]["test_results"]["all"]["r2"] > 0.1
    assert 7.9 < done["epsilon"] <= 8


def test_weights_that_grew_without_bound_are_told(clinic: Path) -> None:
    dpspan(*BEGIN, *STEPWISE, 1)
    text = Path("config.yaml").read_text()
    Path("config.yaml").write_text(re.sub(r"learning_rate: [\d.e-]+", "learning_rate: 1e30", text))
    done = json.loads(dpspan("train", "config.yaml", "--json").stdout)
    assert done["status"] == "diverged"
    measured = done["evaluation"]["test_results"]["all"]
    assert measured["root_mean_squared_error"] is None
    assert json.loads(Path("runs/first/run.json").read_text())["status"] == "diverged"


def test_onnx_gives_numbers_in_their_units(clinic: Path) -> None:
    extra("onnxscript")
    runtime = pytest.importorskip("onnx.reference")
    dpspan(*BEGIN, *STEPWISE, 1)
    dpspan("train", "config.yaml")
    dpspan("export", "runs/first", "--to", "onnx")
    session = runtime.ReferenceEvaluator(str(clinic / "runs/first/export/model.onnx"))
    inputs = np.random.default_rng(0).uniform(-1, 1, (20, 10)).astype(np.float32)
    (found,) = session.run(None, {"inputs": inputs})
    wanted = load_run("runs/first").predict(inputs)
    np.testing.assert_allclose(found[:, 0], wanted, rtol=1e-4)


def test_what_lies_beyond_the_range_counts_as_its_end(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 2)), y=np.array([-5.0, 0.0, 5.0, 1e9]))
    loaded = load(Npz(path=tmp_path / "a.npz"), classes=Target(low=0, high=10))
    assert loaded.outputs == 1
    assert loaded.tensors[1].tolist() == [[-1], [-1], [0], [1]]
    assert loaded.tensors[1].dtype == torch.float32
    assert Target(low=0, high=10).unscaled(np.array([-3.0, -1, 0, 1])).tolist() == [0, 0, 5, 10]


@pytest.mark.parametrize("label", ["SECRET", "", "nan", "inf"])
def test_a_label_that_is_no_number_is_refused_unseen(tmp_path: Path, label: str) -> None:
    (tmp_path / "a.csv").write_text(f"x,z,y\n1,2,3\n4,5,{label}\n")
    source = Csv(path=tmp_path / "a.csv", inputs=("x", "z"), label="y")
    with pytest.raises(ValueError, match=r"Expected numbers as labels in .*at sample 1") as caught:
        load(source, classes=Target(low=0, high=10))
    assert "SECRET" not in str(caught.value)


def test_errors_against_sklearn() -> None:
    from sklearn import metrics

    draw = np.random.default_rng(0)
    true, predicted = draw.normal(size=(2, 50))
    found = errors(predicted, true)
    assert found["records"] == 50
    assert found["mean_absolute_error"] == pytest.approx(
        metrics.mean_absolute_error(true, predicted)
    )
    assert found["root_mean_squared_error"] == pytest.approx(
        metrics.root_mean_squared_error(true, predicted)
    )
    assert found["r2"] == pytest.approx(metrics.r2_score(true, predicted))
    assert errors(predicted, np.ones(50))["r2"] is None


CONFIG = """
data:
  {labels}
  private: {{format: csv, path: train.csv, inputs: [a, b], label: y}}
  public:
    extra: {{format: csv, path: public.csv, inputs: [a, b], label: y}}
    other: {{format: csv, path: other.csv, inputs: [a, b], label: y}}
  test: {{format: csv, path: test.csv, inputs: [a, b], label: y}}
model: {{name: {model}}}
method: {method}
budget: {{epsilon: 1, delta: 1.0e-5}}
training: {{epochs: 1, batch_size: 8, optimizer: {{name: sgd, learning_rate: 0.5}}}}
{more}
output: {{folder: run}}
"""
TARGET, CLASSES = "target: {low: 0, high: 1}", "classes: 2"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"labels": ""}, "data: Expected classes, or target where labels are numbers"),
        ({"labels": f"{TARGET}\n  {CLASSES}"}, "Expected classes, or target"),
        ({"labels": "target: {low: 1, high: 1}"}, "data.target: Expected `low` below `high`."),
        ({"method": "{name: gep, clip: 1, rank: 2, public: extra}"}, "without public directions"),
        ({"method": "{name: mirror, clip: 1, public: extra}"}, "without public directions"),
        ({"method": "{name: adagrad}", "model": "logistic"}, r"set `model: \{name: linear\}`"),
        ({"method": "{name: adagrad}", "labels": CLASSES}, r"set `model: \{name: logistic\}`"),
        ({"more": "evaluate: {threshold: 0.3}"}, "With data.target, `by` alone has a meaning"),
        ({"more": "evaluate: {noise_multiplier: 3}"}, "With data.target, `by` alone"),
    ],
)
def test_what_has_no_meaning_for_numbers_is_refused(settings: dict[str, str], message: str) -> None:
    usual = {"labels": TARGET, "model": "linear", "method": "{name: dpsgd, clip: 1}", "more": ""}
    parse_config(CONFIG.format(**usual))
    with pytest.raises(ConfigError, match=message):
        parse_config(CONFIG.format(**usual | settings))


def test_a_range_is_one_that_a_number_can_hold() -> None:
    target = "target: {low: -1.0e308, high: 1.0e308}"
    text = CONFIG.format(labels=target, model="linear", method="{name: dpsgd, clip: 1}", more="")
    with pytest.raises(ConfigError, match="a range that a number can hold"):
        parse_config(text)


def test_folders_of_images_have_classes() -> None:
    text = CONFIG.format(labels=TARGET, model="linear", method="{name: dpsgd, clip: 1}", more="")
    private = "private: {format: csv, path: train.csv, inputs: [a, b], label: y}"
    with pytest.raises(ConfigError, match="Folders of images have classes"):
        parse_config(text.replace(private, "private: {format: images, path: photos}"))


def test_commands_that_compare_accuracies_refuse_numbers(clinic: Path) -> None:
    Path("public.csv").write_text(Path("test.csv").read_text())
    dpspan(*BEGIN, "--public", "public.csv", "--out", "config.yaml", "--model", "linear")
    for command in (("compare", "config.yaml", "--out", "all"), ("advise", "config.yaml")):
        said = dpspan(*command, code=1).stderr
        assert "accuracies are compared, data.target has none" in said
    assert "`dpspan tune` compares accuracies" in dpspan("tune", "config.yaml", code=1).stderr


@pytest.mark.parametrize("wrong", ["0", "a,b", "0,1,2"])
def test_a_range_is_two_numbers(clinic: Path, wrong: str) -> None:
    said = dpspan("init", "--data", "train.csv", "--target", wrong, code=1).stderr
    assert "Expected --target to be two numbers, such as 0,200." in said


def test_a_range_in_place_of_classes(clinic: Path) -> None:
    said = dpspan("init", "--data", "train.csv", code=1).stderr
    assert "Expected --data and --classes (or --target, where labels are numbers)" in said


@pytest.mark.slow
def test_audits_know_labels_that_are_numbers(clinic: Path) -> None:
    dpspan(*BEGIN, *STEPWISE, 2)
    dpspan("audit", "step", "config.yaml")
    found = json.loads(dpspan("audit", "canaries", "config.yaml", "--json").stdout)
    assert 0 <= found["epsilon"] <= found["declared"]
