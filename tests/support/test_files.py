"""Files that are written whole: who may read them, and what an error leaves behind."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dpspan.support.files import replacing


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("umask", "expected"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_new_file_is_for_whom_the_umask_allows(tmp_path: Path, umask: int, expected: int) -> None:
    before = os.umask(umask)
    try:
        with replacing(tmp_path / "new" / "a.txt", what="a text") as temporary:
            temporary.write_text("text")
    finally:
        os.umask(before)
    assert mode(tmp_path / "new" / "a.txt") == expected


def test_a_file_that_only_its_owner_may_read_stays_so(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    path.chmod(0o600)
    with replacing(path, what="a text") as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new"
    assert mode(path) == 0o600


@pytest.mark.parametrize("old", [None, 0o640])
def test_a_writer_that_makes_a_file_of_its_own(tmp_path: Path, old: int | None) -> None:
    """safetensors' are for their owner only, beside other files of the run that all may read."""
    path = tmp_path / "a.safetensors"
    if old is not None:
        path.touch(old)
    before = os.umask(0o022)
    try:
        with replacing(path, what="a model") as temporary:
            temporary.unlink()
            temporary.touch(0o600)
    finally:
        os.umask(before)
    assert mode(path) == (old or 0o644)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_after_an_error_the_old_file_is_there_and_nothing_else(
    tmp_path: Path, error: type[BaseException]
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(error), replacing(path, what="a text") as temporary:
        temporary.write_text("half")
        raise error
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = "Cannot write the report to .*file/a.txt: .* Choose a folder that can be written to"
    with (
        pytest.raises(OSError, match=message),
        replacing(tmp_path / "file" / "a.txt", what="the report"),
    ):
        pass


def test_where_folders_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, which also syncs only what was opened for writing."""
    opened, as_ever = [], os.open

    def on_windows(path: Path, flags: int, mode: int = 0o777) -> int:
        if path.is_dir():
            raise PermissionError(13, "Permission denied", str(path))
        opened.append(flags)
        return as_ever(path, flags, mode)

    monkeypatch.setattr("dpspan.support.files._FOLDERS_CAN_BE_OPENED", False)
    monkeypatch.setattr("dpspan.support.files.os.open", on_windows)
    with replacing(tmp_path / "a.txt", what="a text") as temporary:
        temporary.write_text("text")
    assert (tmp_path / "a.txt").read_text() == "text"
    assert opened[-1] == os.O_RDWR
