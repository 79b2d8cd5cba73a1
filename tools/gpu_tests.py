"""Run the tests that need a GPU, and keep what came of it: `make test-gpu`.

It installs nothing: `PYTHON` needs torch with CUDA, pytest and what training with dpspan imports.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dpspan

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "gpu-tests.json"


class Counts:
    """A pytest plugin: how many tests passed, failed and were skipped."""

    def __init__(self) -> None:
        self.tests: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test counts when it was called, or when its fixtures failed."""
        if report.when == "call" or not report.passed:
            self.tests[report.outcome] += 1


def main(arguments: list[str]) -> int:
    """Run them; 0 if all of them passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", help="for the record, where there is no repository")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("no GPU: torch.cuda.is_available() is False")
    commit = options.commit or current_commit()
    if not commit:
        parser.error("--commit: results are kept with the commit that made them")
    # Only these files: others may need packages that a machine with a GPU lacks.
    tests = sorted(ROOT.glob("tests/**/test_*.py"))
    files = [str(path) for path in tests if "pytest.mark.gpu" in path.read_text()]
    counts, start = Counts(), time.monotonic()
    pytest_options = ["-m", "gpu", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    code = pytest.main([*pytest_options, *files], plugins=[counts])
    seconds = round(time.monotonic() - start, 1)
    options.out.write_text(json.dumps(record(commit, counts, seconds), indent=1) + "\n")
    print(f"{options.out}: {dict(counts.tests)} in {seconds} s")
    return int(code)


def record(commit: str, counts: Counts, seconds: float) -> dict[str, Any]:
    """What ran, where and when."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "numpy": np.__version__,
            "dpspan": dpspan.__version__,
        },
        **{outcome: counts.tests[outcome] for outcome in ("passed", "failed", "skipped")},
        "seconds": seconds,
    }


def current_commit() -> str:
    """Of the working tree, marked where it has changes; empty outside a repository."""
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    except FileNotFoundError:  # no git
        return ""
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
