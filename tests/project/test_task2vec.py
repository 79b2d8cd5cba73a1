"""The Task2Vec-style distance of experiments: by hand, and of samples."""

import numpy as np
import pytest
import torch
from experiments.distances import task2vec
from experiments.task2vec import fisher_embedding, task2vec_distance
from torch import nn

from dpspan.choose.probe import Probe
from dpspan.public.data import PublicData
from helpers.stripes import conv_network, images


def test_fisher_embedding_is_the_mean_square_by_filter():
    probe = Probe(model=conv_network().double(), loss_fn=nn.CrossEntropyLoss())
    gradients = probe.gradients(PublicData.of(images(9, 1, None).double()))
    rows, at, expected = gradients.matrix(), 0, []
    for shape in gradients.shapes.values():
        own = rows[:, at : at + shape.numel()].square().mean(0).view(shape[0], -1).mean(1)
        expected.append(own)
        at += shape.numel()
    assert torch.allclose(fisher_embedding(gradients), torch.cat(expected), rtol=1e-9)


def test_task2vec_distance():
    a, b = torch.tensor([1.0, 0.0]).double(), torch.tensor([0.0, 2.0]).double()
    assert task2vec_distance(a, a) == 0.0
    assert task2vec_distance(a, b) == 1.0
    assert task2vec_distance(a * 0, a * 0) == 0.0
    assert task2vec_distance(a, a * 0) == 1.0
    c, d = torch.rand(9).double(), torch.rand(9).double()
    p, q = (c / (c + d)).numpy(), (d / (c + d)).numpy()
    cosine = p @ q / np.linalg.norm(p) / np.linalg.norm(q)
    assert task2vec_distance(c, d) == pytest.approx(1 - cosine)
    assert task2vec_distance(c, d) == pytest.approx(task2vec_distance(d, c))


def test_near_data_are_near():
    x = images(60, 1, None)
    far = x * torch.linspace(0, 3, 6)
    found = task2vec(
        conv_network(), images(60, 2, None), {"near": x, "far": far}, samples=50, seed=0
    )
    assert found["near"] < found["far"]
