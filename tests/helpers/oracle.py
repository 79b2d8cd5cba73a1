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


def clip_rows(x: Tensor, clip: float) -> Tensor:
    """Each row scaled to norm at most `clip`."""
    return x * (clip / x.norm(dim=1, keepdim=True).clamp(min=1e-300)).clamp(max=1.0)


def top_directions(h: Tensor, rank: int) -> Tensor:
    """The top right singular vectors of a gradient matrix as rows, at most its rank of them."""
    _, values, vectors = torch.linalg.svd(h.double(), full_matrices=False)
    real = int((values > 1e-6 * values[0]).sum()) if len(values) else 0
    return vectors[: min(rank, real)]


def block_basis(h: Tensor, columns: list[Tensor], ranks: list[int]) -> Tensor:
    """One basis per group of columns, as one k × p matrix."""
    rows = []
    for own, rank in zip(columns, ranks, strict=True):
        directions = top_directions(h[:, own], rank)
        wide = torch.zeros(len(directions), h.shape[1], dtype=torch.float64)
        wide[:, own] = directions
        rows.append(wide)
    return torch.cat(rows)


def gep(g: Tensor, basis: Tensor, s1: float, s2: float) -> tuple[Tensor, Tensor]:
    """GEP's Algorithm 1, lines 10 to 14 without noise: Σ clip(w_i) Bᵀ and Σ clip(r_i)."""
    w = g @ basis.T
    r = g - w @ basis
    return clip_rows(w, s1).sum(0) @ basis, clip_rows(r, s2).sum(0)


def pdpsgd(g: Tensor, basis: Tensor, clip: float) -> Tensor:
    """PDP-SGD's Algorithm 1, line 6 without noise: V Vᵀ Σ clip(g_i)."""
    return clip_rows(g, clip).sum(0) @ basis.T @ basis
