"""What will not be learnt is said before the first step, on the console and the certificate."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dpspan.app.cli.app import four_digits
from dpspan.app.config import parse_config
from dpspan.app.run import train
from dpspan.app.run.resumable import Progress

HEADER = "a,b,colour,ill\n"


def run(folder: Path, **sections: Any) -> Any:
    rows = (f"{row},{row * 1000},{'rb'[row % 2]},{row % 2}\n" for row in range(100))
    (folder / "a.csv").write_text(HEADER + "".join(rows))
    source = {"format": "csv", "path": str(folder / "a.csv"), "label": "ill"}
    source |= {"inputs": ["a", "b"], "mean": [50, 5e4], "std": [30, 3e4]}
    whole: dict[str, Any] = {
        "data": {"classes": 2, "private": source},
        "model": {"name": "logistic"},
        "method": {"name": "dpsgd", "clip": 1.0},
        "budget": {"noise_multiplier": 1.0, "delta": 1e-3, "accountant": "rdp"},
        "training": {
            "epochs": 1,
            "batch_size": 20,
            "optimizer": {"name": "sgd", "learning_rate": 0.1},
        },
        "output": {"folder": str(folder / "run")},
    }
    private = {**source, **sections.pop("private", {})}
    whole["data"] = {**whole["data"], "private": private, **sections.pop("data", {})}
    for name, changes in sections.items():
        whole[name] = {**whole[name], **changes}
    seen: list[Progress] = []
    train(parse_config(json.dumps(whole)), watch=seen.append)
    return json.loads((folder / "run" / "certificate.json").read_text())["warnings"]


def test_a_run_without_doubts(tmp_path: Path) -> None:
    assert not [each for each in run(tmp_path) if "learnt" in each or "q = 1" in each]


AS_IT_IS = {"mean": 0.0, "std": 1.0}
BOUNDS = {name: {"kind": "numeric", "low": 0, "high": 1e5} for name in ("a", "b")}


@pytest.mark.parametrize(
    ("sections", "doubt"),
    [
        ({"private": AS_IT_IS}, "columns of numbers enter as they are"),
        ({"training": {"batch_size": 100}}, "every step uses all of them (q = 1)"),
        ({"training": {"batch_size": 4000}}, "every step uses all of them (q = 1)"),
        ({"budget": {"noise_multiplier": 500.0}}, "all noise together is longer than"),
        ({"model": {"name": "mlp", "hidden": [4000]}}, "all noise together is longer than"),
    ],
)
def test_doubts(tmp_path: Path, sections: dict[str, Any], doubt: str) -> None:
    with pytest.warns(UserWarning, match=re.escape(doubt)):
        written = run(tmp_path, **sections)
    assert any(doubt in each for each in written)


@pytest.mark.parametrize(
    "sections",
    [
        {"private": AS_IT_IS | {"scale": 1e5}},
        {"private": AS_IT_IS | {"inputs": ["colour"], "categories": {"colour": ["r", "b"]}}},
        {"private": AS_IT_IS | {"inputs": []}, "data": {"preprocessing": BOUNDS}},
        {"method": {"name": "rgp", "rank": 1}, "model": {"name": "mlp", "hidden": [4000]}},
    ],
)
def test_no_doubt_where_there_is_no_reason(tmp_path: Path, sections: dict[str, Any]) -> None:
    assert not [each for each in run(tmp_path, **sections) if "learnt" in each]


@pytest.mark.parametrize(
    ("epsilon", "text"), [(0.0, "0.0000"), (1e-5, "1e-05"), (0.01234567, "0.01235"), (3, "3.0000")]
)
def test_no_price_looks_like_none(epsilon: float, text: str) -> None:
    assert four_digits(epsilon) == text
