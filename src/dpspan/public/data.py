"""Samples, and those that are public: read once, held in memory, known by their digest.

A batch is a tensor (inputs), a tuple or list (inputs,) or (inputs, labels), or a mapping as Hugging
Face makes them: the labels under "labels" or "label", everything else inputs. Every tensor has the
samples in its first dimension.
"""

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, singledispatch
from itertools import groupby
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from dpspan.public.fingerprints import Sieve, leaves
from dpspan.support.checks import check_count, expect

_LABEL_KEYS = ("labels", "label")
_COMPARED = 512  # samples that a sieve is made of at a time
_READ = 2048  # samples read, or handed over, at a time where nobody says otherwise

Collate = Callable[[list[Any]], Any]
Batch = tuple[Any, ...]  # (inputs,) or (inputs, labels)


class Piece(NamedTuple):
    """Some of the samples: which they are, on the CPU, and what they are."""

    indices: Tensor
    inputs: Any
    labels: Any | None

    @property
    def batch(self) -> Batch:
        """(inputs,) or (inputs, labels)."""
        return (self.inputs,) if self.labels is None else (self.inputs, self.labels)


@dataclass(frozen=True)
class Samples:
    """Samples of a dataset, held in memory on the CPU; made by `of`.

    Says nothing of who may see them: a private batch is one as well. Two of them are equal if
    their names and contents are, however the samples were batched.
    """

    name: str
    count: int
    labelled: bool
    digest: str  # sha256 over dtypes, shapes and bytes of inputs and labels, sample by sample
    batches: tuple[Batch, ...] = field(repr=False, compare=False)
    largest_piece: int = field(repr=False, compare=False)
    # Of data that a frozen layer has been applied to: the fingerprints before (`encode_public`).
    raw: tuple[bytes, ...] | None = field(default=None, repr=False, compare=False)

    what: ClassVar[str] = "data"  # in errors

    @classmethod
    def of(cls, source: object, *, name: str) -> Self:
        """Read anything that `PublicData.of` reads."""
        if isinstance(source, cls):
            return source
        expect(isinstance(name, str), "name to be a text", name)
        batches = list(read(source))
        if not batches:
            raise ValueError(f"The {cls.what} '{name}' are empty: give at least one sample.")
        if len({len(batch) for batch in batches}) > 1:
            raise ValueError(
                f"Some batches of the {cls.what} '{name}' have labels and some have none: give "
                "all of them labels, or none."
            )
        by_loader = isinstance(source, DataLoader)
        return cls._held(name, batches, max(map(_samples, batches)) if by_loader else _READ)

    @classmethod
    def _held(cls, name: str, parts: list[Batch], largest_piece: int) -> Self:
        batches = _joined(parts)
        _check_finite(f"{cls.what} '{name}'", batches)
        return cls(
            name=name,
            count=sum(map(_samples, batches)),
            labelled=len(batches[0]) == 2,
            digest=_digest(batches),
            batches=batches,
            largest_piece=largest_piece,
        )

    def take(self, chosen: Tensor) -> Self:
        """Some of the samples, by their sorted indices."""
        batches = [piece.batch for piece in self.pieces(chosen=chosen)]
        held = self._held(self.name, batches, self.largest_piece)
        if self.raw is None:
            return held
        # Data that a layer has been applied to are known by what they were before.
        raw = tuple(self.raw[index] for index in chosen.tolist())
        return replace(held, raw=raw, digest=hashlib.sha256(b"".join(raw)).hexdigest())

    def pieces(
        self,
        size: int | None = None,
        chosen: Tensor | None = None,
        device: torch.device | None = None,
    ) -> Iterator[Piece]:
        """The samples in pieces of at most `size`, on the CPU or moved to `device`.

        Without `size` a piece is at most as large as the DataLoader's batches were, or 2048.
        `chosen` are the sorted indices of the samples wanted, all of them by default. Samples of
        different shapes (padded to different lengths) never share a piece.
        """
        size = self.largest_piece if size is None else check_count("size", size)
        indices = torch.arange(self.count) if chosen is None else chosen.cpu()
        ordered = indices.dim() == 1 and bool((indices.diff() > 0).all())
        inside = bool(((indices >= 0) & (indices < self.count)).all())
        expect(ordered and inside, f"chosen to be sorted indices below {self.count}", chosen)
        first = 0
        for batch in self.batches:
            last = first + _samples(batch)
            mine = indices[(indices >= first) & (indices < last)]
            for part in mine.split(size) if len(mine) else ():
                rows = tree_map(itemgetter(part - first), batch)
                inputs, *labels = rows if device is None else move(rows, device)
                yield Piece(part, inputs, labels[0] if labels else None)
            first = last

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: it never changes, and models that hold it are copied often."""
        return self


@dataclass(frozen=True)
class PublicData(Samples):
    """Samples that anybody may see, held in memory on the CPU; made by `PublicData.of`."""

    what: ClassVar[str] = "public data"

    @cached_property
    def sieve(self) -> Sieve:
        """Finds copies of the samples; made once, since they never change."""
        return Sieve(lambda: (piece.inputs for piece in self.pieces(_COMPARED)), self.raw)

    @classmethod
    def of(cls, source: object, *, name: str = "public") -> Self:
        """Read a map-style dataset, a DataLoader, a tensor, (x,), (x, y) or a dict of tensors.

        A DataLoader keeps its collation and its batch size; one that shuffles is read in the order
        of its dataset, so that the same data have the same digest, and the same random labels, in
        every run. Random augmentation is frozen as it was when the data were read.
        """
        if type(source) is Samples:
            raise TypeError(
                f"The samples '{source.name}' are not declared public, and may be private: only "
                "data that anybody may see can become PublicData."
            )
        return super().of(source, name=name)


def move(inputs: Any, device: torch.device) -> Any:
    """Every tensor of a batch on a device."""
    return tree_map_only(Tensor, lambda x: x.to(device, non_blocking=True), inputs)


def read(source: object) -> Iterator[Batch]:
    """The batches, of CPU tensors, without empty ones."""
    return (batch for batch in map(hold, batches_of(source)) if _samples(batch))


@singledispatch
def batches_of(source: Any) -> Iterable[Any]:
    """The batches of anything that samples can be read from."""
    raise TypeError(
        f"Cannot read samples from a {type(source).__name__}: give a map-style torch Dataset, "
        "a DataLoader (it reads any dataset), a tensor, (x,), (x, y), or a dict of tensors."
    )


@batches_of.register(Tensor | tuple | list | Mapping)
def _(source: Any) -> Iterable[Any]:
    return [source]


@batches_of.register
def _(source: Dataset) -> Iterable[Any]:  # type: ignore[type-arg]
    if isinstance(source, IterableDataset) or not hasattr(source, "__len__"):
        raise TypeError(
            f"The dataset ({type(source).__name__}) is an IterableDataset, or has no length: give "
            "a map-style dataset, or a DataLoader over it (it must end: all is held in memory)."
        )
    return (batch for piece in in_order(source, _READ, default_collate) for _, batch in piece)


@batches_of.register
def _(source: DataLoader) -> Iterable[Any]:  # type: ignore[type-arg]
    sampler: Any = source.sampler
    shuffles = isinstance(sampler, RandomSampler) and not sampler.replacement
    if source.batch_size is None or not shuffles or len(sampler) != len(sampler.data_source):
        return source
    own = {name: getattr(source, name) for name in ("batch_size", "drop_last", "generator")}
    return like(source, **own)


def like(loader: DataLoader[Any], **other: Any) -> DataLoader[Any]:
    """A loader of the same dataset, collation and workers, but for what is `other`."""
    kept = "dataset collate_fn num_workers worker_init_fn multiprocessing_context prefetch_factor"
    return DataLoader(**({name: getattr(loader, name) for name in kept.split()} | other))


def check_map_style(dataset: Any, what: str) -> None:
    """TypeError for a stream, with what to give in its place."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"{what} has no length: {type(dataset).__name__} cannot be sampled record by record, "
            "as private training must; give a map-style dataset with __len__ and __getitem__. "
            "Records that do not fit into memory can be mapped from Arrow files: "
            'datasets.load_from_disk(folder).with_format("torch") is map-style (the extra '
            "`datasets`; see docs/many-records.md)."
        )


def in_order(dataset: Any, size: int, collate_fn: Collate) -> Iterator[list[tuple[int, Any]]]:
    """The records of a map-style dataset in order, `size` at a time, as `collated` gives them."""
    for start in range(0, len(dataset), size):
        indices = range(start, min(start + size, len(dataset)))
        inner, chosen = _behind_subsets(dataset, indices)
        if in_memory(inner, collate_fn):
            yield [(len(indices), [tensor[_selected(chosen)] for tensor in inner.tensors])]
        elif callable(several := getattr(inner, "__getitems__", None)):  # as a DataLoader reads
            yield collated(several(list(chosen)), collate_fn)
        else:
            yield collated([inner[index] for index in chosen], collate_fn)


def collated(records: Any, collate_fn: Collate) -> list[tuple[int, Any]]:
    """The records as batches, (records, batch); one by one if they cannot be collated together."""
    if not isinstance(records, list):  # a dataset's own __getitems__ may give a batch ready made
        batch = collate_fn(records)
        rows = [len(x) for x in tree_leaves(batch) if isinstance(x, Tensor) and x.dim()]
        expect(bool(rows), "tensors in a batch that __getitems__ made", type(batch).__name__)
        return [(rows[0], batch)]
    # A collate_fn may take a record apart, and be called a second time.
    copies = [copy.copy(each) if isinstance(each, Mapping) else each for each in records]
    try:
        return [(len(records), collate_fn(copies))]
    except (RuntimeError, ValueError, TypeError):  # tensors of different sizes do not stack
        return [(1, collate_fn([record])) for record in records]


def in_memory(dataset: Any, collate_fn: Collate) -> bool:
    """Whether batches are rows of tensors, which are indexed at once."""
    inner, _ = _behind_subsets(dataset, ())
    return type(inner) is TensorDataset and collate_fn is default_collate


def _behind_subsets(dataset: Any, indices: Sequence[int]) -> tuple[Any, Sequence[int]]:
    while type(dataset) is Subset:  # not a subclass, which may change what it returns
        dataset, indices = dataset.dataset, [int(dataset.indices[index]) for index in indices]
    return dataset, indices


def _selected(indices: Sequence[int]) -> Any:
    if isinstance(indices, range):
        return slice(indices.start, indices.stop)  # a view
    return torch.as_tensor(indices)


def hold(batch: Any) -> Batch:
    """The batch in plain dicts, tuples and CPU tensors."""
    if isinstance(batch, tuple | list) and len(batch) not in (1, 2):
        raise ValueError(
            f"A batch of samples has {len(batch)} parts: give (inputs,) or (inputs, "
            "labels), or a dict if the model takes several inputs."
        )
    labels = tuple(batch[1:]) if isinstance(batch, tuple | list) else ()
    if isinstance(batch, Mapping):
        labels = tuple(batch[key] for key in _LABEL_KEYS if key in batch)
        if len(labels) == 2 or len(batch) == len(labels):
            raise ValueError(
                "A batch of samples has the keys "
                f"{sorted(map(str, batch))}: give inputs, and labels under one of {_LABEL_KEYS}."
            )
    held = tuple(_plain(part) for part in (inputs_of(batch), *labels))
    sizes = sorted({leaf.shape[0] for _, leaf in leaves(held)})
    if len(sizes) != 1:
        raise ValueError(
            "Expected every tensor of a batch to have the samples in its first dimension, "
            f"got first dimensions of {sizes}."
        )
    return held


def inputs_of(batch: Any) -> Any:
    """The inputs of a batch, whatever else it holds."""
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key not in _LABEL_KEYS}
    return batch[0] if isinstance(batch, tuple | list) and batch else batch


def _plain(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {str(key): _plain(value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return tuple(_plain(value) for value in tree)
    if not isinstance(tree, Tensor) or tree.dim() == 0:
        what = "tensor without dimensions" if isinstance(tree, Tensor) else type(tree).__name__
        raise TypeError(
            "Expected batches to hold tensors with the samples in the first "
            f"dimension, got a {what}. Give a DataLoader whose collate_fn makes such tensors."
        )
    tensor = tree.detach().cpu()
    # Worker processes hand over shared memory, of which a process can hold only so many handles.
    return tensor.clone() if tensor.is_shared() else tensor


def _samples(batch: Batch) -> int:
    return len(tree_leaves(batch)[0])


def _joined(batches: list[Batch]) -> tuple[Batch, ...]:
    """Neighbours of the same shapes as one batch each. Always copies: what is held stays."""

    def layout(batch: Batch) -> list[tuple[str, torch.dtype, torch.Size]]:
        return [(path, leaf.dtype, leaf.shape[1:]) for path, leaf in leaves(batch)]

    alike = (list(run) for _, run in groupby(batches, key=layout))
    return tuple(tree_map(lambda *parts: torch.cat(parts), *run) for run in alike)


def _check_finite(what: str, batches: Iterable[Batch]) -> None:
    whole = [[x.isfinite().reshape(len(x), -1).all(1) for x in tree_leaves(b)] for b in batches]
    finite = torch.cat([torch.stack(of_leaves).all(0) for of_leaves in whole])
    bad = (~finite).nonzero().flatten().tolist()
    if bad:
        raise ValueError(
            f"{len(bad)} of the {len(finite)} samples of the {what} hold NaN or "
            f"infinity in their inputs or labels (the first is sample {bad[0]}): leave them out."
        )


def _digest(batches: Iterable[Batch]) -> str:
    whole = hashlib.sha256()
    for batch in batches:
        samples = _samples(batch)
        columns = [
            (
                f"{path}:{leaf.dtype}:{tuple(leaf.shape[1:])};".encode(),
                leaf.reshape(samples, leaf[0].numel()).view(torch.uint8).numpy(),
            )
            for path, leaf in leaves(batch)
        ]
        for sample in range(samples):
            for header, content in columns:
                whole.update(header)
                whole.update(content[sample])
    return whole.hexdigest()
