"""The optimal-transport distance of experiments: by hand, and what it refuses."""

import importlib
import math
import re

import pytest
import torch
from experiments.distances import transport
from experiments.transport import transport_distance
from torch import nn
from torch.utils.data import TensorDataset

from dpspan.choose import rank_public
from dpspan.public.data import PublicData
from helpers.needs import extra


def points(x, y=None):
    x = torch.tensor(x, dtype=torch.float64)
    return PublicData.of(x if y is None else (x, torch.tensor(y)))


def test_transport_by_hand():
    extra("ot")
    a, b = points([[0.0], [1.0]]), points([[3.0], [2.0]])
    assert transport_distance(a, b, labelled=False) == pytest.approx(2.0)  # 0 → 2, 1 → 3
    assert transport_distance(a, a, labelled=False) == 0.0
    # One point a class: classes differ as their points do, and every square counts twice.
    a, b = points([[0.0], [10.0]], [0, 1]), points([[0.5], [9.0]], [1, 0])
    assert transport_distance(a, b, labelled=True) == pytest.approx(math.sqrt(0.25 + 1.0))


def test_labels_count_in_transport():
    extra("ot")
    x = [[0.0], [1.0], [10.0], [11.0]]
    same, other = points(x, [0, 0, 1, 1]), points(x, [0, 1, 0, 1])
    assert transport_distance(same, same, labelled=True) == 0.0
    assert transport_distance(same, other, labelled=False) == 0.0
    assert transport_distance(same, other, labelled=True) > 1.0


def test_transport_refusals():
    extra("ot")
    with pytest.raises(ValueError, match=re.escape("one size, got 1 numbers per sample in")):
        transport_distance(points([[0.0]]), points([[0.0, 1.0]]), labelled=False)
    with pytest.raises(ValueError, match="Expected classes as the labels of 'public': give whole"):
        transport_distance(points([[0.0]]), points([[0.0]]), labelled=True)


def test_transport_without_pot(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ImportError, match=re.escape("pip install 'dpspan[bench]'")):
        transport_distance(points([[0.0]]), points([[0.0]]), labelled=False)


def test_the_samples_are_those_of_the_ranking():
    extra("ot")
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(90, 5, generator=generator), torch.randint(3, (90,), generator=generator)
    private, candidates = TensorDataset(x[:40], y[:40]), {"near": (x[40:], y[40:])}
    candidates["far"] = (x[40:] + 9, y[40:])
    found = transport(private, candidates, samples=30, seed=0)
    ranking = rank_public(
        nn.Linear(5, 3), nn.CrossEntropyLoss(), private, candidates, rank=2, samples=30
    )
    assert set(found) == {row.name for row in ranking.rows}
    assert 0 < found["near"] < found["far"]
    without = transport(private, {"near": x[40:]}, samples=30, seed=0)
    assert 0 < without["near"] < found["near"]  # classes count only where all have them
