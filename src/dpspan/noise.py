"""Gaussian noise from a generator of its own."""

from __future__ import annotations

import secrets

import torch
from torch import Tensor


class Noise:
    """Draws the noise of one training run.

    The generator is seeded from OS entropy, shared with nothing else, and never saved: a resumed
    run draws fresh noise. A fixed `seed` is for debugging, and makes the run not private.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def add(self, parts: dict[str, Tensor], std: float) -> dict[str, Tensor]:
        """Each part plus independent N(0, std²) noise, drawn for all of them at once."""
        sizes = [part.numel() for part in parts.values()]
        flat = torch.cat([part.flatten() for part in parts.values()])
        pieces = flat.add_(self.normal(flat, std)).split(sizes)
        return {
            name: piece.view_as(part)
            for (name, part), piece in zip(parts.items(), pieces, strict=True)
        }

    def normal(self, like: Tensor, std: float) -> Tensor:
        """Independent N(0, std²) numbers in the shape, dtype and device of `like`."""
        generator = self._generators.get(like.device)
        if generator is None:
            generator = torch.Generator(like.device)
            generator.manual_seed(secrets.randbits(63) if self.seed is None else self.seed)
            self._generators[like.device] = generator
        return torch.randn(
            like.shape, generator=generator, dtype=like.dtype, device=like.device
        ).mul_(std)
