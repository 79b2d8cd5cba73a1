"""What a capture or a guard would leave behind on a model."""

from __future__ import annotations

from torch import nn


def traces(model: nn.Module) -> list[str]:
    """The modules that have hooks or a forward pass that is not their class's."""
    return [
        path
        for path, module in model.named_modules()
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    ]
