"""Private records, read so that what one record looks like does not depend on the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from dpspan.choose.subspaces import PIECE
from dpspan.randomness import FreshWorker, fresh_randomness
from dpspan.sampling import PoissonDraw, PrivateLoader, records_of

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
    """The records of a Poisson sample, each with its label."""
    dataset: Any = loader.dataset
    draw = PoissonDraw(records=len(dataset), sample_rate=sample_rate, steps_per_epoch=1)
    (chosen,) = draw.epoch(np.random.default_rng())  # by OS entropy: who is in it is a secret
    if not len(chosen):
        return
    with fresh_randomness():  # the seeds of workers come from here
        batches = iter(
            DataLoader(
                Subset(dataset, chosen.tolist()),
                batch_size=piece,
                collate_fn=loader.collate_fn,
                num_workers=loader.num_workers,
                timeout=loader.timeout,
                worker_init_fn=FreshWorker(loader.worker_init_fn),
                multiprocessing_context=loader.multiprocessing_context,
            )
        )
    while True:
        with fresh_randomness():
            batch = next(batches, None)
        if batch is None:
            return
        yield _inputs_and_labels(batch)


def _inputs_and_labels(batch: Any) -> tuple[Any, Any]:
    if all(isinstance(leaf, Tensor) and leaf.dim() for leaf in tree_leaves(batch)):
        if isinstance(batch, Mapping):
            inputs = {key: value for key, value in batch.items() if key not in _LABEL_KEYS}
            labels = [value for key, value in batch.items() if key in _LABEL_KEYS]
            if len(labels) == 1 and inputs:
                return inputs, labels[0]
        elif isinstance(batch, tuple | list) and len(batch) == 2:
            return batch[0], batch[1]
    raise ValueError(
        "Expected private batches of (inputs, labels), or mappings with the labels under 'labels', "
        "that hold tensors with the records in the first dimension: private gradients are those of "
        "training, with the records' own labels."
    )
