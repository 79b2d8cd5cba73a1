"""Public-data-assisted DP mirror descent (Amid et al. 2022), in its first-order form.

    g_t     (Σ_i clip(g_i, C) + z·C·N(0, I)) / L, what DP-SGD releases
    h_t     the mean gradient of public samples at the present weights, with their real labels
    α_t     how much the private gradient counts at step t, a public constant
    step    along α_t·g_t + (1 − α_t)·h_t

Formal guarantee: DP-SGD's. Public samples, α_t and the weights that earlier steps released say all
there is about h_t, so mixing it in is post-processing, whatever its length: it is not clipped
unless `public_clip` says so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dpspan.gradients.operator import PerSampleGradients
from dpspan.mechanisms.base import Setting, Sums, check_one_clip
from dpspan.mechanisms.clipping import ClippingRule, FlatClipping, clip_factors
from dpspan.mechanisms.dpsgd import DPSGDMechanism
from dpspan.mechanisms.noise import Noise
from dpspan.mechanisms.schedule import Mixing
from dpspan.public.data import PublicData
from dpspan.public.gradients import PublicGradientSource, RealLabels
from dpspan.support.checks import check_number, describe, expect
from dpspan.support.device_facts import Health


@dataclass(frozen=True, kw_only=True)
class MirrorDescent:
    """DP-SGD with the gradient of labelled public samples mixed into every step.

    Args:
        public: public samples with labels (Dataset, DataLoader or tensors).
        mixing: the schedule of α: `CosineMixing(steps=K)`, `ConstantMixing(share=α)` or your own.
        clip: C, of private gradients.
        public_samples: at most so many public samples a step; of a larger public dataset, so many
            are drawn at every step.
        public_loss: `public_loss(model, inputs, labels)` gives one loss per sample; by default the
            engine's criterion does.
        public_clip: clip each public gradient to this norm too. No privacy needs it: it brings
            both gradients to one scale.
        clipping: the rule for clip factors.
        diagnose: note norms and cosine of the two gradients every so many steps; 0: never.
        seed: of what is random about public samples (which of them, dropout); no secret.

    Examples:
        >>> import torch
        >>> import dpspan
        >>> images, labels = torch.randn(100, 64), torch.randint(10, (100,))
        >>> method = dpspan.MirrorDescent(
        ...     public=(images, labels), mixing=dpspan.CosineMixing(steps=1000), clip=1.0
        ... )
    """

    public: Any = field(repr=False, compare=False)
    mixing: Mixing
    clip: float | None = None
    public_samples: int = 256
    public_loss: Callable[..., Tensor] | None = None
    public_clip: float | None = None
    clipping: ClippingRule = field(default_factory=FlatClipping)
    diagnose: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        expect(
            isinstance(self.mixing, Mixing),
            "mixing to be CosineMixing(steps=…), ConstantMixing(share=…) or an object with "
            "alpha(step)",
            self.mixing,
        )
        expect(
            type(self.mixing).__repr__ is not object.__repr__,
            "mixing to have a repr with its parameters, by which a resumed run knows it (a frozen "
            "dataclass has one)",
            self.mixing,
        )
        for name in ("clip", "public_clip"):
            value = getattr(self, name)
            expect(value is None or 0 < value < math.inf, f"{name} > 0", value)
        for name, least in (("public_samples", 1), ("diagnose", 0), ("seed", 0)):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            expect(whole and value >= least, f"{name} an int of at least {least}", value)

    def with_clip(self, clip: float) -> MirrorDescent:
        """This method with clip C, unless it already has another."""
        check_one_clip("MirrorDescent", self.clip, clip)
        return dataclasses.replace(self, clip=clip)

    @property
    def clip_norm(self) -> float:
        """C, 1 if none was given."""
        return 1.0 if self.clip is None else self.clip

    def bind(self, setting: Setting) -> MirrorMechanism:
        """The mechanism for this run."""
        return MirrorMechanism(self, setting, self._gradients(setting))

    def _gradients(self, setting: Setting) -> PublicGradientSource:
        data = PublicData.of(self.public)
        if not data.labelled:
            raise ValueError(
                f"Expected labelled public data for MirrorDescent, got '{data.name}' without "
                "labels: every step trains on them, and labels at random would train for nothing. "
                "Pass inputs and labels, or use GEP, which needs none."
            )
        if setting.criterion is None and self.public_loss is None:
            raise ValueError(
                "MirrorDescent needs a loss for the public samples: pass criterion= to "
                "make_private, or public_loss=, a function (model, inputs, labels) → one loss per "
                "sample."
            )
        gradients = PublicGradientSource(
            model=setting.model,
            data=data,
            labels=RealLabels(),
            criterion=setting.criterion,
            loss=self.public_loss,
            samples=self.public_samples,
            piece=setting.max_physical_batch_size,
            seed=self.seed,
        )
        gradients.try_one()
        return gradients

    def describe(self) -> dict[str, Any]:
        """Name and configuration; the public data itself is in the ledger, by its digest."""
        return {
            "method": "MirrorDescent",
            "mixing": repr(self.mixing),
            "clip": self.clip_norm,
            "public_samples": self.public_samples,
            "public_loss": None if self.public_loss is None else describe(self.public_loss),
            "public_clip": self.public_clip,
            "clipping": describe(self.clipping),
            "seed": self.seed,
        }


class MirrorMechanism:
    """One step of mirror descent: DP-SGD's release, then the public gradient."""

    def __init__(
        self, method: MirrorDescent, setting: Setting, gradients: PublicGradientSource
    ) -> None:
        self._method, self._gradients = method, gradients
        self._private = DPSGDMechanism(method.clip_norm, method.clipping)
        self._lot_size, self._warn = setting.expected_batch_size, setting.warn
        self._notes: list[dict[str, Any]] = []
        self._health = Health()
        self._step = 0
        self._alpha(0)  # a schedule that cannot be used is refused before training

    def carriers(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """None: gradients are needed in full."""
        return {}

    def clipped_sum(self, gradients: PerSampleGradients) -> Sums:
        """Σ_i clip(g_i, C), by parameter."""
        return self._private.clipped_sum(gradients)

    def release(self, total: Sums, noise: Noise, noise_multiplier: float) -> Sums:
        """α_t·(the sum plus z·C·N(0, I)) + (1 − α_t)·L·h_t: whoever asked divides by L."""
        step, self._step = self._step, self._step + 1
        noisy = self._private.release(total, noise, noise_multiplier)
        alpha = self._alpha(step)
        diagnosing = self._method.diagnose > 0 and step % self._method.diagnose == 0
        if alpha == 1 and not diagnosing:
            return noisy
        public = self._public_mean(step)
        if diagnosing:
            self._note(step, alpha, noisy, public)
        weight = (1 - alpha) * self._lot_size
        return {name: alpha * value + weight * public[name] for name, value in noisy.items()}

    def _alpha(self, step: int) -> float:
        alpha = check_number("alpha(step)", self._method.mixing.alpha(step))
        expect(0 <= alpha <= 1, f"alpha({step}) from 0 to 1 in {self._method.mixing!r}", alpha)
        if alpha == 0:
            self._warn(
                "the mixing of MirrorDescent has reached α = 0: steps are charged, but use public "
                "data alone; stop here, or take a longer schedule"
            )
        return float(alpha)

    def _public_mean(self, step: int) -> Sums:
        """h_t, clipped sample by sample if that was asked for."""
        gradients = self._gradients(step)
        clip = self._method.public_clip
        factors = torch.ones(gradients.samples, dtype=torch.float64, device=gradients.device)
        if clip is not None:
            factors = clip_factors(self._method.clipping, gradients.norm_bounds(), clip)
        mean = gradients.combine(factors / gradients.samples)
        finite = torch.stack([value.isfinite().all() for value in mean.values()]).all()
        known = self._health.known(finite[None])
        if known is not None and not known[0]:
            raise ValueError(
                "The gradient of the public samples is not finite, so there is no step to take. If "
                "training has diverged, lower the learning rate; otherwise look for huge values in "
                "the public data."
            )
        # On a GPU the error comes a step late: until then only the private gradient counts.
        return {name: torch.where(finite, value, 0.0) for name, value in mean.items()}

    def _note(self, step: int, alpha: float, noisy: Sums, public: Sums) -> None:
        """Of the private gradient only what has its noise: that may be looked at for nothing."""
        private = {name: value.double() / self._lot_size for name, value in noisy.items()}
        lengths = _inner(private, private).sqrt(), _inner(public, public).sqrt()
        self._notes.append(
            {
                "step": step,
                "alpha": alpha,
                "released_norm": lengths[0],
                "public_norm": lengths[1],
                "cosine": _inner(private, public) / (lengths[0] * lengths[1]).clamp(min=1e-300),
            }
        )

    @property
    def public(self) -> tuple[PublicData, ...]:
        """The public data."""
        return (self._gradients.data,)

    def diagnostics(self) -> list[dict[str, Any]]:
        """Notes on the two gradients: lengths in the units of a mean gradient, and the cosine."""
        return [
            {name: float(v) if isinstance(v, Tensor) else v for name, v in note.items()}
            for note in self._notes
        ]

    def state_dict(self) -> dict[str, Any]:
        """The step, which decides α and the public samples, and which public data the run uses."""
        return {"step": self._step, "public": [data.digest for data in self.public]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from that step."""
        if state.keys() != {"step", "public"}:
            raise ValueError(
                f"Expected a method's state with step and public, got {sorted(state)}."
            )
        whole = type(state["step"]) is int and state["step"] >= 0
        expect(whole, "a method's state with step a whole number of at least 0", state["step"])
        if state["public"] != [data.digest for data in self.public]:
            raise ValueError(
                "The state does not fit this run: it was saved with other public data. Pass the "
                "same public data as then."
            )
        self._step = state["step"]


def _inner(x: Sums, y: Sums) -> Tensor:
    return torch.stack([(v.double() * y[name].double()).sum() for name, v in x.items()]).sum()
