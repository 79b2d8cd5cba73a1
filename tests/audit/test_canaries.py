"""One run with canaries: no more than declared from a sound run, and gross bugs are found."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader

from dpspan import (
    DPSGD,
    GEP,
    PDPSGD,
    RGP,
    AdaptiveClipping,
    ConstantMixing,
    MirrorDescent,
    PrivacyEngine,
)
from dpspan.audit import CanaryAudit, audit_canaries
from dpspan.audit.canaries import IN_TRAINING
from dpspan.mechanisms import dpsgd
from dpspan.mechanisms.noise import Noise
from helpers.training import data

PUBLIC = torch.randn(60, 6, generator=torch.Generator().manual_seed(7))
METHODS = {
    "DPSGD": DPSGD(clip=0.7),
    "PDPSGD": PDPSGD(public=PUBLIC, rank=30, clip=0.7),
    "GEP": GEP(public=PUBLIC, rank=30, clip=0.7, residual_clip=0.3),
    "RGP": RGP(rank=2, clip=0.7),
    "adaptive": DPSGD(clip=0.7, clipping=AdaptiveClipping()),
    "mirror": MirrorDescent(
        public=(PUBLIC, torch.arange(60) % 2),
        clip=0.7,
        clipping=AdaptiveClipping(rate=1.0),
        mixing=ConstantMixing(share=0.5),
    ),
}
WHOLE = ("DPSGD", "adaptive", "mirror")  # they work in no part of the space
ENGINES: list[PrivacyEngine] = []


@pytest.fixture(autouse=True)
def _the_same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coins, batches and noise come from OS entropy; here they come from a counter."""
    numbers, generator = itertools.count(1), np.random.default_rng
    monkeypatch.setattr(
        np.random, "default_rng", lambda seed=None: generator(seed or next(numbers))
    )
    monkeypatch.setattr("dpspan.engine.sampling.secrets.randbits", lambda _: next(numbers))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def rehearsed(
    name: str = "DPSGD", *, z: float = 30.0, like: Any = None, **changes: Any
) -> CanaryAudit:
    def prepare(added: Sequence[Any]) -> Any:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 2))
        engine = PrivacyEngine(accountant="rdp")
        ENGINES[:] = [engine]
        records = ConcatDataset([data(), added]) if added else data()
        return engine, *engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(records, batch_size=10),
            criterion=nn.CrossEntropyLoss(),
            method=METHODS[name],
            noise_multiplier=z,
            sample_rate=0.25,
            expected_batch_size=10.0,
            **changes,
        )

    return audit_canaries(prepare, loss, steps=40, delta=1e-5, like=like)


@pytest.mark.parametrize("name", METHODS)
def test_a_sound_run(name: str) -> None:
    """With z = 30 hardly anything is there to be found; a bound above the declared ε is rarer."""
    audit = rehearsed(name)
    assert audit.passed
    assert audit.steps == 40
    assert audit.black_box == 0
    assert (audit.inside > 0) == (name not in WHOLE)
    assert IN_TRAINING in ENGINES[0].ledger.warnings
    assert audit.describe()["passed"] is True


@pytest.mark.parametrize("name", METHODS)
def test_noise_off(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Noise, "normal", lambda self, like, std: like.double() * 0)
    audit = rehearsed(name)
    assert not audit.passed
    assert audit.epsilon > 2 * audit.declared


def test_clip_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dpsgd, "clip_factors", lambda rule, norms, clip: torch.ones_like(norms))
    audit = rehearsed()
    assert not audit.passed


def test_pieces_of_a_batch_hold_canaries_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise a canary that was never in has a score of what others have in its direction."""
    monkeypatch.setattr(Noise, "normal", lambda self, like, std: like.double() * 0)
    assert rehearsed(max_physical_batch_size=3).epsilon > 1


def test_with_some_noise_something_true_is_found() -> None:
    audit = rehearsed(z=0.7)
    assert 0.2 < audit.epsilon <= audit.declared


def test_black_box_canaries_are_in_the_data_by_their_coins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of the records of noise get into the loader's dataset, and all of them get a score."""
    given = []

    def bound(scores: Any, included: Any, **_: Any) -> float:
        given.append((np.asarray(scores), np.asarray(included)))
        return 0.0

    monkeypatch.setattr("dpspan.audit.canaries.epsilon_lower_bound", bound)
    rehearsed(like=data()[0])
    scores, included = given[0]
    assert len(scores) == len(included) == 1000
    assert 400 < included.sum() < 600
    assert np.isfinite(scores).all()
    run = ENGINES[0]._running()
    assert len(run.loader.dataset) == len(data()) + included.sum()


def test_refusals() -> None:
    with pytest.raises(ValueError, match="Canaries are drawn by Poisson sampling"):
        rehearsed(poisson_sampling=False)
    with pytest.raises(ValueError, match="Expected each record to be its own unit, got 'unit'"):
        rehearsed(unit=[i // 2 for i in range(40)], records_per_unit=2)
    with pytest.raises(ValueError, match="canaries to be an integer of at least 10"):
        audit_canaries(lambda added: None, loss, steps=1, delta=1e-5, canaries=3)
    with pytest.raises(ValueError, match="steps to be an integer of at least 1"):
        audit_canaries(lambda added: None, loss, steps=0, delta=1e-5)
