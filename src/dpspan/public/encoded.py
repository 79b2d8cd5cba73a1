"""Private records that a frozen layer has been applied to, and what has to be known of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import TensorDataset

if TYPE_CHECKING:
    from dpspan.public.data import PublicData


class Encoded(TensorDataset):
    """What a layer made of (input, label) pairs.

    `public` is what the layer was learnt from, `layer` its name, and `raw` are the fingerprints of
    the inputs before: what was encoded is rounded, and copies could no longer be told by it.
    """

    def __init__(
        self, inputs: Tensor, labels: Tensor, *, public: PublicData, layer: str, raw: list[bytes]
    ) -> None:
        super().__init__(inputs, labels)
        self.public, self.layer, self.raw = public, layer, frozenset(raw)


def encodings(dataset: Any) -> list[Encoded]:
    """The encoded datasets that this one is, or is a part or a concatenation of.

    Found behind `dataset` and `datasets`, as torch's Subset and ConcatDataset have them.
    """
    if isinstance(dataset, Encoded):
        return [dataset]
    behind = [getattr(dataset, "dataset", None), *(getattr(dataset, "datasets", None) or ())]
    return [found for each in behind if each is not None for found in encodings(each)]
