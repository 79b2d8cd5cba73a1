"""One run with canaries: what its releases tell about who took part, as ε ≥ x.

A white-box canary is a record whose gradient is a direction of its own, ten times as long as the
clip; the coin says whether it is in the data, and then every step draws it like any record. Half of
them (as many as there is room for) lie inside of the span in which the method works. Its score is
the sum, over the steps, of what the release has in its direction, less what the other records have:
whoever attacks may know all records but the canaries. A black-box canary is a record of noise with
somebody's label, and its score is how small its loss is in the end.

The run is a rehearsal: its model has learnt canaries, and its certificate says so.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from dpspan.audit.lower_bound import FEWEST, epsilon_lower_bound
from dpspan.audit.sensitivity import Loss, exchanged
from dpspan.audit.step import Prepared, take_steps
from dpspan.engine.private_step import PrivateRun
from dpspan.engine.sampling import PoissonDraw
from dpspan.gradients.layers.terms import Rows
from dpspan.gradients.operator import PerSampleGradients, SmallGradient
from dpspan.mechanisms.adaptive import AdaptiveMechanism
from dpspan.mechanisms.base import EMBEDDING, Sums
from dpspan.mechanisms.subspace_method import SubspaceMechanism
from dpspan.support.checks import check_count, check_seed, expect
from dpspan.support.left_as_found import left_as_found
from dpspan.support.strict_json import plain

IN_TRAINING = "canaries of an audit were in the training: a rehearsal, and no model to publish"

_LENGTH = 10.0  # of a canary's gradient, in clips
_MOST_NUMBERS = 4e8  # in all directions together
_MOST_WORK = 1e11  # for directions at right angles, which do not hide each other
_MOST = 1000  # canaries, unless more are asked for


@dataclass(frozen=True, kw_only=True)
class CanaryAudit:
    """ε is at least `epsilon` at δ, with 95 % confidence. Each bound has that confidence by itself.

    Attributes:
        epsilon: from the released gradients, whatever the mechanism is.
        gaussian: the same if the noise is Gaussian, as all methods here declare.
        black_box: from the final model alone.
        declared: what the ledger of the rehearsal says. A bound above it is a finding.
    """

    epsilon: float
    gaussian: float
    black_box: float
    declared: float
    delta: float
    canaries: int
    inside: int  # of the span, of the white-box ones
    steps: int

    @property
    def passed(self) -> bool:
        return max(self.epsilon, self.black_box) <= self.declared

    def describe(self) -> dict[str, Any]:
        """As plain data, None for what is not finite; tagged as not private."""
        return {**plain(asdict(self)), "passed": self.passed, "unprivate": True}


def audit_canaries(
    prepare: Callable[[Sequence[Any]], Prepared],
    loss: Loss,
    *,
    steps: int,
    delta: float,
    canaries: int | None = None,
    like: Any = None,
    seed: int = 0,
) -> CanaryAudit:
    """Rehearse a run with canaries in it, and bound its ε from below.

    Args:
        prepare: `prepare(added)` makes a private run anew, with these records among the private
            ones: the engine, and what its `make_private` returned.
        loss: `loss(model, batch)` as your training loop computes it.
        steps: how many to take.
        delta: of the bound.
        canaries: how many of each kind; by default as many as a step releases numbers, at most
            1,000: more would hide each other.
        like: a record whose form black-box canaries take, of anybody; without one there are none.
        seed: of the canaries. Coins and noise come from OS entropy.
    """
    check_count("steps", steps)
    generator = torch.Generator().manual_seed(check_seed(seed))
    coins = np.random.default_rng()
    count = _MOST if canaries is None else check_count("canaries", canaries, least=FEWEST)

    def normal(x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=generator).to(x)

    records = [] if like is None else [exchanged(like, normal) for _ in range(count)]
    in_data = coins.random(len(records)) < 0.5
    added = [record for record, coin in zip(records, in_data, strict=True) if coin]
    prepared = engine, module, _, loader = prepare(added)
    engine.ledger.warn(IN_TRAINING)
    planted = _Planted(engine._running(), coins, generator)
    with planted.plant(canaries or max(FEWEST, min(_MOST, planted.released_numbers()))):
        take_steps(prepared, loss, lambda: planted.steps == steps)
    black_box, collate = 0.0, loader.collate_fn
    if records:
        with left_as_found(module, 0, mode="evaluation"), torch.no_grad():
            losses = np.array([float(loss(module, collate([record]))) for record in records])
        losses[~np.isfinite(losses)] = np.inf
        black_box = epsilon_lower_bound(-losses, in_data, delta=delta)
    declared = engine.get_epsilon(delta)
    engine.detach()
    scores, coin = planted.scores, planted.coins
    return CanaryAudit(
        epsilon=epsilon_lower_bound(scores, coin, delta=delta),
        gaussian=epsilon_lower_bound(scores, coin, delta=delta, gaussian=True),
        black_box=black_box,
        declared=declared,
        delta=delta,
        canaries=len(planted.coins),
        inside=planted.inside,
        steps=steps,
    )


class _Planted:
    """White-box canaries in a run: adds those that a step draws, and scores its release."""

    def __init__(
        self, run: PrivateRun, coins: np.random.Generator, generator: torch.Generator
    ) -> None:
        self._run, self._coins, self._generator = run, coins, generator
        draw = run.plan.sampling
        expect(run.plan.unit == "record", "each record to be its own unit", run.plan.unit)
        if not isinstance(draw, PoissonDraw):
            raise ValueError("Canaries are drawn by Poisson sampling: leave poisson_sampling=True.")
        self._rate = draw.sample_rate
        self._trained = {n: p for n, p in run._module.named_parameters() if p.requires_grad}
        self._size = sum(p.numel() for p in self._trained.values())
        self._like = next(iter(self._trained.values())).detach()
        self._mechanism = cast(Any, run.mechanism)

    def released_numbers(self) -> int:
        """In how many dimensions canaries have to be told from each other."""
        self._mechanism.prepare()
        one = self._as_gradients(self._like.new_ones(1, self._size))
        return sum(x.numel() for x in self._mechanism.clipped_sum(one).values())

    def plant(self, count: int) -> AbstractContextManager[object]:
        """While steps are taken; coins are tossed here."""
        most = f"at most {_MOST_NUMBERS:.0e} numbers in all canaries: ask for fewer of them"
        expect(count * self._size <= _MOST_NUMBERS, most, count * self._size)
        self._fixed = torch.randn(count, self._size, generator=self._generator).to(self._like)
        if count <= self._size and count**2 * self._size <= _MOST_WORK:  # else nearly so anyway
            self._fixed = torch.linalg.qr(self._fixed.T).Q.T.contiguous()
        self._now, self._real = self._fixed, dict[str, Tensor]()  # of the present step
        self.coins = self._coins.random(count) < 0.5
        self.scores, self.inside, self.steps = np.zeros(count), 0, 0
        self._clipped_sum, self._release = self._mechanism.clipped_sum, self._mechanism.release
        return patch.multiple(
            self._mechanism, clipped_sum=self._with_canaries, release=self._scored
        )

    def _with_canaries(self, gradients: PerSampleGradients) -> Sums:
        total: Sums = self._clipped_sum(gradients)
        first = not self._real
        self._real = {n: x + self._real[n] if self._real else x.clone() for n, x in total.items()}
        if not first:  # another piece of a batch
            return total
        self._now = self._directions()
        drawn = self.coins & (self._coins.random(len(self.coins)) < self._rate)
        if not drawn.any():
            return total
        length = _LENGTH * self._clip
        rows = self._now[torch.from_numpy(drawn).to(self._now.device)] * length
        more: Sums = self._clipped_sum(self._as_gradients(rows))
        return {name: value + more[name] for name, value in total.items()}

    def _scored(self, total: Sums, *rest: Any) -> Sums:
        """The release, and what it has of each canary."""
        released: Sums = self._release(total, *rest)
        left = {name: (x - self._real[name]).flatten() for name, x in released.items()}
        self._real, self.steps = {}, self.steps + 1
        rows = self._as_gradients(self._now)
        if carriers := self._mechanism.carriers():
            rows = rows.compress(carriers)
        for name, x in left.items():
            if name == EMBEDDING:
                image = self._mechanism.span.embed(rows)
            elif name in rows.terms:
                image = rows.terms[name].rows(0, rows.samples)
            else:  # of no gradient: an adaptive clip's count
                continue
            self.scores += (image @ x.to(image)).double().cpu().numpy() / self._clip
        return released

    @property
    def _clip(self) -> float:
        """Of the present step: one that adapts moves, and the noise with it."""
        own = getattr(self._mechanism, "_private", self._mechanism)
        adapts = isinstance(own, AdaptiveMechanism)
        return float(own.clip) if adapts else self._run.plan.method.clip_norm

    def _parts(self, rows: Tensor) -> dict[str, Tensor]:
        """What rows have of each parameter, (n, numel): views of them."""
        sizes = [parameter.numel() for parameter in self._trained.values()]
        return dict(zip(self._trained, rows.split(sizes, dim=1), strict=True))

    def _as_gradients(self, rows: Tensor) -> PerSampleGradients:
        shapes = {name: p.shape for name, p in self._trained.items()}
        parts = self._parts(rows).items()
        terms = {name: [Rows(part.reshape(-1, *shapes[name]))] for name, part in parts}
        return PerSampleGradients(shapes, terms, len(rows), like=rows)

    def _directions(self) -> Tensor:
        """Unit vectors, the first of them in the span of the present step."""
        mechanism, now = self._mechanism, self._fixed.clone()
        if isinstance(mechanism, SubspaceMechanism) and mechanism._span is not None:
            span = mechanism.span
            basis = [span.lift(unit) for unit in torch.eye(span.dimensions).to(now)]
            flat = torch.stack([torch.cat([b[n].flatten() for n in self._trained]) for b in basis])
            flat = flat.to(now)
            whole = any(not isinstance(name, SmallGradient) for name in self._real)
            self.inside = min(len(now) // 2 if whole else len(now), len(flat))
            now -= (now @ flat.T) @ flat
            now[: self.inside] = flat[: self.inside]
        elif carriers := mechanism.carriers():
            self.inside, parts = len(now) // 2, self._parts(now)
            for name, (left, right) in carriers.items():
                part = parts[name][: self.inside]
                x = part.reshape(-1, left.shape[0], right.shape[1])
                across = left @ (left.T @ x)
                part.copy_((across + (x - across) @ right.T @ right).flatten(1))
        return nn.functional.normalize(now, dim=1)
