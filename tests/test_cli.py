"""The command line as users meet it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from dp_accounting import dp_event, pld, rdp
from typer.testing import CliRunner

from digits import digits, settings, write_csv, write_idx, write_images, write_npz
from dpspan.cli import app
from dpspan.config import load_config
from dpspan.run import RunFolder

NOISY = {"noise_multiplier": 1.0, "delta": 1e-5, "accountant": "rdp"}


def dpspan(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


def as_json(*arguments: object) -> Any:
    return json.loads(dpspan(*arguments, "--json").stdout)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_npz(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(folder: Path, name: str = "c.yaml", **sections: Any) -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(settings(folder, **{"budget": NOISY, **sections})))
    return path


# -- train ----------------------------------------------------------------------------------------


def test_train_and_what_follows(folder: Path) -> None:
    path = written(folder)
    done = as_json("train", path)
    assert (done["status"], done["step"]) == ("finished", 10)
    assert done["metrics"]["test_accuracy"] > 0.1
    again = dpspan("train", path, code=1)
    assert again.stderr.startswith("Error: ")
    assert "holds a run already. Go on with it by --resume" in again.stderr
    assert "Traceback" not in again.stderr
    assert "Done: ε =" in dpspan("train", path, "--resume").stderr
    attack = as_json("audit", folder / "run")
    assert attack["private"] is False
    assert attack["unprivate"] is True
    assert 0.3 < attack["success_rate"] < 0.7
    assert "NOT PRIVATE" in dpspan("audit", folder / "run").stdout
    assert as_json("report", folder / "run")["report"].endswith("report.html")
    assert (folder / "run" / "report.html").stat().st_size > 1000


def test_one_sentence_and_no_traceback(folder: Path) -> None:
    bad = written(folder, method={"name": "dpsgd", "clip": -1.0})
    result = dpspan("train", bad, code=1)
    assert result.stderr == (
        f"Error: {bad}:{_line(bad, 'clip')}: method.clip: Expected a number above 0, got -1.0.\n"
    )
    assert result.stdout == ""
    assert "Cannot read the configuration" in dpspan("train", "no.yaml", code=1).stderr
    missing = written(folder, model={"name": "factory", "factory": "nowhere:net"})
    assert "Cannot import 'nowhere'" in dpspan("train", missing, code=1).stderr
    debugged = CliRunner().invoke(app, ["--debug", "train", str(missing)])
    assert isinstance(debugged.exception, ValueError)  # typer would show its traceback
    (folder / "file").write_text("")
    blocked = written(folder, output={"folder": str(folder / "file" / "run")})
    assert "Cannot write to the folder" in dpspan("train", blocked, code=1).stderr
    assert dpspan("train", code=1).exit_code == 1  # an argument is missing
    assert dpspan("nonsense", code=1).exit_code == 1
    assert "holds no finished run" in dpspan("audit", folder, code=1).stderr


def _line(path: Path, key: str) -> int:
    return 1 + next(i for i, line in enumerate(path.read_text().splitlines()) if key in line)


def test_an_error_that_nobody_foresaw(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("inside")

    monkeypatch.setattr("dpspan.run.train", broken)
    result = dpspan("train", written(folder), code=1)
    assert result.stderr == (
        "Error: KeyError: 'inside'. Run `dpspan --debug …` to see where it comes from.\n"
    )


def test_ctrl_c_saves_and_can_be_resumed(folder: Path) -> None:
    training = {**settings(folder)["training"], "epochs": 3000}
    path = written(folder, training=training)
    command = [sys.executable, "-m", "dpspan.cli", "train", str(path), "--json"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=folder)
    metrics = RunFolder(folder / "run").metrics
    deadline = time.monotonic() + 120
    while not metrics.exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert json.loads(output)["status"] == "stopped"  # JSON and nothing else
    assert errors == "Stopping after this step. Press Ctrl-C again to stop at once.\n"
    files = RunFolder(folder / "run")
    certificate = json.loads(files.certificate.read_text())
    assert certificate["steps"] == json.loads(files.ledger.read_text())["steps"] >= 5
    stopped: list[int] = []

    def stop_soon(progress: Any) -> None:
        stopped.append(progress.step)

    from dpspan.run import train

    result = train(path, resume=True, watch=stop_soon, stop=lambda: True)
    assert stopped[0] == certificate["steps"]
    assert result.step == certificate["steps"] + 1


def test_a_stop_is_told_how_to_go_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpspan.cli.train._Stopper.__call__", lambda self: True)
    path = written(folder)
    said = dpspan("train", path, code=130).stderr
    assert f"after 1 of 10 steps; the checkpoint is saved. Go on with: dpspan train {path}" in said


def test_the_users_own_model_and_table(folder: Path) -> None:
    """init, train and report, for a model in the working folder and a CSV."""
    write_csv(folder / "digits.csv", *digits(300))
    write_csv(folder / "held_out.csv", *digits(400)[:2])
    (folder / "mine.py").write_text(
        "from torch import nn\n"
        "def net(width=8):\n"
        "    norm = nn.BatchNorm1d(width)\n"
        "    return nn.Sequential(nn.Linear(64, width), norm, nn.Linear(width, 10))\n"
    )
    arguments = ("--data", "digits.csv", "--classes", 10, "--test", "held_out.csv", "--epochs", 1)
    dpspan("init", *arguments, "--model", "mine:net", "--batch-size", 100)
    assert "exists already: pass --force" in dpspan("init", *arguments, code=1).stderr
    refused = dpspan("train", "config.yaml", code=1)
    assert "BatchNorm" in refused.stderr
    text = (folder / "config.yaml").read_text()
    text = text.replace("name: factory}", "name: factory, fix: true}")
    text = text.replace("test_is_public: false", "test_is_public: true")
    text = text.replace("delta: 1e-05", "delta: 1e-05\n  accountant: rdp")
    (folder / "config.yaml").write_text(text.replace("label: digit", "label: digit, scale: 255"))
    done = as_json("train", "config.yaml")
    assert done["status"] == "finished"
    assert 2.99 < done["epsilon"] <= 3.0
    assert (folder / "runs" / "first" / "model.safetensors").exists()
    dpspan("report", "runs/first", "--out", "page.html")
    assert "digits.csv" in (folder / "page.html").read_text()


@pytest.mark.parametrize("kind", ["npz", "idx", "images", "csv"])
def test_init_for_every_format(folder: Path, kind: str) -> None:
    x, y = digits(60)
    made = {
        "npz": lambda: folder / "digits.npz",
        "idx": lambda: write_idx(folder / "train-images-idx3-ubyte.gz", x),
        "images": lambda: write_images(folder / "images", x, y),
        "csv": lambda: write_csv(folder / "a.csv", x, y),
    }
    path = made[kind]()
    answer = as_json(
        "init", "--data", path, "--classes", "10", "--public", path, "--model", "logistic"
    )
    config = load_config(answer["config"])
    assert config.data.private.format == kind
    assert config.warm_start.public == "extra"
    if kind == "npz":
        assert config.data.private.inputs == "x_train"
        assert config.data.test.inputs == "x_test"
        assert config.data.public["extra"].inputs == "x_public"
    if kind == "idx":
        assert config.data.private.labels.name == "train-labels-idx1-ubyte.gz"


def test_init_asks_only_when_told_to(folder: Path) -> None:
    assert "Expected --data and --classes" in dpspan("init", code=1).stderr
    result = CliRunner().invoke(app, ["init", "--interactive"], input="digits.npz\na,b,c\n")
    assert result.exit_code == 0
    assert load_config("config.yaml").data.classes == ("a", "b", "c")
    unknown = dpspan("init", "--data", "config.yaml", "--classes", 2, "--out", "d.yaml", code=1)
    assert "Cannot tell the format" in unknown.stderr
    arguments = ("--data", "digits.npz", "--classes", 10, "--out", "d.yaml", "--epsilon", -1)
    assert "budget.epsilon: Expected a number above 0" in dpspan("init", *arguments, code=1).stderr
    assert not Path("d.yaml").exists()


# -- account --------------------------------------------------------------------------------------


def test_account_agrees_with_dp_accounting() -> None:
    arguments = ("account", "--records", 10_000, "--batch-size", 250, "--delta", 1e-5)
    (row,) = as_json(*arguments, "--epochs", 30, "--noise-multiplier", 6)["rows"]
    assert (row["sample_rate"], row["steps"]) == (0.025, 1200)
    event = dp_event.PoissonSampledDpEvent(0.025, dp_event.GaussianDpEvent(6.0))
    reference = pld.PLDAccountant().compose(event, 1200).get_epsilon(1e-5)
    assert row["epsilon"] == pytest.approx(reference, abs=1e-3)
    assert row["epsilon"] == pytest.approx(0.5165, abs=1e-3)  # the table of golden numbers
    (slow,) = as_json(*arguments, "--epochs", 30, "--noise-multiplier", 6, "--accountant", "rdp")[
        "rows"
    ]
    by_renyi = rdp.RdpAccountant().compose(event, 1200).get_epsilon(1e-5)
    assert slow["epsilon"] == pytest.approx(by_renyi, rel=1e-6)


def test_account_solves_for_the_third() -> None:
    shared = ("account", "--sample-rate", 0.02, "--delta", 1e-5, "--accountant", "rdp")
    (noise,) = as_json(*shared, "--epsilon", 2, "--epochs", 50)["rows"]
    assert noise["solved_for"] == "noise_multiplier"
    assert noise["noise_multiplier"] == pytest.approx(2.2967, rel=1e-3)  # a golden number
    assert 1.998 < noise["epsilon"] <= 2
    (epochs,) = as_json(*shared, "--epsilon", 2, "--noise-multiplier", noise["noise_multiplier"])[
        "rows"
    ]
    assert epochs["epochs"] == 50
    (none,) = as_json(*shared, "--epsilon", 0.01, "--noise-multiplier", 0.5)["rows"]
    assert (none["epochs"], none["steps"], none["epsilon"]) == (0, 0, 0)
    rows = as_json(*shared, "--epsilon", 1, "--epsilon", 2, "--epochs", 5, "--epochs", 10)["rows"]
    assert [(row["epochs"]) for row in rows] == [5, 10, 5, 10]
    assert rows[0]["noise_multiplier"] < rows[1]["noise_multiplier"]
    table = dpspan(*shared, "--epsilon", 1, "--epochs", 5).stdout
    assert "noise multiplier" in table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--epsilon", 1), "Expected two of --epsilon, --noise-multiplier and --epochs"),
        (("--epsilon", 1, "--epochs", 1, "--noise-multiplier", 1), "Expected two of"),
        (("--epsilon", 1, "--epochs", 0), "Expected --epochs to be a whole number of at least 1"),
        (("--epsilon", -1, "--epochs", 1), "Expected target_epsilon > 0"),
        (("--epsilon", 1, "--epochs", 1, "--accountant", "x"), "accountant to be one of"),
        (("--epsilon", 1, "--epochs", 1, "--records", 5), "--records and --batch-size, or"),
        (
            ("--epsilon", 1, "--epochs", 1, "--sample-rate", 2),
            "--sample-rate above 0 and at most 1",
        ),
    ],
)
def test_account_refuses(arguments: tuple[object, ...], message: str) -> None:
    shared = ("account", "--delta", 1e-5)
    rate = () if {"--sample-rate", "--records"} & set(arguments) else ("--sample-rate", 0.1)
    assert message in dpspan(*shared, *rate, *arguments, code=1).stderr


# -- choose, compare, advise ----------------------------------------------------------------------


def two_candidates(folder: Path) -> dict[str, Any]:
    data: Any = settings(folder)["data"]
    other = {**data["public"]["optin"], "inputs": "x_test", "labels": "y_test"}
    return {**data, "public": {**data["public"], "other": other}}


def test_choose(folder: Path) -> None:
    method = {"name": "gep", "rank": 4}
    choose = {"epsilon": 0.5, "rank": 4}
    path = written(folder, data=two_candidates(folder), method=method, choose=choose)
    ranking = as_json("choose", path, "--unprivate-rank", "--rank", 4)
    assert ranking["private"] is False
    assert {row["name"] for row in ranking["rows"]} == {"optin", "other"}
    assert not (folder / "run").exists()
    choice = as_json("choose", path)
    assert choice["chosen"] in ("optin", "other")
    assert as_json("choose", path) == choice  # made once
    files = RunFolder(folder / "run")
    assert json.loads(files.ledger.read_text())["steps"] == 1
    dpspan("train", path)
    events = json.loads(files.ledger.read_text())["events"]
    assert [event["count"] for event in events] == [1, 10]
    plain = written(folder, "plain.yaml")
    assert "has no `choose` section" in dpspan("choose", plain, code=1).stderr


@pytest.mark.slow
def test_compare(folder: Path) -> None:
    budget = {"epsilon": 8.0, "delta": 1e-5, "accountant": "rdp"}
    training = {**settings(folder)["training"], "epochs": 1}
    shared = {"budget": budget, "training": training}
    warm = {"public": "optin", "max_epochs": 2}
    one = written(folder, "warm.yaml", **shared, warm_start=warm)
    two = written(folder, "rgp.yaml", **shared, method={"name": "rgp", "rank": 2})
    result = as_json("compare", one, two, "--out", "both", "--seeds", 1)
    assert {row["name"] for row in result["rows"]} >= {"warm", "rgp", "public only"}
    assert (folder / "both" / "comparison.png").exists()
    other = written(folder, "other.yaml", **{**shared, "budget": {**budget, "epsilon": 2.0}})
    refused = dpspan("compare", one, other, "--out", "more", code=1)
    assert "Expected the same `budget` in all configurations" in refused.stderr


@pytest.mark.slow
def test_advise_leaves_private_data_alone(folder: Path) -> None:
    data: Any = settings(folder)["data"]
    data["private"]["path"] = data["test"]["path"] = "not-there.npz"
    training = {**settings(folder)["training"], "epochs": 1, "batch_size": 200}
    budget = {"epsilon": 8.0, "delta": 1e-5}
    path = written(folder, data=data, training=training, budget=budget)
    assert "Expected data.records or --records" in dpspan("advise", path, code=1).stderr
    advice = as_json("advise", path, "--records", 400, "--folds", 3)
    assert advice["recommended"] in [trial["name"] for trial in advice["trials"]]
