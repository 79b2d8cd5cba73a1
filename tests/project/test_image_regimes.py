"""The map of regimes for images."""

from __future__ import annotations

from pathlib import Path

import pytest
from experiments import image_regimes, leads
from experiments.catalogue import load
from experiments.runner import Results
from experiments.schema import NON_PRIVATE
from experiments.sweep import all_cells, reported

from dpspan.app.section import ConfigError, parse

NAME = "regimes-images"
MAP = load(NAME)
assert isinstance(MAP, image_regimes.ImageRegimesExperiment)


def test_records_are_settings_of_their_own() -> None:
    few, many = MAP.at(300), MAP.at(3000)
    assert (few.training.batch_size, many.training.batch_size) == (30, 300)
    assert few.digest("DP-SGD") != many.digest("DP-SGD")
    assert few.data.taken == 100  # left out of the private images in every row


def test_every_row_is_on_a_map() -> None:
    text = (Path(image_regimes.__file__).parent / f"{NAME}.yaml").read_text()
    with pytest.raises(ConfigError, match=r"every row, and nothing else; \['RGP'\] differ"):
        parse(
            text.replace("ours: [RGP]", "ours: [DP-SGD]"),
            image_regimes.ImageRegimesExperiment,
            name="map.yaml",
        )


def test_the_page(tmp_path: Path) -> None:
    """GEP ahead of a warm start with 300 records, behind it with 1,000; 3,000 are not complete."""
    results = Results(tmp_path / "results.jsonl")
    for n in (300, 1000, 3000):
        experiment = MAP.at(n)
        for row, target in all_cells(experiment):
            for run in reported(NAME, experiment, row, target, results, MAP.seeds):
                gain = 0.05 * (row == "warm start, GEP") * (1 if n == 300 else -1)
                accuracy = 0.8 + 0.01 * (run.seed % 3) + 0.001 * (run.seed == 4) * bool(gain) + gain
                missing = n == 3000 and row == "RGP" and run.seed == 4
                if row != NON_PRIVATE and not missing:
                    accuracy -= 0.2 * (row not in ("warm start, GEP", "warm start, DP-SGD"))
                    results.add({**vars(run), "accuracy": accuracy})
    page = image_regimes.page(NAME, MAP, results, tmp_path)
    none, last = page.split("**2,000 letters")[0], page.split("**100 digits with labels**")[1]
    labelled = {line.split(" | ")[0]: line.split(" | ")[1:] for line in last.splitlines()}
    assert labelled["| 300"][0] == "**warm start, GEP** +5.0 ± 0.0 (85.8; warm start, DP-SGD)"
    assert labelled["| 1,000"][3].startswith("warm start, DP-SGD is ahead of warm start, ")
    assert "| 10,000" not in labelled  # nothing of it was run
    assert [line.split(" | ")[1] for line in none.splitlines() if "| 3,000" in line] == ["—"]
    assert (tmp_path / f"{NAME}.png").stat().st_size > 5_000


def test_few_seeds_ask_for_a_longer_lead() -> None:
    """Two standard errors are clear with many seeds, not with three."""
    for seeds, clear in ((3, False), (30, True)):
        cell = leads.Cell("simple", "ours", 90.0, 2.2, 1.0, seeds - 1)
        assert cell.clear is clear
