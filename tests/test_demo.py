"""The demo runs, reports what came out, and leaves a certificate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from dpspan import demo


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "EPOCHS", 2)
    monkeypatch.setattr(demo, "RUNS", 1)
    console = Console(record=True, width=120)
    demo.run(tmp_path, console)
    text = console.export_text()
    assert "DP-SGD, ε = 3" in text
    document = json.loads((tmp_path / "certificate.json").read_text())
    assert document["private"] is True
    assert 3.0 - 1e-3 <= document["epsilon"] <= 3.0
    assert document["steps"] == 2 * 6


def test_networks_of_different_seeds_differ() -> None:
    first, second = (next(demo.network(seed).parameters()) for seed in (0, 1))
    assert not (first == second).all()
