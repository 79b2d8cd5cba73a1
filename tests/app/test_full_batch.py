"""Convex methods from a configuration: the estimators' own fits, in the folder of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from dp_accounting import GaussianDpEvent
from typer.testing import CliRunner

import dpspan
from dpspan.app.cli import app
from dpspan.app.config import ConfigError, parse_config
from dpspan.app.run import RunFolder, train
from dpspan.app.run.folder import read_json
from dpspan.convex import PrivateLogisticRegression
from dpspan.convex.methods import METHODS
from helpers.digits import settings, write_npz


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_npz(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def table(folder: Path, classes: int, n: int = 400) -> dict[str, Any]:
    """Numbers of which the first two decide; ids of two records each."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(n + 100, 5)).astype(np.float32)
    y = (x[:, 0] > 0).astype(int) + (x[:, 1] > 0.5).astype(int) * (classes > 2)
    np.savez(folder / "t.npz", x=x[:n], y=y[:n], xt=x[n:], yt=y[n:], who=np.arange(n) // 2)
    source = {"format": "npz", "path": str(folder / "t.npz")}
    test = {**source, "inputs": "xt", "labels": "yt"}
    shown = {"test": test, "test_is_public": True}
    return {"classes": classes, "private": source, "records": n, **shown}


def described(folder: Path, name: str, **sections: Any) -> Any:
    data = sections.pop("data", None) or table(folder, 2)
    whole = {"data": data, "method": {"name": name}, **sections}
    return parse_config(yaml.safe_dump(settings(folder, **whole)))


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("name", ["adagrad", "gd"])
def test_the_estimator_is_what_is_fitted(folder: Path, name: str, classes: int) -> None:
    budget = {"noise_multiplier": 1e-3, "delta": 1e-5, "accountant": "rdp"}
    train(described(folder, name, data=table(folder, classes), budget=budget))
    arrays = np.load("t.npz")
    method = METHODS[name]
    estimator = PrivateLogisticRegression(method=method, noise_multiplier=1e-3)
    estimator.fit(arrays["x"], arrays["y"], ledger=dpspan.Ledger(accountant="rdp"))
    run = dpspan.load_run("run")
    # Noise of 1e-3·C/n in each step is all that the two differ by.
    expected = estimator.predict_proba(arrays["xt"])
    np.testing.assert_allclose(run.predict_proba(arrays["xt"]), expected, atol=2e-3)
    accuracy = float((run.predict(arrays["xt"]) == arrays["yt"].astype(str)).mean())
    assert run.metrics["test_accuracy"] == pytest.approx(accuracy)


def test_what_it_costs_is_certified(folder: Path) -> None:
    result = train(described(folder, "adagrad", method={"name": "adagrad", "steps": 12}))
    run = RunFolder(folder / "run")
    document = read_json(run.certificate)
    assert 3.99 < document["epsilon"] <= 4.0
    assert document["private"]
    assert (document["steps"], result.step, result.steps) == (12, 12, 12)
    z = document["training"]["noise_multiplier"]
    assert document["events"][0]["text"] == f"12 × {GaussianDpEvent(z)}"
    assert document["adjacency"] == "add or remove one record"
    assert not document["discloses_number_of_records"]
    assert document["training"]["method"]["name"] == "NoisyAdaGrad"
    assert dpspan.verify(run.path).holds
    assert result.metrics is not None
    assert result.metrics["test_accuracy"] > 0.8
    page = CliRunner().invoke(app, ["report", "run"])
    assert page.exit_code == 0, page.output
    with pytest.raises(ValueError, match="holds a run already"):
        train(described(folder, "adagrad"))


@pytest.mark.parametrize("there", ["adagrad", "dpsgd"])
@pytest.mark.parametrize("other", ["adagrad", "gd", "dpsgd"])
def test_a_refused_run_changes_nothing_of_the_one_that_is_there(
    folder: Path, there: str, other: str
) -> None:
    """Its model would get other columns, other classes or another threshold to predict by."""
    draw = np.random.default_rng(0)
    lines = [f"{x},{'yes' if x > 0 else 'no'}\n" for x in draw.normal(size=120).round(3)]
    Path("t.csv").write_text("x,ill\n" + "".join(lines))
    source = {"format": "csv", "path": "t.csv", "label": "ill"}

    def plan(method: str, low: float, *classes: str) -> Any:
        column = {"kind": "numeric", "low": low, "high": 3}
        data = {"classes": classes, "private": source, "preprocessing": {"x": column}}
        return described(folder, method, data=yaml.safe_load(json.dumps(data)))

    train(plan(there, -3, "no", "yes"))
    before = {path: path.read_bytes() for path in Path("run").iterdir()}
    for resume in (True, False):
        with pytest.raises(ValueError, match=r"holds a run (already|with other settings)"):
            train(plan(other, -300, "yes", "no"), resume=resume)
    assert {path: path.read_bytes() for path in Path("run").iterdir()} == before


def test_an_accuracy_is_of_the_model_beside_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fit that was killed before its model was written is made, and paid for, once more."""
    data = {**table(folder, 2), "test_is_public": False}
    budget = {"noise_multiplier": 1.0, "delta": 1e-5, "accountant": "rdp"}
    plan = described(folder, "adagrad", data=data, budget=budget, evaluate={"noise_multiplier": 3})
    run = RunFolder("run")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(RunFolder, "write_model", lambda *_: raised(KeyboardInterrupt()))
        train(plan)
    before = read_json(run.evaluation)["test_accuracy"]
    assert train(plan).evaluation["test_accuracy"] != before
    events = read_json(run.certificate)["events"]
    assert [each["count"] for each in events] == [1, 30, 1, 30]


def test_a_fit_that_was_lost_is_not_made_anew_by_the_rest_of_epsilon(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That would be a model of noise, in the place of one that was paid for."""
    plan = described(folder, "adagrad")
    with monkeypatch.context() as patched, pytest.raises(OSError, match="disk"):
        patched.setattr(RunFolder, "write_model", lambda *_: raised(OSError("disk full")))
        train(plan)
    with pytest.raises(ValueError, match=r"the price of a fit whose model was lost.*another fold"):
        train(plan)


def test_a_finished_run_whose_checkpoint_is_gone_is_kept(folder: Path) -> None:
    plan = described(folder, "dpsgd")
    train(plan)
    run = RunFolder("run")
    run.checkpoint.unlink()  # large, and needed no more
    model = run.model.read_bytes()
    for resume in (True, False):
        with pytest.raises(ValueError, match=r"holds a run already\. Choose another"):
            train(plan, resume=resume)
    assert run.model.read_bytes() == model


def raised(error: BaseException) -> None:
    raise error


def test_averages_of_weights_are_of_steps(folder: Path) -> None:
    """All steps of a fit are one release: `average_weights` has no meaning, nor has `epochs`."""
    training = {**settings(folder)["training"], "average_weights": 0.9}
    assert train(described(folder, "gd", training=training)).status == "finished"


def test_a_number_of_records_that_is_not_stated_is_told(folder: Path) -> None:
    data = table(folder, 2)
    del data["records"]
    train(described(folder, "gd", data=data))
    document = read_json(RunFolder("run").certificate)
    assert document["discloses_number_of_records"]
    assert any("data.records of a configuration" in each for each in document["warnings"])
    assert document["adjacency"].startswith("one record counted or not")
    assert document["training"]["divisor"] == 400
    assert dpspan.verify("run").holds


def test_what_was_not_measured_on_private_batches_is_not_written(folder: Path) -> None:
    train(described(folder, "gd", output={"folder": "run", "unprivate_metrics": True}))
    run = RunFolder("run")
    assert "unprivate" not in run.metrics.read_text()
    assert not any("unprivate" in each for each in read_json(run.certificate)["warnings"])


def test_units_are_protected(folder: Path) -> None:
    data = {**table(folder, 2), "unit": "who", "records": 200}
    with pytest.raises(ValueError, match=r"200 units of data\.test also occur in the private data"):
        train(described(folder, "adagrad", data=data))  # all arrays of one file share its ids
    del data["test"], data["test_is_public"]
    train(described(folder, "adagrad", data=data))
    document = read_json(RunFolder("run").certificate)
    assert document["adjacency"].startswith("add or remove one unit")
    assert document["training"]["divisor"] == 200


def test_public_rows_and_a_choice_are_paid_for(folder: Path) -> None:
    data = dict(settings(folder)["data"])  # type: ignore[call-overload]
    part = data["public"]["optin"]
    data["public"] = {"a": part, "b": {**part, "inputs": "x_other", "labels": "y_other"}}
    del data["test"], data["test_is_public"]
    method = {"name": "projected-adagrad", "steps": 5}
    chosen = {"epsilon": 0.5, "rank": 4}
    train(described(folder, "", data=data, method=method, choose=chosen))
    document = read_json(RunFolder("run").certificate)
    assert len(document["events"]) == 2
    assert 3.99 < document["epsilon"] <= 4.0
    assert document["public"][-1]["name"] in ("a", "b")


def test_compare_and_advise(folder: Path) -> None:
    for name in ("adagrad", "gd"):
        part = settings(folder, method={"name": name, "steps": 8})
        Path(f"{name}.yaml").write_text(yaml.safe_dump(part))
    done = CliRunner().invoke(
        app, ["compare", "adagrad.yaml", "gd.yaml", "--out", "c", "--seeds", "1", "--json"]
    )
    assert done.exit_code == 0, done.output
    rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    assert {"adagrad", "gd", "DP-SGD", "public only"} <= set(rows)
    assert rows["adagrad"]["method"] == "NoisyAdaGrad"
    assert rows["DP-SGD"]["learning_rate"] == 0.5
    again = CliRunner().invoke(
        app, ["compare", "adagrad.yaml", "gd.yaml", "--out", "c", "--seeds", "1", "--json"]
    )
    assert json.loads(again.stdout)["rows"] == json.loads(done.stdout)["rows"]  # none made anew


@pytest.mark.slow
def test_advise_tries_it(folder: Path) -> None:
    part: Any = settings(folder)
    part["training"]["batch_size"] = 240
    Path("c.yaml").write_text(yaml.safe_dump(part))
    said = CliRunner().invoke(
        app, ["advise", "c.yaml", "--records", "480", "--folds", "3", "--json"]
    )
    assert said.exit_code == 0, said.output
    trials = {trial["name"]: trial for trial in json.loads(said.stdout)["trials"]}
    assert trials["AdaGrad"]["settings"]["method"] == "NoisyAdaGrad"


def test_what_they_cannot_do(folder: Path) -> None:
    for other in ({"model": {"name": "mlp"}}, {"warm_start": {"public": "optin"}}):
        with pytest.raises(ConfigError, match="method: The method adagrad is for logistic reg"):
            parse_config(yaml.safe_dump(settings(folder, method={"name": "adagrad"}, **other)))
    with pytest.raises(ConfigError, match="needs public data"):
        described(folder, "projected")
    Path("c.yaml").write_text(yaml.safe_dump(settings(folder, method={"name": "adagrad"})))
    refused = {
        "tune c.yaml": "the method adagrad in one fit: settle the hyperparameters by `dpspan",
        "audit step c.yaml": "convex methods are for `dpspan train`, `compare` and `advise`",
    }
    for command, reason in refused.items():
        said = CliRunner().invoke(app, command.split())
        assert said.exit_code == 1
        assert reason in said.stderr
