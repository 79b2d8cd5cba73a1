"""Public samples that are copies of private records: found by fingerprints, and refused.

Also of records that a frozen layer has been applied to, by what they were before.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from dpspan.public.data import Array, Collate, PublicData, in_order, inputs_of, leaves

_COMPARED = 512  # private records compared at a time


class Encoded(TensorDataset):
    """What a layer made of (input, label) pairs.

    `public` is what the layer was learnt from, `layer` its name, and `raw` are the fingerprints of
    the original inputs: rounding hides copies among encoded ones.
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


def fingerprints(inputs: Any) -> list[bytes]:
    """A hash of each sample's inputs: equal for equal values of equal shapes.

    Neither the labels nor the width of a dtype count (floats are compared as float32, integers as
    int64), nor padding that an "attention_mask" marks, or another length would hide a copy.
    """
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    kept = None if mask is None else mask.cpu().bool().numpy()
    columns = [_canonical(leaf) for _, leaf in leaves(inputs)]
    hashes = [hashlib.blake2b(digest_size=16) for _ in columns[0]]
    for column in columns:
        rows = list(column)
        if kept is not None and _is_padded(column, kept):
            rows = [row[keep] for row, keep in zip(column, kept, strict=True)]
        for sample, row in zip(hashes, rows, strict=True):
            sample.update(f"{row.shape};".encode())
            sample.update(row.tobytes())
    return [sample.digest() for sample in hashes]


def _is_padded(column: Array, kept: Array) -> bool:
    """Whether what the mask drops is one constant: a mask of other meaning would drop content."""
    if column.shape[: kept.ndim] != kept.shape:
        return False
    dropped = column[~kept]
    return bool((dropped == dropped.reshape(-1)[:1]).all())


def refuse_overlap(
    public: PublicData, private: Dataset[Any], collate_fn: Collate = default_collate
) -> None:
    """ValueError if public samples are copies of private records, whatever their labels.

    Exact copies only: rounding, another shape, random augmentation and padding that no attention
    mask marks all hide one, and so does a column that numbers the records. The outcome depends on
    private data, so it is an error for the operator to read, never part of a log or certificate.
    """
    encoded = encodings(private)
    if not encoded:
        refuse_copies(public, _private_fingerprints(private, collate_fn))
        return
    if public.raw is None:
        raise ValueError(
            f"The private data are encoded, but the public data '{public.name}' are not, or "
            "without fingerprints of the originals: use dpspan.encode_public(layer, public)."
        )
    refuse_copies(public, (fingerprint for each in encoded for fingerprint in each.raw))


def refuse_copies(public: PublicData, private: Iterable[bytes]) -> None:
    """ValueError if public samples have the fingerprints of private records."""
    known = public_fingerprints(public)
    private_copies = set(known).intersection(private)
    copied = [index for index, fingerprint in enumerate(known) if fingerprint in private_copies]
    if copied:
        raise ValueError(
            f"{len(copied)} of the {public.count} samples of the public data '{public.name}' also "
            f"occur in the private dataset (exact copies, e.g. public sample {copied[0]}). Remove "
            "those records from the private data with dpspan.without_public(private, public), or "
            "give other public data. This message depends on private data: do not publish it."
        )


def without_public(
    private: Dataset[Any], public: object, collate_fn: Collate = default_collate
) -> Subset[Any]:
    """The private records that are not copies of public samples (see `refuse_overlap`).

    Taken out of the private side, where each record's fate depends on it and on public data alone;
    removing the copies from the public data would reveal which records are private.

    Examples:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> import dpspan
        >>> records = TensorDataset(torch.arange(10.0)[:, None])
        >>> len(dpspan.without_public(records, torch.tensor([[3.0], [4.0]])))
        8
    """
    if encodings(private):
        raise ValueError("Remove copies of public samples before the private data are encoded.")
    known = set(public_fingerprints(PublicData.of(public)))
    found = enumerate(_private_fingerprints(private, collate_fn))
    return Subset(private, [index for index, fingerprint in found if fingerprint not in known])


def public_fingerprints(public: PublicData) -> Sequence[bytes]:
    """Of the samples, or of what they were before a layer was applied to them."""
    if public.raw is not None:
        return public.raw
    return [each for _, inputs, _ in public.pieces(_COMPARED) for each in fingerprints(inputs)]


def _private_fingerprints(private: Any, collate_fn: Collate) -> Iterator[bytes]:
    """One a record, in order; an empty one where a record has a form that public data cannot."""
    for records, batch in in_order(private, _COMPARED, collate_fn):
        inputs = inputs_of(batch)
        found = [leaf for _, leaf in leaves(inputs)]
        comparable = found and all(
            isinstance(leaf, Tensor) and leaf.shape[:1] == (records,) for leaf in found
        )
        yield from fingerprints(inputs) if comparable else [b""] * records


def _canonical(leaf: Tensor) -> Array:
    """The values in one dtype for all floats and one for all integers."""
    leaf = leaf.detach().cpu()
    if leaf.is_complex():
        leaf = torch.view_as_real(leaf)
    if leaf.is_floating_point():
        return (leaf.float() + 0.0).numpy().astype("<f4", copy=False)  # −0.0 + 0.0 is 0.0
    return leaf.numpy().astype("<i8", copy=False)
