"""What more than one test file uses, and what every run obeys."""

import multiprocessing
import os
import zlib
from collections.abc import Generator

# Workers side by side with threads of their own only wait for one another. Before torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from helpers import needs, processes

# Whose results come from matrix products and the like, which round differently on other machines.
# `make test-machines` runs them in several ways.
NUMERIC = {
    "test_augmentation",
    "test_capture",
    "test_choose",
    "test_clipping",
    "test_convex_losses",
    "test_convex_methods",
    "test_convex_metric",
    "test_convex_preconditioners",
    "test_convex_public_rows",
    "test_convex_rows",
    "test_convex_scaling",
    "test_convex_subspace",
    "test_dpsgd",
    "test_gep",
    "test_gradients",
    "test_gsd",
    "test_low_rank",
    "test_mirror",
    "test_numerics",
    "test_patches",
    "test_pdpsgd",
    "test_public_gradients",
    "test_public_ideas",
    "test_recurrent",
    "test_residuals",
    "test_rgp",
    "test_rotation",
    "test_subspace",
    "test_subspace_engine",
    "test_transfer",
    "test_views",
}


def pytest_configure() -> None:
    if processes.CHOSEN:
        multiprocessing.set_start_method(processes.CHOSEN, force=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", help="only a part of the numeric tests: 1/4 to 4/4, say")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in NUMERIC:
            item.add_marker("numeric")
    if config.getoption("part"):
        part, parts = map(int, config.getoption("part").split("/"))
        # By name: the same part on every machine, and another test takes nobody's place.
        items[:] = [
            item
            for item in items
            if item.path.stem not in NUMERIC or zlib.crc32(item.nodeid.encode()) % parts == part - 1
        ]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        needs.gpu()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None]:
    yield  # pytest's own lines first
    kinds = ("skipped", "failed", "error")
    reports = [report for kind in kinds for report in terminalreporter.stats.get(kind, ())]
    for line in needs.not_tested(reports):
        terminalreporter.write_line(line, red=True, bold=True)


@pytest.fixture
def pld_evaluations(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry for every ε that is computed by PLD, the costly thing about a ledger."""
    from dpspan.accounting import epsilon as accounting  # not every test needs what this needs

    evaluations = []

    def counted(events, delta):
        evaluations.append(events)
        return accounting.pld_epsilon(events, delta)

    monkeypatch.setitem(accounting._ACCOUNTANTS, "pld", counted)
    return evaluations
