"""After the noise, for any method and at no cost: filtered gradients, and averaged weights.

    g_t   what a step releases, divided by L        m_t = β·m_{t−1} + (1 − β)·g_t,  m_0 = 0
    w_t   the weights after it                      a_t = d_t·a_{t−1} + (1 − d_t)·w_t,  a_0 = w_0

The optimizer gets m_t/(1 − βᵗ), a low-pass filter without its lag at the start. The average has
d_t = min(α, (1 + t)/(10 + t)), so that the first weights are soon forgotten (De et al. 2022).
Both see released numbers only. Of a sharded model each process keeps its own part.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpspan.support.checks import check_count, check_number, expect


@dataclass(frozen=True, kw_only=True)
class Smoothing:
    """What is asked for; None is neither."""

    low_pass: float | None = None  # β
    average_weights: float | None = None  # α

    def __post_init__(self) -> None:
        for name, value in self.describe().items():
            expect(0 < check_number(name, value) < 1, f"{name} between 0 and 1, or None", value)

    def describe(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if value is not None}


class Smoother:
    """Of one run: the filter's memory, and the average."""

    def __init__(self, smoothing: Smoothing, module: nn.Module) -> None:
        self._how, self._module, self._steps = smoothing, module, 0
        self._filtered: dict[str, Tensor] = {}
        self._average: dict[str, Tensor] = {}
        self.shown = False  # the model has the averaged weights at the moment
        if smoothing.average_weights is not None:
            self._average = {n: w.detach().clone() for n, w in self._weights().items()}

    def _weights(self) -> dict[str, Tensor]:
        """What is trained, in float32 at least: in fewer digits an average would stand still."""
        named = self._module.named_parameters()
        own = {n: p.detach() for n, p in named if p.requires_grad or n in self._average}
        return {n: w.to(torch.promote_types(w.dtype, torch.float32)) for n, w in own.items()}

    def filtered(self, gradient: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the optimizer gets of a released gradient."""
        beta = self._how.low_pass
        if beta is None:
            return dict(gradient)
        for name, value in gradient.items():
            self._filtered.setdefault(name, torch.zeros_like(value)).lerp_(value, 1 - beta)
        return {name: self._filtered[name] / (1 - beta ** (self._steps + 1)) for name in gradient}

    @torch.no_grad()
    def stepped(self) -> None:
        """The optimizer has taken a step with a released gradient."""
        self._steps += 1
        decay = min(self._how.average_weights or 0.0, (1 + self._steps) / (10 + self._steps))
        now = self._weights() if self._average else {}
        for name, average in self._average.items():
            average.lerp_(now[name], 1 - decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model has the averaged weights meanwhile."""
        parameters = dict(self._module.named_parameters())
        before = {name: parameters[name].detach().clone() for name in self._average}
        self.show_average()
        try:
            yield
        finally:
            self._put(before)
            self.shown = False

    def show_average(self) -> None:
        self._put(self._average)
        self.shown = True

    @torch.no_grad()
    def _put(self, weights: Mapping[str, Tensor]) -> None:
        parameters = dict(self._module.named_parameters())
        for name, value in weights.items():
            parameters[name].copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Released things only; empty where nothing is smoothed."""
        kept = {"filtered": dict(self._filtered), "average": dict(self._average)}
        return {"steps": self._steps, **kept} if self._how.describe() else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        mine, known = self._weights(), state.keys() == self.state_dict().keys()
        kept = [state.get(name, {}) for name in ("filtered", "average")]
        fits = all(n in mine and x.shape == mine[n].shape for part in kept for n, x in part.items())
        whole = known and fits and kept[1].keys() == self._average.keys()
        expect(whole, "the state of a run of this model, smoothed alike", sorted(state))
        if state:
            self._steps = check_count("steps", state["steps"], least=0)
            self._filtered, self._average = (
                {n: x.to(mine[n].device, copy=True) for n, x in part.items()} for part in kept
            )
