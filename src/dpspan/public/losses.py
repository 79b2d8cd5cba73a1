"""One loss per sample, rather than their sum or mean."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dpspan.public.data import Samples
from dpspan.support.errors import DPSpanError

SampleLosses = Callable[..., Tensor]  # loss(model, inputs, labels): one loss per sample


class SampleCriterion:
    """One loss per sample by a copy of the criterion.

    `instead` names the argument that takes a function where the criterion does not serve.
    """

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


def check_one_each(losses: Any, samples: int, *, of: str = "loss") -> Tensor:
    """The losses that a function returned, if they are one per sample."""
    if not isinstance(losses, Tensor) or losses.shape != (samples,):
        got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(
            f"Expected {of} to return one loss per sample, shape ({samples},), got {got}. Use "
            "reduction='none' and average over what is left."
        )
    return losses


def check_classes(data: Samples, outputs: Sequence[int], criterion: nn.Module) -> None:
    """Class labels must be the model's classes: a GPU's own error would end the process.

    `outputs` is the shape of the outputs for one sample.
    """
    takes_classes = isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss)
    if not takes_classes or not outputs:  # no classes; the criterion says so
        return
    classes, ignored = outputs[0], getattr(criterion, "ignore_index", -100)
    for indices, _, labels in data.pieces():
        if not isinstance(labels, Tensor) or labels.is_floating_point():  # class probabilities
            continue
        wrong = ((labels < 0) | (labels >= classes)) & (labels != ignored)
        if bool(wrong.any()):
            sample = int(indices[wrong.nonzero()[0, 0]])
            raise ValueError(
                f"Expected public labels from 0 to {classes - 1}, the model's classes, got "
                f"{int(labels[wrong][0])} at sample {sample} of '{data.name}': renumber them as "
                "the private data has them, or leave out samples of other classes (GEP and PDPSGD "
                "can do without labels, by public_labels='random')."
            )


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
