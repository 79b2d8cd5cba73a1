"""Residuals that are hard to bound, by the thousand: for the CPU's tests and the GPU's."""

from __future__ import annotations

import torch
from torch import Tensor

from dpspan.gradients.layers.linear import Outer
from dpspan.gradients.layers.terms import Rows
from dpspan.gradients.operator import PerSampleGradients
from dpspan.subspaces.subspace import Subspace

SHAPE = torch.Size((12, 40))


def violations(seed: int, samples: int, device: str, kind: str) -> tuple[int, float]:
    """How many of so many residuals are summed as longer than their bound, and the worst excess.

    Every sample is near the span by a random power of ten, and long or short by another; the public
    gradients are partly twins, so that coefficients are large.
    """
    g = torch.Generator().manual_seed(seed)
    public, own = numbers(24, g), numbers(samples, g)
    public[12:] = public[:12] + 10.0 ** -float(torch.rand((), generator=g) * 6) * public[12:]
    pick = torch.randint(24, (samples,), generator=g)
    closeness = 10.0 ** (-8 * torch.rand(samples, 1, 1, generator=g))
    size = 10.0 ** (30 * torch.rand(samples, 1, 1, generator=g) - 18)
    near = size * (public[pick] + closeness * own)
    H, J = (of_kind(x.to(device), kind) for x in (public, near))
    rank = int(torch.randint(1, 25, (), generator=g))
    subspace = Subspace.from_gradients(H, rank)
    if bool(torch.rand((), generator=g) < 0.3):
        subspace = subspace.explicit()
    _, residual = subspace.split(J)
    bounds = residual.norm_bounds()
    # One sample at a time, with the weight that a clip of 0.3 gives it.
    weights = torch.nan_to_num(0.3 / bounds, posinf=0.0).diag()
    sums = torch.stack(
        [torch.cat([v.flatten() for v in residual.combine(w).values()]).double() for w in weights]
    )
    excess = sums.norm(dim=1) / 0.3
    return int((excess > 1).sum()), float(excess.max())


def numbers(n: int, g: torch.Generator) -> Tensor:
    return torch.randn(n, *SHAPE, generator=g)


def of_kind(x: Tensor, kind: str) -> PerSampleGradients:
    """The same gradients as rows, or as sums of outer products."""
    terms = {"rows": lambda: Rows(x), "factors": lambda: Outer(x[:, :, :30], x[:, :, 30:])}
    shape = SHAPE if kind == "rows" else torch.Size((10, 30))
    return PerSampleGradients({"w": shape}, {"w": [terms[kind]()]}, len(x), like=x.new_empty(0))
