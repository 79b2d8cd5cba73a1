"""`dpspan train` in several processes: one model, one folder, one ledger."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dpspan.app.run import Progress, Result, train
from helpers.digits import settings, write_npz
from helpers.distributed import Failed, Killed, in_processes


@pytest.fixture
def config(tmp_path: Path) -> Path:
    write_npz(tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings(tmp_path)))
    return path


def test_one_folder_and_one_price(config: Path) -> None:
    first, second = in_processes(2, lambda rank: train(config))
    assert isinstance(first, Result), first
    assert isinstance(second, Result), second
    assert (first.status, first.step, first.epsilon) == (second.status, 10, second.epsilon)
    folder = config.parent / "run"
    assert json.loads((folder / "ledger.json").read_text())["steps"] == 10
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [5, 10]
    alone = train(config, resume=True)  # nothing is left to do, with any number of processes
    assert (alone.status, alone.step) == ("finished", 10)


def test_stopped_by_one_killed_and_resumed(config: Path) -> None:
    def stopped(rank: int) -> Result:
        steps: list[Progress] = []
        return train(config, watch=steps.append, stop=lambda: rank == 1 and len(steps) == 4)

    first, second = in_processes(2, stopped)
    assert (first.status, first.step) == (second.status, second.step) == ("stopped", 3)

    def killed(rank: int) -> Result:
        def watch(progress: Progress) -> None:
            if rank == 1 and progress.step == 7:
                os.kill(os.getpid(), signal.SIGKILL)

        return train(config, resume=True, watch=watch)

    first, second = in_processes(2, killed)
    assert second == Killed(-signal.SIGKILL)
    assert isinstance(first, Failed)
    assert "Another process of this run is gone" in first.text
    folder = config.parent / "run"
    charged = json.loads((folder / "ledger.json").read_text())["steps"]
    assert 5 <= charged <= 8  # the end of the first epoch was saved
    (ended, *_) = in_processes(2, lambda rank: train(config, resume=True))
    assert (ended.status, ended.step) == ("finished", 10)
    assert json.loads((folder / "ledger.json").read_text())["steps"] == 10


def test_what_one_process_does_alone_is_refused(config: Path) -> None:
    document = yaml.safe_load(config.read_text())
    document["choose"] = {"epsilon": 1.0, "rank": 4}
    document["method"] = {"name": "gep", "rank": 4, "clip": 1.0}
    public = document["data"]["public"]
    public["test"] = {**public["optin"], "inputs": "x_other", "labels": "y_other"}
    config.write_text(yaml.safe_dump(document))
    for each in in_processes(2, lambda rank: train(config)):
        assert isinstance(each, Failed)
        assert "run `dpspan choose` first" in each.text, each.trace


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    # Standalone: another run on this machine may have torchrun's usual port.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads from /proc")
def test_no_thread_of_the_group_is_left_when_the_interpreter_ends(tmp_path: Path) -> None:
    """One that let go of a tensor after that ended the process by SIGABRT."""
    (tmp_path / "script.py").write_text(
        "from pathlib import Path\n"
        "from dpspan.support import distributed\n"
        "names = lambda: {p.read_text() for p in Path('/proc/self/task').glob('*/comm')}\n"
        "processes = distributed.Processes.of_torchrun()\n"
        "processes.any(False)\n"
        "processes.itself = processes  # only a garbage collector finds it\n"
        "del processes\n"
        "assert any('gloo' in name for name in names())\n"
        "distributed._leave()\n"
        "assert not any('gloo' in name for name in names())\n"
    )
    torchrun(str(tmp_path / "script.py"))


@pytest.mark.slow
def test_the_command(config: Path) -> None:
    result = torchrun("-m", "dpspan", "train", str(config), "--json")
    assert json.loads(result.stdout)["status"] == "finished"  # said once
