"""Private records: each read on its own, what it makes of each candidate, and exact sums of that.

What one record looks like does not depend on the others: each is collated alone, so that a collate
function that pads to the longest record, mixes records or counts them sees one. Only records that
come out in one shape get into one batch. Nothing here is private by itself: `selection` draws from
the sums with ε-DP.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from dpspan.choose.subspaces import PIECE, Loss, energies
from dpspan.engine.sampling import PoissonDraw, PrivateLoader, records_of
from dpspan.model.per_sample import SampleCriterion, per_sample_gradients
from dpspan.public.data import hold, move
from dpspan.subspaces.subspace import Subspace
from dpspan.support.randomness import FreshWorker, fresh_randomness, seeded

UNIT = 2**24  # scores are counted in whole numbers of 1/UNIT, so that their sums are exact


class Score:
    """s_ij of a batch of records: (n, candidates) float64, between 0 and 1.

    Each batch meets the model and the loss as they were: on copies, so that nothing that a batch
    leaves in them reaches the next. Batches of fewer than `piece` records are filled up with
    repetitions, since the last bits of a result depend on the size of the batch.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Loss, subspaces: Sequence[Subspace], *, piece: int = PIECE
    ) -> None:
        if isinstance(loss_fn, nn.Module):
            loss_fn = SampleCriterion(loss_fn, instead="loss_fn=")
        self._model_and_loss = model, loss_fn
        self._subspaces, self._piece = subspaces, piece
        self._device = next(model.parameters()).device
        self.candidates = len(subspaces)

    def __call__(self, inputs: Any, labels: Any | None, *, seed: int = 0) -> Tensor:
        batch = move((inputs,) if labels is None else (inputs, labels), self._device)
        count = len(tree_leaves(batch)[0])
        rows = torch.arange(max(count, self._piece), device=self._device) % count
        model, loss = copy.deepcopy(self._model_and_loss)
        with torch.enable_grad(), seeded(seed):
            filled = tree_map_only(Tensor, lambda leaf: leaf[rows], batch)
            gradients = per_sample_gradients(model, loss, *filled, check=False)
        return energies(gradients, self._subspaces)[:count].cpu()


def totals(score: Score, batches: Iterable[tuple[Any, Any]], threshold: float | None) -> list[int]:
    """q_j in whole numbers: exact, in any order of the records."""
    constants = torch.tensor([] if threshold is None else [threshold], dtype=torch.float64)
    sums = torch.zeros(score.candidates + len(constants), dtype=torch.int64)
    for inputs, labels in batches:
        scores = score(inputs, labels)
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
        for kind, batch in _by_kind(read).items():
            full = _joined([waiting.pop(kind), batch]) if kind in waiting else batch
            if len(tree_leaves(full)[0]) >= piece:
                yield tree_map(lambda leaf: leaf[:piece], full)
                full = tree_map(lambda leaf: leaf[piece:], full)
            if len(tree_leaves(full)[0]):
                waiting[kind] = full
    yield from waiting.values()


class _Single(Subset[Any]):
    """Some of the records, each asked for alone: a dataset may read several at once its own way."""

    __getitems__ = None  # type: ignore[assignment]


def _collated(collate: Callable[[list[Any]], Any], records: list[Any]) -> list[Any]:
    """Batches of records of one shape; in a worker, which had better not send each by itself."""
    return list(_by_kind(_inputs_and_labels(collate([record])) for record in records).values())


def _by_kind(batches: Iterable[Any]) -> dict[Any, Any]:
    """Batches of the same structure, shapes and dtypes as one."""
    alike: dict[Any, list[Any]] = {}
    for batch in batches:
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
