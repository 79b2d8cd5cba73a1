"""Fixtures that more than one test file uses."""

import os

# Workers side by side with threads of their own only wait for one another. Before torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from dpspan import accounting


@pytest.fixture
def pld_evaluations(monkeypatch):
    """One entry for every ε that is computed by PLD, the costly thing about a ledger."""
    evaluations = []

    def counted(events, delta):
        evaluations.append(events)
        return accounting.pld_epsilon(events, delta)

    monkeypatch.setitem(accounting._ACCOUNTANTS, "pld", counted)
    return evaluations
