"""What is missing is said out loud, and fails continuous integration."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from helpers import needs

TESTS = Path(__file__).parents[1]
SUITE = """
import pytest
from helpers.needs import EXTRAS, extra, missing
from pytest import mark

EXTRAS["no_such_package"] = "everything"

def test_one():
    extra("no_such_package.inner")

def test_another():
    extra("no_such_package")

@pytest.fixture
def browser():
    missing("a browser", "install one")

def test_in_a_browser(browser):
    pass

def test_that_fails():
    assert "needs" == "nothing"

@mark.gpu
def test_on_a_gpu():
    pass
"""


def ran(folder: Path, *options: str, ci: str) -> str:
    shutil.copy(TESTS / "conftest.py", folder)
    (folder / "test_it.py").write_text(SUITE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(folder)],
        env={**os.environ, "CI": ci, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout


PACKAGE = "no_such_package: `make test` installs it, or pip install 'dpspan[everything]'"


def test_the_last_lines_say_what_was_not_tested(tmp_path: Path) -> None:
    gpu, browser, package, last = sorted_end(ran(tmp_path, "-n", "2", ci=""))
    assert package == f"NOT TESTED: 2 tests need {PACKAGE}"
    assert browser == "NOT TESTED: 1 test needs a browser: install one"
    assert gpu == "NOT TESTED: 1 test needs a GPU: `make test-gpu` on a machine that has one"
    assert "1 failed, 4 skipped" in last


def test_continuous_integration_fails_but_for_a_gpu(tmp_path: Path) -> None:
    gpu, browser, package, last = sorted_end(ran(tmp_path, ci="true"))
    assert package == f"NOT TESTED: 2 tests need {PACKAGE}"
    assert browser == "NOT TESTED: 1 test needs a browser: install one"
    assert gpu.startswith("NOT TESTED: 1 test needs a GPU")
    assert "3 failed, 1 skipped" in last
    assert "1 error" in last


def sorted_end(out: str) -> list[str]:
    """The last line, and the three before it in an order that does not depend on workers."""
    *_, first, second, third, last = out.splitlines()
    return [*sorted([first, second, third]), last]


def test_an_extra_that_is_there_is_imported() -> None:
    assert needs.extra("pytest") is pytest


def test_everything_that_tests_need_is_installed_with_dev() -> None:
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    (everything,) = extras["all"]
    assert everything == f"dpspan[{','.join(n for n in extras if n not in TOOLS)}]"
    assert "dpspan[all,bench,docs]" in extras["dev"]
    assert set(needs.EXTRAS.values()) <= set(extras)


TOOLS = ("all", "bench", "docs", "dev")
