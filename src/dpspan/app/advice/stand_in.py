"""A rehearsal on public data: the same steps and the same noise, seen by each step.

n records, batches of L and noise multiplier z add noise of size z·C/L to the mean gradient. A
stand-in of m records is sampled at the same rate q, so its batches have L' = q·m records, and z' =
z·L'/L adds noise of the same size, at each of as many steps. So relative noise is that of the real
run. What differs: a batch of L' records is a coarser sample than one of L, and m records teach
less than n. z' is no guarantee of anything: the records are public.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

from dpspan.app.run.training import Contender, Task
from dpspan.public.data import PublicData
from dpspan.public.overlap import without_public

_TEST, _PUBLIC = 0.25, 0.3  # shares of the stand-in to measure on, and to play the public data
_FEWEST = 8  # records in a batch: fewer say nothing


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """One fold: a task on public records, and what plays the public data in it."""

    task: Task
    public: PublicData | None  # None: the contenders' own public data are used as they are
    sample_rate: float
    planned: int  # expected batch size of the real run

    def noise(self, noise_multiplier: float) -> float:
        """z' for the z of the real run."""
        return noise_multiplier * self.task.batch_size / self.planned

    def contender(self, original: Contender) -> Contender:
        """The contender with the public data of this fold."""
        if self.public is None:
            return original
        method: Any = original.method
        if getattr(method, "public", None) is not None:
            method = dataclasses.replace(method, public=self.public)
            if hasattr(method, "rank"):
                method = dataclasses.replace(method, rank=min(method.rank, self.public.count))
        start = original.warm_start and dataclasses.replace(original.warm_start, data=self.public)
        return dataclasses.replace(original, method=method, warm_start=start)


def rehearsal(
    task: Task,
    stand_in: PublicData,
    *,
    records: int,
    fold: int,
    keep_public: bool,
    others: tuple[PublicData, ...],
) -> Rehearsal:
    """Cut the stand-in, in another way for each fold.

    With `keep_public` a part of it plays the public data; otherwise samples that also occur in the
    contenders' public data (`others`) are left out.
    """
    order = np.random.default_rng([fold, stand_in.count]).permutation(stand_in.count)
    tested = max(1, round(stand_in.count * _TEST))
    kept = round(stand_in.count * _PUBLIC) if keep_public else 0
    test, public, rest = np.split(order, [tested, tested + kept])
    part = _part(stand_in, public, name="a part of the public data") if kept else None
    private: Dataset[Any] = _dataset(_part(stand_in, rest[:records], name="stand-in"))
    for data in (*others, *([] if part is None else [part])):
        private = without_public(private, data)
    size = len(private)  # type: ignore[arg-type]
    rate = task.batch_size / records
    batch = round(rate * size)
    if batch < _FEWEST:
        raise ValueError(
            f"Expected a stand-in large enough for batches of {_FEWEST} at the sampling rate "
            f"{rate:.3g} of the real run, got {size} samples to train on (batches of {batch}). "
            "Give more labelled public data, or plan with a larger batch_size."
        )
    tested_on = _dataset(_part(stand_in, test, name="stand-in test"))
    rehearsed = dataclasses.replace(
        task, private=private, test=tested_on, batch_size=batch, public=None, warm_start=None
    )
    return Rehearsal(task=rehearsed, public=part, sample_rate=rate, planned=task.batch_size)


def public_of(contender: Contender) -> tuple[PublicData, ...]:
    """The public data that a contender uses."""
    start = contender.warm_start
    sources = (getattr(contender.method, "public", None), None if start is None else start.data)
    return tuple(PublicData.of(source) for source in sources if source is not None)


def _part(data: PublicData, indices: Any, *, name: str) -> PublicData:
    chosen = torch.from_numpy(np.sort(indices))
    pieces = list(data.pieces(data.count, chosen))
    if len(pieces) != 1:
        raise ValueError(
            "Expected a stand-in whose samples all have the same shape, got several shapes: give "
            "tensors, or a DataLoader that pads to one length."
        )
    _, inputs, labels = pieces[0]
    return PublicData.of((inputs, labels), name=name)


def _dataset(data: PublicData) -> TensorDataset:
    ((inputs, labels),) = data.batches
    return TensorDataset(inputs, labels)
