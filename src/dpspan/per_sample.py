"""The expert's door: per-sample gradients of any loss, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dpspan.capture import Capture
from dpspan.gradients import PerSampleGradients


def per_sample_gradients(
    model: nn.Module, loss_fn: Callable[..., Tensor], *batch: Any
) -> PerSampleGradients:
    """The gradients of each sample's loss, where `loss_fn(model, *batch)` gives one loss a sample.

    Nothing here is private: this is the raw material of the mechanisms.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> import dpspan
        >>> def loss(model, x, y):
        ...     return nn.functional.cross_entropy(model(x), y, reduction="none")
        >>> x, y = torch.randn(5, 4), torch.tensor([0, 1, 0, 1, 1])
        >>> J = dpspan.per_sample_gradients(nn.Linear(4, 2), loss, x, y)
        >>> J.samples, J.norms().shape
        (5, torch.Size([5]))
    """
    sizes = {
        leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()
    }
    if len(sizes) != 1:
        raise ValueError(
            f"Expected every tensor of the batch to have the same first dimension, got {sizes}."
        )
    (samples,) = sizes
    with Capture(model) as capture:
        capture.expect(samples)
        losses = loss_fn(model, *batch)
        if losses.shape != (samples,):
            raise ValueError(
                f"Expected loss_fn to return one loss per sample, shape ({samples},), got "
                f"{tuple(losses.shape)}. Use reduction='none' and average over what is left."
            )
        losses.sum().backward()
        return capture.collect()
