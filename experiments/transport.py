"""Optimal-transport dataset distance (after Alvarez-Melis and Fusi), by POT: for reference.

The cost of moving a sample (x, y) to (x', y') is ‖x − x'‖² + W²(y, y'), where W is the Wasserstein
distance between the samples of the two classes, taken as Gaussians with diagonal covariances.
Without labels it is ‖x − x'‖² alone. Not private.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpspan.public.data import Samples


def transport_distance(first: Samples, second: Samples, *, labelled: bool) -> float:
    """The root of the mean cost of the cheapest way to move one dataset onto the other."""
    ot = _pot()
    (x, y), (other, z) = _points(first), _points(second)
    if x.shape[1] != other.shape[1]:
        raise ValueError(
            f"Expected inputs of one size, got {x.shape[1]} numbers per sample in '{first.name}' "
            f"and {other.shape[1]} in '{second.name}': bring them to the same shape."
        )
    cost = torch.cdist(x, other).square()
    if labelled:
        cost = cost + _between_classes(x, _classes(first, y), other, _classes(second, z))
    mass = ([1 / len(x)] * len(x), [1 / len(other)] * len(other))
    total = float(ot.emd2(*mass, cost.numpy(), numItermax=10_000_000))
    return math.sqrt(max(0.0, total))


def has_classes(data: Samples) -> bool:
    """Whether its labels are classes."""
    return all(
        isinstance(labels, Tensor) and not labels.is_floating_point() and labels.dim() == 1
        for _, _, labels in data.pieces()
    )


def _pot() -> Any:
    try:
        return importlib.import_module("ot")
    except ImportError as error:
        raise ImportError(
            "The optimal-transport distance needs the package POT: pip install 'dpspan[bench]'."
        ) from error


def _points(data: Samples) -> tuple[Tensor, list[Any]]:
    """All samples as rows of numbers, and their labels."""
    rows, labels = [], []
    for _, inputs, given in data.pieces():
        leaves = [leaf.flatten(1).double() for leaf in tree_leaves(inputs)]
        rows.append(torch.cat(leaves, dim=1))
        labels.append(given)
    return torch.cat(rows), labels


def _classes(data: Samples, labels: list[Any]) -> Tensor:
    if not has_classes(data):
        raise ValueError(
            f"Expected classes as the labels of '{data.name}': give whole numbers, one a sample, "
            "or compare without labels."
        )
    return torch.cat(labels)


def _between_classes(x: Tensor, y: Tensor, other: Tensor, z: Tensor) -> Tensor:
    """W² between the classes of each pair of samples."""
    (moments, own), (others, their) = _moments(x, y), _moments(other, z)
    return torch.cdist(moments, others).square()[own][:, their]


def _moments(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each class side by side, and each sample's class.

    The distance between two such rows is W for Gaussians with diagonal covariances.
    """
    classes, index = y.unique(return_inverse=True)
    groups = [x[index == i] for i in range(len(classes))]
    rows = [torch.cat([g.mean(0), g.std(0, correction=0)]) for g in groups]
    return torch.stack(rows), index
