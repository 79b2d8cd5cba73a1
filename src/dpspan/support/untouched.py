"""Modules run on the side: what they keep and the random numbers of the process are put back."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def fresh_seed() -> int:
    """A seed that nobody knows."""
    return secrets.randbits(32)


def shuffled(count: int) -> Tensor:
    """0 … count − 1 in an order that takes nothing from torch's own random numbers."""
    generator = torch.Generator("cpu").manual_seed(fresh_seed())
    return torch.randperm(count, generator=generator, device="cpu")


def positions(count: int) -> Tensor:
    """0 … count − 1, on the CPU whatever device torch makes tensors on."""
    return torch.arange(count, device="cpu")


def plain_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Tensors that are attributes, neither parameters nor buffers, by their path."""
    return {
        f"{path}.{name}" if path else name: value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, Tensor)
    }


@dataclass(frozen=True)
class RandomNumbers:
    """Where the generators stand that a module may draw from: torch's, numpy's and Python's."""

    cpu: bytes
    cuda: tuple[tuple[int, bytes], ...]
    numpy: tuple[Any, ...]
    python: tuple[Any, ...]

    @classmethod
    def of(cls, module: nn.Module) -> RandomNumbers:
        """Now."""
        devices = sorted({p.device.index or 0 for p in module.parameters() if p.is_cuda})
        name, keys, *rest = np.random.get_state()
        return cls(
            torch.get_rng_state().numpy().tobytes(),
            tuple((d, torch.cuda.get_rng_state(d).numpy().tobytes()) for d in devices),
            (name, tuple(np.asarray(keys).tolist()), *rest),
            random.getstate(),
        )

    def restore(self) -> None:
        """Draw from here on what was drawn then."""
        torch.set_rng_state(_bytes(self.cpu))
        for device, content in self.cuda:
            torch.cuda.set_rng_state(_bytes(content), device)
        np.random.set_state(self.numpy)
        random.setstate(self.python)

    def seed(self, seed: int) -> None:
        """Start these generators, and no other device's, from a seed."""
        torch.default_generator.manual_seed(seed)
        for device, _ in self.cuda:
            torch.cuda.default_generators[device].manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


@contextmanager
def untouched(module: nn.Module, start: int | RandomNumbers) -> Iterator[Callable[[], None]]:
    """All is drawn from a seed, or as from another time, and anew when the function is called.

    Afterwards buffers, attributes and random numbers are as before, whatever happened: a rehearsal
    must not leave private data behind.
    """
    parts = [(part, dict(vars(part)), dict(part._buffers)) for part in module.modules()]
    kept = (*module.buffers(), *plain_tensors(module).values())
    contents = [(x, x.clone()) for x in kept if x.grad_fn is None and not x.is_inference()]
    before = RandomNumbers.of(module)

    def restart() -> None:
        if isinstance(start, RandomNumbers):
            start.restore()
        else:
            before.seed(start)

    try:
        restart()
        yield restart
    finally:
        before.restore()
        for part, attributes, buffers in parts:
            for name in vars(part).keys() - attributes.keys():
                del vars(part)[name]
            vars(part).update(attributes)
            part._buffers.clear()
            part._buffers.update(buffers)
        with torch.no_grad():
            for tensor, content in contents:
                if not torch.equal(tensor, content):  # else a graph may still hold it as it is
                    tensor.copy_(content)
