"""Datasets as diagonals of Fisher information matrices, after Task2Vec: for reference. Not private.

F = mean of g², averaged within each filter. Task2Vec trains the probe's last layer on each task
first and uses its labels; here the probe is as it is and labels are random, since candidates need
not have labels of the private task.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpspan.gradients.layers.terms import line_blocks
from dpspan.gradients.numerics import plain_arithmetic
from dpspan.gradients.operator import PerSampleGradients


@plain_arithmetic()
def fisher_embedding(gradients: PerSampleGradients) -> Tensor:
    """F, one number per output neuron or channel of each parameter, float64."""
    means = []
    for name, shape in gradients.shapes.items():
        filters = shape[0] if shape else 1
        width = shape.numel() // max(1, filters)
        term = gradients.term(name)
        for rows, _ in line_blocks(term, term, shape):
            squares = rows.square().double().mean(0)
            means.append(squares.unflatten(0, (-1, width)).mean(1))
    return gradients.scale**2 * torch.cat(means)


def task2vec_distance(first: Tensor, second: Tensor) -> float:
    """Cosine distance of two embeddings, each divided by the sum of both; 0 to 1."""
    total = first + second
    a, b = (torch.where(total > 0, f / total, 0.0) for f in (first, second))
    lengths = a.norm() * b.norm()
    if not bool(lengths > 0):
        return 0.0 if bool((first == second).all()) else 1.0
    return float((1 - (a @ b) / lengths).clamp(0, 1))
