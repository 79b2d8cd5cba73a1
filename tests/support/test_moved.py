"""The paths of 0.1 still work, and say where things are now."""

from __future__ import annotations

import importlib
import sys

import pytest

from dpspan.support.moved import MOVED, _new_path


@pytest.mark.parametrize("old", MOVED)
def test_every_old_path_leads_to_a_module(old: str) -> None:
    assert _new_path(old) == MOVED[old]
    assert importlib.util.find_spec(MOVED[old]) is not None


def test_a_module_below_a_package_that_moved_may_have_a_name_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(MOVED, "dpspan.run.parts", "dpspan.app.run.run_inputs")
    for name in ("dpspan.run", "dpspan.run.parts"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.warns(DeprecationWarning, match=r"moved to dpspan\.app\.run\.run_inputs"):
        old = importlib.import_module("dpspan.run.parts")
    assert old.make_parts is importlib.import_module("dpspan.app.run.run_inputs").make_parts


def test_a_module_that_is_gone_says_where_to_look() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"benchmarks/text_models\.py"):
        importlib.import_module("dpspan.text")
