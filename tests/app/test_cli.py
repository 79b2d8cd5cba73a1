"""The command line as users meet it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from dp_accounting import dp_event, pld, rdp
from typer.testing import CliRunner

from dpspan import PrivacyEngine, SecondPhase
from dpspan.app.advice import Advice
from dpspan.app.cli import app
from dpspan.app.comparison.results import SCORE
from dpspan.app.comparison.search import Try
from dpspan.app.comparison.tuning import RowSearch
from dpspan.app.config import load_config
from dpspan.app.run import RunFolder
from dpspan.app.run.from_config import make_parts
from dpspan.app.run.models import draw_model
from dpspan.support.errors import BudgetExceeded
from helpers.digits import digits, settings, write_csv, write_idx, write_images, write_npz

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
    assert as_json("report", folder / "run")["report"].endswith("report.html")
    assert (folder / "run" / "report.html").stat().st_size > 1000


def test_an_audit_leaves_its_trace(folder: Path) -> None:
    path, run = written(folder), RunFolder(folder / "run")
    dpspan("train", path)
    assert "audit" not in run.certificate.read_text() + run.ledger.read_text()
    attack = as_json("audit", run.path)
    assert attack.pop("private") is False
    assert all(name.startswith("unprivate_") for name in attack)
    assert 0.3 < attack["unprivate_success_rate"] < 0.7
    assert json.loads(run.audit.read_text()) == attack
    note = "unprivate: an audit (membership inference) of the model was made on private records"
    for document in (run.ledger, run.certificate):
        assert json.loads(document.read_text())["warnings"].count(note) == 1
    assert "NOT PRIVATE" in dpspan("audit", run.path).stdout
    dpspan("train", path, "--resume")  # writes the certificate anew
    assert json.loads(run.certificate.read_text())["warnings"].count(note) == 1
    page = Path(as_json("report", run.path)["report"]).read_text()
    assert note in page
    assert "unprivate_success_rate" not in page


def test_an_audit_that_cannot_be_recorded_is_not_shown(folder: Path) -> None:
    dpspan("train", written(folder))
    run = RunFolder(folder / "run")
    with run.locked():
        refused = dpspan("audit", run.path, code=1)
    assert refused.stdout == ""
    assert "Another process is training in" in refused.stderr
    assert not run.audit.exists()


def test_one_sentence_and_no_traceback(folder: Path) -> None:
    bad = written(folder, method={"name": "dpsgd", "clip": -1.0})
    result = dpspan("train", bad, code=1)
    assert result.stderr == (
        f"Error: {bad}:{_line(bad, 'clip')}: method.clip: Expected a number above 0.\n"
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

    monkeypatch.setattr("dpspan.app.run.train", broken)
    result = dpspan("train", written(folder), code=1)
    assert result.stderr == (
        "Error: KeyError: 'inside'. Run `dpspan --debug …` to see where it comes from.\n"
    )


def test_a_budget_that_is_spent_is_a_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise BudgetExceeded("One more would exceed the budget. Stop training.")

    monkeypatch.setattr("dpspan.app.run.train", refused)
    said = dpspan("train", written(folder), code=1).stderr
    assert said == "Error: One more would exceed the budget. Stop training.\n"


def test_warnings_are_notes_each_said_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def warn(*_: Any, **__: Any) -> None:
        for message in ("dpspan: rank is reduced.", "dpspan: rank is reduced.", "of another kind"):
            warnings.warn(message, stacklevel=1)
        raise ValueError("enough")

    monkeypatch.setattr("dpspan.app.run.train", warn)
    with pytest.warns(UserWarning, match="of another kind") as others:
        result = dpspan("train", written(folder), code=1)
    assert result.stderr.count("Note: rank is reduced.") == 1
    assert len(others) == 1


def test_ctrl_c_saves_and_can_be_resumed(folder: Path) -> None:
    training = {**settings(folder)["training"], "epochs": 3000}
    path = written(folder, training=training)
    command = [sys.executable, "-m", "dpspan", "train", str(path), "--json"]
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

    from dpspan.app.run import train

    result = train(path, resume=True, watch=stop_soon, stop=lambda: True)
    assert stopped[0] == certificate["steps"]
    assert result.step == certificate["steps"] + 1


def test_a_stop_is_told_how_to_go_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpspan.app.cli.runs._Stopper.__call__", lambda self: True)
    path = written(folder)
    said = dpspan("train", path, code=130).stderr
    assert f"after 1 of 10 steps; the checkpoint is saved. Go on with: dpspan train {path}" in said


def test_the_users_own_model_and_table(folder: Path) -> None:
    """init, train and report, for a model in the working folder and a CSV."""
    write_csv(folder / "digits.csv", *digits(300))
    write_csv(folder / "held_out.csv", *(part[300:] for part in digits(400)))
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
    x, y = digits(120)
    made: dict[str, Callable[[str, slice], Path]] = {
        "npz": lambda name, part: folder / "digits.npz",
        "idx": lambda name, part: write_idx(folder / f"{name}-images-idx3-ubyte.gz", x[part]),
        "images": lambda name, part: write_images(folder / name, x[part], y[part]),
        "csv": lambda name, part: write_csv(folder / f"{name}.csv", x[part], y[part]),
    }
    path, public = made[kind]("train", slice(60)), made[kind]("other", slice(60, 120))
    answer = as_json(
        "init", "--data", path, "--classes", "10", "--public", public, "--model", "logistic"
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


def test_init_looks_for_the_column_of_ids(folder: Path) -> None:
    (folder / "a.csv").write_text("Patient_ID,x,ill\n1,2,0\n")
    arguments = ("init", "--data", "a.csv", "--classes", 2, "--out", "d.yaml", "--unit")
    said = dpspan(*arguments, "patient id", code=1).stderr
    assert "--unit to be a column (or array) of a.csv (did you mean 'Patient_ID'?)" in " ".join(
        said.split()
    )
    assert not Path("d.yaml").exists()
    dpspan(*arguments, "Patient_ID")
    write_images(folder / "images", *digits(20))
    images = ("init", "--data", "images", "--classes", 10, "--out", "e.yaml", "--unit", "who")
    assert "Expected --unit to be a column (or array)" in dpspan(*images, code=1).stderr


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
        (("--epsilon", 1, "--epochs", 0), "Expected --epochs to be an integer of at least 1"),
        (("--epsilon", -1, "--epochs", 1), "Expected target_epsilon > 0"),
        (("--epsilon", 1, "--epochs", 1, "--accountant", "x"), "accountant to be one of"),
        (
            ("--epsilon", 1000, "--noise-multiplier", 100, "--accountant", "rdp"),
            "lasts for more than 1,000,000 epochs: take a smaller ε or less noise",
        ),
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
    other = {**data["public"]["optin"], "inputs": "x_other", "labels": "y_other"}
    return {**data, "public": {**data["public"], "other": other}}


def test_choose(folder: Path) -> None:
    method = {"name": "gep", "rank": 4}
    choose = {"epsilon": 0.5, "rank": 4}
    path = written(folder, data=two_candidates(folder), method=method, choose=choose)
    ranking = as_json("choose", path, "--unprivate-rank", "--rank", 4)
    assert ranking["private"] is False
    assert {row["name"] for row in ranking["rows"]} == {"optin", "other"}
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


LOOK = "unprivate: public data were ranked by private data, without noise"


@pytest.mark.parametrize("when", ["before", "after", "between"])
def test_a_table_that_was_looked_at_is_on_the_certificate(folder: Path, when: str) -> None:
    """Before the run, after it, or before it goes on."""
    path = written(folder, data=two_candidates(folder))
    run = RunFolder(folder / "run")
    if when != "before":
        dpspan("train", path)
        assert LOOK not in run.certificate.read_text()
    dpspan("choose", path, "--unprivate-rank", "--rank", 4)
    assert LOOK in json.loads(run.ledger.read_text())["warnings"]
    if when != "after":
        dpspan("train", path, *(["--resume"] if when == "between" else []))
    for document in (run.ledger, run.certificate):
        assert json.loads(document.read_text())["warnings"].count(LOOK) == 1
    dpspan("report", run.path)
    assert LOOK in (run.path / "report.html").read_text()


def test_no_table_where_the_record_was_lost(folder: Path) -> None:
    path = written(folder, data=two_candidates(folder))
    dpspan("train", path)
    RunFolder(folder / "run").ledger.unlink()
    shown = dpspan("choose", path, "--unprivate-rank", code=1)
    assert "ledger.json is missing" in shown.stderr
    assert not shown.stdout


def test_choose_leaves_a_run_that_has_begun_alone(folder: Path) -> None:
    dpspan("train", written(folder))
    files = RunFolder(folder / "run")
    before = {path: path.read_bytes() for path in files.path.iterdir()}
    path = written(
        folder,
        data=two_candidates(folder),
        method={"name": "gep", "rank": 4},
        choose={"epsilon": 0.5, "rank": 4},
    )
    assert "holds a run that was made without choice.json" in dpspan("choose", path, code=1).stderr
    assert {path: path.read_bytes() for path in files.path.iterdir()} == before


PRICE = {"epsilon": 8.0, "delta": 1e-5, "accountant": "rdp"}


def shared(folder: Path, **training: Any) -> dict[str, Any]:
    whole: Any = settings(folder)["training"]
    return {"budget": PRICE, "training": {**whole, "epochs": 1, **training}}


def test_compare(folder: Path) -> None:
    warm = {"public": "optin", "max_epochs": 2}
    one = written(folder, "warm.yaml", **shared(folder), warm_start=warm)
    two = written(folder, "rgp.yaml", **shared(folder), method={"name": "rgp", "rank": 2})
    result = as_json("compare", one, two, "--out", "both", "--seeds", 1)
    assert {row["name"] for row in result["rows"]} >= {"warm", "rgp", "public only"}
    assert (folder / "both" / "comparison.png").exists()
    assert result["epsilon_together"] > 8.0


def test_compare_searches_learning_rates(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pretend(self: RowSearch, each: Try) -> None:
        RunFolder(self.row).write_json(self._path(each), {SCORE: -abs(each.rate - own)})

    monkeypatch.setattr(RowSearch, "make", pretend)
    path = written(folder, **shared(folder))
    own = 3 * load_config(path).training.optimizer.learning_rate
    short = dpspan("compare", path, "--out", "out", "--search", 2, code=1).stderr
    assert "greater than or equal to 3" in short
    result = as_json("compare", path, "--out", "out", "--seeds", 1, "--search", 4)
    private = [row for row in result["rows"] if row["private"]]
    assert [row["learning_rate"] for row in private] == pytest.approx([own, own])
    assert [len(row["tries"]) for row in private] == [10, 10]  # the two best with three seeds
    assert result["search_runs"] == 20
    assert all("unprivate_held_out_accuracy" in each for each in private[0]["tries"])


def test_compare_trains_as_the_configurations_say(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optimizer, schedule, pieces, seed, records, accountant, fix, trainable: none is ignored."""
    (folder / "fixable.py").write_text(
        "from torch import nn\n"
        "def net():\n"
        "    return nn.Sequential(\n"
        "        nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))\n"
    )
    data: Any = settings(folder)["data"]
    adam = {"name": "adam", "learning_rate": 0.01, "weight_decay": 0.1}
    options = {
        "physical_batch_size": 7,
        "cuda_graphs": True,
        "seed": 5,
        "optimizer": adam,
        "schedule": {"name": "cosine", "warmup": 0.1},
    }
    path = written(
        folder,
        "mine.yaml",
        **shared(folder, **options),
        data={**data, "records": 960},
        model={"name": "factory", "factory": "fixable:net", "fix": True},
        trainable={"name": "last-layers", "count": 1},
        warm_start={"public": "optin", "max_epochs": 2},
    )
    seen: dict[str, Any] = {}
    original = PrivacyEngine.make_private

    def spy(self: PrivacyEngine, **arguments: Any) -> Any:
        seen.update(arguments)
        return original(self, **arguments)

    monkeypatch.setattr(PrivacyEngine, "make_private", spy)
    as_json("compare", path, "--out", "out", "--seeds", 1)
    trained = [n for n, p in seen["module"].named_parameters() if p.requires_grad]
    assert trained == ["3.weight", "3.bias"]
    assert "GroupNorm" in str(seen["module"])
    assert isinstance(seen["warm_start"], SecondPhase)
    assert seen["warm_start"].seed == 5
    assert (seen["max_physical_batch_size"], seen["cuda_graphs"]) == (7, True)
    group = seen["optimizer"].param_groups[0]
    assert (type(seen["optimizer"]).__name__, group["weight_decay"]) == ("AdamW", 0.1)
    assert group["lr"] < 0.005  # the cosine is near its end
    run = folder / "out" / "mine" / "seed-5"
    certificate = json.loads((run / "certificate.json").read_text())
    (entry,) = certificate["events"]
    assert (entry["count"], entry["event"]["sampling_probability"]) == (10, 0.1)
    assert certificate["accountant"]["used"] == "rdp"
    dpspan("compare", path, "--out", "out", "--seeds", 1)  # nothing is released again
    other = yaml.safe_load(path.read_text())
    other["trainable"]["count"] = 2
    path.write_text(yaml.safe_dump(other))
    refused = dpspan("compare", path, "--out", "out", "--seeds", 1, code=1)
    assert "holds a run with other settings" in refused.stderr


def test_compare_pays_for_a_choice_once(folder: Path) -> None:
    sections = {**shared(folder), "data": two_candidates(folder), "choose": {"epsilon": 0.5}}
    gep = written(folder, "gep.yaml", **sections, method={"name": "gep", "rank": 4})
    other = written(folder, "biased.yaml", **sections, method={"name": "biased-gep", "rank": 4})
    result = as_json("compare", gep, other, "--out", "out", "--seeds", 1)
    choice = (folder / "out" / "choice.json").read_bytes()

    def choices(name: str) -> int:
        events = json.loads((folder / "out" / name / "certificate.json").read_text())["events"]
        return sum(e["count"] for e in events if "Laplace" in e["event"]["kind"])

    assert choices("gep/seed-0") == choices("biased/seed-0") == choices("") == 1
    assert choices("dp-sgd/seed-0") == 0
    assert all(row["results"][0]["epsilon"] <= 8.0 for row in result["rows"])
    assert as_json("compare", gep, other, "--out", "out", "--seeds", 1) == result
    assert (folder / "out" / "choice.json").read_bytes() == choice


def test_a_choice_that_an_interrupted_compare_made_is_paid(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = {**shared(folder), "data": two_candidates(folder)}
    method, plain = {"name": "gep", "rank": 4}, written(folder, "plain.yaml", **sections)
    path = written(folder, "gep.yaml", **sections, method=method, choose={"epsilon": 0.5})

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    dpspan("compare", plain, "--out", "out", "--seeds", 1)
    with monkeypatch.context() as patched:
        patched.setattr("dpspan.app.comparison.compare", interrupted)
        dpspan("compare", path, plain, "--out", "out", "--seeds", 1, code=130)
    out = folder / "out"
    assert (out / "choice.json").exists()
    assert not (out / "certificate.json").exists()  # the one that was there leaves the choice out
    dpspan("compare", plain, "--out", "out", "--seeds", 1)
    events = json.loads((out / "certificate.json").read_text())["events"]
    assert sum(e["count"] for e in events if "Laplace" in e["event"]["kind"]) == 1
    (out / "ledger.json").unlink()
    refused = dpspan("compare", plain, "--out", "out", "--seeds", 1, code=1)
    assert "ledger.json is missing, so nobody knows what the other files in" in refused.stderr


def test_a_folder_is_of_a_run_or_of_a_comparison(folder: Path) -> None:
    sections = {**shared(folder), "data": two_candidates(folder)}
    path = written(folder, **sections)
    method, choose = {"name": "gep", "rank": 4}, {"epsilon": 0.5, "rank": 4}
    chooser = written(folder, "d.yaml", **sections, method=method, choose=choose)
    dpspan("compare", path, "--out", "run", "--seeds", 1)
    before = {file: file.read_bytes() for file in (folder / "run").rglob("*.*")}
    for command in ("train", "choose"):
        assert "run holds a comparison" in dpspan(command, chooser, code=1).stderr
    assert {file: file.read_bytes() for file in (folder / "run").rglob("*.*")} == before
    single = written(folder, **sections, output={"folder": str(folder / "single")})
    dpspan("train", single)
    before = {file: file.read_bytes() for file in (folder / "single").rglob("*.*")}
    told = written(folder, "told.yaml", **sections, report={"title": "Another"})
    for config in (path, chooser, told):
        refused = dpspan("compare", config, "--out", "single", "--seeds", 1, code=1)
        assert "single holds a run, whose certificate would be replaced" in refused.stderr
    assert {file: file.read_bytes() for file in (folder / "single").rglob("*.*")} == before
    of_a_comparison = dpspan("audit", folder / "run" / "c" / "seed-0", code=1).stderr
    assert "is a run of a comparison, which leaves no config.yaml" in of_a_comparison


@pytest.mark.slow
def test_compare_and_advise_in_processes(folder: Path) -> None:
    path = written(folder, **shared(folder))
    result = as_json("compare", path, "--out", "out", "--seeds", 2, "--jobs", 2)
    assert [len(row["results"]) for row in result["rows"]] == [2, 2, 2]
    assert (folder / "out" / "c" / "seed-1" / "model.safetensors").exists()
    training = {**settings(folder)["training"], "epochs": 1, "batch_size": 200}
    path = written(folder, training=training, budget={"epsilon": 8.0, "delta": 1e-5})
    assert as_json("advise", path, "--records", 400, "--folds", 3, "--jobs", 2)["trials"]


def test_rows_that_would_share_a_folder(folder: Path) -> None:
    path = written(folder, "dp-sgd.yaml", **shared(folder), method={"name": "rgp", "rank": 2})
    refused = dpspan("compare", path, "--out", "out", code=1).stderr
    assert "got 'dp-sgd', 'DP-SGD'. Rename yours (a configuration: its file)" in refused
    path = written(folder, "日本.yaml", **shared(folder))
    dpspan("compare", path, "--out", "out", "--seeds", 1)
    assert (folder / "out" / "日本" / "seed-0" / "certificate.json").exists()


def test_compare_refuses(folder: Path) -> None:
    def refused(*paths: Path) -> str:
        answer = dpspan("compare", *paths, "--out", "out", code=1).stderr
        assert not (folder / "out").exists()
        return str(answer)

    one = written(folder, "one.yaml", **shared(folder))
    (folder / "sub").mkdir()
    twin = written(folder, "sub/one.yaml", **shared(folder), method={"name": "rgp"})
    assert "Expected configurations with different file names" in refused(one, twin)
    dear = written(folder, "two.yaml", **{**shared(folder), "budget": {**PRICE, "epsilon": 2.0}})
    assert "Expected the same `budget` in all configurations" in refused(one, dear)
    pieces = written(folder, "two.yaml", **shared(folder, physical_batch_size=3))
    assert "Expected the same `training.physical_batch_size`" in refused(one, pieces)
    last = written(folder, "two.yaml", **shared(folder), trainable={"name": "last-layers"})
    assert "Expected the same `trainable`" in refused(one, last)
    noisy = written(folder, "two.yaml")
    assert "Expected budget.epsilon" in refused(noisy)
    data: Any = settings(folder)["data"]
    untested = written(folder, "two.yaml", **shared(folder), data={**data, "test": None})
    assert "Expected data.test" in refused(untested)
    secret = {"data": {**data, "test_is_public": False}, "evaluate": {"noise_multiplier": 5.0}}
    released = written(folder, "two.yaml", **shared(folder), **secret)
    assert "Leave evaluate.noise_multiplier out" in refused(released)


def test_the_probe_network_can_be_trained(folder: Path) -> None:
    path = written(folder, model={"name": "probe"}, training={**shared(folder)["training"]})
    config = load_config(path)
    parts = make_parts(config)

    def drawn(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return draw_model(config.model, parts.private).state_dict()

    first, again, other = drawn(3), drawn(3), drawn(4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["layers.0.weight"], other["layers.0.weight"])


def test_advise_rehearses_the_configuration(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def note(task: Any, contenders: Any, **others: Any) -> Any:
        given.update(others, task=task, contenders={c.name: c for c in contenders})
        return Advice(recommended="a", sure=False, tied=(), trials=(), notes=("n",))

    monkeypatch.setattr("dpspan.app.advice.advise", note)
    data = two_candidates(folder)
    data["private"]["path"] = data["test"]["path"] = "not-there.npz"
    adam = {"name": "adam", "learning_rate": 0.01}
    path = written(
        folder,
        **shared(folder, optimizer=adam, schedule={"name": "cosine"}, physical_batch_size=7),
        data={**data, "records": 960},
        model={"name": "mlp", "fix": True},
        trainable={"name": "last-layers", "count": 1},
        method={"name": "gep", "rank": 4},
        choose={"epsilon": 0.5},
    )
    answer = as_json("advise", path)
    assert answer["notes"][1].startswith("The private choice may fall on other public data")
    assert given["rates"] == pytest.approx([0.002, 0.005, 0.01, 0.02, 0.04])
    task, own = given["task"], given["contenders"]["c"]
    assert (task.records, task.accountant, task.physical_batch_size) == (960, "rdp", 7)
    model = task.model()
    assert sum(p.requires_grad for p in model.parameters()) == 2
    for contender in given["contenders"].values():
        described = contender.describe()
        assert described["optimizer"]["name"] == "AdamW"
        assert described["schedule"]["last"] < 1e-3
        chosen = getattr(contender.method, "public", None) is not None
        assert (contender.paid is not None) == chosen
    assert type(own.method).__name__ == "GEP"
    assert own.paid["events"][0]["event"]["noise_parameter"] == 0.5


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


# -- disks ----------------------------------------------------------------------------------------


class TestDisks:
    def test_a_full_one_costs_a_sentence_and_not_the_run(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        path = written(folder)
        with monkeypatch.context() as small:
            small.setattr("dpspan.engine.checkpoint.safetensors.torch.save_file", full)
            refused = dpspan("train", path, code=1)
        assert "\nError: Cannot write a checkpoint to " in refused.stderr  # after the progress
        assert "No space left on device. Choose a folder" in refused.stderr
        assert "Traceback" not in refused.stderr
        assert as_json("train", path, "--resume")["status"] == "finished"
        certificate = json.loads(RunFolder(folder / "run").certificate.read_text())
        assert certificate["steps"] == 10  # nothing was released before the first checkpoint

    def test_a_report_that_cannot_be_written(self, folder: Path) -> None:
        dpspan("train", written(folder))
        (folder / "file").write_text("")
        refused = dpspan("report", folder / "run", "--out", folder / "file" / "r.html", code=1)
        assert refused.stderr.startswith("Error: Cannot write the report to ")
        assert "Choose a folder that can be written to" in refused.stderr
        assert "is not a folder" in dpspan("report", folder / "file", code=1).stderr
        assert "There is nothing at" in dpspan("report", folder / "nowhere", code=1).stderr
