"""The folder of a run: what 0.1 left goes on, another version is refused, the page tells all."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpspan import DPSGD, Budget, Contender, Task, WarmStart, compare
from dpspan.app.comparison import _is_done
from dpspan.app.report import render
from dpspan.app.run import Progress, RunFolder, train
from dpspan.app.run.folder import is_comparison, read_json, read_lines
from dpspan.app.run.task import in_batches
from helpers.blobs import blobs
from helpers.digits import config, settings, write_npz

OLD = Path(__file__).parent / "folders-0.1"  # made by 0.1: see the tests that use them
PAGE = Path(__file__).parents[2] / "docs" / "run-folder.md"
NOISY = {"noise_multiplier": 1.0, "delta": 1e-5, "accountant": "rdp"}
PLAIN = Contender(name="DP-SGD", method=DPSGD(clip=1.0), learning_rate=0.5)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # the old configuration has relative paths
    shutil.copytree(OLD, tmp_path, dirs_exist_ok=True)
    write_npz(Path())
    return tmp_path


def task() -> Task:
    return Task(
        model=lambda: nn.Linear(4, 2),
        private=TensorDataset(*blobs(200, 0)),
        test=TensorDataset(*blobs(60, 1)),
        batch_size=50,
        epochs=2,
        budget=Budget(epsilon=5.0, delta=1e-5),
        public=blobs(20, 2),
        warm_start=WarmStart(data=blobs(20, 2), max_epochs=3),
        test_is_public=True,
        accountant="rdp",
    )


def test_a_run_that_0_1_began_goes_on(place: Path) -> None:
    """It was stopped after 7 of 10 steps, two of them after the last checkpoint but one."""
    seen: list[Progress] = []
    files = RunFolder("run")
    assert files.facts is None
    result = train(config(Path(), budget=NOISY), resume=True, watch=seen.append)
    assert (seen[0].step, result.step, result.status) == (7, 10, "finished")
    assert read_json(files.ledger)["steps"] == 10
    assert [line["step"] for line in read_lines(files.metrics)] == [5, 10]
    assert files.facts is not None
    assert files.facts["version"] == 2


def test_a_run_that_0_1_began_is_refused_with_other_settings(place: Path) -> None:
    other = {**NOISY, "noise_multiplier": 0.5}
    with pytest.raises(ValueError, match=r"other settings \(budget is .*Put them back"):
        train(config(Path(), budget=other), resume=True)
    with pytest.raises(ValueError, match="holds a run already"):
        train(config(Path(), budget=NOISY))
    assert read_json(RunFolder("run").ledger)["steps"] == 7


def test_a_comparison_that_0_1_made_counts_as_done(place: Path) -> None:
    out = place / "comparison"
    before = read_json(out / "comparison.json")
    models = {path: path.read_bytes() for path in out.rglob("model.safetensors")}
    assert len(models) == 3
    again = compare(task(), [PLAIN], out=out, seeds=(0,))
    after = json.loads(json.dumps(again.to_dict()))
    ended = [result.pop("status") for row in after["rows"] for result in row["results"]]
    assert ended == ["finished"] * 3  # which 0.1 did not write down
    together = after.pop("epsilon_together"), before.pop("epsilon_together")
    assert together[0] == pytest.approx(together[1], rel=1e-9)  # another scipy adds up otherwise
    searched = [(row.pop("tries"), row.pop("at_the_end")) for row in after["rows"]]
    assert (after.pop("search_runs"), searched) == (0, [([], False)] * 3)  # it knew no searches
    assert after.pop("verdicts")  # which 0.1 left to the report
    assert [row.pop("own_model") for row in after["rows"]] == [False] * 3  # it knew none
    assert after == before
    more = compare(task(), [PLAIN], out=out, seeds=(0, 1))
    assert {path: path.read_bytes() for path in models} == models
    assert more.epsilon_together > again.epsilon_together + 0.5
    assert read_json(out / "certificate.json")["steps"] == 4 * 8
    other = dataclasses.replace(PLAIN, learning_rate=0.7)
    with pytest.raises(ValueError, match=r"learning_rate is 0\.5 there, 0\.7 here"):
        compare(task(), [other], out=out, seeds=(0,))
    assert render([out], place / "report.html").exists()


def test_a_run_that_0_1_was_killed_in_is_paid_and_removed(place: Path) -> None:
    out = place / "comparison"
    (hidden := out / "dp-sgd" / ".seed-1.x").mkdir()
    for name in ("certificate.json", "model.safetensors"):
        shutil.copy(out / "dp-sgd" / "seed-0" / name, hidden)
    compare(task(), [PLAIN], out=out, seeds=(0,))
    assert [path.name for path in hidden.iterdir()] == ["certificate.json"]
    whole = read_json(out / "certificate.json")
    assert whole["steps"] == 3 * 8
    assert any("a run was charged whose model is not here" in w for w in whole["warnings"])


def test_another_version_is_refused(place: Path) -> None:
    train(config(Path(), budget=NOISY), resume=True)
    files = RunFolder("run")
    files.run.write_text(json.dumps({**read_json(files.run), "version": 3}))
    with pytest.raises(ValueError, match=r"another dpspan \(version 3 .*Go on with that one"):
        train(config(Path(), budget=NOISY), resume=True)


def test_the_page_describes_every_file(place: Path) -> None:
    method = {"name": "gep", "public": "optin", "rank": 4, "diagnose": 5}
    data: Any = settings(Path())["data"]
    other = {**data["public"]["optin"], "inputs": "x_other", "labels": "y_other"}
    chosen = config(
        Path(),
        data={**data, "public": {**data["public"], "other": other}},
        budget=NOISY,
        method={"name": "gep", "rank": 4, "diagnose": 5},
        choose={"epsilon": 0.5, "rank": 4},
        output={"folder": "chosen"},
    )
    train(chosen)
    train(config(Path(), budget=NOISY, method=method, output={"folder": "other"}))
    compare(task(), [PLAIN], out="compared", seeds=(0,))
    folders = ("chosen", "other", "compared")
    written = {path.name for name in folders for path in Path(name).rglob("*") if path.is_file()}
    described = set(re.findall(r"`([\w.]+\.(?:\w+)|\.lock)`", PAGE.read_text()))
    assert written <= described
    files = [path for path in vars(RunFolder("x")).values() if isinstance(path, Path)]
    assert {path.name for path in files if path.suffix} <= described
    keys = set(read_json(Path("compared/dp-sgd/seed-0/run.json")))
    assert all(f"`{key}`" in PAGE.read_text() for key in keys)


# -- what a review has found ----------------------------------------------------------------------


class Agreed(TensorDataset):
    """Gives half of its records, in a form of its own."""

    def __len__(self) -> int:
        return len(self.tensors[0]) // 2

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x, 1 - y


def test_a_dataset_of_ones_own_is_read_by_its_own_rules() -> None:
    dataset = Agreed(*blobs(200, 0))
    batches = list(in_batches(dataset, 50))
    assert [len(x) for x, _ in batches] == [50, 50]
    assert torch.equal(torch.cat([y for _, y in batches]), 1 - blobs(200, 0)[1][:100])


GEP_OF_0_1 = {"method": "GEP", "rank": 3, "leftover": False, "embedding_share": 0.5}


def test_options_that_are_gone_are_no_other_settings(tmp_path: Path) -> None:
    folder, here = RunFolder(tmp_path), {"method": {"method": "GEP", "rank": 3}, "seed": 0}
    folder.refuse_other_settings(here, {"method": GEP_OF_0_1, "seed": 0})
    with pytest.raises(ValueError, match="holds a run with other settings"):
        folder.refuse_other_settings(here, {"method": {**GEP_OF_0_1, "leftover": True}, "seed": 0})


@pytest.mark.parametrize(
    "used", [{"low_pass": 0.9}, {"average_weights": 0.9}, {"model": lambda: nn.Linear(4, 2)}]
)
def test_settings_that_are_used_no_more_are_other_settings(
    tmp_path: Path, used: dict[str, Any]
) -> None:
    """A setting that stands in the folder only where it is used."""
    compare(
        task(), [PLAIN, dataclasses.replace(PLAIN, name="other", **used)], seeds=[0], out=tmp_path
    )
    with pytest.raises(ValueError, match=rf"other settings \({next(iter(used))} is .*, None here"):
        compare(task(), [PLAIN, dataclasses.replace(PLAIN, name="other")], seeds=[0], out=tmp_path)


def test_a_run_of_train_inside_a_comparison_is_added_up(tmp_path: Path) -> None:
    write_npz(tmp_path)
    inside = tmp_path / "all" / "mine" / "seed-1"
    train(config(tmp_path, budget=NOISY, output={"folder": str(inside)}))
    assert not is_comparison(tmp_path / "all")
    result = compare(task(), [PLAIN], seeds=[0], out=tmp_path / "all")
    alone = compare(task(), [PLAIN], seeds=[0], out=tmp_path / "alone")
    assert result.epsilon_together > alone.epsilon_together


def test_steps_whose_ledger_was_lost_are_not_forgotten(tmp_path: Path) -> None:
    compare(task(), [PLAIN], seeds=[0], out=tmp_path)
    run = RunFolder(tmp_path / "dp-sgd" / "seed-0")
    run.write_facts(**{**read_json(run.run), "status": None})
    run.ledger.unlink()
    other = dataclasses.replace(PLAIN, learning_rate=0.1)
    with pytest.raises(ValueError, match=r"ledger\.json is missing"):
        _is_done(task(), other, 0, run)
    assert run.checkpoint.exists()


SCRIPT = """
import sys, time
from pathlib import Path
from dpspan.app.run.jobs import workers

def work(name):
    Path(name).touch()
    time.sleep(60)

if __name__ == "__main__":
    with workers(2, None, "waiting", total=6) as run:
        run(work, [(f"{sys.argv[1]}/{i}",) for i in range(6)])
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_call_takes_its_workers_along(tmp_path: Path, sent: signal.Signals) -> None:
    script, done = tmp_path / "script.py", tmp_path / "done"
    script.write_text(SCRIPT)
    done.mkdir()
    command = [sys.executable, str(script), str(done)]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while len(list(done.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    if sent is signal.SIGINT:
        os.killpg(process.pid, sent)  # as Ctrl-C does
    else:
        process.send_signal(sent)
    process.communicate(timeout=20)  # ends when all who hold its stderr have
    assert len(list(done.iterdir())) == 2
