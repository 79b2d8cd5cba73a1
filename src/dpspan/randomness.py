"""Random numbers by a seed, with torch's own left as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


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
def left_as_found(model: nn.Module, seed: int) -> Iterator[None]:
    """Run the model on copies of its buffers, and its dropout on random numbers of its own.

    Copies, rather than contents restored: buffers are watched for changes during a private step.
    """
    found = [(module, dict(module._buffers)) for module in model.modules()]
    copies = {buffer: buffer.clone() for buffer in model.buffers()}  # what is shared stays shared
    try:
        for module, buffers in found:
            module._buffers.update({n: b if b is None else copies[b] for n, b in buffers.items()})
        with seeded(model, seed):
            yield
    finally:
        for module, buffers in found:
            module._buffers.clear()
            module._buffers.update(buffers)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """All of a model in evaluation mode."""
    modes = [(part, part.training) for part in model.modules()]
    try:
        for part, _ in modes:
            part.training = False
        yield
    finally:
        for part, training in modes:
            part.training = training


@contextmanager
def without_dropout() -> Iterator[None]:
    """Dropout keeps everything, so that two runs in training mode can be compared."""
    with _KeepAll():  # type: ignore[no-untyped-call]
        yield


class _KeepAll(TorchDispatchMode):
    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kept = args[1] if len(args) > 1 else 0.5
        if func is torch.ops.aten.bernoulli_.float:
            return args[0].fill_(kept)  # which dropout divides by the same number
        if func is torch.ops.aten.bernoulli.p:
            return torch.full_like(args[0], kept)
        if func is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        return func(*args, **(kwargs or {}))
