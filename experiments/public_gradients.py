"""Two methods that look at the public gradient at every step: DOPE-SGD and AdaDPS.

Both write the rows of J out, change each by public numbers, and sum the very rows they measured: a
bound of the norm is then of that vector, whatever cancelled in it, and no inner products are
needed. That is for small models: a batch takes as much memory as its samples' gradients.

**DOPE-SGD** (Nasr et al. 2023) clips private gradients around the public one.

    g_i     the gradient of private record i at the present weights
    h       the mean gradient of public samples at the same weights
    release Σ_i clip(g_i − h, C) + z·C·N(0, I)
    step    (what was released + L·h) / L,  L the expected batch size

Formal guarantee: h is made of public samples and of weights that were released, so a record more or
less changes nothing but its own summand, of norm at most C whatever h is: DP-SGD's Gaussian
mechanism. What was taken off the B records that were drawn is B·h. But B is private: to add B·h to
the noisy sum would release it, all of h being known. L = E[B] is configuration, so adding L·h is
post-processing, and right on average.

**AdaDPS** (Li et al. 2022) scales coordinates by public second moments before the clip.

    v       mean square of the public samples' gradients, coordinate by coordinate
    s       1/(√(v/v̄) + stability), v̄ the mean of v: how large the loss is has no part in it
    release Σ_i clip(s ∘ g_i, C) + z·C·N(0, I), and that is the step: it is not scaled back

Formal guarantee: DP-SGD's. s is public, and the clip is of the scaled vector, which is summed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dpspan.app.config.methods import MethodSection
from dpspan.app.config.sections import RandomAffineSection
from dpspan.app.section import Count, Positive
from dpspan.gradients.capture import Capture
from dpspan.gradients.numerics import Arithmetic, ieee, plain_arithmetic, squared_norms
from dpspan.gradients.operator import PerSampleGradients, usable_weights
from dpspan.mechanisms.base import Gradient, Method, Setting, SteppedMechanism, Sums
from dpspan.mechanisms.clipping import ClippingRule, clip_factors
from dpspan.mechanisms.noise import Noise
from dpspan.public.data import PublicData
from dpspan.public.gradients import PublicGradientSource, RealLabels

_NOT_FINITE = (
    "The gradients of the public samples are not finite. If training diverged, lower the learning "
    "rate; if not, look for huge public values."
)


@dataclass(frozen=True, kw_only=True)
class PublicGradientMethod(Method):
    """What both have: labelled public samples, perhaps augmented anew whenever they are used."""

    counts: ClassVar[Mapping[str, int]] = {"public_samples": 1, "seed": 0}

    public: Any = field(repr=False, compare=False)
    public_samples: int = 256
    augment: Callable[[Any], Any] | None = None
    seed: int = 0

    def source(self, setting: Setting) -> PublicGradientSource:
        """Their gradients at the present weights."""
        found = PublicGradientSource(
            model=setting.model,
            data=PublicData.of(self.public),
            labels=RealLabels(),
            criterion=setting.criterion,
            loss=None if self.augment is None else AugmentedLoss(self.augment),
            samples=self.public_samples,
            piece=setting.max_physical_batch_size,
            seed=self.seed,
            processes=setting.processes,
        )
        found.try_one()
        return found


@dataclass(frozen=True)
class AugmentedLoss:
    """The cross-entropy of changed inputs; a step's changes follow from a public seed."""

    augment: Callable[[Any], Any]

    def __call__(self, model: nn.Module, inputs: Any, labels: Tensor) -> Tensor:
        return cross_entropy(model(self.augment(inputs)), labels, reduction="none")


class ChangedRows(SteppedMechanism):
    """A Gaussian sum of rows that were changed by public numbers, then clipped."""

    def __init__(self, method: PublicGradientMethod, setting: Setting) -> None:
        super().__init__()
        self._clip, self._clipping = method.clip_norm, method.clipping
        self._source, self._lot_size = method.source(setting), setting.expected_batch_size
        self.public = (self._source.data,)

    def release(self, total: Sums, noise: Noise, noise_multiplier: float) -> Sums:
        """The sum plus z·C·N(0, I)."""
        return noise.add(total, std=noise_multiplier * self._clip)

    def _sum(self, rows: Tensor, gradients: PerSampleGradients) -> Sums:
        total = clipped_rows(rows, self._clip, self._clipping, gradients.counted)
        return in_parts(total, gradients)


@dataclass(frozen=True, kw_only=True)
class DOPESGD(PublicGradientMethod):
    """DOPE-SGD."""

    def bind(self, setting: Setting) -> SteppedMechanism:
        return DOPEMechanism(self, setting)


class DOPEMechanism(ChangedRows):
    """One step of DOPE-SGD."""

    _mean: Tensor | None = None  # h

    def prepare(self, capture: Capture | None = None) -> None:
        if self._mean is None:
            found = self._source(self.step, capture)
            weights = torch.full((found.samples,), 1 / found.samples, dtype=torch.float64)
            parts = found.combine(weights.to(found.device)).values()
            self._mean = _finite(torch.cat([part.flatten() for part in parts]))

    def clipped_sum(self, gradients: PerSampleGradients) -> Sums:
        """Σ_i clip(g_i − h, C)."""
        assert self._mean is not None, "prepare() comes first"
        return self._sum(gradients.matrix() - self._mean, gradients)

    def gradient(self, released: Sums) -> Gradient:
        """With L·h: whoever asked divides by L."""
        assert self._mean is not None, "prepare() comes first"
        parts = self._mean.split([value.numel() for value in released.values()])
        self._mean, self.step = None, self.step + 1
        return {
            name: value + self._lot_size * part.view_as(value)
            for (name, value), part in zip(released.items(), parts, strict=True)
        }


@dataclass(frozen=True, kw_only=True)
class AdaDPS(PublicGradientMethod):
    """AdaDPS with second moments of public samples, computed every `refresh` steps."""

    counts: ClassVar[Mapping[str, int]] = {**PublicGradientMethod.counts, "refresh": 1}
    positive = ("clip", "stability")

    stability: float = 0.1
    refresh: int = 10

    def bind(self, setting: Setting) -> SteppedMechanism:
        return AdaDPSMechanism(self, setting)


class AdaDPSMechanism(ChangedRows):
    """One step of AdaDPS."""

    _scale: Tensor | None = None  # s

    def __init__(self, method: AdaDPS, setting: Setting) -> None:
        super().__init__(method, setting)
        self._stability, self._refresh = method.stability, method.refresh

    def prepare(self, capture: Capture | None = None) -> None:
        if self._scale is None or self.step % self._refresh == 0:
            found = self._source(self.step // self._refresh, capture)
            squares = found.matrix().double().square().mean(0)
            shares = squares / squares.mean().clamp(min=torch.finfo(squares.dtype).tiny)
            self._scale = _finite(1 / (shares.sqrt() + self._stability)).to(found.like)

    def clipped_sum(self, gradients: PerSampleGradients) -> Sums:
        """Σ_i clip(s ∘ g_i, C)."""
        assert self._scale is not None, "prepare() comes first"
        return self._sum(gradients.matrix() * self._scale, gradients)

    def gradient(self, released: Sums) -> Gradient:
        self.step += 1
        return super().gradient(released)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._scale = None  # computed anew


@plain_arithmetic()
def clipped_rows(
    rows: Tensor, clip: float, rule: ClippingRule, counted: Tensor | None = None
) -> Tensor:
    """Σ_i clip(row_i, C): the rows that are measured are those that are summed.

    Rows that are not finite, and those that do not count, add nothing.
    """
    arithmetic = Arithmetic.of(rows)
    # As in PerSampleGradients: the weights are rounded to working precision.
    bounds = (1 + arithmetic.norm + 16 * arithmetic.unit) * squared_norms(rows).sqrt()
    if counted is not None:
        bounds = bounds.masked_fill(~counted, torch.inf)
    weights = clip_factors(rule, bounds, clip).to(rows)
    used = usable_weights(weights)
    if not bool(used.all()):
        weights, rows = weights.masked_fill(~used, 0.0), torch.where(used.unsqueeze(1), rows, 0.0)
    with ieee(rows):
        return weights @ rows


def in_parts(vector: Tensor, gradients: PerSampleGradients) -> dict[str, Tensor]:
    """A vector over all parameters, by parameter."""
    shapes = gradients.shapes
    parts = vector.split([shape.numel() for shape in shapes.values()])
    return {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}


def _finite(value: Tensor) -> Tensor:
    if not bool(value.isfinite().all()):
        raise ValueError(_NOT_FINITE)
    return value


class PublicGradientSection(MethodSection):
    """What both say."""

    public: str | None = None
    public_samples: Count = 256
    augment: RandomAffineSection | None = None


class DOPESGDSection(PublicGradientSection):
    """DOPE-SGD."""

    name: Literal["dope-sgd"] = "dope-sgd"

    def build(self, public: PublicData | None, *, steps: int) -> Method:
        return DOPESGD(public=public, **self.arguments())


class AdaDPSSection(PublicGradientSection):
    """AdaDPS."""

    name: Literal["adadps"] = "adadps"
    stability: Positive = 0.1
    refresh: Count = 10

    def build(self, public: PublicData | None, *, steps: int) -> Method:
        return AdaDPS(public=public, **self.arguments())


AnyPublicGradientMethod = DOPESGDSection | AdaDPSSection
