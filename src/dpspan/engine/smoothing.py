"""After the noise, for any method and at no cost: filtered gradients, and averaged weights.

    g_t   what a step releases, divided by L        m_t = β·m_{t−1} + (1 − β)·g_t,  m_0 = 0
    w_t   the weights after it                      a_t = d_t·a_{t−1} + (1 − d_t)·w_t,  a_0 = w_0

The optimizer gets m_t/(1 − βᵗ), a low-pass filter without its lag at the start. The average has
d_t = min(α, (1 + t)/(10 + t)), so that the first weights are soon forgotten (De et al. 2022).
Both see released numbers only. Of a sharded model each process keeps its own part.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dpspan.support.checks import check_count, expect


class Smoother:
    """Of one run: the filter's memory, and the average; `how` has `low_pass`, `average_weights`."""

    def __init__(self, how: Mapping[str, float], module: nn.Module) -> None:
        self._how, self._module, self._steps = how, module, 0
        self._filtered: dict[str, Tensor] = {}
        self._average: dict[str, Tensor] = {}
        self.shown = False  # the model has the averaged weights at the moment
        if "average_weights" in how:
            self._average = {name: weight.clone() for name, weight in self._weights().items()}

    def _weights(self) -> dict[str, Tensor]:
        """What is trained, in float32 at least: in fewer digits an average would stand still."""
        named = self._module.named_parameters()
        own = {n: p.detach() for n, p in named if p.requires_grad or n in self._average}
        return {n: w.to(torch.promote_types(w.dtype, torch.float32)) for n, w in own.items()}

    def filtered(self, gradient: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the optimizer gets of a released gradient."""
        beta = self._how.get("low_pass")
        if beta is None:
            return dict(gradient)
        for name, value in gradient.items():
            self._filtered.setdefault(name, torch.zeros_like(value)).lerp_(value, 1 - beta)
        return {name: self._filtered[name] / (1 - beta ** (self._steps + 1)) for name in gradient}

    def stepped(self) -> None:
        """The optimizer has taken a step with a released gradient."""
        self._steps += 1
        now = self._weights() if self._average else {}
        for name, average in self._average.items():
            decay = min(self._how["average_weights"], (1 + self._steps) / (10 + self._steps))
            average.lerp_(now[name], 1 - decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model has the averaged weights meanwhile."""
        named = self._module.named_parameters()
        before = {n: p.detach().clone() for n, p in named if n in self._average}
        self.show(self._average)
        try:
            yield
        finally:
            self.show(before)
            self.shown = False

    @torch.no_grad()
    def show(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """By default the average, for good."""
        self.shown, weights = True, self._average if weights is None else weights
        for name, parameter in self._module.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])

    def state_dict(self) -> dict[str, Any]:
        """Released things only; empty where nothing is smoothed."""
        kept = {"filtered": dict(self._filtered), "average": dict(self._average)}
        return {"steps": self._steps, **kept} if self._how else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        mine, kept = self._weights(), [state.get(name, {}) for name in ("filtered", "average")]
        fits = all(n in mine and x.shape == mine[n].shape for part in kept for n, x in part.items())
        alike = state.keys() == self.state_dict().keys() and kept[1].keys() == self._average.keys()
        expect(fits and alike, "the state of a run of this model, smoothed alike", sorted(state))
        self._steps = check_count("steps", state.get("steps", self._steps), least=0)
        self._filtered, self._average = (
            {n: x.to(mine[n].device, copy=True) for n, x in part.items()} for part in kept
        )
