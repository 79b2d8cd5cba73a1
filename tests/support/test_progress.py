"""The bar: in a terminal, for what takes a while, and gone at the end."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dpspan.support import progress
from dpspan.support.progress import watched


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    written = io.StringIO()
    monkeypatch.setattr(
        progress, "Console", lambda stderr: Console(file=written, force_terminal=stderr, width=80)
    )
    return written


def test_what_takes_a_while_has_a_bar(
    terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    steps = watched((n for n in range(4)), "reading", shown=True, total=4)
    assert next(steps) == 0
    assert terminal.getvalue() == ""
    assert list(steps) == [1, 2, 3]
    assert "reading" in terminal.getvalue()
    assert "100%" in terminal.getvalue()
    assert "\x1b[2K" in terminal.getvalue().rpartition("100%")[2]  # the line is erased


@pytest.mark.parametrize(("shown", "patience"), [(False, 0.0), (True, 60.0)])
def test_what_is_quick_or_not_to_be_shown_has_none(
    terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch, shown: bool, patience: float
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", patience)
    assert list(watched([1, 2, 3], "reading", shown=shown)) == [1, 2, 3]
    assert terminal.getvalue() == ""


def test_a_bar_goes_away_with_its_steps(
    terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)

    def fails() -> None:
        for n in watched([1, 2, 3], "reading", shown=True):
            if n == 3:
                raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert terminal.getvalue().endswith("\x1b[2K")


def test_no_bar_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(watched([1, 2], "reading", shown=True)) == [1, 2]
    assert capsys.readouterr() == ("", "")
