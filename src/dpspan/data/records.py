"""Samples in memory: what every source of data ends up as."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor
from torch.utils.data import TensorDataset


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What was read: the samples, and what a model has to know to take them."""

    dataset: TensorDataset = field(repr=False)
    classes: int
    shape: tuple[int, ...]  # of one sample's inputs
    labelled: bool

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """(inputs,) or (inputs, labels)."""
        return self.dataset.tensors
