"""Checks what `python -m build` left in dist/, as somebody meets it who has nothing but that.

The wheel goes into an empty environment, where the demo is run. The sdist is unpacked, and its own
tests are collected: they import everything that they need from it, or this fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Check both, and say so."""
    (wheel,) = (ROOT / "dist").glob("*.whl")
    (sdist,) = (ROOT / "dist").glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as folder:
        _check_wheel(wheel, Path(folder))
        _check_sdist(sdist, Path(folder))
    print(f"{wheel.name} runs the demo, and the tests in {sdist.name} find what they import.")


def _check_wheel(wheel: Path, folder: Path) -> None:
    venv.create(folder / "empty", with_pip=True)
    programs = folder / "empty" / ("Scripts" if os.name == "nt" else "bin")
    constraints = ("--constraint", ROOT / "constraints.txt")
    _run(programs / "python", "-m", "pip", "install", "--quiet", *constraints, wheel, at=folder)
    _run(programs / "dpspan", "--version", at=folder)
    _run(programs / "dpspan", "demo", "--seeds", "1", at=folder)
    if not (folder / "runs" / "demo" / "report.html").exists():
        sys.exit("The demo of the wheel left no report.")


def _check_sdist(sdist: Path, folder: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    _run(sys.executable, "-m", "pytest", "--collect-only", "-qqq", at=unpacked)


def _run(*command: str | Path, at: Path) -> None:
    """Without the clone on the path; of the sdist, its own sources."""
    environment = {**os.environ, "PYTHONPATH": str(at / "src")}
    subprocess.run([str(word) for word in command], cwd=at, env=environment, check=True)


if __name__ == "__main__":
    main()
