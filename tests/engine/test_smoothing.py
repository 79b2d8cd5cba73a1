"""Filtered gradients and averaged weights: against sums by hand, and over saved states."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpspan import GEP, RGP, PrivacyEngine
from dpspan.accounting.certificate import weights_sha256
from helpers.distributed import in_processes
from helpers.training import data, network, private_with_epsilon, setup, train, weights

ALPHA, BETA = 0.6, 0.8
BOTH = {"low_pass": BETA, "average_weights": ALPHA}


def averaged(trajectory: list[Tensor], alpha: float = ALPHA) -> Tensor:
    """Each of the weights times its share: a product of all decays that came after it."""
    decays = [min(alpha, (1 + t) / (10 + t)) for t in range(1, len(trajectory))]
    total = trajectory[0].double() * math.prod(decays)
    for t, now in enumerate(trajectory[1:]):
        total = total + now.double() * (1 - decays[t]) * math.prod(decays[t + 1 :])
    return total


def filtered(gradients: list[Tensor], beta: float = BETA) -> Tensor:
    shares = [beta**age for age in reversed(range(len(gradients)))]
    return sum(s * g for s, g in zip(shares, gradients, strict=True)) / sum(shares)


def steps(model: Any, optimizer: Any, loader: Any, epochs: int = 1) -> tuple[list[Any], list[Any]]:
    """The weights after each step, those before the first in front, and gradients handed over."""
    trajectory, gradients = [weights(model)], []
    criterion = nn.CrossEntropyLoss()
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            given = [p.grad for p in model.parameters()]
            if given[0] is not None:
                trajectory.append(weights(model))
                gradients.append(torch.cat([g.flatten() for g in given]))
    return trajectory, gradients


@pytest.mark.parametrize("physical", [None, 4])  # 4: several pieces, and one step of all
def test_the_average_is_that_of_the_weights_after_each_step(physical: int | None) -> None:
    engine, model, *rest = setup(average_weights=ALPHA, max_physical_batch_size=physical)
    trajectory, _ = steps(model, *rest, epochs=3)
    assert len(trajectory) == 13
    with engine.averaged():
        assert torch.allclose(weights(model).double(), averaged(trajectory), atol=1e-6)
        assert not torch.equal(weights(model), trajectory[-1])
    assert torch.equal(weights(model), trajectory[-1])
    with pytest.raises(KeyError), engine.averaged():
        raise KeyError  # as an evaluation may
    assert torch.equal(weights(model), trajectory[-1])
    steps(model, *rest)  # goes on with the weights that are trained
    warnings = engine.certificate(delta=1e-5)["warnings"]
    assert not any("changed between" in warning for warning in warnings)


def test_early_weights_are_soon_forgotten() -> None:
    engine, model, *rest = setup(average_weights=0.9999)
    trajectory, _ = steps(model, *rest, epochs=2)
    with engine.averaged():
        assert torch.allclose(weights(model).double(), averaged(trajectory, 0.9999), atol=1e-6)


@pytest.mark.parametrize(
    "method", [None, RGP(rank=1), GEP(public=data(12).tensors[0].flip(0) + 0.5, rank=4, clip=1.0)]
)
def test_the_optimizer_gets_the_filtered_gradient_of_any_method(method: Any) -> None:
    """Without a learning rate the weights stay, and both runs release the same numbers."""

    def run(**more: Any) -> list[Tensor]:
        model = network()
        still = torch.optim.SGD(model.parameters(), lr=0.0)
        chosen = {} if method is None else {"method": method, "criterion": nn.CrossEntropyLoss()}
        return steps(*setup(module=model, optimizer=still, **chosen, **more)[1:])[1]

    plain, smooth = run(), run(low_pass=BETA)
    for count, found in enumerate(smooth, 1):
        assert torch.allclose(found, filtered(plain[:count]), rtol=1e-5, atol=1e-6)


def test_a_run_goes_on_from_a_saved_state(tmp_path: Path) -> None:
    engine, model, optimizer, loader = setup(**BOTH)
    trajectory, gradients = steps(model, optimizer, loader)
    engine.save_checkpoint(tmp_path / "run.ckpt", module=model, optimizer=optimizer)
    other, again, optimizer, loader = setup(**BOTH)
    other.load_checkpoint(tmp_path / "run.ckpt", module=again, optimizer=optimizer)
    more, later = steps(again, optimizer, loader)
    with other.averaged():
        assert torch.allclose(weights(again).double(), averaged(trajectory + more[1:]), atol=1e-6)
    with pytest.raises(ValueError, match="post_processing is"):
        setup()[0].load_checkpoint(tmp_path / "run.ckpt", module=network())
    assert len(later) == len(gradients) == 4
    state = torch.cat(
        [x.flatten() for x in other.state_dict()["post_processing"]["filtered"].values()]
    )
    assert torch.allclose(state, later[-1] * (1 - BETA**8), atol=1e-6)


def test_a_damaged_state_changes_nothing() -> None:
    engine, model, *rest = setup(**BOTH)
    steps(model, *rest)
    before = engine.state_dict()["post_processing"]
    kept = {name: x.clone() for name, x in before["average"].items()}
    for wrong in ({}, {**before, "average": {}}, {**before, "steps": -1}):
        with pytest.raises(ValueError, match="Expected"):
            engine.load_state_dict({**engine.state_dict(), "post_processing": wrong})
    after = engine.state_dict()["post_processing"]["average"]
    assert all(torch.equal(kept[name], after[name]) for name in kept)


def test_it_costs_nothing_and_is_on_the_certificate() -> None:
    engine = PrivacyEngine(accountant="rdp")
    model, *rest = private_with_epsilon(engine, **BOTH)
    train(model, *rest, epochs=2)
    document = engine.certificate()
    assert document["training"]["post_processing"] == BOTH
    assert f", low_pass={BETA}, average_weights={ALPHA})" in str(engine.plan)
    plain = PrivacyEngine(accountant="rdp")
    model, *rest = private_with_epsilon(plain)
    train(model, *rest, epochs=2)
    assert document["epsilon"] == plain.certificate()["epsilon"]
    assert "post_processing" not in plain.certificate()["training"]
    assert "post_processing" not in plain.state_dict()


def test_the_certificate_is_of_the_weights_that_the_model_has() -> None:
    engine, model, *rest = setup(average_weights=ALPHA)
    steps(model, *rest)
    with engine.averaged():
        inside = engine.certificate(delta=1e-5)["training"]["weights_sha256"]
        assert inside == weights_sha256(model.state_dict())
    assert engine.certificate(delta=1e-5)["training"]["weights_sha256"] != inside
    engine.adopt_average()
    engine.detach()
    assert engine.certificate(delta=1e-5)["training"]["weights_sha256"] == inside


def test_what_would_lose_weights_is_refused() -> None:
    engine, model, optimizer, loader = setup(average_weights=ALPHA)
    steps(model, optimizer, loader)
    with engine.averaged():
        for use in (lambda: next(iter(loader)), engine.state_dict, engine.adopt_average):
            with pytest.raises(RuntimeError, match=r"Leave engine\.averaged\(\)"):
                use()
    batches = iter(loader)
    next(batches)
    with pytest.raises(RuntimeError, match="between steps"), engine.averaged():
        pass
    with pytest.raises(RuntimeError, match="Give average_weights="), setup()[0].averaged():
        pass


@pytest.mark.parametrize("name", ["low_pass", "average_weights"])
@pytest.mark.parametrize("value", [0.0, 1.0, -0.5])
def test_only_shares_are_taken(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"0 < {name} < 1"):
        setup(**{name: value})


def test_few_digits_are_averaged_in_more() -> None:
    engine, model, *_ = setup(module=network().bfloat16(), average_weights=0.99)
    kept = engine.state_dict()["post_processing"]["average"]
    assert {x.dtype for x in kept.values()} == {torch.float32}
    with engine.averaged():
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def _in_one_process(rank: int) -> tuple[Tensor, Tensor]:
    engine, model, *rest = setup(**BOTH)
    trajectory, _ = steps(model, *rest, epochs=2)
    with engine.averaged():
        return weights(model), averaged(trajectory)


def test_several_processes_have_one_average() -> None:
    found = in_processes(2, _in_one_process)
    for own, expected in found:
        assert torch.allclose(own.double(), expected, atol=1e-6)
    assert torch.equal(found[0][0], found[1][0])
