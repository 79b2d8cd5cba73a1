"""The principal gradient subspace of a dataset, with its basis written out.

k × p numbers, whatever the number of samples: what a dataset is compared by once its gradients
have been let go.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dpspan.gradients.capture import captures_on
from dpspan.gradients.operator import PerSampleGradients
from dpspan.model.validation import validate
from dpspan.public.data import PublicData
from dpspan.public.gradients import Labels, PublicGradientSource, RandomLabels, labels_of
from dpspan.subspaces.subspace import Subspace

PIECE = 256  # samples run through the model at a time
Loss = Callable[..., Tensor]  # a criterion, or (model, inputs[, labels]) → one loss per sample


def evaluated(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode, as dropout would tie a sample's gradient to its place.

    Refuses a model whose samples have no gradients of their own.
    """
    validate(model)
    if captures_on(model):
        raise ValueError(
            "The model belongs to a private run: choose public data before make_private, or call "
            "detach() on its engine first."
        )
    return copy.deepcopy(model).eval()


def sample_gradients(
    model: nn.Module,
    loss_fn: Loss,
    data: PublicData,
    *,
    labels: str | Labels = "random",
    seed: int = 0,
    piece: int = PIECE,
) -> PerSampleGradients:
    """One gradient per sample at the model's weights; the model is left as it was.

    With a criterion as `loss_fn` the labels are drawn for the model's classes ("random") or are
    the data's own ("real"). A function `loss_fn(model, inputs[, labels])` gets what the data hold.
    """
    criterion = loss_fn if isinstance(loss_fn, nn.Module) else None
    if criterion is None:
        _check_arguments(loss_fn, data)
    chosen = RandomLabels(seed=seed) if labels == "random" else labels_of(labels)
    make = PublicGradientSource(
        model=model,
        data=data,
        labels=chosen,
        criterion=criterion,
        loss=loss_fn if criterion is None else None,
        samples=data.count,
        piece=piece,
        seed=seed,
    )
    return make(0)


def _check_arguments(loss: Loss, data: PublicData) -> None:
    """A function gets the labels that samples come with: nobody could draw them for it."""
    try:
        signature = inspect.signature(loss)
    except ValueError:  # some that are not written in Python have none
        return
    try:
        signature.bind(*range(3 if data.labelled else 2))
    except TypeError:
        given, advice = (
            ("labels", "leave them out, or let it take them")
            if data.labelled
            else ("no labels", "add them, or pass a criterion, which gets random ones")
        )
        raise ValueError(
            f"Expected loss_fn to take a model and what '{data.name}' holds, inputs and {given}, "
            f"got {getattr(loss, '__name__', type(loss).__name__)}{signature}: {advice}."
        ) from None


def principal_subspace(gradients: PerSampleGradients, rank: int, *, of: str) -> Subspace:
    """The top `rank` directions; ValueError if the gradients are not finite or span none."""
    subspace = Subspace.from_gradients(gradients, rank)
    if not bool(torch.isfinite(subspace.coefficients).all()):
        raise ValueError(
            f"The gradients of '{of}' are not finite, so they span no subspace. Look for NaN, Inf "
            "or huge values in its inputs, and in the weights of the model."
        )
    if subspace.rank == 0:
        raise ValueError(
            f"The gradients of '{of}' are all zero, so they span no subspace. Give a model at its "
            "initial weights, and samples that it can still learn from."
        )
    return subspace.explicit()
