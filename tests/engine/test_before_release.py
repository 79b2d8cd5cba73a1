"""The books come first: what is about to be released is in the ledger before noise is drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dpspan import DPSGD, GEP, PDPSGD, RGP, BiasedGEP, Budget, PrivacyEngine, WarmStart
from dpspan.accounting.events import step_event
from dpspan.accounting.ledger import Ledger
from dpspan.convex import PrivateLogisticRegression
from dpspan.convex.fitting import GaussianNoise
from dpspan.support.errors import BudgetExceeded
from helpers.training import data, network, setup, train, weights

PUBLIC = torch.randn(20, 6, generator=torch.Generator().manual_seed(7))
METHODS = {
    "DPSGD": DPSGD(clip=1.0),
    "PDPSGD": PDPSGD(public=PUBLIC, rank=4, clip=1.0),
    "BiasedGEP": BiasedGEP(public=PUBLIC, rank=4, clip=1.0),
    "GEP": GEP(public=PUBLIC, rank=4, clip=1.0),
    "RGP": RGP(rank=2, clip=1.0),
}


def watched(engine: PrivacyEngine) -> list[int]:
    """What the ledger holds whenever something is released."""
    mechanism: Any = engine._running().mechanism
    release, held = mechanism.release, []

    def watch(*arguments: Any) -> Any:
        held.append(engine.ledger.steps)
        return release(*arguments)

    mechanism.release = watch
    return held


@pytest.mark.parametrize("name", METHODS)
def test_every_step_is_charged_before_it_is_released(name: str) -> None:
    engine, *run = setup(method=METHODS[name], criterion=nn.CrossEntropyLoss())
    held = watched(engine)
    train(*run, epochs=2)
    assert held == list(range(1, 9))


def test_an_epoch_of_a_partition_is_charged_before_its_first_step() -> None:
    engine, *run = setup(poisson_sampling=False)
    held = watched(engine)
    train(*run, epochs=2)
    assert held == [1] * 4 + [2] * 4


def test_what_is_refused_is_not_released() -> None:
    engine, model, optimizer, loader = setup(sample_rate=0.25)
    held = watched(engine)
    costs = step_event(1.0, 0.25)
    price = Ledger()
    price.charge(costs, 2)
    engine.ledger.budget = Budget(epsilon=price.epsilon(1e-5) + 1e-3, delta=1e-5)
    with pytest.raises(BudgetExceeded):
        train(model, optimizer, loader)
    assert held == [1, 2]
    assert engine.ledger.steps == 2


def test_a_fit_charges_each_step_before_its_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, held = Ledger(accountant="rdp"), []
    normal = GaussianNoise.normal

    def watch(self: GaussianNoise, size: int, std: float) -> Any:
        held.append(ledger.steps)
        return normal(self, size, std)

    monkeypatch.setattr(GaussianNoise, "normal", watch)
    x = np.random.default_rng(0).normal(size=(60, 3))
    model = PrivateLogisticRegression(method="gd", delta=1e-5, classes=[0, 1])
    model.fit(x, np.arange(60) % 2, ledger=ledger)
    assert held == list(range(1, ledger.steps + 1))
    assert len(held) > 1


@pytest.mark.parametrize("copies", [1, 40])
def test_a_warm_start_on_private_records_is_refused_before_it_trains(copies: int) -> None:
    """One record among public samples is enough, whatever its label."""
    public = torch.cat([PUBLIC, data().tensors[0][:copies]])
    start = WarmStart(data=(public, torch.arange(len(public)) % 2), validation=0, max_epochs=2)
    model, engine = network(), PrivacyEngine()
    before = weights(model).clone()
    with pytest.raises(ValueError, match=f"{copies} of the {20 + copies} samples .*also occur"):
        setup(engine, module=model, warm_start=start, criterion=nn.CrossEntropyLoss())
    assert torch.equal(weights(model), before)
    assert engine.ledger.public == ()
    assert engine.ledger.steps == 0
    kept = WarmStart(data=(PUBLIC, torch.arange(20) % 2), validation=0, max_epochs=2)
    setup(engine, module=model, warm_start=kept, criterion=nn.CrossEntropyLoss())
    assert not torch.equal(weights(model), before)
    assert [record.count for record in engine.ledger.public] == [20]
