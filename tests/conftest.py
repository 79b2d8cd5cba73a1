"""Fixtures that more than one test file uses."""

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
