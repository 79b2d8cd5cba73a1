"""Public samples that are copies of private records: found by fingerprints, and refused.

Also of records that a frozen layer has been applied to, by what they were before.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from dpspan.public.data import (
    Collate,
    PublicData,
    check_map_style,
    collated,
    in_memory,
    in_order,
    inputs_of,
    like,
)
from dpspan.public.fingerprints import Sieve, leaves
from dpspan.public.unchanged import stamp
from dpspan.support.progress import watched
from dpspan.support.units import Units

_COMPARED = 512  # private records compared at a time

Found = tuple[int, list[dict[int, bytes]]]  # how many records; of each sieve, which it found


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
    """The encoded ones in a dataset, also behind torch's Subset and ConcatDataset.

    ValueError if there are others beside them, of which nobody knows what they were.
    """
    parts = list(_parts(dataset))
    found = [each for each in parts if isinstance(each, Encoded)]
    if found and len(found) < len(parts):
        raise ValueError(
            "Some of the private records are encoded and others are not, so they cannot all be "
            "compared with public samples: join them before dpspan.encode(layer, records)."
        )
    return found


def _parts(dataset: Any) -> Iterator[Any]:
    behind = [getattr(dataset, "dataset", None), *(getattr(dataset, "datasets", None) or ())]
    inner = [each for each in behind if each is not None]
    if isinstance(dataset, Encoded) or not inner:
        yield dataset
        return
    for each in inner:
        yield from _parts(each)


def refuse_overlap(
    private: DataLoader[Any], public: Iterable[PublicData], units: Units | None = None
) -> None:
    """ValueError if public samples are copies of private records, whatever their labels.

    All public data are compared in one pass over the records, by the loader's workers. Exact copies
    only: rounding, another shape, random augmentation and padding that no attention mask marks all
    hide one, and so does a column that numbers the records. The outcome depends on private data, so
    it is an error for the operator to read, never part of a log or certificate. With `units` it
    says how many of them have such records.
    """
    public = dict.fromkeys(public)
    if encoded := encodings(private.dataset):
        for each in public:
            if each.raw is None:
                raise ValueError(
                    f"The private data are encoded, but the public data '{each.name}' are not, or "
                    "lack the originals' fingerprints: use dpspan.encode_public(layer, public)."
                )
            refuse_copies(each, (fingerprint for one in encoded for fingerprint in one.raw))
        return
    seen = stamp(private)
    asked = [each for each in public if seen not in each.sieve.cleared]
    copies: list[dict[int, bytes]] = [{} for _ in asked]
    first = 0
    for records, found in _compared(private, [each.sieve for each in asked]) if asked else ():
        for known, new in zip(copies, found, strict=True):
            known.update({first + place: copy for place, copy in new.items()})
        first += records
    for each, known in zip(asked, copies, strict=True):
        whose = None if units is None else len({int(units.owners[place]) for place in known})
        refuse_copies(each, known.values(), whose)
    if seen is not None and seen == stamp(private):  # nothing changed meanwhile
        for each in asked:
            each.sieve.cleared.add(seen)


def refuse_copies(public: PublicData, private: Iterable[bytes], units: int | None = None) -> None:
    """ValueError if public samples have the fingerprints of private records, of so many units."""
    copied = public.sieve.places(private)
    if copied:
        whose = "" if units is None else f", as records of {units} units"
        ids = "" if units is None else " and their ids with .indices of what it returns"
        raise ValueError(
            f"{len(copied)} of the {public.count} samples of the public data '{public.name}' also "
            f"occur in the private dataset (exact copies, e.g. public sample {copied[0]}){whose}. "
            f"Remove those records with dpspan.without_public(private, public){ids}, or give other "
            "public data. This message depends on private data: do not publish it."
        )


def without_public(
    private: Dataset[Any],
    public: object,
    collate_fn: Collate = default_collate,
    num_workers: int = 0,
) -> Subset[Any]:
    """The private records that are not copies of public samples (see `refuse_overlap`).

    Taken out of the private side, where each record's fate depends on it and on public data alone;
    removing the copies from the public data would reveal which records are private. `public` is
    anything that `PublicData.of` reads; `collate_fn` and `num_workers` are as of a DataLoader.
    """
    check_map_style(private, "The private dataset")
    if encodings(private):
        raise ValueError("Remove copies of public samples before the private data are encoded.")
    loader: DataLoader[Any] = DataLoader(private, collate_fn=collate_fn, num_workers=num_workers)
    kept: list[int] = []
    first = 0
    for records, (copies,) in _compared(loader, [PublicData.of(public).sieve]):
        kept += [first + place for place in range(records) if place not in copies]
        first += records
    return Subset(private, kept)


def _compared(private: DataLoader[Any], sieves: Sequence[Sieve]) -> Iterator[Found]:
    """Every record of the dataset, in order, a few at a time."""
    dataset: Any = private.dataset
    pieces: Iterable[list[Found]]
    if private.num_workers == 0 or in_memory(dataset, private.collate_fn):
        read = in_order(dataset, _COMPARED, private.collate_fn)
        pieces = ([_found(sieves, *batch) for batch in piece] for piece in read)
    else:
        pieces = like(
            private,
            batch_size=_COMPARED,
            collate_fn=partial(_found_by_worker, sieves, private.collate_fn),
            generator=torch.Generator(),  # takes nothing from torch's own random numbers
        )
    count = math.ceil(len(dataset) / _COMPARED)
    for piece in watched(pieces, "looking for public samples", shown=True, total=count):
        yield from piece


def _found_by_worker(
    sieves: Sequence[Sieve], collate_fn: Collate, records: list[Any]
) -> list[Found]:
    """In place of a collate_fn: what is found goes to the main process, not the records."""
    return [_found(sieves, *batch) for batch in collated(records, collate_fn)]


def _found(sieves: Sequence[Sieve], records: int, batch: Any) -> Found:
    inputs = inputs_of(batch)
    parts = [leaf for _, leaf in leaves(inputs)]
    comparable = parts and all(
        isinstance(leaf, Tensor) and leaf.shape[:1] == (records,) for leaf in parts
    )  # others have a form that public data cannot have
    return records, [sieve.among(inputs) if comparable else {} for sieve in sieves]
