"""What the commands for testers write down and give back."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import conftest
from dpspan.app.config import Config
from helpers.tools import tool

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("failing", ["none", "AVX2"])
def test_each_machines_result_is_told(
    failing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machines, ran = tool("machines"), []

    def run(command: list[str], *, env: dict[str, str], check: bool) -> Any:
        ran.append(command)
        return SimpleNamespace(returncode=int(env.get("ONEDNN_MAX_CPU_ISA") == failing))

    monkeypatch.setattr(subprocess, "run", run)
    assert machines.main(["-n", "2"]) == (failing != "none")
    assert len(ran) == len(machines.MACHINES)
    assert all(str(TESTS / "public" / "test_patches.py") in command for command in ran)
    assert [command[-2:] for command in ran] == [["--part", f"{n}/4"] for n in (1, 2, 3)]
    told = capsys.readouterr().out.splitlines()[-len(ran) :]
    for line, (name, setting) in zip(told, machines.MACHINES.items(), strict=True):
        assert line.startswith("FAILED" if failing in name else "passed")
        assert all(f"{variable}={value}" in line for variable, value in setting.items())


def test_every_machine_may_run_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    machines, ran = tool("machines"), []
    answer = SimpleNamespace(returncode=0)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: ran.append(command) or answer)
    assert machines.main(["-n", "2", "--every-machine"]) == 0
    assert not any("--part" in command or "--every-machine" in command for command in ran)


def test_parts_are_disjoint_and_all_there() -> None:
    def item(name: str, file: str) -> Any:
        return SimpleNamespace(nodeid=name, path=Path(file), add_marker=lambda _: None)

    everything = [item(f"test[{n}]", "test_gep.py") for n in range(60)]
    other = item("other", "test_files.py")  # in every part
    taken: list[Any] = []
    for part in ("1/3", "2/3", "3/3"):
        items = [*everything, other]
        config = SimpleNamespace(getoption=lambda _, part=part: part)
        conftest.pytest_collection_modifyitems(config, items)
        assert len(items) > 5
        items.remove(other)
        taken += items
    assert sorted(item.nodeid for item in taken) == sorted(item.nodeid for item in everything)


def test_numeric_files_are_there() -> None:
    assert {path.stem for path in TESTS.rglob("test_*.py")} >= tool("machines").NUMERIC


def test_a_run_on_a_gpu_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = tool("gpu_tests")

    def main(options: list[str], plugins: list[Any]) -> int:
        assert [Path(option).name for option in options if option.endswith(".py")] == GPU_FILES
        for when, outcome in REPORTS:
            report = SimpleNamespace(when=when, outcome=outcome, passed=outcome == "passed")
            plugins[0].pytest_runtest_logreport(report)
        return 1

    monkeypatch.setattr(pytest, "main", main)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    assert gpu.main(["--commit", "abc", "--out", str(tmp_path / "kept.json")]) == 1
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert (kept["passed"], kept["failed"], kept["skipped"]) == (2, 2, 1)
    assert (kept["commit"], kept["device"]) == ("abc", "a GPU")
    assert kept["versions"]["torch"] == torch.__version__
    assert kept["date"]
    assert kept["seconds"] >= 0


GPU_FILES = ["test_cuda.py", "test_graphs.py", "test_kernels.py"]
REPORTS = [
    *[("setup", "passed"), ("call", "passed"), ("teardown", "passed")] * 2,
    *[("setup", "passed"), ("call", "failed"), ("teardown", "passed")],
    *[("setup", "failed"), ("teardown", "passed")],
    *[("setup", "skipped"), ("teardown", "passed")],
]


def test_without_a_gpu_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        tool("gpu_tests").main(["--out", str(tmp_path / "kept.json")])
    assert "no GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# -- the reference --------------------------------------------------------------------------------


def test_the_reference_is_current() -> None:
    for name, content in tool("reference").pages().items():
        page = TESTS.parent / "docs" / "reference" / name
        assert page.read_text() == content, f"{page} is not what the code says: make reference"


def test_the_reference_has_every_key_and_command() -> None:
    keys, commands = tool("reference").pages().values()
    schema = Config.model_json_schema()
    for section in (schema, *schema["$defs"].values()):
        for key in section.get("properties", ()):
            assert f"| `{key}` |" in keys, key
    for name in ("train", "predict", "export", "audit step", "verify"):
        assert f"## `dpspan {name}`" in commands
    assert "| `noise_multiplier` | number > 0, or nothing | `null` |" in keys
    assert "### `method: {name: gep}`" in keys
    assert "| `--folds` | Ways to cut the stand-in. | `4` |" in commands
    assert "| `second` | whole number ≥ 0 | `0` |" in keys  # 0 and 1 are not false and true
