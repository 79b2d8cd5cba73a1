"""Files that are written whole or not at all, in folders that one process at a time writes to."""

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import safetensors
from filelock import FileLock, Timeout

_FOLDERS_CAN_BE_OPENED = os.name == "posix"


@contextlib.contextmanager
def replacing(path: Path, *, what: str) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place, and is on the disk, at the end.

    It may be read by whoever could read the old file; a new one by whom the umask allows. After an
    error the old file is still there. A process that is killed may leave the temporary file
    behind: `.NAME.….tmp`.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        temporary.touch(exist_ok=False)
        try:
            if path.exists():
                shutil.copymode(path, temporary)
            mode = stat.S_IMODE(temporary.stat().st_mode)
            yield temporary
            _sync(temporary, os.O_RDWR)  # or a crash could leave an empty file under the new name
            temporary.chmod(mode)  # safetensors puts a file of its own in its place
            temporary.replace(path)
            if _FOLDERS_CAN_BE_OPENED:
                _sync(path.parent, os.O_RDONLY)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except (OSError, safetensors.SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(
            f"Cannot write {what} to {path}: {reason}. Choose a folder that can be written to, on "
            "a disk with room."
        ) from error


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time: two would each leave out the other's releases."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path / ".lock").acquire(timeout=0)  # ends with the process, however it ends
    except Timeout as error:
        cure = "Wait for it, or choose another folder"
        raise RuntimeError(f"Another process is training in {path}. {cure}.") from error
    except OSError as error:
        reason = f"{error.strerror or error}. Choose another output folder"
        raise OSError(f"Cannot write to the folder {path}: {reason}.") from error
    with lock:
        for interrupted in path.glob(".*.????????.tmp"):  # as `replacing` names them
            interrupted.unlink()
        yield


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
