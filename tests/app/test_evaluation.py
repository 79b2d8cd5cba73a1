"""Results on test data: against scikit-learn, by hand, by group, and with noise if private."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from sklearn import metrics
from typer.testing import CliRunner

import dpspan
from dpspan.app.cli import app
from dpspan.app.config import ConfigError, parse_config
from dpspan.app.run import RunFolder, train
from dpspan.app.run.evaluation import evaluate
from dpspan.app.run.folder import read_json
from helpers.digits import settings


def scored(classes: int, n: int = 500) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(classes)
    labels = draw.integers(classes, size=n)
    logits = draw.normal(size=(n, classes)) + 1.5 * np.eye(classes)[labels]
    odds = np.exp(logits)
    return odds / odds.sum(1, keepdims=True), labels


@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.9])
def test_two_classes_at_a_threshold(threshold: float) -> None:
    p, y = scored(2)
    found = evaluate(p, y, threshold=threshold)
    predicted = (p[:, 1] >= threshold).astype(int)
    assert found["sensitivity"] == pytest.approx(metrics.recall_score(y, predicted))
    assert found["specificity"] == pytest.approx(metrics.recall_score(y, predicted, pos_label=0))
    assert found["auc"] == pytest.approx(metrics.roc_auc_score(y, p[:, 1]))
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(y, predicted))
    assert found["confusion"] == metrics.confusion_matrix(y, predicted).tolist()


def test_several_classes() -> None:
    p, y = scored(4)
    found = evaluate(p, y)
    assert found["accuracy"] == pytest.approx((p.argmax(1) == y).mean())
    assert found["auc"] == pytest.approx(metrics.roc_auc_score(y, p, multi_class="ovr"))
    assert "sensitivity" not in found
    assert found["recalls"] == pytest.approx(metrics.recall_score(y, p.argmax(1), average=None))


def test_calibration_bin_by_bin() -> None:
    p, y = scored(3)
    sure, right = p.max(1), p.argmax(1) == y
    expected = 0.0
    for low in range(15):
        here = (sure >= low / 15) & (sure < (low + 1) / 15)
        if here.any():
            expected += here.mean() * abs(sure[here].mean() - right[here].mean())
    assert evaluate(p, y)["calibration_error"] == pytest.approx(expected)
    certain = np.eye(2)[[0, 1, 1]]
    assert evaluate(certain, np.array([0, 1, 1]))["calibration_error"] == 0.0


def test_whoever_is_certain_falls_into_the_last_bin() -> None:
    p = np.array([[0.05, 0.95]] * 10 + [[0.0, 1.0]] * 10)
    y = np.array([1] * 15 + [0] * 5)  # gaps of both signs, which one bin sets off
    assert evaluate(p, y)["calibration_error"] == pytest.approx(0.975 - 0.75)


def test_a_model_that_says_nothing_any_more() -> None:
    """Its probabilities are none: they do not add up to 1."""
    found = evaluate(np.zeros((6, 3)), np.array([0, 1, 2] * 2))
    assert (found["auc"], found["accuracy"]) == (None, pytest.approx(1 / 3))


def test_what_cannot_be_measured_is_null() -> None:
    p, _ = scored(2, n=5)
    found = evaluate(p, np.zeros(5, dtype=int))
    assert found["auc"] is None
    assert found["sensitivity"] is None
    assert found["specificity"] is not None


# -- in a run -------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    x = draw.normal(size=(600, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(int)
    sex = np.where(draw.random(200) < 0.5, "f", "m")
    np.savez("a.npz", x=x[:400], y=y[:400])
    np.savez("b.npz", x=x[400:], y=y[400:], sex=sex)
    return tmp_path


def described(folder: Path, *, public: bool = True, **sections: Any) -> Any:
    data = {
        "classes": ["healthy", "ill"],
        "private": {"format": "npz", "path": "a.npz"},
        "test": {"format": "npz", "path": "b.npz"},
        "test_is_public": public,
        "records": 400,
    }
    return settings(folder, **{"data": data, **sections})


def run(folder: Path, **sections: Any) -> Any:
    return train(parse_config(yaml.safe_dump(described(folder, **sections))))


def test_by_group_in_file_output_and_report(folder: Path) -> None:
    section = {"threshold": 0.3, "by": "sex"}
    Path("c.yaml").write_text(yaml.safe_dump(described(folder, evaluate=section)))
    done = CliRunner().invoke(app, ["train", "c.yaml"])
    assert done.exit_code == 0, done.output
    document = read_json(RunFolder("run").evaluation)
    assert document["threshold"] == 0.3
    results, file = document["test_results"], np.load("b.npz")
    assert list(results) == ["all", "sex = f", "sex = m"]
    trained = dpspan.load_run("run")
    p = trained.predict_proba("b.npz")
    for name, own in {"all": np.full(200, True), "sex = f": file["sex"] == "f"}.items():
        expected = evaluate(p[own], file["y"][own], threshold=0.3)
        assert results[name].keys() == expected.keys()
        for key in set(expected) - {"confusion"}:
            assert results[name][key] == pytest.approx(expected[key], abs=1e-6)
        assert results[name]["confusion"] == expected["confusion"]
    names = np.where(p[:, 1] >= 0.3, "ill", "healthy")
    np.testing.assert_array_equal(trained.predict("b.npz"), names)
    auc = f"{results['sex = f']['auc']:.3f}"
    count = results["sex = f"]["records"]
    assert f"sex = f ({count} records): accuracy" in done.stdout
    assert f"auc {auc}" in done.stdout
    page = CliRunner().invoke(app, ["report", "run", "--out", "page.html"])
    assert page.exit_code == 0, page.output
    assert f'>sex = f</th><td class="number">{count}</td>' in Path("page.html").read_text()


def test_results_that_are_not_public_say_so(folder: Path) -> None:
    result = run(folder, public=False, output={"folder": "run", "unprivate_metrics": True})
    assert "unprivate_test_results" in result.evaluation
    assert "test_results" not in result.evaluation
    CliRunner().invoke(app, ["report", "run", "--out", "page.html"])
    assert 'id="results"' not in Path("page.html").read_text()
    assert run(folder, public=False, output={"folder": "other"}).evaluation == {"threshold": 0.5}


def test_an_accuracy_with_noise_is_within_the_budget(folder: Path) -> None:
    sections: dict[str, Any] = {"public": False, "evaluate": {"noise_multiplier": 3.0}}
    result = run(folder, **sections)
    released = result.evaluation["test_accuracy"]
    certificate = read_json(RunFolder("run").certificate)
    assert "GaussianDpEvent(noise_multiplier=3.0)" in certificate["events"][0]["text"]
    assert 3.99 < certificate["epsilon"] <= 4.0
    assert dpspan.verify("run").holds
    labels = np.load("b.npz")["y"]
    truth = (dpspan.load_run("run").predict_proba("b.npz").argmax(1) == labels).mean()
    # The error is about z/n = 0.015 at most: eight of them are never seen.
    assert abs(released["value"] - truth) < 8 * 3.0 / 200
    again = train(parse_config(yaml.safe_dump(described(folder, **sections))), resume=True)
    assert again.evaluation["test_accuracy"] == released  # and is not drawn once more
    assert read_json(RunFolder("run").certificate)["events"] == certificate["events"]
    RunFolder("run").evaluation.unlink()
    with pytest.raises(ValueError, match=r"evaluation\.json is missing, with an accuracy that is"):
        train(parse_config(yaml.safe_dump(described(folder, **sections))), resume=True)


@pytest.mark.parametrize(
    ("section", "sections", "message"),
    [
        ({"by": "sex"}, {"data": {"test": None}}, "evaluate: Expected data.test"),
        ({"noise_multiplier": 1.0}, {}, "This is for private test data"),
        ({"threshold": 1.5}, {}, "evaluate.threshold: Expected a number below 1"),
    ],
)
def test_refused(folder: Path, section: Any, sections: Any, message: str) -> None:
    whole = described(folder, evaluate=section)
    whole["data"] = {**whole["data"], **sections.get("data", {})}
    with pytest.raises(ConfigError, match=message):
        parse_config(yaml.safe_dump(whole))


def test_a_column_that_is_not_there(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"evaluate\.by to be a column there, got 'age'"):
        run(folder, evaluate={"by": "age"})


def test_groups_are_checked_before_anything_is_spent(folder: Path) -> None:
    """Not by the measurement at the end, without which there is no model."""
    arrays = dict(np.load("b.npz"))
    np.savez("b.npz", **arrays, few=np.arange(3), person=np.arange(200))
    for by, what in (("few", "one value for each test record"), ("person", "at most 20 different")):
        with pytest.raises(ValueError, match=rf"evaluate\.by to (have|be).*{what}.* got '{by}'"):
            run(folder, evaluate={"by": by})
    assert not RunFolder("run").ledger.exists()


@pytest.mark.parametrize("classes", [2, 3])
def test_weights_that_grew_without_bound_are_measured(folder: Path, classes: int) -> None:
    draw = np.random.default_rng(1)
    np.savez("b.npz", x=draw.normal(size=(60, 4)).astype(np.float32), y=np.arange(60) % classes)
    data = {**described(folder)["data"], "classes": classes}
    plan = described(folder, model={"name": "mlp"})
    plan["data"], plan["training"]["optimizer"] = data, {"name": "sgd", "learning_rate": 1e30}
    result = train(parse_config(yaml.safe_dump(plan)))
    assert result.status == "diverged"
    assert result.evaluation["test_results"]["all"]["auc"] in (None, 0.5)
    assert RunFolder("run").model.exists()


# -- what is said on the way ----------------------------------------------------------------------


def test_a_header_and_a_line_for_each_epoch(folder: Path) -> None:
    Path("c.yaml").write_text(yaml.safe_dump(described(folder)))
    done = CliRunner().invoke(app, ["train", "c.yaml"])
    header, *epochs, last = done.stderr.splitlines()
    assert header.startswith("DPSGD on 400 records: 10 parameters, 8 steps with batches of 96, z =")
    assert "ε = 4 at δ = 1e-05 in the end" in header
    assert [line.split(",")[0] for line in epochs] == ["epoch 1/2", "epoch 2/2"]
    assert last.startswith("Done: ε = 3.99")
    quiet = described(folder, output={"folder": "quiet"})
    Path("q.yaml").write_text(yaml.safe_dump(quiet))
    assert "epoch" not in CliRunner().invoke(app, ["train", "q.yaml", "--quiet"]).stderr


def test_epsilon_is_a_bound_on_the_way_and_exact_at_the_end(folder: Path) -> None:
    budget = {"noise_multiplier": 1.2, "delta": 1e-5}
    seen: list[Any] = []
    config = parse_config(yaml.safe_dump(described(folder, budget=budget)))
    result = train(config, watch=seen.append)
    event = RunFolder("run")
    ledger = dpspan.Ledger.from_state(read_json(event.ledger))
    (step, count), exact = ledger.events[0], ledger.epsilon(1e-5)
    assert result.epsilon == read_json(event.certificate)["epsilon"] == exact
    for progress in seen[1:]:
        so_far = dpspan.Ledger()
        so_far.charge(step, progress.step)
        assert so_far.epsilon(1e-5) <= progress.epsilon <= exact + 1e-9
    assert (seen[0].epsilon, seen[-1].step) == (0.0, count)
    lines = [json.loads(line) for line in event.metrics.read_text().splitlines()]
    assert lines[-1]["epsilon"] == exact
    assert not math.isclose(lines[0]["epsilon"], lines[-1]["epsilon"])


def test_no_certificate_of_fewer_steps(folder: Path) -> None:
    """One that was stopped has a certificate; while it goes on there is none that is too small."""
    config = parse_config(yaml.safe_dump(described(folder)))
    first = train(config, stop=lambda: True)
    run = RunFolder("run")
    assert first.status == "stopped"
    assert read_json(run.certificate)["steps"] == 1
    stale: list[bool] = []
    result = train(
        config, resume=True, watch=lambda progress: stale.append(run.certificate.exists())
    )
    assert not any(stale[5:])  # after the end of an epoch
    assert read_json(run.certificate)["steps"] == result.steps
