"""What the methods that work in a subspace share: their configuration, and what they do with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from dpspan.mechanisms.base import Setting, Sums, check_one_clip
from dpspan.mechanisms.clipping import ClippingRule, FlatClipping
from dpspan.mechanisms.noise import Noise
from dpspan.mechanisms.span_keeper import SpanKeeper
from dpspan.public.data import PublicData
from dpspan.public.gradients import Labels, PublicGradientSource, labels_of
from dpspan.subspaces.solvers import Eigh, Solver
from dpspan.subspaces.sources import (
    Groups,
    PublicSpan,
    RandomSpan,
    RandomSubspace,
    SpanSource,
    grouped,
)
from dpspan.support.checks import describe

EMBEDDING = "subspace:embedding"  # the sum of embeddings among what a step sums


@dataclass(frozen=True, kw_only=True)
class SubspaceMethod:
    """Configuration that PDPSGD, BiasedGEP and GEP have in common.

    Args:
        public: public samples (Dataset, DataLoader or tensors); only inputs need to fit the model.
        rank: k, the number of directions.
        clip: the clip of the embedding (GEP) or of the gradient (PDP-SGD).
        public_labels: 'random' (drawn once), 'redrawn' (at every refresh, as in GEP's paper),
            'real', or `RandomLabels(…)` with a seed of your own.
        public_loss: `public_loss(model, inputs)`, or `(model, inputs, labels)` where the public
            data have labels, gives one loss per sample; by default the engine's criterion does.
        public_samples: at most so many public samples span the subspace; of a larger public
            dataset, so many are drawn at every refresh.
        groups: the parameters' groups, each with a basis of its own: a number of contiguous
            groups, or a function from a parameter's name to its group (`dpspan.by_stage`).
        refresh: the subspace is computed every so many steps.
        solver: `Eigh()`, `Lanczos()` or `PowerIteration()`.
        subspace: `RandomSubspace(rank)` instead of public data.
        clipping: the rule for clip factors.
        diagnose: note spectrum, drift and noise every so many steps; 0: never.
        seed: of what is random about public samples (which of them, dropout); no secret.
    """

    public: Any = field(default=None, repr=False, compare=False)
    rank: int | None = None
    clip: float | None = None
    public_labels: str | Labels = "random"
    public_loss: Callable[..., Tensor] | None = None
    public_samples: int = 2000
    groups: Groups = 1
    refresh: int = 1
    solver: Solver = field(default_factory=Eigh)
    subspace: RandomSubspace | None = None
    clipping: ClippingRule = field(default_factory=FlatClipping)
    diagnose: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        name = type(self).__name__
        if (self.public is None) == (self.subspace is None):
            raise ValueError(
                f"{name} needs a subspace: pass public= (public data) and rank=, or "
                "subspace=RandomSubspace(rank=...)."
            )
        if self.public is not None and (not isinstance(self.rank, int) or self.rank < 1):
            raise ValueError(f"Expected rank an int of at least 1 in {name}, got {self.rank!r}.")
        if self.subspace is not None and self.rank not in (None, self.subspace.rank):
            raise ValueError(f"Expected one rank, got rank={self.rank} and {self.subspace}.")
        if self.subspace is not None and self.groups != 1:
            raise ValueError("A random subspace has no groups: leave groups= out.")
        if isinstance(self.groups, int) and self.groups < 1:
            raise ValueError(f"Expected groups of at least 1, got {self.groups}.")
        if not isinstance(self.groups, int) and not callable(self.groups):
            raise ValueError(
                "Expected groups to be a number of groups or a function from a parameter's name to "
                f"its group (dpspan.by_stage), got {self.groups!r}."
            )
        if self.clip is not None and not 0 < self.clip < float("inf"):
            raise ValueError(f"Expected clip > 0, got {self.clip}.")
        numbers = (("refresh", 1), ("public_samples", 1), ("diagnose", 0), ("seed", 0))
        for field_name, least in numbers:
            value = getattr(self, field_name)
            if not isinstance(value, int) or value < least:
                raise ValueError(
                    f"Expected {field_name} an int of at least {least}, got {value!r}."
                )
        labels_of(self.public_labels)

    def with_clip(self, clip: float) -> Self:
        """This method with the clip given as `max_grad_norm`, unless it already has another."""
        check_one_clip(type(self).__name__, self.clip, clip)
        return dataclasses.replace(self, clip=clip)

    @property
    def clip_norm(self) -> float:
        """The clip, 1 if none was given."""
        return 1.0 if self.clip is None else self.clip

    def source(self, setting: Setting) -> SpanSource:
        """Where the subspaces of this run come from."""
        if self.subspace is not None:
            random = self.subspace
            return RandomSpan(
                setting.model, rank=random.rank, redraw=random.redraw, seed=random.seed
            )
        assert self.rank is not None
        gradients = PublicGradientSource(
            model=setting.model,
            data=PublicData.of(self.public),
            labels=labels_of(self.public_labels),
            criterion=setting.criterion,
            loss=self.public_loss,
            samples=self.public_samples,
            piece=setting.max_physical_batch_size,
            seed=self.seed,
        )
        gradients.try_one()
        shapes = {n: p.shape for n, p in setting.model.named_parameters() if p.requires_grad}
        grouped(shapes, self.groups)
        return PublicSpan(
            gradients, rank=self.rank, groups=self.groups, solver=self.solver, warn=setting.warn
        )

    def describe(self) -> dict[str, Any]:
        """Name and configuration; the public data itself is in the ledger, by its digest."""
        public = self.public is not None
        return {
            "method": type(self).__name__,
            "subspace": "public gradients" if public else repr(self.subspace),
            "rank": self.rank if self.subspace is None else self.subspace.rank,
            "clip": self.clip_norm,
            "public_labels": describe(labels_of(self.public_labels)) if public else None,
            "public_loss": None if self.public_loss is None else describe(self.public_loss),
            "public_samples": self.public_samples if public else None,
            "groups": self.groups if isinstance(self.groups, int) else describe(self.groups),
            "refresh": self.refresh,
            "solver": describe(self.solver) if public else None,
            "seed": self.seed,
            "clipping": describe(self.clipping),
        }


class SubspaceMechanism:
    """The part of a mechanism that is the same for all methods in a subspace."""

    def __init__(self, method: SubspaceMethod, setting: Setting, *, passes: int) -> None:
        self._clip, self._clipping = method.clip_norm, method.clipping
        self._keeper = SpanKeeper(
            method.source(setting),
            refresh=method.refresh,
            products=passes * setting.expected_batch_size,
            diagnose=method.diagnose,
        )

    def carriers(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """None: gradients are needed in full."""
        return {}

    def _release_embedding(self, total: Sums, noise: Noise, std: float) -> Sums:
        """The sum of embeddings with noise of this size, lifted to parameters."""
        span = self._keeper.span()
        w = noise.add(total, std)[EMBEDDING]
        gradient = span.lift(w)
        self._keeper.finish(w, gradient, {"embedding": span.dimensions * std**2})
        return gradient

    @property
    def public(self) -> tuple[PublicData, ...]:
        """The public data behind the subspace."""
        return self._keeper.public

    def diagnostics(self) -> list[dict[str, Any]]:
        """Notes on subspace and noise."""
        return self._keeper.notes()

    def state_dict(self) -> dict[str, Any]:
        """The step, and the public data's digest."""
        return self._keeper.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from that step."""
        self._keeper.load_state_dict(state)


def lengths(embeddings: Tensor) -> Tensor:
    """Norms of rows in float64, rounded up."""
    norms: Tensor = torch.linalg.vector_norm(embeddings, dim=1)
    return norms * (1 + 2.0**-53 * (embeddings.shape[1] + 16))


def weighted_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """wᵀX, where a row of weight zero adds nothing, even if it is not finite."""
    return weights.to(rows) @ torch.where(weights.unsqueeze(1) != 0, rows, 0.0)
