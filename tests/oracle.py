"""The slow, obviously right version: one sample at a time, plain autograd, float64 if asked."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def per_sample_matrix(model: nn.Module, loss_fn: Callable[..., Tensor], *batch: Tensor) -> Tensor:
    """J, row by row: the gradient of each sample's own loss with a batch of one."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for i in range(batch[0].shape[0]):
        loss = loss_fn(model, *(part[i : i + 1] for part in batch)).sum()
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        rows.append(
            torch.cat(
                [
                    (torch.zeros_like(p) if g is None else g).flatten()
                    for p, g in zip(parameters, grads, strict=True)
                ]
            )
        )
    size = sum(p.numel() for p in parameters)
    return torch.stack(rows) if rows else parameters[0].new_zeros(0, size)
