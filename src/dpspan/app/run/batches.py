"""Batches of samples in memory, each read at once: a sample at a time would take most of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

Samples = tuple[Tensor, ...]


class _Records(Dataset[Samples]):
    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset
        self._tensors = dataset.tensors

    def __len__(self) -> int:
        return len(self._tensors[0])

    def __getitem__(self, index: int) -> Samples:
        return tuple(tensor[index] for tensor in self._tensors)

    def __getitems__(self, indices: list[int]) -> Samples:
        chosen = torch.as_tensor(indices)
        return tuple(tensor[chosen] for tensor in self._tensors)


def _collate(batch: Samples | list[Samples]) -> Samples:
    """A batch that was read at once is one already."""
    return batch if isinstance(batch, tuple) else tuple(default_collate(batch))


def in_batches(dataset: TensorDataset, batch_size: int) -> DataLoader[Any]:
    """A loader over tensors."""
    return DataLoader(_Records(dataset), batch_size=batch_size, collate_fn=_collate)
