"""Random numbers by a seed, or from OS entropy, with everybody else's left as they were."""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

# Where torch's CPU generator keeps the words of its Mersenne twister: see `_fill`.
_STATE_OFFSET, _STATE_WORDS = 24, 624


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


@contextmanager
def fresh_randomness() -> Iterator[None]:
    """What Python, numpy and torch draw comes from OS entropy; their state is as before afterwards.

    With random numbers that anybody knows, as after `torch.manual_seed(0)`, one more record would
    change the dropout masks and the augmentation of all records that come after it, and no clip
    covers that.
    """
    python, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(_cuda_devices()):
            renew()
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


def renew() -> int:
    """Seed Python, numpy and torch (all devices in use) from OS entropy; torch's own seed."""
    random.seed()
    # As np.random.seed() does, which takes several times as long.
    np.random.set_state(("MT19937", _entropy(), _STATE_WORDS, 0, 0.0))
    torch.default_generator.manual_seed(secrets.randbits(63))
    _fill(torch.default_generator)
    for device in _cuda_devices():
        torch.cuda.default_generators[device].manual_seed(secrets.randbits(63))
    return torch_seed()


def torch_seed() -> int:
    """What torch's CPU generator was seeded with last."""
    return torch.default_generator.initial_seed()


@dataclass(frozen=True)
class FreshWorker:
    """Begins a worker of a DataLoader as the user says, and with random numbers of its own."""

    begin: Callable[[int], Any] | None

    def __call__(self, worker: int) -> None:
        if self.begin is not None:
            self.begin(worker)
        renew()  # last: the usual recipes seed numpy and Python


def _fill(generator: torch.Generator) -> None:
    """Fill the whole state of a CPU generator from OS entropy.

    The Mersenne twister takes only 32 bits of its seed: few enough to try them all. (A GPU's
    generator takes 64.)
    """
    state = generator.get_state().numpy()
    words = state[_STATE_OFFSET : _STATE_OFFSET + 8 * _STATE_WORDS].view(np.uint64)
    if words[0] != generator.initial_seed() % 2**32:
        raise RuntimeError(
            f"torch {torch.__version__} keeps the state of its generator in an unknown way, so it "
            "cannot be seeded securely. Use a torch version that dpspan supports."
        )
    words[:] = _entropy()
    generator.set_state(torch.from_numpy(state))


def _entropy() -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """The state of a Mersenne twister."""
    return np.frombuffer(os.urandom(4 * _STATE_WORDS), dtype=np.uint32)


def _cuda_devices() -> range:
    return range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
