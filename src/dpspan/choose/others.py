"""Does a record's score depend on the records beside it? Asked of public samples.

A record may move its own score only. So public samples are scored, and again in another order, with
other random numbers, and with half of them replaced by the worst neighbours there are: the scores
of the other half must not change. Private data are not read, so a refusal may be published.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dpspan.choose.scores import Score
from dpspan.choose.subspaces import Loss
from dpspan.model.per_sample import SampleCriterion, call
from dpspan.public.data import Piece, PublicData, move
from dpspan.public.gradients import RandomLabels
from dpspan.subspaces.subspace import Subspace
from dpspan.support.errors import UnsupportedModule
from dpspan.support.randomness import seeded

# Rounding, at the most. 60,000 records that each move by this, either way as often, move their sum
# by 5e-4: an eighth of what `selection` keeps for it.
_TOLERANCE = 2e-6
_SAMPLES = 64  # of each candidate, at the most


def _times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda values: values * factor if values.is_floating_point() else values


# What one half of the samples is replaced by, then the other half, and so on: NaN, outliers, and
# copies of one sample, which show in any maximum, mean or count. Those are last, where they also
# show what a loss remembers of the batches before.
_NEIGHBOURS: tuple[Callable[[Tensor], Tensor], ...] = (
    _times(torch.nan),
    _times(1e4),
    lambda values: values[:1].expand_as(values),
    lambda values: values[:1].expand_as(values),
)


def check_independence(
    model: nn.Module,
    loss_fn: Loss,
    subspaces: Sequence[Subspace],
    data: PublicData,
    *,
    seed: int,
    piece: int,
) -> None:
    """`UnsupportedModule` if the scores by this model and loss are not those of single samples."""
    piece = min(piece, _SAMPLES)
    score = Score(model, loss_fn, subspaces, piece=piece)
    batch = _samples(model, loss_fn, data, seed=seed, piece=piece)
    alone = score(*batch)
    generator = torch.Generator().manual_seed(seed)
    same, beside = torch.randperm(len(alone), generator=generator).tensor_split(2)
    for number, replaced in enumerate(_NEIGHBOURS, start=1):
        same, beside = beside, same
        order = torch.randperm(len(alone), generator=generator)
        again = score(*_beside(batch, replaced, beside, order), seed=number)[order.argsort()]
        if bool(((again - alone)[same].abs() > _TOLERANCE).any()):
            raise UnsupportedModule(
                "A sample's gradient depends on the other samples of its batch or on random "
                "numbers, even in evaluation mode, so no record's influence on the choice would be "
                f"bounded (seen with the public samples of '{data.name}'). Replace layers and "
                "losses that mix samples, or use a ProbeNetwork; if it is rounding, compute in "
                "float32 or float64."
            )


def _beside(
    batch: tuple[Any, Any], replaced: Callable[[Tensor], Tensor], beside: Tensor, order: Tensor
) -> tuple[Any, Any]:
    def one(leaf: Tensor) -> Tensor:
        rows = beside.to(leaf.device)
        return leaf.index_copy(0, rows, replaced(leaf[rows]))[order.to(leaf.device)]

    changed: tuple[Any, Any] = tree_map_only(Tensor, one, batch)
    return changed


def _samples(
    model: nn.Module, loss_fn: Loss, data: PublicData, *, seed: int, piece: int
) -> tuple[Any, Any]:
    """Inputs and labels of at most a piece, each sample once (a single one stands beside itself).

    Labels are random for a criterion, and the data's own for a function, as in `sample_gradients`.
    """
    indices, *given = next(data.pieces(piece))
    inputs, labels = move(given, next(model.parameters()).device)
    outputs = _outputs(model, loss_fn, inputs, labels, seed)
    if isinstance(loss_fn, nn.Module):
        scores = SampleCriterion(loss_fn, instead="loss_fn=").outputs(outputs, len(indices))
        source = RandomLabels(seed=seed).source(loss_fn, data)
        labels = source(Piece(indices, inputs, None), scores, 0)
    rows = torch.arange(max(len(indices), min(piece, 2))) % len(indices)
    batch: tuple[Any, Any] = tree_map_only(Tensor, lambda x: x[rows.to(x.device)], (inputs, labels))
    return batch


def _outputs(model: nn.Module, loss_fn: Loss, inputs: Any, labels: Any, seed: int) -> Any:
    """What a copy of the model (or a function of it) returns.

    Its buffers may change (a counter, a cache of positions), but not with the samples.
    """
    runs = []
    for given in (inputs, tree_map_only(Tensor, torch.zeros_like, inputs)):
        copied = copy.deepcopy(model)
        with torch.no_grad(), seeded(seed):
            if isinstance(loss_fn, nn.Module):
                returned = call(copied, given)
            else:
                returned = loss_fn(copied, given, *(() if labels is None else (labels,)))
        runs.append((returned, dict(copied.named_buffers())))
    (outputs, state), (_, blank) = runs
    for name, buffer in state.items():
        if name not in blank or not torch.equal(buffer, blank[name]):
            raise UnsupportedModule(
                f"'{name}' changes with the samples that the model sees, even in evaluation mode: "
                "a record would change the scores of others. Turn the running statistics of its "
                "module off, or use a ProbeNetwork."
            )
    return outputs
