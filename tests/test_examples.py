"""The examples run, and moving from Opacus stays a change of two lines."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_moving_from_opacus_changes_the_import_and_adds_the_method() -> None:
    before = (EXAMPLES / "from_opacus" / "before.py").read_text().splitlines()[1:]
    after = (EXAMPLES / "from_opacus" / "after.py").read_text().splitlines()[1:]
    changes = [
        line
        for line in difflib.unified_diff(before, after, lineterm="", n=0)
        if line[0] in "+-" and line[:3] not in ("+++", "---")
    ]
    assert changes == [
        "-from opacus import PrivacyEngine",
        "+from dpspan import DPSGD, PrivacyEngine",
        "+        method=DPSGD(),",
    ]


@pytest.mark.filterwarnings("ignore")  # Opacus' own
@pytest.mark.parametrize("name", ["before", "after"])
def test_both_scripts_learn(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    accuracy = load(EXAMPLES / "from_opacus" / f"{name}.py").main(["-n", "4"])
    assert accuracy > 0.5  # chance is 0.1; both reach about 0.8
    assert "ε = " in capsys.readouterr().out
