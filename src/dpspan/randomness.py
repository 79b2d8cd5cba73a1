"""Random numbers by a seed, with torch's own left as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def seeded(model: nn.Module, seed: int) -> Iterator[Callable[[], None]]:
    """What the model draws comes from this seed, and anew when the function given is called.

    Generator by generator: torch.manual_seed would also seed the devices that are not in use,
    and nobody would put those back.
    """
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})

    def reseed() -> None:
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)

    with torch.random.fork_rng(devices):
        reseed()
        yield reseed
