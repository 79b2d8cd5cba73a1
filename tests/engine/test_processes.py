"""What works in one process only is refused in several, and so are wrappers for many devices.

How several train one model together is in test_distributed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from dpspan import (
    DPSGD,
    Budget,
    Contender,
    Ledger,
    PrivacyEngine,
    Task,
    choose_public,
    compare,
    private_metric,
    private_quantiles,
)
from dpspan.convex import PrivateLogisticRegression
from dpspan.support.errors import UnsupportedModule
from helpers.training import data, network, private_with_epsilon, setup, train

REFUSED = "one of several processes .* Start one process without torchrun"


def fit() -> None:
    PrivateLogisticRegression().fit(np.eye(4), [0, 1, 0, 1])


def choose() -> None:
    choose_public(network(), nn.CrossEntropyLoss(), data(), {}, ledger=Ledger())


def comparison() -> None:
    task = Task(
        model=network,
        private=data(),
        test=data(),
        batch_size=10,
        epochs=1,
        budget=Budget(epsilon=1.0, delta=1e-5),
    )
    plain = Contender(name="DP-SGD", method=DPSGD(clip=1.0), learning_rate=0.5)
    compare(task, [plain], out="nowhere")


ENGINE: dict[str, Callable[[], Any]] = {
    "make_private": setup,
    "make_private_with_epsilon": lambda: private_with_epsilon(PrivacyEngine(accountant="rdp")),
}
DOORS: dict[str, Callable[[], Any]] = {
    "fit": fit,
    "metric": lambda: private_metric([1.0], noise_multiplier=1.0, ledger=Ledger()),
    "quantiles": lambda: private_quantiles(
        [1.0], [0.5], bounds=(0, 1), epsilon=1.0, ledger=Ledger()
    ),
    "choose_public": choose,
    "compare": comparison,
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("variables", [{"WORLD_SIZE": "2", "RANK": "0"}, {"RANK": "1"}])
def test_under_torchrun(door: str, variables: dict[str, str], monkeypatch: Any) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=REFUSED):
        DOORS[door]()


@pytest.mark.parametrize("door", ENGINE)
@pytest.mark.parametrize("variables", [{"WORLD_SIZE": "2", "RANK": "0"}, {"RANK": "1"}])
def test_strangers_are_introduced_first(
    door: str, variables: dict[str, str], monkeypatch: Any
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=r"do not know each other yet.*init_process_group\(\)"):
        ENGINE[door]()


@pytest.mark.parametrize("variables", [{"WORLD_SIZE": "1", "RANK": "0"}, {"RANK": "sergeant"}])
def test_one_process_is_one(variables: dict[str, str], monkeypatch: Any) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    _, *run = setup()
    train(*run)


@pytest.fixture
def group() -> Iterator[Callable[[int], None]]:
    """Makes a process group in which this process is the first of so many."""

    def made(size: int) -> None:
        distributed.init_process_group("fake", rank=0, world_size=size, store=FakeStore())

    yield made
    distributed.destroy_process_group()


@pytest.mark.parametrize("door", DOORS)
def test_in_a_group_of_two(door: str, group: Callable[[int], None]) -> None:
    group(2)
    with pytest.raises(RuntimeError, match=REFUSED):
        DOORS[door]()


def test_a_group_that_is_made_later_is_noticed_at_the_first_batch(
    group: Callable[[int], None],
) -> None:
    engine, *run = setup()
    group(2)
    with pytest.raises(RuntimeError, match="was initialised after make_private"):
        train(*run)
    assert engine.ledger.steps == 0


def test_wrapped_before(group: Callable[[int], None]) -> None:
    group(1)
    for wrapper in (DistributedDataParallel, DataParallel):
        name = wrapper.__name__
        with pytest.raises(UnsupportedModule, match=f"the model itself is wrapped in {name}"):
            setup(module=wrapper(network()))
        with pytest.raises(UnsupportedModule, match=f"0 is wrapped in {name}"):
            setup(module=nn.Sequential(wrapper(nn.Linear(6, 8)), nn.Linear(8, 2)))


def test_wrapped_after_is_noticed_at_the_first_step(group: Callable[[int], None]) -> None:
    group(1)
    engine, model, optimizer, loader = setup()
    wrapped = DistributedDataParallel(model)
    with pytest.raises(UnsupportedModule, match="the model is wrapped in DistributedDataParallel"):
        train(wrapped, optimizer, loader)
    assert engine.ledger.steps == 0
    engine.detach()
    wrapped(torch.zeros(3, 6))  # a model that was trained may be used in any way


def test_a_replica_on_another_device_is_noticed() -> None:
    """What DataParallel calls on each of several GPUs."""
    engine, model, optimizer, loader = setup()

    def replicated(x: torch.Tensor) -> torch.Tensor:
        return model._replicate_for_data_parallel()(x)

    with pytest.raises(UnsupportedModule, match="the model is wrapped in DataParallel"):
        train(replicated, optimizer, loader)
    assert engine.ledger.steps == 0


def test_a_fit_of_a_table_loads_no_torch() -> None:
    program = "import sys, dpspan.convex; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
