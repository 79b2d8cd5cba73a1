"""The folder of a comparison: one process at a time, and nothing in it that is not counted.

The folder of a run appears whole or not at all. Until then its files are in a hidden one, where the
certificate is the first. Whoever ends there leaves it behind: somebody may have seen what was being
written beside it, so its steps stay charged, and the rest is taken away.

`ledger.json` is the record of a private choice that was made for the comparison.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dpspan.accounting.certificate import write_certificate
from dpspan.app.run.folder import RunFolder
from dpspan.app.run.folder import locked as lock

CERTIFICATE = "certificate.json"
_SUMMARY = (CERTIFICATE, "comparison.json", "comparison.png", "metrics.jsonl")


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """One process at a time; ValueError, and nothing touched, in the folder of a run."""
    with lock(out):
        if RunFolder(out).is_run:
            raise ValueError(
                f"{out} holds a run, whose certificate would be replaced. Choose another folder "
                "for the comparison."
            )
        for folder in out.glob("*/.seed-*"):
            _strip(folder)
        yield


def take_summary_away(out: Path) -> None:
    """More is about to be released than the summary of an earlier call tells."""
    for name in _SUMMARY:
        (out / name).unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(folder: Path, certificate: Mapping[str, Any]) -> Iterator[Path]:
    """A hidden folder with the certificate, to put the rest into; it becomes `folder`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        write_certificate(temporary / CERTIFICATE, certificate)
        yield temporary
        temporary.chmod(0o755)  # mkdtemp's is for one user only
        temporary.replace(folder)
    except BaseException:
        with contextlib.suppress(OSError):  # the next call tries again
            _strip(temporary)
        raise


def left_behind(out: Path) -> list[Path]:
    """The certificates of runs whose models may have been seen before they were taken away."""
    return sorted(out.glob(f"*/.seed-*/{CERTIFICATE}"))


def _strip(folder: Path) -> None:
    """Leave the certificate; nothing, if it had not come to that."""
    for path in folder.iterdir():
        if path.name != CERTIFICATE:
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()
