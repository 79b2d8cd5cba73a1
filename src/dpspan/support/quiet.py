"""Running a model without a trace, and without dropout, so that two runs can be compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpspan.support.untouched import untouched


@contextmanager
def on_the_side(model: nn.Module, seed: int) -> Iterator[None]:
    """Run a model from a seed, on copies of its buffers: those are watched for being written to."""
    with untouched(model, seed):  # which puts the buffers back, too
        copies = {buffer: buffer.clone() for buffer in model.buffers()}
        for part in model.modules():
            part._buffers.update(
                {n: None if b is None else copies[b] for n, b in part._buffers.items()}
            )
        yield


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
