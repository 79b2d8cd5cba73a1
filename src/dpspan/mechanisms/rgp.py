"""Reparametrized Gradient Perturbation (Yu, Zhang, Chen, Yin, Liu 2021), its Algorithm 1.

    L, R      carriers of each weight: orthonormal, from released weights (`carriers`)
    ∂L, ∂R    G Rᵀ and Lᵀ G for the gradient G of a weight; r(d_out + d_in) numbers per sample
    release   Σ clip((∂L, ∂R of all weights, full gradients of the rest), C) + z·C·N(0, I)
    update    ∂L R + L ∂R − L Lᵀ ∂L R, for any optimizer

The authors never carry the classifier, and make its gradient shorter before the clip, or it would
take up most of it: s·g is what is clipped and released (`head_scale`), times a rate of its own in
the update (`head_rate`).

Formal guarantee: what is clipped and summed is one vector per sample, the tuple of all its small
gradients, so one release is a Gaussian mechanism of noise multiplier z. Everything that is trained
is in it, and every entry gets noise. The update is post-processing.

The model itself is not reparametrized: ∂L and ∂R come from each layer's input and output gradient.
The part of ∂L inside L takes no part in the update, so it is taken off before the clip.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from dpspan.gradients.layers.terms import Rows
from dpspan.gradients.operator import Left, PerSampleGradients, Right
from dpspan.mechanisms.base import Gradient, Method, Setting, SteppedMechanism, Sums, of_parameters
from dpspan.mechanisms.carriers import (
    Carrier,
    CarrierSource,
    History,
    RandomCarriers,
    RunCarriers,
    carried_weights,
    head_of,
)
from dpspan.mechanisms.clipping import clip_factors
from dpspan.mechanisms.noise import Noise
from dpspan.support.checks import check_count, describe
from dpspan.support.distributed import Processes
from dpspan.support.sharded import Shards

_NAMED: dict[str, CarrierSource] = {
    "history": History(),
    "weights": History(warmup=None),
    "random": RandomCarriers(),
}


@dataclass(frozen=True, kw_only=True)
class RGP(Method):
    """RGP with carriers of this rank.

    Args:
        rank: r, the carriers' rank.
        clip: C, over all small gradients jointly.
        carriers: 'history' (W_t − W_0), 'weights' (W_t, as the authors' code), 'random', or
            `History(warmup=...)`.
        layers: which weights are carried, by name; by default all of linear and convolution
            layers that become smaller. The rest that is trained is released in full.
        left_only: release ∂L only, as the authors' code trains.
        head_scale: given, the last linear layer is not carried, and its gradient is multiplied by
            this before the clip (the authors': 0.01 for images, 0.1 for text).
        head_rate: what its released gradient is multiplied by, 1 if left out; 1 / head_scale undoes
            the scale, for the noise too.
        clipping: the rule for clip factors.
        seed: of the random numbers that carriers start from; not a secret.
    """

    counts = {"rank": 1, "seed": 0}  # noqa: RUF012
    positive = ("clip", "head_scale", "head_rate")

    rank: int = 1
    carriers: str | CarrierSource = "history"
    layers: Callable[[str], bool] | None = None
    left_only: bool = False
    head_scale: float | None = None
    head_rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.carriers, str) and self.carriers not in _NAMED:
            raise ValueError(f"Expected carriers {' or '.join(_NAMED)}, got {self.carriers!r}.")
        if self.head_scale is None and self.head_rate is not None:
            raise ValueError("head_rate= is for a head with a head_scale=: give both.")

    @property
    def source(self) -> CarrierSource:
        """Where the carriers come from."""
        return _NAMED[self.carriers] if isinstance(self.carriers, str) else self.carriers

    def bind(self, setting: Setting) -> SteppedMechanism:
        return RGPMechanism(self, setting.model, setting.processes)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "carriers": describe(self.source)}


class RGPMechanism(SteppedMechanism):
    """One step of RGP."""

    stays_in_place = True  # carriers are written over

    def __init__(self, method: RGP, model: nn.Module, processes: Processes) -> None:
        super().__init__()
        self._method = method
        self._head = set() if method.head_scale is None else head_of(model)
        weights = carried_weights(model, method.rank, method.layers, self._head)
        self._carried = RunCarriers(weights, method.source, method.rank, method.seed, processes)
        self._sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        self._placement = Shards(model).of_same

    def carriers(self) -> Mapping[str, Carrier]:
        """L and R of the present step."""
        return self._carried.at(self.step)

    @property
    def _head_rate(self) -> float:
        return 1.0 if self._method.head_rate is None else self._method.head_rate

    def clipped_sum(self, gradients: PerSampleGradients) -> Sums:
        """Σ_i clip((∂L, ∂R, …)_i, C), of gradients seen through `carriers` or still whole."""
        method = self._method
        whole = {n: c for n, c in self.carriers().items() if n in gradients.shapes}
        small = gradients.compress(whole)
        if method.left_only:
            small = small.select([name for name in small.shapes if not isinstance(name, Right)])
        else:
            small = self._outside_left(small)
        if method.head_scale is not None:
            shorter = {
                n: small.terms[n].scaled(method.head_scale) for n in self._head & {*small.terms}
            }
            small = small.derived({**small.terms, **shorter})
        factors = clip_factors(method.clipping, small.norm_bounds(), method.clip_norm)
        return small.combine(factors)

    def _outside_left(self, small: PerSampleGradients) -> PerSampleGradients:
        """∂L − L Lᵀ ∂L in place of ∂L: all that the update has of it."""
        terms = dict(small.terms)
        for name, term in small.terms.items():
            if isinstance(name, Left):
                carrier = self.carriers()[str(name)].left
                left = term.rows(0, small.samples).view(-1, *carrier.shape)
                terms[name] = Rows(left - carrier @ (carrier.T @ left))
        return small.derived(terms)

    def release(self, total: Sums, noise: Noise, noise_multiplier: float) -> Sums:
        """The sums plus z·C·N(0, I)."""
        std = noise_multiplier * self._method.clip_norm
        if not self._notes:  # it is the same at every step
            self._notes.append({"step": self.step, "noise_energy": self._energy(total, std)})
        return noise.add(total, std=std)

    def gradient(self, released: Sums) -> Gradient:
        """Put together to gradients of the weights: ∂L R + L ∂R − L Lᵀ ∂L R."""
        carriers = self.carriers()
        self.step += 1
        update = of_parameters(released)
        for name in self._head & update.keys():
            update[name] = update[name] * self._head_rate
        return update | self._placement(self._carried.reconstructed(carriers, released))

    def _energy(self, total: Sums, std: float) -> dict[str, float]:
        """E‖noise‖² of the update, in carried weights and in what is released in full."""
        rank, carried = self._method.rank, 0
        for d_out, d_in in (matrix.shape for matrix in self._carried.matrices.values()):
            # Of the noise on ∂L only what lies outside L takes part in the update.
            carried += rank * (d_out if self._method.left_only else d_out - rank + d_in)
        full = sum(
            self._sizes[name] * (self._head_rate**2 if name in self._head else 1)
            for name in of_parameters(total)
        )
        energy = {"carriers": carried * std**2, "full": full * std**2}
        return {part: value for part, value in energy.items() if value}

    def state_dict(self) -> dict[str, Any]:
        """The step, and the weights that the history began with."""
        return {"step": self.step, "first": self._carried.first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.keys() != {"step", "first"}:
            raise ValueError(f"Expected RGP's state with step and first, got {sorted(state)}.")
        step = check_count("RGP's step", state["step"], least=0)
        self._carried.begin_from(state["first"])
        self.step = step
