"""One process trains one model. Several are refused, and so are the wrappers that use several.

Each process would draw batches from all records and noise of its own, write a ledger of its own,
and know nothing of the others' releases: no certificate would hold for what they make together.
"""

from __future__ import annotations

import os
from typing import Any

from torch import distributed, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from dpspan.capture import Hook
from dpspan.errors import UnsupportedModule

_WRAPPERS = (DistributedDataParallel, DataParallel)


def refuse_several_processes() -> None:
    """RuntimeError in a process that is one of several, by torch.distributed or by torchrun."""
    started = {name: os.environ.get(name, "") for name in ("WORLD_SIZE", "RANK")}
    several = _number(started["WORLD_SIZE"]) > 1 or _number(started["RANK"]) > 0
    if distributed.is_available() and distributed.is_initialized():
        several = several or distributed.get_world_size() > 1
    if several:
        raise RuntimeError(
            "This is one of several processes (torch.distributed, or WORLD_SIZE and RANK as "
            "torchrun sets them), and private training works in one: each would release a model of "
            "its own from all records, and its ledger would leave the others out. Start one "
            "process without torchrun; max_physical_batch_size= makes a large batch fit. For "
            "several runs that are released one by one, start each by itself, with WORLD_SIZE and "
            "RANK unset."
        )


def refuse_wrappers(model: nn.Module) -> None:
    """UnsupportedModule if the model, or a part of it, is wrapped for several devices."""
    for path, module in model.named_modules():
        if isinstance(module, _WRAPPERS):
            _refuse(type(module).__name__, path or "the model itself")


def watch_for_wrappers(model: nn.Module) -> RemovableHandle:
    """Refuse, when the model is called, what it was wrapped into since."""

    def look(called: nn.Module, _: Any) -> None:
        # While one of them calls its module, torch knows it by this name.
        if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
            _refuse(DistributedDataParallel.__name__, "the model")
        if getattr(called, "_is_replica", False):  # as one GPU of several gets it
            _refuse(DataParallel.__name__, "the model")

    return model.register_forward_pre_hook(Hook(look), prepend=True)


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _refuse(wrapper: str, what: str) -> None:
    raise UnsupportedModule(
        f"{what} is wrapped in {wrapper}, which splits batches and adds up gradients before they "
        "are clipped. Train the module inside it, on one device: pass it to make_private as it is, "
        "and leave it so."
    )
