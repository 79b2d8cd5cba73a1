"""The folder of a run: what 0.1 left goes on, another version is refused, the page tells all."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpspan import DPSGD, Budget, Contender, Task, WarmStart, compare
from dpspan.app.report import render
from dpspan.app.run import Progress, RunFolder, train
from dpspan.app.run.folder import read_json, read_lines
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


def blobs(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    return torch.randn(count, 4, generator=draw) + 3.0 * labels[:, None], labels


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
    assert json.loads(again.to_json()) == before
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
    other = {**data["public"]["optin"], "inputs": "x_test", "labels": "y_test"}
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
    assert {path.name for path in vars(RunFolder("x")).values() if path.suffix} <= described
    keys = set(read_json(Path("compared/dp-sgd/seed-0/run.json")))
    assert all(f"`{key}`" in PAGE.read_text() for key in keys)
