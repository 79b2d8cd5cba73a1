"""Private records, read so that what one record looks like does not depend on the others.

Each is read and collated on its own: a collate function that pads to the longest record, mixes
records or counts them sees one. Only records that come out in one shape get into one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dpspan.choose.subspaces import PIECE
from dpspan.engine.sampling import PoissonDraw, PrivateLoader, records_of
from dpspan.support.randomness import FreshWorker, fresh_randomness

_LABEL_KEYS = ("labels", "label")


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
            if _count(full) >= piece:
                yield tree_map(lambda leaf: leaf[:piece], full)
                full = tree_map(lambda leaf: leaf[piece:], full)
            if _count(full):
                waiting[kind] = full
    yield from waiting.values()


class _Single(Dataset[Any]):
    """Some of the records, each asked for alone: a dataset may read several at once its own way."""

    def __init__(self, dataset: Any, chosen: list[int]) -> None:
        self._dataset, self._chosen = dataset, chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[self._chosen[index]]


def _collated(collate: Callable[[list[Any]], Any], records: list[Any]) -> list[Any]:
    """Batches of records of one shape; in a worker, which had better not send each by itself."""
    return list(_by_kind(_inputs_and_labels(collate([record])) for record in records).values())


def _by_kind(batches: Iterable[Any]) -> dict[Any, Any]:
    """Batches of the same structure, shapes and dtypes as one."""
    alike: dict[Any, list[Any]] = {}
    for batch in batches:
        leaves, form = tree_flatten(batch)
        kind = form, *((leaf.shape[1:], leaf.dtype) for leaf in leaves)
        alike.setdefault(kind, []).append(batch)
    return {kind: _joined(held) for kind, held in alike.items()}


def _joined(batches: list[Any]) -> Any:
    return tree_map(lambda *leaves: torch.cat(leaves), *batches)


def _count(batch: Any) -> int:
    return len(tree_leaves(batch)[0])


def _inputs_and_labels(batch: Any) -> tuple[Any, Any]:
    """Of a batch of one record."""
    if all(isinstance(leaf, Tensor) and leaf.shape[:1] == (1,) for leaf in tree_leaves(batch)):
        if isinstance(batch, Mapping):
            inputs = {key: value for key, value in batch.items() if key not in _LABEL_KEYS}
            labels = [value for key, value in batch.items() if key in _LABEL_KEYS]
            if len(labels) == 1 and inputs:
                return inputs, labels[0]
        elif isinstance(batch, tuple | list) and len(batch) == 2:
            return batch[0], batch[1]
    raise ValueError(
        "Expected private batches of (inputs, labels), or mappings with the labels under 'labels', "
        "that hold tensors with one row for each record, in the first dimension: private gradients "
        "are those of training, with the records' own labels."
    )
