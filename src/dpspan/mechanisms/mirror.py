"""Public-data-assisted DP mirror descent (Amid et al. 2022), in its first-order form.

    g_t     (Σ_i clip(g_i, C) + z·C·N(0, I)) / L, what DP-SGD releases
    h_t     the mean gradient of public samples at the present weights, with their real labels
    α_t     how much the private gradient counts at step t, a public constant
    step    along α_t·g_t + (1 − α_t)·h_t

Formal guarantee: DP-SGD's. h_t follows from public samples, α_t and weights that earlier steps
released, so mixing it in is post-processing, however long it is (`public_clip` may clip it).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from dpspan.gradients.capture import Capture
from dpspan.gradients.operator import PerSampleGradients
from dpspan.mechanisms.base import Gradient, Method, Setting, SteppedMechanism, Sums
from dpspan.mechanisms.clipping import clip_factors
from dpspan.mechanisms.dpsgd import private_part
from dpspan.mechanisms.mixing import ConstantMixing as ConstantMixing
from dpspan.mechanisms.mixing import CosineMixing as CosineMixing
from dpspan.mechanisms.mixing import Mixing
from dpspan.mechanisms.noise import Noise
from dpspan.public.data import PublicData
from dpspan.public.gradients import PublicGradientSource, RealLabels
from dpspan.support.checks import check_number, expect
from dpspan.support.device_facts import Health


@dataclass(frozen=True, kw_only=True)
class MirrorDescent(Method):
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
        seed: of what is random about public samples (which of them, dropout); not a secret.
    """

    counts = {"public_samples": 1, "diagnose": 0, "seed": 0}  # noqa: RUF012
    positive = ("clip", "public_clip")
    adapts: ClassVar[bool] = True

    public: Any = field(repr=False, compare=False)
    mixing: Mixing
    public_samples: int = 256
    public_loss: Callable[..., Tensor] | None = None
    public_clip: float | None = None
    diagnose: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        known = "mixing to be CosineMixing(steps=…), ConstantMixing(share=…) or to have alpha(step)"
        expect(isinstance(self.mixing, Mixing), known, self.mixing)
        resumed = "mixing to have a repr, by which a resumed run knows it (a frozen dataclass has)"
        expect(type(self.mixing).__repr__ is not object.__repr__, resumed, self.mixing)

    def bind(self, setting: Setting) -> SteppedMechanism:
        gradients = PublicGradientSource(
            model=setting.model,
            data=PublicData.of(self.public),
            labels=RealLabels(),
            criterion=setting.criterion,
            loss=self.public_loss,
            samples=self.public_samples,
            piece=setting.max_physical_batch_size,
            seed=self.seed,
            processes=setting.processes,
        )
        gradients.try_one()
        return MirrorMechanism(self, setting, gradients)

    def describe(self) -> dict[str, Any]:
        """Name and configuration; a schedule of your own is known by its repr."""
        return {**super().describe(), "mixing": repr(self.mixing)}


class MirrorMechanism(SteppedMechanism):
    """One step of mirror descent: DP-SGD's release, then the public gradient."""

    def __init__(
        self, method: MirrorDescent, setting: Setting, gradients: PublicGradientSource
    ) -> None:
        super().__init__(diagnose=method.diagnose)
        self._method, self._gradients = method, gradients
        self._private = private_part(method, setting)
        self._lot_size, self._warn = setting.expected_batch_size, setting.warn
        self._processes = setting.processes
        self._health = Health()
        self._public_mean: Gradient | None = None  # h_t, where the step needs it
        self.public = (gradients.data,)
        self._alpha()  # a schedule that cannot be used is refused before training

    def prepare(self, capture: Capture | None = None) -> None:
        """h_t, unless the private gradient counts alone."""
        if self._public_mean is None and (self._alpha() < 1 or self._diagnosing):
            self._public_mean = self._mean(self._gradients.share(self.step, capture))

    def clipped_sum(self, gradients: PerSampleGradients) -> Sums:
        return self._private.clipped_sum(gradients)

    def release(self, total: Sums, noise: Noise, noise_multiplier: float) -> Sums:
        return self._private.release(total, noise, noise_multiplier)

    def gradient(self, released: Sums) -> Gradient:
        """α_t·L·g_t + (1 − α_t)·L·h_t: whoever asked divides by L."""
        noisy, alpha = self._private.gradient(released), self._alpha()
        public, self._public_mean = self._public_mean, None
        assert public is not None or alpha == 1, "prepare() comes first"
        if public is not None:
            if self._diagnosing:
                self._note(alpha, noisy, public)
            weight = (1 - alpha) * self._lot_size
            noisy = {name: alpha * value + weight * public[name] for name, value in noisy.items()}
        self.step += 1
        return noisy

    def _alpha(self) -> float:
        alpha = check_number("alpha(step)", self._method.mixing.alpha(self.step))
        what = f"alpha({self.step}) from 0 to 1 in {self._method.mixing!r}"
        expect(0 <= alpha <= 1, what, alpha)
        if alpha == 0:
            self._warn(
                "the mixing of MirrorDescent has reached α = 0: steps are charged, but use public "
                "data alone; stop here, or take a longer schedule"
            )
        return float(alpha)

    def _mean(self, share: PerSampleGradients) -> Gradient:
        """The mean of public gradients, clipped sample by sample if that was asked for."""
        clip, processes = self._method.public_clip, self._processes
        with processes.together():
            factors = torch.ones(share.samples, dtype=torch.float64, device=share.device)
            if clip is not None:
                factors = clip_factors(self._method.clipping, share.norm_bounds(), clip)
            mean = share.combine(factors / self._gradients.count)
        if self._gradients.shared_out:
            mean = processes.spread(processes.add_up(mean))
        with processes.together():  # a GPU tells late, and not all at the same step
            finite = torch.stack([value.isfinite().all() for value in mean.values()]).all()
            known = self._health.known(finite[None])
            if known is not None and not known[0]:
                raise ValueError(
                    "The gradient of the public samples is not finite, so there is no step to "
                    "take. If training diverged, lower the learning rate; if not, look for huge "
                    "public values."
                )
        # On a GPU the error comes a step late: until then only the private gradient counts.
        return {name: torch.where(finite, value, 0.0) for name, value in mean.items()}

    def _note(self, alpha: float, noisy: Gradient, public: Gradient) -> None:
        """Lengths as of a mean gradient; the private one has its noise, so a look is free."""
        private = {name: value.double() / self._lot_size for name, value in noisy.items()}
        released_norm, public_norm = (_inner(x, x).sqrt() for x in (private, public))
        note = {
            "step": self.step,
            "alpha": alpha,
            "released_norm": released_norm,
            "public_norm": public_norm,
            "cosine": _inner(private, public) / (released_norm * public_norm).clamp(min=1e-300),
        }
        self._notes.append(note)

    def state_dict(self) -> dict[str, Any]:
        private = self._private.state_dict()  # of a fixed clip nothing
        return {**super().state_dict(), **({"private": private} if private else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._private.load_state_dict(state.get("private", {}))
        self._public_mean = None


def _inner(x: Gradient, y: Gradient) -> Tensor:
    return torch.stack([(v.double() * y[name].double()).sum() for name, v in x.items()]).sum()
