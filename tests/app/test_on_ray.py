"""Runs on a cluster are those of this machine; the cluster here is a local one."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpspan.accounting.promises import Budget
from dpspan.app.comparison import Contender, Task, compare
from dpspan.app.run.jobs import workers
from dpspan.app.run.on_ray import OnRay
from dpspan.mechanisms import DPSGD
from helpers.needs import extra


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = extra("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


def task() -> Task:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(140, 4, generator=g)
    y = (x.sum(1) > 0).long()
    return Task(
        model=lambda: nn.Linear(4, 2),
        private=TensorDataset(x[:100], y[:100]),
        test=TensorDataset(x[100:], y[100:]),
        batch_size=25,
        epochs=2,
        budget=Budget(epsilon=3.0, delta=1e-4),
        test_is_public=True,
        accountant="rdp",
    )


PLAIN = Contender(name="DP-SGD", method=DPSGD(clip=1.0), learning_rate=0.5)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    comparison = compare(task(), [PLAIN], out="out", seeds=(0, 1, 2), jobs=2, executor=OnRay())
    (row,) = comparison.rows
    assert len({result.value for result in row.results}) > 1  # other weights, other noise
    assert all(2.99 < result.epsilon <= 3.0 for result in row.results)
    assert comparison.epsilon_together > 3.0
    assert len(list(tmp_path.glob("out/dp-sgd/seed-*/model.safetensors"))) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_an_error_is_the_error_and_ends_all(tmp_path: Path) -> None:
    def wait(folder: str, number: int) -> int:  # here: the cluster does not know this file
        Path(folder, str(number)).touch()
        if number == 1:
            raise ValueError("Expected something else.")
        time.sleep(0.01 if number == 0 else 60)
        return number

    arguments = [(str(tmp_path), number) for number in range(4)]
    began = time.monotonic()
    with (
        pytest.raises(ValueError, match="Expected something else"),
        workers(2, None, "waiting", total=4, executor=OnRay()) as run,
    ):
        run(wait, arguments)
    assert time.monotonic() - began < 40  # nobody waits for the others
    assert len(list(tmp_path.iterdir())) <= 3
    with workers(2, None, "adding", total=2, executor=OnRay()) as run:
        assert run(max, [(1, 2), (4, 3)]) == [2, 4]


def test_a_folder_that_the_machine_does_not_see(tmp_path: Path) -> None:
    missing = tmp_path / "elsewhere"
    with (
        pytest.raises(FileNotFoundError, match="Choose one that all machines share"),
        workers(1, None, "touching", total=1, shared=missing) as run,
    ):
        run(Path.touch, [(tmp_path / "touched",)])
    assert not (tmp_path / "touched").exists()


def test_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'dpspan\[ray\]'"):
        compare(task(), [PLAIN], out=tmp_path, seeds=(0,), executor=OnRay())
