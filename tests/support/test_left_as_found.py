"""A model that was run on the side, and the random numbers of the process, are as before."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpspan.support.left_as_found import Mode, left_as_found
from dpspan.support.randomness import RandomState, seeded


class Keeper(nn.Module):
    """Changes all that a module can keep, but its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))
        self.plain, self.calls = torch.zeros(2), 0
        self.alias = self.mean
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.mean += x.mean(0)
        self.plain.data += x.mean(0)
        self.replaced = x.mean(0)
        self.calls += 1
        self.seen = x
        noise = torch.rand(2) + float(np.random.random()) + random.random()
        return self.dropout(x + self.alias) + noise


def kept(model: Keeper) -> list[Any]:
    names = [name for part in model.modules() for name in vars(part)]
    tensors = [model.mean, model.replaced, model.plain]
    modes = [part.training for part in model.modules()]
    return [names, [id(x) for x in tensors], [x.tolist() for x in tensors], model.calls, modes]


@pytest.mark.parametrize("mode", ["as found", "without dropout", "evaluation"])
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stays(mode: Mode, fails: bool) -> None:
    model, x = Keeper(), torch.ones(3, 2)
    model.dropout.eval()  # modes differ from part to part
    before, numbers = kept(model), RandomState.now()
    version = model.mean._version
    try:
        with left_as_found(model, 3, mode=mode):
            model(x)
            assert model.mean.tolist() == model.alias.tolist() == [1, 1]
            assert model.training == (mode != "evaluation")
            assert not model.dropout.training
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert kept(model) == before
    assert RandomState.now() == numbers
    assert model.mean._version == version


def test_the_same_start_gives_the_same_numbers_of_all_generators() -> None:
    model, x = Keeper(), torch.ones(3, 2)
    earlier = RandomState.now()
    with left_as_found(model, 2**63 - 1) as restart:
        model(x)
        first = torch.rand(2), np.random.random(), random.random()
        restart()
        model(x)
        second = torch.rand(2), np.random.random(), random.random()
    assert first[0].tolist() == second[0].tolist()
    assert first[1:] == second[1:]
    expected = torch.rand(1), np.random.random(), random.random()
    with seeded(earlier):
        assert (torch.rand(1), np.random.random(), random.random()) == expected


def test_without_dropout_everything_is_kept_in_training_mode() -> None:
    model = nn.Dropout(0.5)
    with left_as_found(model, mode="without dropout"):
        assert torch.equal(model(torch.ones(100)), torch.ones(100))
        assert model.training


def test_a_buffer_that_was_not_written_keeps_its_graph() -> None:
    model = nn.Module()
    model.register_buffer("scale", torch.full((2,), 3.0))
    x = torch.ones(2, requires_grad=True)
    y = (x * model.scale).sum()
    with left_as_found(model):
        pass
    y.backward()
    assert x.grad.tolist() == [3, 3]


def test_a_stand_in_for_the_forward_pass_stays() -> None:
    """Gradients are recorded there, and what is planned on a public pass must hold after it."""
    model = nn.Linear(2, 2)
    with left_as_found(model):
        model.forward = lambda x: x
    x = torch.ones(1, 2)
    assert model(x) is x
