"""Images of noise on one half of the pixels, which a choice of public data tells apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def images(n: int, seed: int, stripes: bool | None = False) -> Tensor:
    """Noise on the one half and nothing on the other, or the other way round; None: on both."""
    x = torch.randn(n, 1, 6, 6, generator=torch.Generator().manual_seed(seed))
    if stripes is not None:
        x[..., :3] *= not stripes
        x[..., 3:] *= stripes
    return x


def labels(n: int, seed: int = 0) -> Tensor:
    return torch.randint(4, (n,), generator=torch.Generator().manual_seed(seed))


def conv_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 5, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(180, 4))
