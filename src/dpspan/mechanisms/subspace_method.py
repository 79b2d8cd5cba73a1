"""What the methods that work in a subspace share: their configuration, and what they do with it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from dpspan.gradients.capture import Capture
from dpspan.mechanisms.base import EMBEDDING, Gradient, Method, Setting, SteppedMechanism, Sums
from dpspan.mechanisms.clipping import clip_factors
from dpspan.mechanisms.noise import Noise
from dpspan.public.data import PublicData
from dpspan.public.gradients import Labels, PublicGradientSource, labels_of
from dpspan.subspaces.solvers import Eigh, Solver
from dpspan.subspaces.sources import (
    GroupedSubspace,
    Groups,
    PublicSpan,
    RandomSpan,
    RandomSubspace,
    SpanSource,
    grouped,
    ranks,
)
from dpspan.subspaces.subspace import stable_rank
from dpspan.support.checks import check_count, describe


@dataclass(frozen=True, kw_only=True)
class SubspaceMethod(Method):
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
        seed: of what is random about public samples (which of them, dropout); not a secret.
    """

    counts = {"refresh": 1, "public_samples": 1, "diagnose": 0, "seed": 0}  # noqa: RUF012

    public: Any = field(default=None, repr=False, compare=False)
    rank: int | None = None
    public_labels: str | Labels = "random"
    public_loss: Callable[..., Tensor] | None = None
    public_samples: int = 2000
    groups: Groups = 1
    refresh: int = 1
    solver: Solver = field(default_factory=Eigh)
    subspace: RandomSubspace | None = None
    diagnose: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.public is None) == (self.subspace is None):
            raise ValueError(
                f"{type(self).__name__} needs a subspace: pass public= (public data) and rank=, or "
                "subspace=RandomSubspace(rank=...)."
            )
        if self.public is not None:
            object.__setattr__(self, "rank", check_count("rank", self.rank))
        if self.subspace is not None and self.rank not in (None, self.subspace.rank):
            raise ValueError(f"Expected one rank, got rank={self.rank} and {self.subspace}.")
        if self.subspace is not None and self.groups != 1:
            raise ValueError("A random subspace has no groups: leave groups= out.")
        if not callable(self.groups):
            what = "groups (or pass a function from a parameter's name to its group: by_stage)"
            object.__setattr__(self, "groups", check_count(what, self.groups))
        labels_of(self.public_labels)

    def source(self, setting: Setting) -> SpanSource:
        """Where the subspaces of this run come from."""
        if self.subspace is not None:
            return RandomSpan(setting.model, self.subspace, setting.processes)
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
            processes=setting.processes,
        )
        gradients.try_one()
        shapes = {n: p.shape for n, p in setting.model.named_parameters() if p.requires_grad}
        ranks(shapes, grouped(shapes, self.groups), self.rank)  # a wrong number is refused here
        return PublicSpan(
            gradients,
            rank=self.rank,
            groups=self.groups,
            solver=self.solver,
            warn=setting.warn,
            processes=setting.processes,
        )

    def describe(self) -> dict[str, Any]:
        """Name and configuration; what only public data need is None for a random subspace."""
        plain = super().describe()
        if self.subspace is not None:
            nothing = dict.fromkeys(("public_labels", "public_samples", "solver"))
            return {**plain, **nothing, "rank": self.subspace.rank}
        labels = describe(labels_of(self.public_labels))
        return {**plain, "subspace": "public gradients", "public_labels": labels}


class SubspaceMechanism(SteppedMechanism):
    """Keeps the subspace of the present step, and takes embeddings through it.

    By the step's number, public data and released weights: for all pieces and processes the same.
    """

    passes: ClassVar[int] = 1  # products with the subspace that a step takes

    def __init__(self, method: SubspaceMethod, setting: Setting) -> None:
        super().__init__(diagnose=method.diagnose)
        self._clip, self._clipping = method.clip_norm, method.clipping
        self._source, self._refresh = method.source(setting), method.refresh
        own = setting.expected_batch_size / setting.processes.world  # samples of this process
        self._products = self.passes * own * method.refresh
        self._span: GroupedSubspace | None = None
        self._number = -1  # of the present subspace
        self._earlier: GroupedSubspace | None = None
        self._noise_energy: dict[str, float] = {}  # expected, of the present step
        self.public = self._source.public

    def prepare(self, capture: Capture | None = None) -> None:
        number = self.step // self._refresh
        if self._span is None or number != self._number:
            # Let go first: two subspaces at once would take twice the memory.
            self._earlier, self._span = (self._span if self._diagnosing else None), None
            self._span = self._source.span(number, products=self._products, capture=capture)
            self._number = number

    @property
    def span(self) -> GroupedSubspace:
        assert self._span is not None, "prepare() comes first"
        return self._span

    def _clipped_embedding(self, w: Tensor, norms: Tensor | None = None) -> Tensor:
        """Σ_i clip(w_i, C), where a sample may count as longer than its embedding."""
        rounding = 1 + 2.0**-53 * (w.shape[1] + 16)  # lengths are rounded up
        lengths = torch.linalg.vector_norm(w, dim=1) * rounding
        if norms is not None:
            lengths = torch.maximum(norms, lengths)
        factors = clip_factors(self._clipping, lengths, self._clip)
        # A row of weight zero adds nothing, even if it is not finite.
        return factors.to(w) @ torch.where(factors.unsqueeze(1) != 0, w, 0.0)

    def release(self, total: Sums, noise: Noise, noise_multiplier: float) -> Sums:
        """The embedding plus z·C·N(0, I_k)."""
        std = noise_multiplier * self._clip
        self._noise_energy = {"embedding": self.span.dimensions * std**2}
        return noise.add({EMBEDDING: total[EMBEDDING]}, std=std)

    def gradient(self, released: Sums) -> Gradient:
        """The embedding lifted to parameters, and what was released beside it."""
        gradient = {
            name: value + released[name] if name in released else value
            for name, value in self.span.lift(released[EMBEDDING]).items()
        }
        if self._diagnosing:  # from what has been released: that may be looked at for nothing
            self._notes.append(self._note(released[EMBEDDING], gradient))
        self.step += 1
        return gradient

    def _note(self, embedding: Tensor, gradient: Gradient) -> dict[str, Any]:
        parts = list(self.span.parts.values())
        note: dict[str, Any] = {
            "step": self.step,
            "noise_energy": self._noise_energy,
            "released_energy": {
                "embedding": _energy(embedding),
                "gradient": torch.stack([_energy(value) for value in gradient.values()]).sum(),
            },
            "rank": [part.live for part in parts],
            "eigenvalues": [part.eigenvalues for part in parts],
            "stable_rank": [stable_rank(part.eigenvalues) for part in parts],
        }
        if self._earlier is not None:
            pairs = zip(parts, self._earlier.parts.values(), strict=True)
            note["drift"] = [part.drift(earlier) for part, earlier in pairs]
        self._earlier = None
        return note

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._span, self._number = None, -1  # computed anew


def _energy(value: Tensor) -> Tensor:
    return value.double().square().sum()
