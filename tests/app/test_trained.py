"""The model in use: loaded, asked, exported."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
import yaml
from typer.testing import CliRunner

import dpspan
from dpspan.app import export as exporting
from dpspan.app.cli import app
from dpspan.app.config import parse_config
from dpspan.app.export import export
from dpspan.app.run import RunFolder, train
from dpspan.app.run.folder import read_json
from dpspan.app.run.from_config import make_parts
from dpspan.app.run.models import load_weights
from helpers.digits import config, digits, settings, write_npz
from helpers.needs import extra

NOISY = {"noise_multiplier": 1.0, "delta": 1e-5, "accountant": "rdp"}
SECRET = "P-4711-secret"


def command(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_npz(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def patients(folder: Path) -> Path:
    """A run on a table with two named classes, one column of texts among its inputs."""
    x, y = digits(200)
    rows = [
        [
            f"id{n}",
            *image.flatten()[20:28],
            "left" if n % 2 else "right",
            "odd" if d % 2 else "even",
        ]
        for n, (image, d) in enumerate(zip(x, y, strict=True))
    ]
    names = ["id", *(f"p{i}" for i in range(8)), "side", "kind"]
    for name, some in (("train.csv", rows[:150]), ("new.csv", rows[150:])):
        with (folder / name).open("w", newline="") as file:
            csv.writer(file).writerows([names, *some])
    source = {
        "format": "csv", "path": "train.csv", "inputs": names[1:-1], "label": "kind",
        "categories": {"side": ["left", "right"]}, "scale": 255.0,
    }  # fmt: skip
    data = {"classes": ["even", "odd"], "private": source, "records": 150}
    train(parse_config(yaml.safe_dump(settings(folder, data=data, budget=NOISY))))
    return folder / "run"


def test_predictions_are_those_of_the_weights(folder: Path) -> None:
    settings = config(folder, budget=NOISY)
    train(settings)
    run = dpspan.load_run(folder / "run")
    by_hand = make_parts(settings)
    load_weights(by_hand.model, folder / "run" / "model.safetensors")
    assert by_hand.test is not None
    expected = by_hand.model(by_hand.test.tensors[0]).softmax(1).detach().numpy()
    np.savez("new.npz", x_train=np.load("digits.npz")["x_test"])  # no labels
    found = run.predict_proba("new.npz")
    np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_allclose(run.predict_proba(by_hand.test.tensors[0]), found, atol=1e-6)
    assert list(run.predict("new.npz")) == [str(place) for place in expected.argmax(1)]
    document = read_json(folder / "run" / "certificate.json")
    assert (run.epsilon, run.delta, run.certificate) == (document["epsilon"], 1e-5, document)
    assert not run.model.training
    assert f"ε = {run.epsilon:.4g} at δ = 1e-05" in repr(run)
    assert "10 classes" in repr(run)


def test_no_data_of_the_run_are_needed(folder: Path) -> None:
    train(config(folder, budget=NOISY))
    before = dpspan.load_run("run").predict_proba(np.zeros((3, 1, 8, 8)))
    (folder / "digits.npz").unlink()
    np.testing.assert_array_equal(
        dpspan.load_run("run").predict_proba(np.zeros((3, 1, 8, 8))), before
    )


def test_predict_on_the_command_line(patients: Path) -> None:
    run = dpspan.load_run(patients)
    assert run.classes == ("even", "odd")
    said = command("predict", patients, "new.csv", "--out", "p.csv", "--id", "id")
    assert "Wrote 50 predictions to p.csv" in said.stderr
    rows = list(csv.DictReader(Path("p.csv").read_text().splitlines()))
    assert list(rows[0]) == ["id", "prediction", "p_even", "p_odd"]
    assert [row["id"] for row in rows] == [f"id{n}" for n in range(150, 200)]
    probabilities = run.predict_proba("new.csv")
    assert [float(row["p_odd"]) for row in rows] == pytest.approx(probabilities[:, 1], abs=1e-6)
    assert [row["prediction"] for row in rows] == list(run.predict("new.csv"))
    printed = list(csv.reader(io.StringIO(command("predict", patients, "new.csv").stdout)))
    assert printed[0][:2] == ["row", "prediction"]
    assert [row[1:] for row in printed[1:]] == [list(row.values())[1:] for row in rows]
    document = json.loads(command("predict", patients, "new.csv", "--json").stdout)
    assert document["columns"] == printed[0]
    assert len(document["rows"]) == 50


def test_wrong_files_are_refused_without_a_value(patients: Path) -> None:
    lines = Path("new.csv").read_text().splitlines()

    def refused(text: str, *options: object) -> str:
        Path("wrong.csv").write_text(text)
        said = command("predict", patients, "wrong.csv", *options, code=1)
        assert SECRET not in said.output
        return str(said.stderr)

    short = "\n".join(",".join(line.split(",")[:7]) for line in lines)
    assert "wrong.csv has no column 'p6', 'p7', 'side' among its 7." in refused(short)
    record = "\n".join([lines[1].replace("id150", SECRET), *lines[2:]])  # no header
    assert "has no column 'p0', 'p1', 'p2'," in refused(record)
    broken = "\n".join([lines[0], lines[1].replace("right", SECRET)])
    assert "Expected one of ['left', 'right'] in column 'side'" in refused(broken)
    assert "Expected --id to be a column of wrong.csv, got 'name'" in refused(
        "\n".join(lines), "--id", "name"
    )
    assert "There is nothing at no.csv" in command("predict", patients, "no.csv", code=1).stderr
    said = command("predict", Path(), "new.csv", code=1).stderr
    assert "There is no model.safetensors in .. Name the folder of a run of `dpspan train`" in said
    run = dpspan.load_run(patients)
    with pytest.raises(ValueError, match=r"to be a path, or an array of numbers\.$"):
        run.predict([[SECRET]])
    with pytest.raises(ValueError, match=r"of shape \(10,\) for the model, got \(3,\)"):
        run.predict(np.zeros((2, 3)))


def test_every_kind_of_run(folder: Path) -> None:
    """With a frozen layer, and with a network of the user's own."""
    features = {"name": "patches", "public": "optin", "filters": 9, "directions": 12, "size": [3]}
    train(config(folder, budget=NOISY, features=features, output={"folder": "patches"}))
    run = dpspan.load_run("patches")
    x = torch.as_tensor(np.load("digits.npz")["x_test"], dtype=torch.float32)[:, None] / 255
    settings = config(folder, budget=NOISY, features=features)
    parts = make_parts(settings, RunFolder("patches"), goes_on=True)
    assert parts.test is not None
    trained = run.model[1]  # behind the frozen layer
    expected = trained(parts.test.tensors[0]).softmax(1).detach().numpy()
    np.testing.assert_allclose(run.predict_proba(x), expected, atol=1e-5)

    Path("own.py").write_text(
        "from torch import nn\ndef network(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))"
    )
    train(config(folder, budget=NOISY, model={"name": "factory", "factory": "own:network"}))
    weights = safetensors.torch.load_file("run/model.safetensors")
    model = {"name": "checkpoint", "factory": "own:network", "weights": "start.safetensors"}
    safetensors.torch.save_file(weights, "start.safetensors")
    train(config(folder, budget=NOISY, model=model, output={"folder": "went-on"}))
    Path("start.safetensors").unlink()  # what it began with is not needed
    assert dpspan.load_run("went-on").predict(x).shape == (60,)


def test_folders_that_cannot_be_used(folder: Path) -> None:
    train(config(folder, budget=NOISY))
    run = RunFolder(folder / "run")
    facts = read_json(run.run)
    with pytest.raises(ValueError, match=r"The weights in .* do not fit MLP"):
        run.write_facts(**{key: facts[key] for key in facts if key != "sample_shape"})
        dpspan.load_run(run.path)
    run.write_facts(**facts)
    weights = safetensors.torch.load_file(run.model)
    name = next(iter(weights))
    safetensors.torch.save_file({**weights, name: weights[name] + 1}, run.model)
    with pytest.raises(ValueError, match=r"is not the model that certificate.json is about"):
        dpspan.load_run(run.path)
    run.config.unlink()
    with pytest.raises(FileNotFoundError, match=r"no config\.yaml in .*of a run of `dpspan train`"):
        dpspan.load_run(run.path)


def test_tables_are_prepared_as_in_training(folder: Path) -> None:
    """A file, a mapping by column and a pandas frame; what was not seen before is no error."""
    draw = np.random.default_rng(0)
    ages, sides = draw.integers(20, 90, 120), draw.choice(["left", "right"], 120)
    both = enumerate(zip(ages, sides, strict=True))
    rows = [[f"P{n}", age, side, "yes" if age > 55 else "no"] for n, (age, side) in both]
    for name, some in (("train.csv", rows[:100]), ("new.csv", [*rows[100:], ["", "", SECRET, ""]])):
        with Path(name).open("w", newline="") as file:
            csv.writer(file).writerows([["id", "age", "side", "ill"], *some])
    columns = {
        "id": {"kind": "id"},
        "age": {"kind": "numeric", "low": 0, "high": 100, "indicator": True},
        "side": {"kind": "categorical", "values": ["left", "right"]},
    }
    source = {"format": "csv", "path": "train.csv", "label": "ill"}
    data = {"classes": ["no", "yes"], "private": source, "preprocessing": columns, "records": 100}
    train(parse_config(yaml.safe_dump(settings(folder, data=data, budget=NOISY))))
    Path("train.csv").unlink()
    run = dpspan.load_run("run")
    assert run.preprocessing is not None
    assert run.sample_shape == (5,)
    found = run.predict_proba("new.csv")
    assert len(found) == 21
    table = {"age": [*ages[100:], ""], "side": [*sides[100:], SECRET]}
    np.testing.assert_allclose(run.predict_proba(table), found, atol=1e-6)
    frame = pytest.importorskip("pandas").DataFrame(table)
    np.testing.assert_allclose(run.predict_proba(frame), found, atol=1e-6)
    with pytest.raises(ValueError, match="does not have: 'side'"):
        run.predict({"age": [1]})
    _, card, *_ = export(run, "safetensors", "out")
    assert "csv records (age, side)" in card.read_text()
    kept = folder / "run" / "preprocessing.json"
    kept.write_text(kept.read_text().replace('"low": 0.0', '"low": -900.0'))
    with pytest.raises(
        ValueError, match=r"not the description of columns that certificate\.json is"
    ):
        dpspan.load_run("run")
    kept.unlink()  # and is not made again, of public rows that may be others by now
    with pytest.raises(FileNotFoundError, match=r"no preprocessing\.json in run"):
        dpspan.load_run("run")


@pytest.mark.filterwarnings("default:dpspan")
def test_columns_of_which_nothing_can_be_read_are_told(folder: Path) -> None:
    """Whoever predicts may have other records; but a decimal comma makes a gap of every number."""
    draw = np.random.default_rng(0)
    ages = draw.integers(20, 90, 200)
    lines = "".join(f"{age},{'yes' if age > 55 else 'no'}\n" for age in ages)
    Path("train.csv").write_text("age,ill\n" + lines)
    Path("new.csv").write_text("age\n" + '"50,5"\n' * 30)
    columns = {"age": {"kind": "numeric", "low": 0, "high": 100}}
    source = {"format": "csv", "path": "train.csv", "label": "ill"}
    data = {"classes": ["no", "yes"], "private": source, "preprocessing": columns}
    train(parse_config(yaml.safe_dump(settings(folder, data=data, budget=NOISY))))
    said = command("predict", "run", "new.csv")
    assert "Note: Nothing in columns 'age' of new.csv is what data.preprocessing" in said.stderr
    assert len(said.stdout.splitlines()) == 31


def test_ids_of_other_records(folder: Path) -> None:
    train(config(folder, budget=NOISY))
    np.savez("new.npz", x_train=np.load("digits.npz")["x_test"], who=np.arange(3))
    said = command("predict", "run", "new.npz", "--id", "who", code=1)
    assert "Expected --id to name one value for each record, got 'who'." in said.stderr


def test_a_table_in_memory_has_its_columns_described(patients: Path) -> None:
    """Else it would be taken for what the network gets: unscaled, in whatever order."""
    run, table = dpspan.load_run(patients), {f"p{i}": [0.5] for i in range(8)}
    for given in (
        table | {"left": [0], "right": [1]},
        pytest.importorskip("pandas").DataFrame(table),
    ):
        with pytest.raises(ValueError, match=r"A table in memory needs a run with data\.prep"):
            run.predict(given)


# -- export ---------------------------------------------------------------------------------------


def test_safetensors_carry_the_price(patients: Path) -> None:
    said = command("export", patients, "--to", "safetensors").stderr
    assert "Wrote model.safetensors, MODEL_CARD.md, model.certificate.json to" in said
    run, out = dpspan.load_run(patients), patients / "export"
    with safetensors.safe_open(out / "model.safetensors", framework="pt") as file:
        facts = file.metadata()
        kept = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert float(facts["epsilon"]) == run.epsilon
    assert facts["delta"] == "1e-05"
    assert facts["adjacency"] == "add or remove one record"
    assert json.loads(facts["classes"]) == ["even", "odd"]
    assert facts["threshold"] == "0.5"
    for name, value in run.model.state_dict().items():
        torch.testing.assert_close(kept[name], value)
    certified = (patients / "certificate.json").read_text()
    assert (out / "model.certificate.json").read_text() == certified
    assert dpspan.verify(out / "model.certificate.json").holds
    page = Path(json.loads(command("report", patients, "--json").stdout)["report"]).read_text()
    assert "with all else on record here" not in page  # an export is no release of its own


def test_the_model_card(folder: Path) -> None:
    train(config(folder, output={"folder": "run", "unprivate_metrics": True}))
    _, card, _ = export(dpspan.load_run("run"), "safetensors", "out")
    text, line = card.read_text(), dpspan.load_run("run").metrics
    assert (
        f"**ε = {line['epsilon']:.4g}** at δ = 1e-05; adjacency: add or remove one record" in text
    )
    assert f"- test accuracy: {line['test_accuracy']:.4g}\n" in text
    assert "unprivate_train_loss" in line
    assert "train loss" not in text
    assert "\n\n\n" not in text


def test_a_card_has_results_as_sentences(folder: Path) -> None:
    x = np.random.default_rng(0).normal(size=(300, 4)).astype(np.float32)
    np.savez("a.npz", x=x[:200], y=x[:200, 0] > 0, xt=x[200:], yt=x[200:, 0] > 0)
    source = {"format": "npz", "path": "a.npz"}
    test = {**source, "inputs": "xt", "labels": "yt"}
    for public, evaluate, expected in (
        (True, {"threshold": 0.25}, "\n- all (100 records): accuracy 0."),
        (False, {"noise_multiplier": 5.0}, "\n- test accuracy 0."),
    ):
        data = {"classes": ["no", "yes"], "private": source, "test": test, "test_is_public": public}
        more: dict[str, Any] = {"evaluate": evaluate, "output": {"folder": str(public)}}
        train(parse_config(yaml.safe_dump(settings(folder, data=data, budget=NOISY, **more))))
        text = export(dpspan.load_run(str(public)), "safetensors", "out")[1].read_text()
        assert expected in text
        assert "{" not in text
        assert (
            f"`yes` is predicted from a probability of {evaluate.get('threshold', 0.5)} on." in text
        )


def test_what_is_not_private_says_so(folder: Path) -> None:
    train(config(folder))
    run = RunFolder(folder / "run")
    document = read_json(run.certificate)
    broken = {"private": False, "not_private_because": ["the noise was fixed"]}
    run.write_certificate({**document, **broken})
    _, card, _ = export(dpspan.load_run(run.path), "safetensors", "out")
    assert "**This model is not private**: the noise was fixed." in card.read_text()
    assert "ε = " not in card.read_text()
    assert "NOT PRIVATE" in repr(dpspan.load_run(run.path))


def test_onnx_gives_the_same_probabilities(patients: Path) -> None:
    extra("onnxscript")
    onnx = extra("onnx")
    evaluator = extra("onnx.reference").ReferenceEvaluator
    command("export", patients, "--to", "onnx", "--out", "onnx-out")
    path = Path("onnx-out/model.onnx")
    assert [file.name for file in sorted(path.parent.iterdir())] == [
        "MODEL_CARD.md", "model.certificate.json", "model.onnx",
    ]  # fmt: skip
    model = onnx.load(path)
    run = dpspan.load_run(patients)
    facts = {each.key: each.value for each in model.metadata_props}
    assert float(facts["epsilon"]) == run.epsilon
    x = np.random.default_rng(0).normal(size=(7, 10)).astype(np.float32)  # another number of them
    (found,) = evaluator(model).run(None, {"inputs": x})
    np.testing.assert_allclose(found, run.predict_proba(x), atol=1e-5)


def test_onnx_is_an_extra(patients: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(module: str, what: str, extra: str) -> None:
        raise ModuleNotFoundError(f"{what} need {module}: pip install 'dpspan[{extra}]'.")

    monkeypatch.setattr(exporting, "optional", gone)
    said = command("export", patients, "--to", "onnx", code=1).stderr
    assert said == "Error: Exports to ONNX need onnxscript: pip install 'dpspan[onnx]'.\n"
    assert not any((patients / "export").iterdir())
    wrong = command("export", patients, "--to", "pickle", code=1).stderr
    assert "Expected a format out of safetensors, onnx, got 'pickle'." in wrong
    into = command("export", patients, "--to", "safetensors", "--out", patients, code=1).stderr
    assert "another folder than the run's" in into
