"""What each record gives each candidate: read on its own, checked to be its own, summed exactly.

What one record looks like does not depend on the others: each is collated alone, so that a collate
function that pads to the longest record, mixes records or counts them sees one. Only records that
come out in one shape get into one batch. Nothing here is private by itself: `selection` draws from
the sums with ε-DP.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from dpspan.choose.probe import PIECE, Probe
from dpspan.engine.sampling import PoissonDraw, PrivateLoader, records_of
from dpspan.public.data import PublicData, hold
from dpspan.public.gradients import Piece, RandomLabels
from dpspan.public.losses import SampleCriterion, call
from dpspan.subspaces.subspace import Subspace
from dpspan.support.errors import UnsupportedModule
from dpspan.support.randomness import FreshWorker, fresh_randomness, seeded

UNIT = 2**24  # scores are counted in whole numbers of 1/UNIT, so that their sums are exact


def totals(
    probe: Probe,
    subspaces: Sequence[Subspace],
    batches: Iterable[tuple[Any, Any]],
    threshold: float | None,
) -> list[int]:
    """q_j in whole numbers: exact, in any order of the records."""
    constants = torch.tensor([] if threshold is None else [threshold], dtype=torch.float64)
    sums = torch.zeros(len(subspaces) + len(constants), dtype=torch.int64)
    for inputs, labels in batches:
        scores = probe.scores(subspaces, inputs, labels)
        scores = torch.cat([scores, constants.expand(len(scores), -1)], dim=1)
        sums += (scores * UNIT).long().sum(0)
    result: list[int] = sums.tolist()
    return result


# -- reading -------------------------------------------------------------------------------------


def private_loader(private: Any) -> DataLoader[Any]:
    """A loader over the private records, whatever they came as."""
    if isinstance(private, tuple | list) and all(isinstance(x, Tensor) for x in private):
        private = TensorDataset(*private)
    if isinstance(private, Dataset):
        private = DataLoader(private, batch_size=PIECE)
    if isinstance(private, DataLoader | PrivateLoader):
        records_of(private)  # refuses what cannot be sampled record by record
    if not isinstance(private, DataLoader):
        raise TypeError(
            f"Cannot read private records from a {type(private).__name__}: give a DataLoader, a "
            "map-style Dataset, or tensors (inputs, labels)."
        )
    return private


def sampled_batches(
    loader: DataLoader[Any], sample_rate: float, piece: int
) -> Iterator[tuple[Any, Any]]:
    """The records of a Poisson sample, each with its label, in batches of one shape each."""
    dataset: Any = loader.dataset
    draw = PoissonDraw(records=len(dataset), sample_rate=sample_rate, steps_per_epoch=1)
    (chosen,) = draw.epoch(np.random.default_rng())  # by OS entropy: who is in it is a secret
    if not len(chosen):
        return
    with fresh_randomness():  # the seeds of workers come from here
        batches = iter(
            DataLoader(
                _Single(dataset, chosen.tolist()),
                batch_size=piece,
                collate_fn=partial(_collated, loader.collate_fn),
                num_workers=loader.num_workers,
                timeout=loader.timeout,
                worker_init_fn=FreshWorker(loader.worker_init_fn),
                multiprocessing_context=loader.multiprocessing_context,
            )
        )
    waiting: dict[Any, Any] = {}
    while True:
        with fresh_randomness():
            read = next(batches, None)
        if read is None:
            break
        for kind, batch in read.items():
            held = [waiting.pop(kind)] if kind in waiting else []
            full = _joined([*held, batch])  # copies: handles of workers' shared memory are few
            if len(tree_leaves(full)[0]) >= piece:
                yield tree_map(lambda leaf: leaf[:piece], full)
                full = tree_map(lambda leaf: leaf[piece:], full)
            if len(tree_leaves(full)[0]):
                waiting[kind] = full
    yield from waiting.values()


class _Single(Subset[Any]):
    """Some of the records, each asked for alone: a dataset may read several at once its own way."""

    __getitems__ = None  # type: ignore[assignment]


def _collated(collate: Callable[[list[Any]], Any], records: list[Any]) -> dict[Any, Any]:
    """A batch for each structure, shapes and dtypes that there are.

    Made in a worker, which had better not send each record by itself.
    """
    alike: dict[Any, list[Any]] = {}
    for record in records:
        batch = _inputs_and_labels(collate([record]))
        leaves, form = tree_flatten(batch)
        kind = repr(form), *((leaf.shape[1:], leaf.dtype) for leaf in leaves)
        alike.setdefault(kind, []).append(batch)
    return {kind: _joined(held) for kind, held in alike.items()}


def _joined(batches: list[Any]) -> Any:
    return tree_map(lambda *leaves: torch.cat(leaves), *batches)


def _inputs_and_labels(batch: Any) -> tuple[Any, ...]:
    """Of a batch of one record."""
    parts = hold(batch)
    if len(parts) == 2 and len(tree_leaves(parts)[0]) == 1:
        return parts
    raise ValueError(
        "Expected private batches of (inputs, labels), or mappings with the labels under 'labels', "
        "that hold tensors with one row for each record, in the first dimension: private gradients "
        "are those of training, with the records' own labels."
    )


# -- does a record's score depend on the records beside it? ---------------------------------------
#
# Public samples are scored, and again in another order, with other random numbers, and with half of
# them replaced by the worst neighbours there are: the scores of the other half must not change.
# Private data are not read, so a refusal may be published.

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


def check_independence(probe: Probe, subspaces: Sequence[Subspace], data: PublicData) -> None:
    """`UnsupportedModule` if the scores of a probe are not those of single samples."""
    probe = replace(probe, piece=min(probe.piece, _SAMPLES))
    batch = _samples(probe, data)
    alone = probe.scores(subspaces, *batch)
    generator = torch.Generator().manual_seed(probe.seed)
    same, beside = torch.randperm(len(alone), generator=generator).tensor_split(2)
    for number, replaced in enumerate(_NEIGHBOURS, start=1):
        same, beside = beside, same
        order = torch.randperm(len(alone), generator=generator)
        changed = _beside(batch, replaced, beside, order)
        again = probe.scores(subspaces, *changed, seed=number)[order.argsort()]
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


def _samples(probe: Probe, data: PublicData) -> tuple[Any, Any]:
    """Inputs and labels of at most a piece, each sample once (a single one stands beside itself).

    Labels are random for a criterion, and the data's own for a function, as for gradients.
    """
    indices, inputs, labels = next(data.pieces(probe.piece, device=probe.device))
    outputs = _outputs(probe, inputs, labels)
    if isinstance(probe.loss_fn, nn.Module):
        scores = SampleCriterion(probe.loss_fn, instead="loss_fn=").outputs(outputs, len(indices))
        source = RandomLabels(seed=probe.seed).source(probe.loss_fn, data)
        labels = source(Piece(0, indices, inputs, None), scores)
    rows = torch.arange(max(len(indices), min(probe.piece, 2))) % len(indices)
    batch: tuple[Any, Any] = tree_map_only(Tensor, lambda x: x[rows.to(x.device)], (inputs, labels))
    return batch


def _outputs(probe: Probe, inputs: Any, labels: Any) -> Any:
    """What a copy of the model (or a function of it) returns.

    Its buffers may change (a counter, a cache of positions), but not with the samples.
    """
    runs = []
    for given in (inputs, tree_map_only(Tensor, torch.zeros_like, inputs)):
        copied = copy.deepcopy(probe.model)
        with torch.no_grad(), seeded(probe.seed):
            if isinstance(probe.loss_fn, nn.Module):
                returned = call(copied, given)
            else:
                returned = probe.loss_fn(copied, given, *(() if labels is None else (labels,)))
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
