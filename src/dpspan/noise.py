"""Gaussian noise from a generator of its own."""

from __future__ import annotations

import os
import secrets

import numpy as np
import torch
from torch import Tensor

# Where torch's CPU generator keeps the words of its Mersenne twister: see `_fill_state`.
_STATE_OFFSET, _STATE_WORDS = 24, 624


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
        if like.device not in self._generators:
            self._generators[like.device] = _generator(like.device, self.seed)
        generator = self._generators[like.device]
        return torch.randn(
            like.shape, generator=generator, dtype=like.dtype, device=like.device
        ).mul_(std)


def _generator(device: torch.device, seed: int | None) -> torch.Generator:
    generator = torch.Generator(device)
    if seed is not None:
        return generator.manual_seed(seed)
    generator.manual_seed(secrets.randbits(63))
    if device.type == "cpu":
        _fill_state(generator)
    return generator


def _fill_state(generator: torch.Generator) -> None:
    """Fill the whole state of a CPU generator from OS entropy.

    The Mersenne twister takes only 32 bits of its seed: few enough to try them all, and with a
    guess of one gradient an adversary would find all noise. (A GPU's generator takes 64.)
    """
    state = generator.get_state().numpy()
    words = state[_STATE_OFFSET : _STATE_OFFSET + 8 * _STATE_WORDS].view(np.uint64)
    if words[0] != generator.initial_seed() % 2**32:
        raise RuntimeError(
            f"torch {torch.__version__} keeps the state of its generator in an unknown way, so it "
            "cannot be seeded securely. Use a torch version that dpspan supports."
        )
    words[:] = np.frombuffer(os.urandom(4 * _STATE_WORDS), dtype=np.uint32)
    generator.set_state(torch.from_numpy(state))
