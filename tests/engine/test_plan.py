"""The plan of a run: what it says is what happens, and it is made without private records."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dpspan
from dpspan.accounting.ledger import RECORDS_TOLD
from dpspan.engine.plan import Given, plan_run
from dpspan.public.data import PublicData
from helpers.training import train


class Unread(Dataset[Any]):
    """Has a length, and nothing that may be read."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a private record was read")


def planned(**changes: Any) -> Any:
    settings: dict[str, Any] = {
        "module": nn.Linear(4, 2),
        "data_loader": DataLoader(Unread(), batch_size=20),
        "method": dpspan.DPSGD(clip=0.5),
        "noise_multiplier": 1.3,
        "non_private": False,
        "loss_reduction": "mean",
        "poisson_sampling": True,
        "sample_rate": None,
        "expected_batch_size": None,
        "views": 1,
        "secure_mode": False,
    }
    unset = {each.name for each in dataclasses.fields(Given)} - settings.keys()
    return plan_run(Given(**{**dict.fromkeys(unset), **settings, **changes}), "rdp")


def run(**changes: Any) -> Any:
    torch.manual_seed(0)
    x = torch.randn(200, 4)
    model, engine = nn.Linear(4, 2), dpspan.PrivacyEngine(accountant="rdp")
    made = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=20),
        criterion=nn.CrossEntropyLoss(),
        target_epsilon=2.0,
        target_delta=1e-5,
        epochs=2,
        **changes,
    )
    return engine, *made


def test_no_private_record_is_needed_to_plan() -> None:
    plan = planned()
    assert (plan.expected_batch_size, plan.trainable_parameters) == (20.0, 10)
    assert plan.sampling.steps_per_epoch == 10
    assert plan.sampling.events_per_epoch == 10
    z = dpspan.calibrate(2.0, 1e-5, sample_rate=0.1, steps=30, accountant="rdp")
    assert 1.999 <= planned(noise_multiplier=z).epsilon(3, 1e-5) <= 2.0


def test_a_plan_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        planned().noise_multiplier = 0.1


@pytest.mark.parametrize("poisson", [True, False])
def test_what_is_charged_is_what_was_planned(poisson: bool) -> None:
    engine, model, optimizer, loader = run(poisson_sampling=poisson)
    plan = engine.plan
    assert engine.get_epsilon() == 0.0  # a plan costs nothing
    train(model, optimizer, loader, epochs=2)
    ((event, count),) = engine.ledger.events
    assert event == plan.event
    assert count == plan.epochs * plan.sampling.events_per_epoch == (20 if poisson else 2)
    assert engine.get_epsilon() == pytest.approx(plan.epsilon())
    training = engine.certificate()["training"]
    assert training.items() >= plan.describe().items()


def test_it_reads_as_a_table() -> None:
    public = PublicData.of(torch.randn(30, 4), name="leaflets")
    engine, *_ = run(method=dpspan.GEP(public=public, rank=3, clip=0.5))
    lines = dict(line.split(None, 1) for line in str(engine.plan).splitlines())
    assert lines["method"].startswith("GEP(clip=0.5, ")
    assert lines["sampling"].startswith("PoissonDraw(sample_rate=0.1, steps_per_epoch=10)")
    assert f"z = {engine.noise_multiplier:g}" == lines["noise"]
    assert "2 at δ = 1e-05 for 2 epochs" in str(engine.plan)
    assert "<th>expected ε </th><td>2 at δ = 1e-05" in engine.plan._repr_html_()
    assert lines["public"] == "'leaflets' (GEP: public gradients)"


def test_without_noise_or_epochs_it_says_so() -> None:
    assert "without noise nothing is private" in str(planned(noise_multiplier=0, non_private=True))
    assert "see plan.epsilon(epochs, delta)" in str(planned())
    with pytest.raises(ValueError, match="Expected epochs to be an integer"):
        planned().epsilon(delta=1e-5)
    with pytest.raises(ValueError, match="Expected delta=, as the run has no budget"):
        planned().epsilon(2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_multiplier": -1.0}, "Expected noise_multiplier >= 0"),
        ({"noise_multiplier": 0.0}, "gives no privacy"),
        ({"expected_batch_size": 0.0}, "Expected expected_batch_size > 0"),
        ({"views": True}, "Expected views to be an integer"),
        ({"sample_rate": 1.5}, "Expected 0 < sample_rate <= 1"),
    ],
)
def test_what_cannot_be_planned_is_refused(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned(**changes)


def test_warnings_follow_from_the_plan() -> None:
    assert [text.startswith(RECORDS_TOLD) for text in planned().warnings] == [True]
    assert planned(sample_rate=0.1).warnings == []
    (told,) = planned(sample_rate=0.1, poisson_sampling=False).warnings
    assert "without amplification" in told


def test_there_is_none_before_make_private() -> None:
    with pytest.raises(RuntimeError, match="call make_private first"):
        _ = dpspan.PrivacyEngine().plan
