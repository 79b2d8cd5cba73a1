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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from dpspan.gradients.layers.terms import Rows, Term
from dpspan.gradients.operator import Left, PerSampleGradients, Right, SmallGradient
from dpspan.mechanisms.base import (
    ClippingMethod,
    Gradient,
    Mechanism,
    Setting,
    Sums,
    of_parameters,
)
from dpspan.mechanisms.carried_weights import CarriedWeights, carried_weights
from dpspan.mechanisms.carriers import Carrier, CarrierSource, History, RandomCarriers
from dpspan.mechanisms.clipping import clip_factors
from dpspan.mechanisms.noise import Noise
from dpspan.support.checks import check_count, describe

_NAMED: dict[str, CarrierSource] = {"history": History(), "random": RandomCarriers()}


@dataclass(frozen=True, kw_only=True)
class RGP(ClippingMethod):
    """RGP with carriers of this rank.

    Args:
        rank: r, the carriers' rank.
        clip: C, over all small gradients jointly.
        carriers: 'history' (W_t − W_0), 'random', or `History(warmup=...)`.
        layers: which weights are carried, by name; by default all of linear and convolution
            layers that become smaller. The rest that is trained is released in full.
        left_only: release ∂L only, as the authors' code trains.
        full_scale: weigh gradients that are released in full by this before the clip, and by its
            inverse after it: below 1 they take less of the clip and get more noise.
        clipping: the rule for clip factors.
        seed: of the random numbers that carriers start from; not a secret.

    Examples:
        >>> import dpspan
        >>> method = dpspan.RGP(rank=8, clip=1.0)
        >>> control = dpspan.RGP(rank=8, clip=1.0, carriers="random")
    """

    counts = {"rank": 1, "seed": 0}  # noqa: RUF012

    rank: int = 1
    carriers: str | CarrierSource = "history"
    layers: Callable[[str], bool] | None = None
    left_only: bool = False
    full_scale: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("full_scale")
        if isinstance(self.carriers, str) and self.carriers not in _NAMED:
            raise ValueError(f"Expected carriers {' or '.join(_NAMED)}, got {self.carriers!r}.")

    @property
    def source(self) -> CarrierSource:
        """Where the carriers come from."""
        return _NAMED[self.carriers] if isinstance(self.carriers, str) else self.carriers

    def bind(self, setting: Setting) -> RGPMechanism:
        """The mechanism for this run."""
        return RGPMechanism(self, setting.model)

    def describe(self) -> dict[str, Any]:
        """Name and configuration."""
        return {**super().describe(), "carriers": describe(self.source)}


class RGPMechanism(Mechanism):
    """One step of RGP."""

    def __init__(self, method: RGP, model: nn.Module) -> None:
        self._method = method
        self._weights = CarriedWeights(carried_weights(model, method.rank, method.layers))
        self._carriers: dict[str, Carrier] | None = None  # of the present step
        self._step = 0
        self._notes: list[dict[str, Any]] = []

    def carriers(self) -> Mapping[str, Carrier]:
        """L and R of the present step."""
        if self._carriers is None:
            method = self._method
            self._carriers = self._weights.carriers(
                method.source, method.rank, step=self._step, seed=method.seed
            )
        return self._carriers

    def clipped_sum(self, gradients: PerSampleGradients) -> Sums:
        """Σ_i clip((∂L, ∂R, …)_i, C), of gradients seen through `carriers` or still whole."""
        method = self._method
        whole = {n: c for n, c in self.carriers().items() if n in gradients.shapes}
        small = self._weighed(gradients.compress(whole))
        factors = clip_factors(method.clipping, small.norm_bounds(), method.clip_norm)
        return small.combine(factors)

    def _weighed(self, small: PerSampleGradients) -> PerSampleGradients:
        """∂L − L Lᵀ ∂L in place of ∂L (all that the update has of it), and the full ones scaled."""
        method, carriers = self._method, self.carriers()
        if method.left_only:
            small = small.select([name for name in small.shapes if not isinstance(name, Right)])
        terms: dict[str, list[Term]] = {}
        for name, term in small.terms.items():
            terms[name] = [term]
            if not isinstance(name, SmallGradient) and method.full_scale != 1:
                terms[name] = [term.scaled(method.full_scale)]
            elif isinstance(name, Left) and not method.left_only:
                carrier = carriers[name.weight].left
                left = term.rows(0, small.samples).view(-1, *carrier.shape)
                terms[name] = [Rows(left - carrier @ (carrier.T @ left))]
        return PerSampleGradients(
            small.shapes, terms, small.samples, like=small.like, scale=small.scale
        )

    def release(self, total: Sums, noise: Noise, noise_multiplier: float) -> Sums:
        """The sums plus z·C·N(0, I)."""
        std = noise_multiplier * self._method.clip_norm
        if not self._notes:  # it is the same at every step
            self._notes.append({"step": self._step, "noise_energy": self._energy(total, std)})
        return noise.add(total, std=std)

    def gradient(self, released: Sums) -> Gradient:
        """Put together to gradients of the weights: ∂L R + L ∂R − L Lᵀ ∂L R."""
        carriers, self._carriers = self.carriers(), None
        self._step += 1
        scale = self._method.full_scale
        update = {name: value / scale for name, value in of_parameters(released).items()}
        for name, carrier in carriers.items():
            left = released[Left(name)]
            if self._method.left_only:
                matrix = left @ carrier.right
            else:
                matrix = carrier.reconstruct(left, released[Right(name)])
            update[name] = self._weights.unflattened(name, matrix)
        return update

    def _energy(self, total: Sums, std: float) -> dict[str, float]:
        """E‖noise‖² of the update, in carried weights and in what is released in full."""
        rank, carried = self._method.rank, 0
        for d_out, d_in in self._weights.shapes().values():
            # Of the noise on ∂L only what lies outside L takes part in the update.
            carried += rank * (d_out if self._method.left_only else d_out - rank + d_in)
        full = sum(value.numel() for value in of_parameters(total).values())
        energy = {"carriers": carried * std**2, "full": full * (std / self._method.full_scale) ** 2}
        return {part: value for part, value in energy.items() if value}

    def diagnostics(self) -> list[dict[str, Any]]:
        """The expected energy of the noise in a step's update: once, since it does not change."""
        return list(self._notes)

    def state_dict(self) -> dict[str, Any]:
        """The step, and the weights that the history began with."""
        return {"step": self._step, "first": self._weights.first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from that step."""
        if state.keys() != {"step", "first"}:
            raise ValueError(f"Expected RGP's state with step and first, got {sorted(state)}.")
        step = check_count("RGP's step", state["step"], least=0)
        self._weights.go_on_from(state["first"])
        self._step, self._carriers = step, None
