"""Samples in memory: what every source of data ends up as."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import TensorDataset

_PIECE = 2048  # samples fingerprinted at a time


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What was read: the samples, and what a model has to know to take them.

    `raw` are fingerprints of the inputs as the file holds them, before they are scaled.
    """

    dataset: TensorDataset = field(repr=False)
    classes: int
    shape: tuple[int, ...]  # of one sample's inputs
    labelled: bool
    raw: tuple[bytes, ...] = field(repr=False)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """(inputs,) or (inputs, labels)."""
        return self.dataset.tensors

    def copies_of(self, other: Loaded) -> list[int]:
        """Which samples have the inputs of one of the other's, whatever their labels.

        Exact copies, in the files or after scaling: two sources of one file that are scaled
        differently have the first in common, a file and a scaled copy of it the second.
        """
        raw, scaled = set(other.raw), set(other._scaled)
        pairs = zip(self.raw, self._scaled, strict=True)
        return [i for i, (one, two) in enumerate(pairs) if one in raw or two in scaled]

    @cached_property
    def _scaled(self) -> tuple[bytes, ...]:
        return fingerprinted(self.tensors[0])


def fingerprinted(inputs: Tensor) -> tuple[bytes, ...]:
    """One hash a sample; whole numbers and floats of the same value are the same."""
    from dpspan.public.overlap import fingerprints

    return tuple(print_ for piece in inputs.split(_PIECE) for print_ in fingerprints(piece.float()))
