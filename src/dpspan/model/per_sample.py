"""One loss per sample, rather than their sum or mean; and its gradients, without an engine."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dpspan.gradients.capture import Capture
from dpspan.gradients.operator import PerSampleGradients
from dpspan.model import isolation
from dpspan.model.isolation import Rehearsal, differ, parameter_norms
from dpspan.support.errors import DPSpanError, UnsupportedModule
from dpspan.support.left_as_found import left_as_found
from dpspan.support.randomness import RandomState

SampleLosses = Callable[..., Tensor]  # loss(model, inputs, labels): one loss per sample


def per_sample_gradients(
    model: nn.Module, loss_fn: Callable[..., Tensor], *batch: Any, check: bool = True
) -> PerSampleGradients:
    """The gradients of each sample's loss, where `loss_fn(model, *batch)` gives one loss a sample.

    Nothing here is private: this is the raw material of the mechanisms. Of a sharded model, all
    processes must ask for the same batch.

    `check` takes half of the samples in other company and compares, which doubles the time: turn
    it off where the same model and loss have passed before. Without it a model that mixes samples,
    or layers with another dimension in front that is as long as the batch, give wrong rows.
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

    rehearsal = Rehearsal(model, (batch, {}), samples, 1, frozenset(tensors))
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
    capture.expect(samples, everywhere=True)
    try:
        check_one_each(loss_fn(), samples, of="loss_fn").sum().backward()
        return capture.collect()
    finally:
        capture.disarm()  # or what a run's own capture sees next would pass for this batch


def check_one_each(losses: Any, samples: int, *, of: str = "loss") -> Tensor:
    """The losses that a function returned, if they are one per sample."""
    if not isinstance(losses, Tensor) or losses.shape != (samples,):
        got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(
            f"Expected {of} to return one loss per sample, shape ({samples},), got {got}. Use "
            "reduction='none' and average over what is left."
        )
    return losses


class SampleCriterion:
    """One loss per sample by a copy of the criterion, or by an argument called `instead`."""

    def __init__(self, criterion: nn.Module, *, instead: str) -> None:
        self.name, self._instead = type(criterion).__name__, instead
        if not hasattr(criterion, "reduction"):
            raise ValueError(
                f"{self.name} has no `reduction`, so it cannot be asked for one loss per sample: "
                f"pass {instead}, a function that returns them."
            )
        # The user's own keeps its reduction, and its hooks: the engine watches private batches.
        unreduced: Any = copy.deepcopy(criterion)
        unreduced.reduction = "none"
        self._criterion: nn.Module = unreduced

    def __call__(self, model: nn.Module, inputs: Any, labels: Any) -> Tensor:
        """The model's loss for each sample."""
        if labels is None:
            raise ValueError(
                f"Expected samples with labels for {self.name}, got inputs only: give (inputs, "
                f"labels), or pass {self._instead}, a function that returns one loss per sample."
            )
        return self.losses(self.outputs(call(model, inputs), len(tree_leaves(labels)[0])), labels)

    def outputs(self, returned: Any, samples: int) -> Tensor:
        """The scores in what a model returns; Hugging Face models have them as `logits`."""
        scores = getattr(returned, "logits", returned)
        by_token = scores is not returned and isinstance(scores, Tensor) and scores.dim() == 3
        if by_token or not isinstance(scores, Tensor) or scores.shape[:1] != (samples,):
            raise ValueError(
                f"The model returns {shapes(scores)} for {samples} samples, and how that "
                f"enters the loss is unknown: pass {self._instead}, a function that returns one "
                "loss per sample."
            )
        return scores

    def losses(self, outputs: Tensor, labels: Any) -> Tensor:
        """The mean loss of each sample; ValueError if it is not that sample's alone."""
        with explained(
            f"{self.name} cannot compare the model's outputs, {shapes(outputs)}, with the labels, "
            f"{shapes(labels)}; if they need some preparation, pass {self._instead}"
        ):
            # Not by calling the module: its copy has the hooks that it had itself.
            entries: Tensor = self._criterion.to(outputs.device).forward(outputs, labels)
        # Outputs (n, 1) against labels (n,) give n² entries: every sample with every label.
        if entries.shape[:1] != outputs.shape[:1] or entries.numel() > outputs.numel():
            raise ValueError(
                f"{self.name} gives losses of shape {tuple(entries.shape)} for outputs of shape "
                f"{tuple(outputs.shape)}, labels of {shapes(labels)} and reduction='none', not "
                "one or more per sample. Give the labels the shape that it expects, or pass "
                f"{self._instead}, a function that returns one loss per sample."
            )
        return entries.reshape(len(outputs), -1).mean(1)


def call(model: nn.Module, inputs: Any) -> Any:
    """The model run on a batch; a mapping holds its arguments by name."""
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Say what was tried when torch refuses it."""
    try:
        yield
    except (DPSpanError, torch.OutOfMemoryError):
        raise  # they say themselves what to do
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ValueError(f"{what}: {error}") from error


def shapes(tree: Any) -> str:
    """Shapes and dtypes in words."""
    if isinstance(tree, Mapping):
        return ", ".join(f"{key}: {shapes(value)}" for key, value in tree.items())
    if isinstance(tree, tuple | list):
        return ", ".join(map(shapes, tree))
    if isinstance(tree, Tensor):
        return f"shape {tuple(tree.shape)} ({str(tree.dtype).removeprefix('torch.')})"
    return type(tree).__name__
