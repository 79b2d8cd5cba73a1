"""Reparametrized Gradient Perturbation (Yu, Zhang, Chen, Yin, Liu 2021), its Algorithm 1.

    L, R      carriers of each weight: orthonormal, from released weights (`carriers`)
    ∂L, ∂R    G Rᵀ and Lᵀ G for the gradient G of a weight; r(d_out + d_in) numbers per sample
    release   Σ clip((∂L, ∂R of all weights, full gradients of the rest), C) + z·C·N(0, I)
    update    ∂L R + L ∂R − L Lᵀ ∂L R, for any optimizer

Formal guarantee: what is clipped and summed is one vector per sample, the tuple of all its small
gradients, so one release is a Gaussian mechanism of noise multiplier z. Everything that is trained
is in it, and every entry gets noise. The update is post-processing.

The model itself is not reparametrized: ∂L and ∂R come from each layer's input and output gradient.
The part of ∂L inside L takes no part in the update, so it is taken off before the clip.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from dpspan.gradients.layers.terms import Rows, Term
from dpspan.gradients.operator import Left, PerSampleGradients, Right, SmallGradient
from dpspan.mechanisms.base import Setting, Sums, check_one_clip
from dpspan.mechanisms.carried_weights import CarriedWeights, carried_weights
from dpspan.mechanisms.carriers import Carrier, CarrierSource, Chance, History
from dpspan.mechanisms.clipping import ClippingRule, FlatClipping, clip_factors
from dpspan.mechanisms.noise import Noise
from dpspan.public.data import PublicData
from dpspan.support.checks import describe

_NAMED: dict[str, CarrierSource] = {"history": History(), "random": Chance()}


@dataclass(frozen=True, kw_only=True)
class RGP:
    """RGP with carriers of this rank.

    Args:
        rank: r, the carriers' rank.
        clip: C, over all small gradients jointly.
        carriers: 'history' (W_t − W_0), 'random', or `History(warmup=...)`.
        layers: which weights are carried, by name; by default all of linear and convolution
            layers that become smaller. The rest that is trained is released in full.
        orthogonal: take the part of ∂L inside L off before the clip (the same update, clipped
            less); False is the paper's tuple. (Nothing is taken off with `left_only`.)
        left_only: release ∂L only, as the authors' code trains.
        full_scale: weigh gradients that are released in full by this before the clip, and by its
            inverse after it: below 1 they take less of the clip and get more noise.
        clipping: the rule for clip factors.
        seed: of the random numbers that carriers start from; no secret.

    Examples:
        >>> import dpspan
        >>> method = dpspan.RGP(rank=8, clip=1.0)
        >>> control = dpspan.RGP(rank=8, clip=1.0, carriers="random")
    """

    rank: int = 1
    clip: float | None = None
    carriers: str | CarrierSource = "history"
    layers: Callable[[str], bool] | None = None
    orthogonal: bool = True
    left_only: bool = False
    full_scale: float = 1.0
    clipping: ClippingRule = field(default_factory=FlatClipping)
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (("rank", self.rank, 1), ("seed", self.seed, 0)):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"Expected {name} an int of at least {least}, got {value!r}.")
        if self.clip is not None and not 0 < self.clip < float("inf"):
            raise ValueError(f"Expected clip > 0, got {self.clip}.")
        if not 0 < self.full_scale < float("inf"):
            raise ValueError(f"Expected full_scale > 0, got {self.full_scale}.")
        if isinstance(self.carriers, str) and self.carriers not in _NAMED:
            raise ValueError(f"Expected carriers {' or '.join(_NAMED)}, got {self.carriers!r}.")

    @property
    def source(self) -> CarrierSource:
        """Where the carriers come from."""
        return _NAMED[self.carriers] if isinstance(self.carriers, str) else self.carriers

    @property
    def clip_norm(self) -> float:
        """C, 1 if none was given."""
        return 1.0 if self.clip is None else self.clip

    def with_clip(self, clip: float) -> RGP:
        """This method with clip C, unless it already has another."""
        check_one_clip("RGP", self.clip, clip)
        return dataclasses.replace(self, clip=clip)

    def bind(self, setting: Setting) -> RGPMechanism:
        """The mechanism for this run."""
        return RGPMechanism(self, setting.model)

    def describe(self) -> dict[str, Any]:
        """Name and configuration."""
        return {
            "method": "RGP",
            "rank": self.rank,
            "clip": self.clip_norm,
            "carriers": describe(self.source),
            "layers": None if self.layers is None else describe(self.layers),
            "orthogonal": self.orthogonal,
            "left_only": self.left_only,
            "full_scale": self.full_scale,
            "clipping": describe(self.clipping),
            "seed": self.seed,
        }


class RGPMechanism:
    """One step of RGP."""

    public: tuple[PublicData, ...] = ()

    def __init__(self, method: RGP, model: nn.Module) -> None:
        self._method = method
        self._weights = CarriedWeights(carried_weights(model, method.rank, method.layers))
        self._carriers: dict[str, Carrier] | None = None  # of the present step
        self._step = 0
        self._notes: list[dict[str, Any]] = []

    def clipped_sum(self, gradients: PerSampleGradients) -> Sums:
        """Σ_i clip((∂L, ∂R, …)_i, C), of gradients seen through `carriers` or still whole."""
        whole = {n: c for n, c in self.carriers().items() if n in gradients.shapes}
        small = gradients.compress(whole)
        small = self._weighed(small)
        if self._method.left_only:
            small = small.select([name for name in small.shapes if not isinstance(name, Right)])
        method = self._method
        return small.combine(clip_factors(method.clipping, small.norm_bounds(), method.clip_norm))

    def release(self, total: Sums, noise: Noise, noise_multiplier: float) -> Sums:
        """The noisy sums, put together to gradients of the weights."""
        std = noise_multiplier * self._method.clip_norm
        noisy = noise.add(total, std=std)
        carriers, self._carriers = self.carriers(), None
        if not self._notes:  # it is the same at every step
            self._notes.append({"step": self._step, "noise_energy": self._energy(total, std)})
        self._step += 1
        scale = self._method.full_scale
        released = {
            name: value / scale
            for name, value in noisy.items()
            if not isinstance(name, SmallGradient)
        }
        for name, carrier in carriers.items():
            left = noisy[Left(name)]
            if self._method.left_only:
                update = left @ carrier.right
            else:
                update = carrier.reconstruct(left, noisy[Right(name)])
            released[name] = self._weights.unflattened(name, update)
        return released

    def _energy(self, total: Sums, std: float) -> dict[str, float]:
        """E‖noise‖² of the update, in carried weights and in what is released in full."""
        rank, carried = self._method.rank, 0
        for d_out, d_in in self._weights.shapes().values():
            # Of the noise on ∂L only what lies outside L takes part in the update.
            carried += rank * (d_out if self._method.left_only else d_out - rank + d_in)
        full = sum(
            value.numel() for name, value in total.items() if not isinstance(name, SmallGradient)
        )
        energy = {"carriers": carried * std**2, "full": full * (std / self._method.full_scale) ** 2}
        return {part: value for part, value in energy.items() if value}

    def _weighed(self, small: PerSampleGradients) -> PerSampleGradients:
        """∂L − L Lᵀ ∂L in place of ∂L (all that the update has of it), and the full ones scaled."""
        scale, carriers = self._method.full_scale, self.carriers()
        terms: dict[str, list[Term]] = {}
        for name, term in small.terms.items():
            if not isinstance(name, SmallGradient) and scale != 1:
                terms[name] = [term.scaled(scale)]
            elif isinstance(name, Left) and self._method.orthogonal and not self._method.left_only:
                carrier = carriers[name.weight].left
                left = term.rows(0, small.samples).view(-1, *carrier.shape)
                terms[name] = [Rows(left - carrier @ (carrier.T @ left))]
            else:
                terms[name] = [term]
        return PerSampleGradients(
            small.shapes, terms, small.samples, like=small.like, scale=small.scale
        )

    def carriers(self) -> Mapping[str, Carrier]:
        """L and R of the present step."""
        if self._carriers is None:
            method = self._method
            self._carriers = self._weights.carriers(
                method.source, method.rank, step=self._step, seed=method.seed
            )
        return self._carriers

    def diagnostics(self) -> list[dict[str, Any]]:
        """The expected energy of the noise in a step's update: once, since it does not change."""
        return list(self._notes)

    def state_dict(self) -> dict[str, Any]:
        """The step, and the weights that the history began with."""
        return {"step": self._step, "first": self._weights.first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from that step."""
        if state.keys() != {"step", "first"} or not isinstance(state["step"], int):
            raise ValueError(f"Expected RGP's state with step and first, got {sorted(state)}.")
        self._weights.go_on_from(state["first"])
        self._step, self._carriers = state["step"], None
