"""Two clouds of points that a linear model tells apart: what runs and comparisons learn."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def blobs(count: int, seed: int, shift: float = 3.0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    return torch.randn(count, 4, generator=draw) + shift * labels[:, None], labels


def linear() -> nn.Module:
    return nn.Linear(4, 2)
