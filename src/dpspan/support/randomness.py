"""Random numbers by a seed, or from OS entropy, with everybody else's left as they were."""

import os
import random
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

# Where torch's CPU generator keeps the words of its Mersenne twister: see `_fill`.
_STATE_OFFSET, _STATE_WORDS = 24, 624


class RandomState(NamedTuple):
    """Where the generators of torch (all devices in use), numpy and Python stand."""

    torch: tuple[bytes, ...]
    numpy: tuple[Any, ...]
    python: tuple[Any, ...]

    @classmethod
    def now(cls) -> Self:
        states = tuple(g.get_state().numpy().tobytes() for g in _generators())
        name, keys, *rest = np.random.get_state()
        return cls(states, (name, tuple(np.asarray(keys).tolist()), *rest), random.getstate())

    def restore(self) -> None:
        """Draw from here on what was drawn then."""
        for generator, state in zip(_generators(), self.torch, strict=False):
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        np.random.set_state(self.numpy)
        random.setstate(self.python)


@contextmanager
def seeded(start: int | RandomState | None) -> Iterator[Callable[[], None]]:
    """All is drawn from a seed, or as from another time, and anew when the function is called.

    Afterwards the generators stand where they stood; None is for that alone.
    """
    before = RandomState.now()

    def restart() -> None:
        if start is None or isinstance(start, RandomState):
            (start or before).restore()
            return
        for generator in _generators():  # torch.manual_seed would seed devices not in use, too
            generator.manual_seed(int(start))
        np.random.seed(int(start) % 2**32)
        random.seed(int(start))

    try:
        restart()
        yield restart
    finally:
        before.restore()


@contextmanager
def fresh_randomness() -> Iterator[None]:
    """What Python, numpy and torch draw comes from OS entropy; their state is as before afterwards.

    With random numbers that anybody knows, as after `torch.manual_seed(0)`, one more record would
    change the dropout masks and the augmentation of all records that come after it, and no clip
    covers that.
    """
    with seeded(None):
        renew()
        yield


def renew() -> int:
    """Seed Python, numpy and torch (all devices in use) from OS entropy; torch's own seed."""
    random.seed()
    # As np.random.seed() does, which takes several times as long.
    np.random.set_state(("MT19937", _entropy(), _STATE_WORDS, 0, 0.0))
    for generator in _generators():
        generator.manual_seed(secrets.randbits(63))
    _fill(torch.default_generator)
    return torch.initial_seed()


@dataclass(frozen=True)
class FreshWorker:
    """Begins a worker of a DataLoader as the user says, and with random numbers of its own."""

    begin: Callable[[int], Any] | None

    def __call__(self, worker: int) -> None:
        if self.begin is not None:
            self.begin(worker)
        renew()  # last: the usual recipes seed numpy and Python


def fresh_seed() -> int:
    """A seed that nobody knows."""
    return secrets.randbits(32)


def shuffled(count: int, seed: int | None = None) -> Tensor:
    """0 … count - 1 in an order that takes nothing from torch's own random numbers."""
    generator = torch.Generator("cpu").manual_seed(fresh_seed() if seed is None else seed)
    return torch.randperm(count, generator=generator, device="cpu")


def _generators() -> list[torch.Generator]:
    """Those that torch draws from by default, on the CPU and on every GPU if one is in use."""
    on_gpus = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [torch.default_generator, *on_gpus]


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
