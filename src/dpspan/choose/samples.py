"""Samples of datasets that are to be compared: so many of each, or of several as one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from dpspan.public.data import PublicData, Samples
from dpspan.support.checks import check_count, expect

_S = TypeVar("_S", bound=Samples)


def drawn(source: object, samples: int, *, seed: int, name: str, kind: type[_S]) -> _S:
    """At most `samples` of a dataset, by a seed that is no secret; of a large one only those."""
    check_count("samples", samples)
    if isinstance(source, Dataset) and hasattr(source, "__len__") and len(source) > samples:
        source = Subset(source, _chosen(len(source), samples, seed).tolist())
    data = replace(kind.of(source, name=name), name=name)
    return data if data.count <= samples else data.take(_chosen(data.count, samples, seed))


def combined(
    sources: Sequence[object], samples: int, *, seed: int = 0, name: str = "combined"
) -> PublicData:
    """Several public datasets as one candidate, with an equal share of `samples` from each.

    One that has fewer gives all it has, and the others no more for that. Labels are renumbered so
    that no two datasets share a class; random labels ignore them.
    """
    if len(sources) < 2:
        raise ValueError(f"Expected at least 2 datasets to combine, got {len(sources)}.")
    share = check_count("samples", samples) // len(sources)
    expect(share > 0, f"samples of at least {len(sources)}, one of each dataset", samples)
    parts = [drawn(source, share, seed=seed, name=name, kind=PublicData) for source in sources]
    batches: list[tuple[Any, ...]] = []
    classes = 0
    for part in parts:
        own = list(_batches(part))
        numbers = [labels for _, *rest in own for labels in rest if _are_classes(labels)]
        if not all(p.labelled for p in parts) or len(numbers) < len(own):
            batches += [batch[:1] for batch in own]
            continue
        batches += [(inputs, labels + classes) for inputs, labels in own]
        classes += 1 + int(max(labels.max() for labels in numbers))
    if len({len(batch) for batch in batches}) > 1:
        batches = [batch[:1] for batch in batches]
    raw = [print_ for part in parts for print_ in part.raw or ()]
    return _known_by(_held(name, iter(batches)), raw if all(part.raw for part in parts) else None)


def _chosen(count: int, samples: int, seed: int) -> Tensor:
    picked = np.random.default_rng([seed, count]).choice(count, samples, replace=False)
    return torch.from_numpy(np.sort(picked))


def _batches(data: PublicData) -> Iterator[tuple[Any, ...]]:
    for _, inputs, labels in data.pieces():
        yield (inputs,) if labels is None else (inputs, labels)


def _held(name: str, batches: Iterator[tuple[Any, ...]]) -> PublicData:
    ready: Any = list(batches)
    loader: Any = DataLoader(ready, batch_size=None, generator=torch.Generator())
    return PublicData.of(loader, name=name)


def _known_by(data: PublicData, raw: Sequence[bytes] | None) -> PublicData:
    """Data that a layer has been applied to are known by what they were before."""
    if raw is None:
        return data
    return replace(data, raw=tuple(raw), digest=hashlib.sha256(b"".join(raw)).hexdigest())


def _are_classes(labels: Any) -> bool:
    return isinstance(labels, Tensor) and not labels.is_floating_point() and labels.dim() == 1
