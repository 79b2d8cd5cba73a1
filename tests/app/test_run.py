"""Training from a configuration: what it leaves behind, and that it survives being killed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import dpspan.app.run.training
import dpspan.engine.checkpoint
from dpspan.accounting.certificate import weights_sha256
from dpspan.accounting.events import pure_event
from dpspan.accounting.ledger import Ledger
from dpspan.app.config import Config
from dpspan.app.run import Progress, Result, RunFolder, train
from dpspan.app.run.folder import read_lines
from dpspan.engine.checkpoint import load_file, save_file
from dpspan.mechanisms.noise import Noise
from helpers.digits import config, settings, write_npz
from helpers.needs import extra
from helpers.processes import CONTEXT

NOISY = {"noise_multiplier": 1.0, "delta": 1e-5, "accountant": "rdp"}  # quick: no PLD, no search
KEYS = {"engine", "module", "optimizer", "checkpoint_dict"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_npz(tmp_path)
    return tmp_path


def ledger_steps(folder: RunFolder) -> int:
    return int(json.loads(folder.ledger.read_text())["steps"])


def checkpoint_steps(folder: RunFolder) -> int:
    return int(load_file(folder.checkpoint, KEYS)["engine"]["ledger"]["steps"])


def test_a_run_leaves_everything_behind(folder: Path) -> None:
    seen: list[Progress] = []
    result = train(config(folder), watch=seen.append)
    files = RunFolder(folder / "run")
    assert result.status == "finished"
    assert result.step == result.steps == 10  # 480 records, batches of 96, 2 epochs
    assert 3.99 < result.epsilon <= 4.0
    lines = read_lines(files.metrics)
    assert [line["step"] for line in lines] == [5, 10]
    assert [line["epoch"] for line in lines] == [1, 2]
    assert 0 < lines[0]["epsilon"] < lines[1]["epsilon"] == result.epsilon
    assert set(lines[0]) == {
        "step", "epoch", "epsilon", "delta", "test_loss", "test_accuracy",
    }  # fmt: skip
    certificate = json.loads(files.certificate.read_text())
    assert certificate["private"]
    assert certificate["steps"] == ledger_steps(files) == checkpoint_steps(files) == 10
    assert certificate["epsilon"] == result.epsilon
    weights = safetensors.torch.load_file(files.model)
    assert {name: tuple(w.shape) for name, w in weights.items()} == {
        "1.weight": (10, 64),
        "1.bias": (10,),
    }
    assert seen[0].step == 0
    assert seen[-1].step == 10
    assert seen[-1].metrics == lines[-1] == result.metrics
    assert "unprivate" not in files.metrics.read_text() + files.certificate.read_text()
    assert Config.model_validate(config(folder).model_dump()) == config(folder)
    assert json.dumps(result.describe())


@pytest.mark.parametrize(
    "method",
    [
        {"name": "pdpsgd", "public": "optin", "rank": 8, "solver": "lanczos"},
        {"name": "pdpsgd", "random_subspace": True, "rank": 8, "start_epoch": 1},
        {"name": "biased-gep", "public": "optin", "rank": 8, "public_labels": "real"},
        {"name": "gep", "public": "optin", "rank": 8, "diagnose": 3, "groups": 2},
        {"name": "rgp", "rank": 2, "clipping": "automatic"},
        {"name": "mirror", "public": "optin"},
        {"name": "mirror", "public": "optin", "private_share": 0.7},
    ],
    ids=lambda method: "-".join(map(str, method.values()))[:24],
)
def test_every_method(folder: Path, method: dict[str, Any]) -> None:
    chosen = config(folder, method=method, budget=NOISY, model={"name": "mlp", "hidden": [16]})
    assert train(chosen).status == "finished"
    files = RunFolder(folder / "run")
    certificate = json.loads(files.certificate.read_text())
    assert certificate["training"]["method"].lower() == {
        "biased-gep": "biasedgep",
        "mirror": "mirrordescent",
    }.get(method["name"], method["name"])
    assert [public["name"] for public in certificate["public"]] == (
        ["optin", "test"] if "public" in method else ["test"]
    )
    noted = {"gep": [0, 3, 6, 9], "rgp": [0]}  # as asked for; RGP its noise, once
    steps = [note["step"] for note in read_lines(files.diagnostics)]
    assert steps == noted.get(method["name"], [])


def test_other_ways_to_train(folder: Path) -> None:
    """Warm start of a part of the model, a schedule, pieces, a number of records, Adam."""
    chosen = config(
        folder,
        data={**settings(folder)["data"], "records": 400},
        model={"name": "mlp", "hidden": [16]},
        budget=NOISY,
        trainable={"name": "last-layers", "count": 1},
        warm_start={"public": "optin", "max_epochs": 3, "learning_rate": 0.01},
        training={
            "epochs": 1,
            "batch_size": 100,
            "physical_batch_size": 32,
            "optimizer": {"name": "adam", "learning_rate": 0.01},
            "schedule": {"name": "cosine", "warmup": 0.1},
            "device": "cpu",
        },
    )
    assert train(chosen).step == 4
    certificate = json.loads(RunFolder(folder / "run").certificate.read_text())
    assert certificate["training"]["trainable_parameters"] == 17 * 10
    assert certificate["training"]["expected_batch_size"] == 100.0
    assert "sample_rate=0.25" in certificate["training"]["sampling"]
    assert certificate["public"][0]["detail"].startswith(("warm start", "second phase"))


def test_the_choice_of_public_data_is_paid_once(folder: Path) -> None:
    data = settings(folder)["data"]
    other = {**data["public"]["optin"], "inputs": "x_other", "labels": "y_other"}
    sections = {
        "data": {**data, "public": {**data["public"], "other": other}},
        "choose": {"epsilon": 0.5, "rank": 4},
        "method": {"name": "gep", "rank": 4},
    }
    stops = iter([False, True])
    assert train(config(folder, **sections), stop=lambda: next(stops)).status == "stopped"
    files = RunFolder(folder / "run")
    chosen = json.loads(files.choice.read_text())
    assert chosen["chosen"] in ("optin", "other")
    result = train(config(folder, **sections), resume=True)
    assert result.status == "finished"
    assert result.epsilon <= 4.0
    assert json.loads(files.choice.read_text()) == chosen
    events = json.loads(files.ledger.read_text())["events"]
    assert [(event["event"]["kind"], event["count"]) for event in events] == [
        ("DiscreteLaplaceDpEvent", 1),
        ("PoissonSampledDpEvent", 10),
    ]
    sections["choose"] = {"epsilon": 0.25, "rank": 4}
    files.checkpoint.unlink()
    files.run.unlink()
    with pytest.raises(ValueError, match=r"choice\.json was chosen with other settings"):
        train(config(folder, **sections))


def test_a_run_that_has_begun_chooses_no_more(folder: Path) -> None:
    """A choice made now would be missing from what the run has certified."""
    data: Any = settings(folder)["data"]
    other = {**data["public"]["optin"], "inputs": "x_other", "labels": "y_other"}
    sections: dict[str, Any] = {
        "data": {**data, "public": {**data["public"], "other": other}},
        "choose": {"epsilon": 0.5, "rank": 4},
        "method": {"name": "gep", "rank": 4},
        "budget": NOISY,
    }
    train(config(folder, **sections), stop=lambda: True)
    files = RunFolder(folder / "run")
    record, certificate = files.ledger.read_bytes(), files.certificate.read_bytes()
    files.choice.unlink()
    for resume in (True, False):
        with pytest.raises(ValueError, match=r"made without choice\.json|holds a run already"):
            train(config(folder, **sections), resume=resume)
    files.checkpoint.unlink()  # what it certified is there all the same
    with pytest.raises(ValueError, match=r"made without choice\.json"):
        train(config(folder, **sections), resume=True)
    assert files.ledger.read_bytes() == record
    assert files.certificate.read_bytes() == certificate


def test_a_ledger_is_not_replaced_by_one_that_tells_less(tmp_path: Path) -> None:
    files, longer, shorter = RunFolder(tmp_path), Ledger(), Ledger()
    longer.charge(pure_event(0.1), 2)
    longer.warn("something")
    files.write_ledger(longer)
    record = files.ledger.read_bytes()
    shorter.warn("something")
    shorter.charge(pure_event(0.1))
    with pytest.raises(ValueError, match="tells of releases that this process does not know"):
        files.write_ledger(shorter)
    shorter = Ledger()
    shorter.charge(pure_event(0.1), 3)
    with pytest.raises(ValueError, match="tells of releases"):
        files.write_ledger(shorter)  # without the warning
    assert files.ledger.read_bytes() == record
    longer.charge(pure_event(0.2))
    files.write_ledger(longer)
    assert ledger_steps(files) == 3


def test_nothing_is_trained_beside_what_has_no_record(folder: Path) -> None:
    files = RunFolder(folder / "run")
    files.path.mkdir()
    for path in (files.certificate, files.choice, files.model):
        path.write_text("{}")
        with pytest.raises(ValueError, match=r"ledger\.json is missing, so nobody knows"):
            train(config(folder, budget=NOISY))
        assert path.read_text() == "{}"
        path.unlink()


@pytest.mark.parametrize("name", ["comparison.json", "a/seed-0/run.json", "a/.seed-0.x/model"])
def test_the_folder_of_a_comparison_is_left_alone(folder: Path, name: str) -> None:
    files = RunFolder(folder / "run")
    (files.path / name).parent.mkdir(parents=True)
    for path in (files.path / name, files.certificate):
        path.write_text("of the comparison")
    with pytest.raises(ValueError, match="holds a comparison, whose certificate would be replaced"):
        train(config(folder, budget=NOISY))
    assert files.certificate.read_text() == "of the comparison"
    assert not files.ledger.exists()


def test_unprivate_metrics_only_on_request_and_on_record(folder: Path) -> None:
    data = {**settings(folder)["data"], "test_is_public": False}
    train(config(folder, data=data, budget=NOISY))
    (line, *_) = read_lines(RunFolder(folder / "run").metrics)
    assert set(line) == {"step", "epoch", "epsilon", "delta"}
    output = {"folder": str(folder / "open"), "unprivate_metrics": True}
    train(config(folder, data=data, budget=NOISY, output=output))
    files = RunFolder(folder / "open")
    (line, *_) = read_lines(files.metrics)
    shown = {name for name in line if name.startswith("unprivate_")}
    assert shown == {
        "unprivate_train_loss", "unprivate_train_accuracy",
        "unprivate_test_loss", "unprivate_test_accuracy",
    }  # fmt: skip
    assert not any("loss" in name or "accuracy" in name for name in set(line) - shown)
    warnings = json.loads(files.certificate.read_text())["warnings"]
    assert sum("unprivate" in warning for warning in warnings) == 2


def test_equal_test_records_may_be_declared_other_people_s(folder: Path) -> None:
    arrays = dict(np.load(folder / "digits.npz"))
    arrays["x_test"][:3] = arrays["x_train"][:3]
    np.savez(folder / "digits.npz", **arrays)
    with pytest.raises(ValueError, match=r"say `equal_rows_allowed: true` under data"):
        train(config(folder, budget=NOISY))
    data = {**settings(folder)["data"], "equal_rows_allowed": True}
    result = train(config(folder, data=data, budget=NOISY))
    assert "test_accuracy" in result.metrics
    certificate = json.loads(RunFolder(folder / "run").certificate.read_text())
    assert any("declared to be other people's" in each for each in certificate["warnings"])


def test_tensorboard_gets_the_same_numbers(folder: Path) -> None:
    extra("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(config(folder, budget=NOISY, output={"folder": str(folder / "run"), "tensorboard": True}))
    events = EventAccumulator(str(folder / "run" / "tensorboard"))
    events.Reload()
    names = set(events.Tags()["scalars"])
    assert names == {"epoch", "epsilon", "delta", "test_loss", "test_accuracy"}
    assert [event.step for event in events.Scalars("epsilon")] == [5, 10]
    assert {event.wall_time for event in events.Scalars("epsilon")} == {0.0}  # time tells of sizes


def test_tensorboard_leaves_out_what_is_no_number(folder: Path) -> None:
    extra("tensorboard")
    output = {"folder": str(folder / "run"), "tensorboard": True}
    training: Any = settings(folder)["training"]
    wild = {**training, "optimizer": {"name": "sgd", "learning_rate": 3e38}}
    assert train(config(folder, budget=NOISY, output=output, training=wild)).status == "diverged"
    assert RunFolder(folder / "run").certificate.exists()
    assert read_lines(RunFolder(folder / "run").metrics)[-1]["test_loss"] is None


# -- stopping and going on ------------------------------------------------------------------------


def test_a_run_that_is_refused_leaves_no_file_for_tensorboard(folder: Path) -> None:
    extra("tensorboard")
    output = {"folder": str(folder / "run"), "tensorboard": True}
    method = {"name": "rgp", "rank": 500}
    with pytest.raises(ValueError, match="becomes smaller with rank=500"):
        train(config(folder, method=method, output=output, budget=NOISY))
    assert not (folder / "run" / "tensorboard").exists()


def test_stop_and_resume(folder: Path) -> None:
    seen: list[Progress] = []
    stopped = train(config(folder), watch=seen.append, stop=lambda: seen[-1].step == 3)
    assert (stopped.status, stopped.step) == ("stopped", 3)
    files = RunFolder(folder / "run")
    assert ledger_steps(files) == checkpoint_steps(files) == 3
    assert not files.model.exists()
    with pytest.raises(ValueError, match=r"holds a run already\. Go on with it by --resume"):
        train(config(folder))
    seen.clear()
    result = train(config(folder), resume=True, watch=seen.append)
    assert result.status == "finished"
    assert [p.step for p in seen[:3]] == [3, 4, 5]
    assert 3.99 < result.epsilon <= 4.0
    assert ledger_steps(files) == 10
    assert not [w for w in json.loads(files.certificate.read_text())["warnings"] if "steps" in w]
    assert train(config(folder), resume=True).status == "finished"  # nothing left to do
    assert ledger_steps(files) == 10


@pytest.mark.filterwarnings("ignore:dpspan. batch_size is at least:UserWarning")
def test_a_resumed_run_equals_an_uninterrupted_one_but_for_chance(folder: Path) -> None:
    """Learning rates, momentum and positions: with next to no noise and all records, no chance."""
    sections = {
        "budget": {**NOISY, "noise_multiplier": 1e-7},
        "training": {
            "epochs": 4,
            "batch_size": 480,
            "optimizer": {"name": "sgd", "learning_rate": 1.0, "momentum": 0.9},
            "schedule": {"name": "cosine", "warmup": 0.3},
        },
    }
    train(config(folder, **sections, output={"folder": str(folder / "whole")}))
    step = 0

    def stop() -> bool:
        nonlocal step
        step += 1
        return step % 2 == 0

    parts = config(folder, **sections, output={"folder": str(folder / "parts")})
    while train(parts, resume=True, stop=stop).status == "stopped":
        pass
    whole, pieces = (
        safetensors.torch.load_file(RunFolder(folder / name).model) for name in ("whole", "parts")
    )
    for name, weight in whole.items():
        torch.testing.assert_close(pieces[name], weight, rtol=1e-4, atol=1e-5)


def test_what_may_not_change(folder: Path) -> None:
    train(config(folder, budget=NOISY), stop=lambda: True)
    files = RunFolder(folder / "run")
    with pytest.raises(
        ValueError,
        match=r"other settings \(budget is .* 1\.0, .* 0\.5, .* here\)",
    ):
        train(config(folder, budget={**NOISY, "noise_multiplier": 0.5}), resume=True)
    record = files.ledger.read_text()
    files.ledger.write_text(record.replace('"steps": 1,', '"steps": 0,', 1))
    with pytest.raises(ValueError, match="steps"):
        train(config(folder, budget=NOISY), resume=True)
    shorter = json.loads(record)
    files.ledger.write_text(json.dumps({**shorter, "events": [], "steps": 0}))
    with pytest.raises(ValueError, match="leaves out releases that are behind the checkpoint"):
        train(config(folder, budget=NOISY), resume=True)
    files.ledger.write_text("{")
    with pytest.raises(ValueError, match=r"ledger\.json is damaged"):
        train(config(folder, budget=NOISY), resume=True)
    files.ledger.unlink()
    with pytest.raises(ValueError, match=r"ledger\.json is missing"):
        train(config(folder, budget=NOISY), resume=True)


def test_steps_that_may_have_been_seen_stay_charged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full between ledger and checkpoint: the latter may be there in part."""
    real, calls = dpspan.engine.checkpoint.save_file, 0

    def full(path: Path, content: dict[str, Any]) -> Path:
        nonlocal calls
        calls += 1
        if calls == 2:  # the first is at step 0
            raise OSError(28, "No space left on device")
        return real(path, content)

    monkeypatch.setattr(dpspan.engine.checkpoint, "save_file", full)
    output = {"folder": str(folder / "run"), "checkpoint_every": 3}
    with pytest.raises(OSError, match="No space left"):
        train(config(folder, output=output))
    files = RunFolder(folder / "run")
    assert (ledger_steps(files), checkpoint_steps(files)) == (3, 0)
    result = train(config(folder, output=output), resume=True)
    assert result.status == "budget spent"  # three were lost, and the budget is a hard stop
    assert result.epsilon <= 4.0
    assert result.step == 7
    assert [line["step"] for line in read_lines(files.metrics)] == [5, 7]
    assert train(config(folder, output=output), resume=True).step == 7  # no way around it
    assert len(read_lines(files.metrics)) == 2
    assert ledger_steps(files) == 10
    assert files.model.exists()
    certificate = json.loads(files.certificate.read_text())
    assert certificate["steps"] == 10
    assert any("3 steps were charged" in warning for warning in certificate["warnings"])


def test_a_lost_checkpoint_takes_its_metrics_along(folder: Path) -> None:
    method = {"name": "gep", "public": "optin", "rank": 8, "diagnose": 5}
    train(config(folder, budget=NOISY, method=method))
    files = RunFolder(folder / "run")
    files.checkpoint.unlink()
    train(config(folder, budget=NOISY, method=method), resume=True)
    assert ledger_steps(files) == 20  # the first ten were released
    assert [line["step"] for line in read_lines(files.metrics)] == [5, 10]
    assert [line["step"] for line in read_lines(files.diagnostics)] == [0, 5]


def test_a_mistake_in_the_model_does_not_cost_the_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mistaken(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if self.training:
                raise RuntimeError("a mistake")
            return super().forward(inputs)

    mine: Any = types.ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", mine)
    mine.net = lambda: nn.Sequential(nn.Flatten(), Mistaken(64, 12), nn.Linear(12, 10))
    chosen = config(folder, budget=NOISY, model={"name": "factory", "factory": "mine:net"})
    with pytest.raises(RuntimeError, match="a mistake"):
        train(chosen)
    files = RunFolder(folder / "run")
    assert (ledger_steps(files), checkpoint_steps(files)) == (0, 0)
    mine.net = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(ValueError, match="No private step was taken yet: train without --resume"):
        train(chosen, resume=True)
    other = config(folder, budget=NOISY)
    with pytest.raises(ValueError, match=r"\(model is .* train without --resume"):
        train(other, resume=True)
    assert train(chosen).status == "finished"
    assert ledger_steps(files) == 10
    with pytest.raises(ValueError, match="holds a run already"):
        train(chosen)


def test_steps_after_the_first_checkpoint_are_a_run(folder: Path) -> None:
    """The ledger went on, the checkpoint did not come: somebody may have seen a part of it."""
    files = RunFolder(folder / "run")

    def interrupted(progress: Progress) -> None:
        if progress.step == 1:
            raise KeyboardInterrupt

    train(config(folder, budget=NOISY), stop=lambda: True)
    longer = files.ledger.read_bytes()
    shutil.rmtree(files.path)
    with pytest.raises(KeyboardInterrupt):
        train(config(folder, budget=NOISY), watch=interrupted)
    assert (ledger_steps(files), checkpoint_steps(files)) == (0, 0)
    files.ledger.write_bytes(longer)
    with pytest.raises(ValueError, match="holds a run already"):
        train(config(folder, budget=NOISY))


def test_a_full_disk_is_reported_and_the_old_checkpoint_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_file(tmp_path / "a.safetensors", {"x": torch.ones(3)})

    def full(*_: object, **__: object) -> None:
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(dpspan.engine.checkpoint.safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match=r"Cannot write a checkpoint to .*No space left"):
        save_file(path, {"x": torch.zeros(3)})
    assert torch.equal(load_file(path, {"x"})["x"], torch.ones(3))
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_checkpoints_keep_every_kind_of_value(tmp_path: Path) -> None:
    tied = torch.arange(6.0).view(2, 3)
    content = {
        "tensors": {"a": tied, "b": tied, "part": tied[:, 1], "empty": torch.zeros(0)},
        "keys": {
            1: "number",
            "1": "text",
            "nested": {0: {"x": torch.tensor(1, dtype=torch.int32)}},
        },
        "plain": [None, True, 3, 0.1, "é", (1, [2, ()]), float("inf"), -float("inf")],
        "half": torch.ones(2, dtype=torch.bfloat16),
    }
    loaded = load_file(save_file(tmp_path / "c", content), set(content))
    assert loaded["plain"] == content["plain"]
    assert type(loaded["plain"][5]) is tuple
    assert loaded["keys"][1] == "number"
    assert loaded["keys"]["1"] == "text"
    assert loaded["keys"]["nested"][0]["x"].dtype == torch.int32
    for name, tensor in content["tensors"].items():
        assert torch.equal(loaded["tensors"][name], tensor)
    assert loaded["half"].dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"Cannot save plain\.x: expected numbers, text, tensors"):
        save_file(tmp_path / "c", {"plain": {"x": object()}})
    with pytest.raises(ValueError, match="not a complete dpspan checkpoint"):
        load_file(safe_without_state(tmp_path), {"x"})


def safe_without_state(folder: Path) -> Path:
    safetensors.torch.save_file({"x": torch.ones(1)}, folder / "other.safetensors")
    return folder / "other.safetensors"


def test_two_processes_cannot_share_a_folder(folder: Path) -> None:
    with (
        RunFolder(folder / "run").locked(),
        pytest.raises(RuntimeError, match="Another process is training in"),
    ):
        train(config(folder, budget=NOISY))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"training": {"device": "cuda:99"}}, "Expected device to be auto, cpu or"),
        ({"data": {"private": {"path": "nowhere.npz"}}}, r"There is nothing at nowhere\.npz"),
        ({"data": {"private": {"labels": None}}}, r"Expected labels in data\.private"),
        ({"data": {"test": {"layout": "as_is"}}}, r"Expected samples of shape \(1, 8, 8\)"),
        ({"model": {"name": "cnn"}}, "Expected square images of at least 14 × 14"),
        ({"model": {"name": "resnet20"}}, "Expected images of 3 channels"),
        ({"model": {"name": "factory", "factory": "nowhere:net"}}, "Cannot import 'nowhere'"),
        ({"model": {"name": "factory", "factory": "torch:nonsense"}}, "'torch' has no 'nonsense'"),
        ({"model": {"name": "factory", "factory": "torch"}}, "Expected a factory such as"),
        (
            {"model": {"name": "factory", "factory": "torch:zeros", "arguments": {"size": [1]}}},
            "Expected torch:zeros to return a torch module",
        ),
    ],
)
def test_refused_with_a_sentence(folder: Path, sections: dict[str, Any], message: str) -> None:
    base: Any = settings(folder, budget=NOISY)
    for name, section in sections.items():
        for key, value in section.items():
            if isinstance(value, dict) and key in base[name]:
                base[name][key] |= value
            else:
                base[name][key] = value
    with pytest.raises((ValueError, TypeError, OSError), match=message):
        train(Config.model_validate(base))
    assert not (folder / "run" / "checkpoint.safetensors").exists()


# -- killed at any moment -------------------------------------------------------------------------


def test_killed_again_and_again(folder: Path) -> None:
    survive(folder, kills=4, epochs=6, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_killed_many_times(folder: Path, seed: int) -> None:
    survive(folder, kills=15, epochs=20, seed=seed)


def survive(folder: Path, *, kills: int, epochs: int, seed: int) -> None:
    """Kill the process at random moments and look at the disk as an adversary would."""
    generator = random.Random(seed)
    training = {**settings(folder)["training"], "epochs": epochs}
    output = {"folder": str(folder / "run"), "checkpoint_every": 2}
    chosen = config(folder, training=training, budget=NOISY, output=output)
    files, log, killed, reached = RunFolder(folder / "run"), folder / "noise", 0, 0
    while True:
        before = ledger_steps(files) if files.ledger.exists() else -1
        process = CONTEXT.Process(target=logged_training, args=(chosen, log))
        process.start()
        if killed < kills:
            while process.is_alive() and (
                not files.ledger.exists() or ledger_steps(files) <= before
            ):
                time.sleep(0.001)
            time.sleep(generator.expovariate(1 / 0.02))
            os.kill(process.pid, signal.SIGKILL)
            killed += 1
        process.join()
        # Every file that can be read was preceded by the ledger.
        steps = ledger_steps(files)
        assert steps >= before
        lines = read_lines(files.metrics)
        for line in lines:
            reached = max(reached, line["step"])
        if files.checkpoint.exists():
            assert steps >= checkpoint_steps(files)
        assert steps >= reached
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert killed == kills
    total = epochs * 5
    assert steps >= total
    assert [line["step"] for line in lines] == list(range(5, total + 1, 5))
    certificate = json.loads(files.certificate.read_text())
    assert certificate["steps"] == steps
    lost = [w for w in certificate["warnings"] if "steps were charged that" in w]
    assert (steps > total) == bool(lost)
    drawn = log.read_text().split()
    assert len(drawn) >= total
    assert len(set(drawn)) == len(drawn)  # no noise was drawn twice, in any process
    assert not list(files.path.glob(".*.tmp"))


def logged_training(chosen: Config, log: Path) -> None:
    """Train, and note each draw of noise by its first number."""
    real = Noise.add

    def noted(self: Noise, parts: dict[str, torch.Tensor], std: float) -> dict[str, torch.Tensor]:
        zeros = {name: torch.zeros_like(part) for name, part in parts.items()}
        noise = real(self, zeros, std)
        with log.open("a") as file:
            file.write(f"{float(next(iter(noise.values())).flatten()[0])!r}\n")
        return {name: part + noise[name] for name, part in parts.items()}

    Noise.add = noted  # type: ignore[method-assign]
    torch.set_num_threads(1)
    result: Result = train(chosen, resume=True)
    assert result.status == "finished"


def test_metrics_are_strict_json(folder: Path) -> None:
    """A run that diverged has no finite loss, and JSON no word for that."""
    training: Any = settings(folder)["training"]
    training["optimizer"]["learning_rate"] = 1e38
    train(config(folder, budget=NOISY, training=training))
    text = RunFolder(folder / "run").metrics.read_text()
    assert "null" in text
    for line in text.splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_the_model_is_the_average_and_a_run_goes_on_with_it(folder: Path) -> None:
    smooth = {"average_weights": 0.9, "low_pass": 0.5, "views": 2, "augment": {"name": "affine"}}

    def made(name: str) -> Config:
        chosen = settings(folder, budget=NOISY)
        chosen["training"] |= smooth
        chosen["output"] = {"folder": str(folder / name), "checkpoint_every": 1}
        return Config.model_validate(chosen)

    whole = train(made("whole"))
    files = RunFolder(folder / "whole")
    certificate = json.loads(files.certificate.read_text())
    assert certificate["training"]["post_processing"] == {"low_pass": 0.5, "average_weights": 0.9}
    assert certificate["training"]["views"] == 2
    model, kept = safetensors.torch.load_file(files.model), load_file(files.checkpoint, KEYS)
    average = kept["engine"]["post_processing"]["average"]
    assert all(torch.equal(model[name], average[name]) for name in average)
    assert not torch.equal(model["1.weight"], kept["module"]["1.weight"])
    assert certificate["training"]["weights_sha256"] == weights_sha256(model)

    train(made("parts"), stop=lambda: True)  # after a step
    result = train(made("parts"), resume=True)
    assert (result.status, result.step) == ("finished", whole.step)
    parts = RunFolder(folder / "parts")
    state = load_file(parts.checkpoint, KEYS)["engine"]["post_processing"]
    assert state["steps"] == whole.step
    assert torch.equal(
        safetensors.torch.load_file(parts.model)["1.bias"], state["average"]["1.bias"]
    )


def test_what_older_folders_do_not_know_is_left_out(folder: Path) -> None:
    chosen = settings(folder)["training"]
    assert set(config(folder).fixed()["training"]) & {"views", "augment", "low_pass"} == set()
    with pytest.raises(ValueError, match="Expected `augment` beside it"):
        Config.model_validate({**settings(folder), "training": {**chosen, "views": 2}})
