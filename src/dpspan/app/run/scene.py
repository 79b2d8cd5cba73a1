"""Public records in the place of the private ones: the same noise, at no cost in privacy.

n records, batches of L and noise multiplier z add noise of size z·C/L to the mean gradient. A
stand-in of m records is sampled at the same rate q, so its batches have L' = q·m records, and
z' = z·L'/L adds noise of the same size, at each of as many steps. So relative noise is that of
the real run. What differs: a batch of L' records is a coarser sample than one of L, and m records
teach less than n. z' is no guarantee of anything: the records are public.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from dpspan.app.run.task import Contender, Task
from dpspan.convex.thermometer import ThermometerFeatures
from dpspan.public.data import PublicData
from dpspan.public.overlap import without_public
from dpspan.public.patches import PatchFeatures, encode_public

_TEST, _PUBLIC = 0.25, 0.3  # shares of the stand-in to measure on, and to play the public data
_FEWEST = 8  # records in a batch: fewer say nothing


@dataclass(frozen=True, kw_only=True)
class BehindLayer:
    """A contender's model: a linear layer behind a frozen one that these public data make."""

    section: ClassVar[str]  # its name in a configuration, under `features`
    more: ClassVar[float] = 1.0  # learning rates are so much larger behind it
    public: PublicData
    classes: int

    @property
    def settings(self) -> dict[str, Any]:
        """Of the `features` section, and of `learn`."""
        own = fields(self)[len(fields(BehindLayer)) :]
        return {field.name: getattr(self, field.name) for field in own}

    def layer(self) -> PatchFeatures:
        raise NotImplementedError

    def learnt(self) -> tuple[PatchFeatures, nn.Linear]:
        """The frozen layer, and the other one."""
        layer = self.layer()
        return layer, nn.Linear(layer.basis.shape[1], self.classes)

    def __call__(self) -> nn.Module:
        return nn.Sequential(*self.learnt())


@dataclass(frozen=True, kw_only=True)
class OnPatches(BehindLayer):
    """Behind patches of the public images."""

    section = "patches"
    more = 40.0  # as features are short
    size: tuple[int, ...]  # of patches, in pixels
    filters: int = 300
    directions: int = 500
    mirror: bool = False  # which photographs would like, and letters not

    @classmethod
    def of(cls, task: Task, public: PublicData) -> Self | None:
        """For images that have room for patches; None for anything else."""
        inputs = public.batches[0][0]
        if not isinstance(inputs, torch.Tensor) or inputs.dim() != 4 or min(inputs.shape[2:]) < 8:
            return None
        size = (4, 6, 9) if min(inputs.shape[2:]) >= 20 else (3, 4, 5)
        classes = _outputs(task, inputs)
        return None if task.numeric else cls(public=public, classes=classes, size=size)

    def layer(self) -> PatchFeatures:
        return PatchFeatures.learn(self.public, **self.settings, progress=False)


@dataclass(frozen=True, kw_only=True)
class OnCuts(BehindLayer):
    """Behind cut points of the public rows."""

    section = "thermometer"
    cuts: int = 4

    @classmethod
    def of(cls, task: Task, public: PublicData) -> Self | None:
        """For rows of numbers with classes; None for anything else."""
        inputs = public.batches[0][0]
        rows = isinstance(inputs, torch.Tensor) and inputs.is_floating_point() and inputs.dim() == 2
        if task.numeric or not rows:
            return None
        return cls(public=public, classes=_outputs(task, inputs))

    def layer(self) -> PatchFeatures:
        return ThermometerFeatures.learn(self.public, **self.settings)


@torch.no_grad()
def _outputs(task: Task, inputs: torch.Tensor) -> int:
    return int(task.new_model(0).eval()(inputs[:2].to(task.device)).shape[1])


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One fold: a task on public records, and what plays the public data in it."""

    task: Task
    public: PublicData | None  # None: the contenders' own public data are used as they are
    sample_rate: float
    planned: int  # expected batch size of the real run

    def job(self, contender: Contender, noise: float, seed: int) -> tuple[Any, ...]:
        """The arguments of `rehearse`, with z' for the z of the real run."""
        noise *= self.task.batch_size / self.planned
        return self.task, self.contender(contender), seed, noise, self.sample_rate

    def contender(self, original: Contender) -> Contender:
        """The contender with the public data of this fold."""
        if self.public is None:
            return original
        method: Any = original.method
        if getattr(method, "public", None) is not None:
            rank = {"rank": min(method.rank, self.public.count)} if hasattr(method, "rank") else {}
            method = dataclasses.replace(method, public=self.public, **rank)
        start = original.warm_start and dataclasses.replace(original.warm_start, data=self.public)
        model = None if isinstance(original.model, BehindLayer) else original.model
        return dataclasses.replace(original, method=method, warm_start=start, model=model)

    def behind(self, made: BehindLayer) -> Scene:
        """The same fold as the frozen layer sees it that its public part makes: once for all."""
        public, task = self.public or made.public, self.task
        layer, head = dataclasses.replace(made, public=public).learnt()
        layer = layer.to(task.device)

        def seen(data: Dataset[Any]) -> TensorDataset:
            return TensorDataset(*encode_public(layer, data).batches[0])

        assert task.test is not None
        linear = functools.partial(nn.Linear, head.in_features, head.out_features)
        task = dataclasses.replace(
            task, model=linear, private=seen(task.private), test=seen(task.test)
        )
        vectors = dataclasses.replace(encode_public(layer, public), raw=None)
        return dataclasses.replace(self, task=task, public=vectors)


def scene_of(
    task: Task,
    stand_in: PublicData,
    *,
    fold: int,
    others: tuple[PublicData, ...] | None,
    share: float = 1.0,
) -> Scene:
    """Cut the stand-in, in another way for each fold.

    Samples that also occur in the contenders' public data (`others`) are left out; with None a part
    of the stand-in plays the public data. No more than a `share` of the records is trained on.
    """
    order = np.random.default_rng([fold, stand_in.count]).permutation(stand_in.count)
    tested = max(1, round(stand_in.count * _TEST))
    kept = round(stand_in.count * _PUBLIC) if others is None else 0
    test, public, rest = np.split(order, [tested, tested + kept])
    part = None
    if kept:
        part = PublicData.of(_part(stand_in, public).tensors, name="a part of the public data")
        others = (part,)
    private: Dataset[Any] = _part(stand_in, rest[: round(share * task.count)])
    for data in others or ():
        private = without_public(private, data)
    size = len(private)  # type: ignore[arg-type]
    rate = task.sample_rate
    batch = round(rate * size)
    if batch < _FEWEST:
        raise ValueError(
            f"Expected a stand-in large enough for batches of {_FEWEST} at the sampling rate "
            f"{rate:.3g} of the real run, got {size} samples to train on (batches of {batch}). "
            "Give more labelled public data, or plan with a larger batch_size."
        )
    own: dict[str, Any] = {"test": _part(stand_in, test), "batch_size": batch, "records": None}
    rehearsed = dataclasses.replace(task, private=private, **own, public=None, warm_start=None)
    return Scene(task=rehearsed, public=part, sample_rate=rate, planned=task.batch_size)


def public_of(contender: Contender) -> tuple[PublicData, ...]:
    """The public data that a contender uses."""
    start = contender.warm_start
    sources = (getattr(contender.method, "public", None), None if start is None else start.data)
    return tuple(PublicData.of(source) for source in sources if source is not None)


def _part(data: PublicData, indices: Any) -> TensorDataset:
    pieces = list(data.pieces(data.count, torch.from_numpy(np.sort(indices))))
    if len(pieces) != 1:
        raise ValueError(
            "Expected a stand-in whose samples all have the same shape, got several shapes: give "
            "tensors, or a DataLoader that pads to one length."
        )
    return TensorDataset(*pieces[0].batch)
