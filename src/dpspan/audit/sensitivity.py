"""How far can one record move what is released, in units of its noise?

A canary is the last row of a batch. Its content is exchanged while it counts nothing: then nobody
else's row may change. Then it counts, and the sums move by what it adds. Random numbers are drawn
from one seed, so that everybody keeps the same dropout masks. The sums are taken where they would
get their noise: nothing is released, and the weights stay.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from dpspan.audit.findings import Check
from dpspan.audit.noise import MeasuredNoise
from dpspan.engine.private_step import PrivateRun
from dpspan.engine.sampling import Piece
from dpspan.mechanisms.base import Sums
from dpspan.support.randomness import seeded

Loss = Callable[[nn.Module, Any], Tensor]
Content = Callable[[Tensor], Tensor]

_OTHERS = 15  # records beside the canary
_SOME = 8  # canaries of a kind of which there are many
_STEEP = 1e6  # what a loss is multiplied by, so that every gradient is clipped
_ROUNDING = 1e-3  # of the declared sensitivity


class _Stop(Exception):
    """Raised in place of a release, with what it would have been about."""


def _stop(total: Sums, *_: Any) -> Sums:
    raise _Stop({name: value.detach().double().clone() for name, value in total.items()})


class Batches:
    """The sums of one batch whose last row is a canary."""

    def __init__(self, run: PrivateRun, optimizer: Optimizer, loss: Loss, seed: int) -> None:
        self._run, self._optimizer, self._loss, self._seed = run, optimizer, loss, seed
        dataset = run.loader.dataset
        # Records are read once: augmentation by the dataset stays what it was.
        *self._others, self.last = [dataset[i] for i in range(min(_OTHERS + 1, len(dataset)))]

    def sums(self, canary: Any, *, counts: bool, steepness: float = 1.0) -> Sums:
        run, size = self._run, len(self._others) + 1
        batch = run.loader.collate_fn([*self._others, canary])
        run.on_piece(Piece(size, size, padded=False, first=True, last=True))
        run.guard.hand_over(batch)
        run.loader._seed = None  # this batch is not the loader's, and seeded on purpose
        if not counts:
            run._capture.batch.live = size - 1
        with patch.object(run.mechanism, "release", _stop), seeded(self._seed):
            self._optimizer.zero_grad()
            (self._loss(run._module, batch) * steepness).backward()
            try:
                self._optimizer.step()
            except _Stop as stopped:
                return dict(stopped.args[0])
        raise RuntimeError("The optimizer's step released nothing: it must call the private step.")

    def canaries(self) -> dict[str, list[Any]]:
        """Records by their kind. Of whole numbers alone (words) there are no huge ones."""
        generator = torch.Generator().manual_seed(self._seed)
        if not any(map(_is_real, tree_leaves(self.last))):
            return {"other records": self._others[:_SOME]}

        def normal(size: float) -> Content:
            def content(x: Tensor) -> Tensor:
                drawn = torch.randn(x.shape, generator=generator, dtype=torch.float64) * size
                largest = torch.finfo(x.dtype).max / 4
                return drawn.clamp(-largest, largest).to(x.dtype)

            return content

        near = self._of_public() or self._others[:_SOME]
        return {
            "random": [exchanged(self.last, normal(1.0))],
            "near the span": [exchanged(r, lambda x: x + normal(1e-3)(x).to(x)) for r in near],
            "far outside": [exchanged(self.last, normal(100.0))],
            "huge": [exchanged(self.last, normal(1e12))],
            "NaN": [exchanged(self.last, lambda x: torch.full_like(x, math.nan))],
        }

    def _of_public(self) -> list[Any]:
        """Public samples, whose gradients are in the span of public ones, as records are given."""
        data = next(iter(self._run.mechanism.public), None)
        if data is None or not isinstance(self.last, tuple | list):
            return []
        first, inputs = self.last[0], next(iter(data.pieces(_SOME))).inputs
        both = isinstance(first, Tensor) and isinstance(inputs, Tensor)
        if not both or inputs.shape[1:] != first.shape:
            return []
        others = zip(inputs, self._others, strict=False)
        return [(sample.detach().to(first), *rest) for sample, (_, *rest) in others]


def exchanged(record: Any, content: Content) -> Any:
    """A record with other content: its real numbers by `content`, whole ones as they are."""

    def other(leaf: Any) -> Any:
        if not _is_real(leaf):
            return leaf
        if isinstance(leaf, Tensor):
            return content(leaf)
        return float(content(torch.tensor(leaf, dtype=torch.float64)))

    return tree_map(other, record)


def _is_real(leaf: Any) -> bool:
    return isinstance(leaf, float) or (isinstance(leaf, Tensor) and leaf.is_floating_point())


def sensitivity_checks(batches: Batches, noise: MeasuredNoise, z: float) -> Iterator[Check]:
    """A record may move the sums as far as noise of the measured std covers at z."""

    def length(one: Sums, other: Sums) -> float:
        parts = [(float((one[n] - other[n]).norm()), noise.std[n]) for n in one]
        total = z * math.hypot(*(m / std if std else math.inf for m, std in parts if m))
        return math.inf if math.isnan(total) else total

    check, most = partial(Check, "sensitivity"), 1 + noise.error + _ROUNDING
    trials = {kind: (some, 1.0) for kind, some in batches.canaries().items()}
    trials["steep loss"] = ([batches.last], _STEEP)
    for kind, (canaries, steepness) in trials.items():
        sums = partial(batches.sums, steepness=steepness)
        before, moved, added = sums(batches.last, counts=False), 0.0, 0.0
        for canary in canaries:
            without = sums(canary, counts=False)
            moved = max(moved, length(without, before))
            added = max(added, length(sums(canary, counts=True), without))
        yield check(f"others moved by a canary ({kind})", moved, "0", moved <= _ROUNDING)
        name = f"of a canary ({kind}), of the declared one"
        yield check(name, added, "at most 1", added <= most)
