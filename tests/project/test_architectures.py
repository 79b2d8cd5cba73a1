"""Hugging Face's models: exact or refused, never wrong, and the page says which."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

# The table is of models as they are today: older releases of some fail by themselves.
pytest.importorskip("transformers", minversion="4.50")
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.architectures import ARCHITECTURES, PAGE, RESULTS, check, page

STORED = json.loads(RESULTS.read_text())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["BART", "Gemma", "T5", "Swin", "Mixtral"])
def test_some_architectures(name: str) -> None:
    """A table as long as the batch, padding, relative bias, windows; and experts, refused."""
    found = check(ARCHITECTURES[name])
    assert found["status"] == ("refused" if name == "Mixtral" else "exact"), found.get("reason")
    if name == "Mixtral":
        assert "which token it sees depends on the batch" in found["reason"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_all_architectures_are_as_the_page_says(name: str) -> None:
    found = check(ARCHITECTURES[name])
    assert found["status"] == STORED["architectures"][name]["status"], found.get("reason")


def test_the_page_is_of_the_stored_results_and_nothing_in_it_is_wrong() -> None:
    assert PAGE.read_text() == page(STORED)
    assert list(STORED["architectures"]) == list(ARCHITECTURES)
    statuses = {each["status"] for each in STORED["architectures"].values()}
    assert statuses == {"exact", "exact after fix", "refused"}
