"""The expert's door: per-sample gradients of any loss, without an engine."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from dpspan.gradients.capture import Capture
from dpspan.gradients.operator import PerSampleGradients
from dpspan.model import isolation
from dpspan.model.isolation import differ, parameter_norms
from dpspan.support.errors import UnsupportedModule
from dpspan.support.left_as_found import left_as_found
from dpspan.support.randomness import RandomState


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
    tensors = isolation.tensors_of((batch, {}))
    sizes = {len(x) for x in tensors.values()}
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
    start = RandomState.now()
    result = gradients(*batch)
    here = parameter_norms(result)

    def norms(*batch: Any) -> Tensor:
        with left_as_found(model, start):
            return parameter_norms(gradients(*batch))

    rehearsal = isolation.Rehearsal(model, (batch, {}), samples, 1, frozenset(tensors))
    ways = isolation.companies(samples, wide=True), isolation.neighbours(samples)
    for kept, _, company in ways:
        elsewhere, _ = rehearsal.of(company)
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
    try:
        losses = loss_fn()
        if losses.shape != (samples,):
            raise ValueError(
                f"Expected loss_fn to return one loss per sample, shape ({samples},), got "
                f"{tuple(losses.shape)}. Use reduction='none' and average over what is left."
            )
        losses.sum().backward()
        return capture.collect()
    finally:
        capture.disarm()  # or what a run's own capture sees next would pass for this batch
