"""Models that are wrapped for several devices are refused, before make_private and after it."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from dpspan.gradients.capture import Hook
from dpspan.support.errors import UnsupportedModule

_WRAPPERS = (DistributedDataParallel, DataParallel)


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


def _refuse(wrapper: str, what: str) -> None:
    raise UnsupportedModule(
        f"{what} is wrapped in {wrapper}, which splits batches and adds up gradients before they "
        "are clipped. Train the module inside it, on one device: pass it to make_private as it is, "
        "and leave it so."
    )
