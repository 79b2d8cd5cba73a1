"""The demo runs, reports what came out, and leaves certificates, models and a report."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from experiments import demo_rates
from matplotlib import font_manager
from rich.console import Console
from torch.utils.data import DataLoader

from dpspan.app import demo
from dpspan.app.demo import data
from dpspan.app.run import RunFolder
from dpspan.public.data import PublicData
from dpspan.public.fingerprints import fingerprints
from dpspan.public.overlap import refuse_overlap

OLD_FONTS = not any(font.name in data.ITALIC for font in font_manager.fontManager.ttflist)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    short = dataclasses.replace(demo.WARM, max_epochs=2)
    for module in (demo, demo_rates):
        monkeypatch.setattr(module, "WARM", short)


def test_the_folder_of_a_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="holds a run, whose certificate would be replaced"):
        demo.run(tmp_path, Console(quiet=True))
    assert not (tmp_path / "about.json").exists()


@pytest.mark.usefixtures("quick")
def test_demo(tmp_path: Path) -> None:
    console = Console(record=True, width=120)
    comparison = demo.run(tmp_path, console, epsilon=3.0, epochs=1, seeds=1, jobs=1)
    text = console.export_text()
    for said in (
        "How close is each candidate?",
        "chose, for ε = 0.05",
        "Had somebody labelled",
        "The same with ε = 8",
    ):
        assert said in text
    names = [row.name for row in comparison.rows]
    assert names[0] == "public only"
    assert {"DP-SGD", "PDP-SGD", "GEP", "RGP", "warm start + DP-SGD", demo.PATCHES} <= set(names)
    for row in comparison.rows:
        for result in row.results:
            folder = tmp_path / result.folder
            certificate = json.loads((folder / "certificate.json").read_text())
            assert certificate["private"] is True
            assert certificate["epsilon"] <= 3.0
            assert (folder / "model.safetensors").exists()
            choices = [e for e in certificate["events"] if "Laplace" in e["event"]["kind"]]
            assert len(choices) == (row.method in ("PDPSGD", "GEP") or row.own_model)
    whole = json.loads((tmp_path / "certificate.json").read_text())
    choices = [e["count"] for e in whole["events"] if "Laplace" in e["event"]["kind"]]
    assert sum(choices) == 1  # one choice, however many runs used it
    page = (tmp_path / "report.html").read_text()
    assert "unprivate_" not in page
    for name in ("accuracy", "gsd", "spectrum", "noise"):
        assert f'id="plot-{name}"' in page
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["run"] for line in lines} == set(names)
    # Again: nothing is released a second time.
    models = {
        p: p.read_bytes() for p in [*tmp_path.rglob("*.safetensors"), tmp_path / "choice.json"]
    }
    demo.run(tmp_path, Console(quiet=True), epsilon=3.0, epochs=1, seeds=1, jobs=1)
    assert {path: path.read_bytes() for path in models} == models


def test_the_choice_of_0_1_is_not_made_again(tmp_path: Path) -> None:
    """It kept the ledger inside choice.json."""
    private = data.handwritten(opt_in=100, test=360).private
    candidates = {"noise": data.noise(20, seed=0), "photographs": data.photographs(20, seed=0)}
    arguments = (tmp_path, demo.network(), private, candidates)
    made = demo._choose(*arguments)
    files = RunFolder(tmp_path)
    record = json.loads(files.ledger.read_text())
    assert record["steps"] == 1
    files.choice.write_text(json.dumps({**made, "ledger": record}))
    files.ledger.unlink()
    assert demo._choose(*arguments)["chosen"] == made["chosen"]
    assert json.loads(files.ledger.read_text()) == record


@pytest.mark.slow
@pytest.mark.skipif(OLD_FONTS, reason="the search needs a font of matplotlib 3.11")
@pytest.mark.usefixtures("quick")
def test_the_search_for_settings() -> None:
    console = Console(record=True, width=120)
    advice = demo_rates.tune(console, records=300, jobs=1, folds=3, epochs=1)
    assert {trial.name for trial in advice.trials} >= {"public only", *demo.RATES[demo.EPSILON]}
    assert "Rehearsed on public data" in console.export_text()


def test_no_record_is_in_two_parts() -> None:
    digits = data.handwritten(opt_in=demo.OPT_IN, test=demo.TEST)
    assert len(digits.private) == 1797 - demo.OPT_IN - demo.TEST
    refuse_overlap(DataLoader(digits.private), [PublicData.of(digits.opt_in)])
    tested = set(fingerprints(digits.test.tensors[0]))
    assert not tested & set(fingerprints(digits.private.tensors[0]))


def test_pictures_are_as_dark_as_the_digits() -> None:
    pictures = {
        "printed": data.rendered(40, seed=0)[0],
        "photographs": data.photographs(40, seed=0),
        "noise": data.noise(40, seed=0),
        "handwritten": data.handwritten(opt_in=100, test=360).private.tensors[0],
    }
    for pixels in pictures.values():
        assert pixels.shape[1:] == (1, 8, 8)
        assert pixels.dtype == torch.float32
        assert -1 <= pixels.min() < -0.5
        assert 0.5 < pixels.max() <= 1


def test_printed_digits_come_from_the_fonts_asked_for() -> None:
    x, y = data.rendered(50, seed=0)
    assert torch.equal(data.rendered(50, seed=0)[0], x)
    assert not torch.equal(data.rendered(50, seed=1)[0], x)
    assert y.bincount().tolist() == [5] * 10
    assert len(data._fonts(data.OTHERS)) == 20
    if OLD_FONTS:
        with pytest.raises(ValueError, match=r"no font \('cmti10',\): install version 3.11"):
            data._fonts(data.ITALIC)
    else:
        assert len(data._fonts(data.ITALIC)) == 1


def test_ink_is_counted_by_blocks() -> None:
    bitmap = np.zeros((1, 32, 32))
    bitmap[0, 4:8, 8:12] = 1
    bitmap[0, 0, 0] = 1
    ink = data._ink(bitmap)
    assert ink[0, 0, 1, 2] == 16
    assert ink[0, 0, 0, 0] == 1
    assert ink.sum() == 17


def test_models_of_different_seeds_differ() -> None:
    torch.manual_seed(0)
    first, second = (next(demo.network().parameters()) for _ in range(2))
    assert not (first == second).all()
    assert sum(p.numel() for p in demo.network().parameters()) == 5114
