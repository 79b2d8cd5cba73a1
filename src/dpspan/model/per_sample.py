"""The expert's door: per-sample gradients of any loss, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from dpspan.gradients.capture import Capture
from dpspan.gradients.operator import PerSampleGradients
from dpspan.model.isolation import companies, differ, neighbours, parameter_norms
from dpspan.support.errors import UnsupportedModule
from dpspan.support.untouched import RandomNumbers, untouched


def per_sample_gradients(
    model: nn.Module, loss_fn: Callable[..., Tensor], *batch: Any, check: bool = True
) -> PerSampleGradients:
    """The gradients of each sample's loss, where `loss_fn(model, *batch)` gives one loss a sample.

    Nothing here is private: this is the raw material of the mechanisms.

    `check` takes half of the samples in other company and compares, which doubles the time: turn
    it off where the same model and loss have passed before. Without it a model whose layers do not
    have the batch in front (or that mixes samples) gives wrong rows where another dimension happens
    to be as long as the batch.

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

    def gradients(*batch: Any) -> PerSampleGradients:
        with Capture(model) as capture:
            return recorded(capture, lambda: loss_fn(model, *batch), samples)

    if not check or samples < 2:
        return gradients(*batch)
    start = RandomNumbers.of(model)
    result = gradients(*batch)

    def norms(*batch: Any) -> Tensor:
        with untouched(model, start):
            return parameter_norms(gradients(*batch))

    here = parameter_norms(result)
    for kept, _, company in (companies(samples, wide=True), neighbours(samples)):
        elsewhere = tree_map_only(Tensor, partial(_rows, rows=company), batch)
        try:
            there = norms(*elsewhere)
        except (RuntimeError, ValueError):  # sequences that must be sorted, say: in another order
            continue
        if differ(here[kept], there[kept]) and not differ(here, norms(*batch)):
            raise UnsupportedModule(
                f"The gradient of a sample of {type(model).__name__} depends on the other samples "
                "of the batch: a layer, or the loss, mixes them, or does not have the batch in the "
                "first dimension of its input. Build layers with batch_first=True, and give inputs "
                "that all samples share a first dimension of 1."
            )
        break
    return result


def recorded(capture: Capture, loss_fn: Callable[[], Tensor], samples: int) -> PerSampleGradients:
    """The gradients of one loss per sample, recorded by a capture of the model."""
    capture.expect(samples)
    losses = loss_fn()
    if losses.shape != (samples,):
        raise ValueError(
            f"Expected loss_fn to return one loss per sample, shape ({samples},), got "
            f"{tuple(losses.shape)}. Use reduction='none' and average over what is left."
        )
    losses.sum().backward()
    return capture.collect()


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    return x[rows.to(x.device)] if x.dim() else x
