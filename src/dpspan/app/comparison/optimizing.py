"""How a contender takes its steps: an optimizer by its factory, and a schedule of its rate.

Both are known by what they do, not by their names: two lambdas have the same name.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dpspan.support.checks import expect

# factory(parameters, lr=rate), as torch.optim.Adam is called
OptimizerFactory = Callable[..., Optimizer]
# schedule(step, steps): what the learning rate is multiplied by
Schedule = Callable[[int, int], float]

_STEPS = 1000
_HOW_IT_RUNS = {"params", "foreach", "fused", "capturable", "differentiable"}  # and changes nothing


def describe_optimizer(factory: OptimizerFactory, learning_rate: float) -> dict[str, Any]:
    """The class that it makes for a small model, and its settings."""
    parameters = [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))]
    made = factory(parameters, lr=learning_rate)
    expect(isinstance(made, Optimizer), "optimizer to make a torch optimizer", made)
    groups = [
        {key: _plain(value) for key, value in group.items() if key not in _HOW_IT_RUNS}
        for group in made.param_groups
    ]
    return {"name": type(made).__name__, "groups": groups}


def describe_schedule(schedule: Schedule) -> dict[str, Any]:
    """Its factors over 1,000 steps: the first, the last, and a digest of them all."""
    factors = [float(schedule(step, _STEPS)) for step in range(_STEPS)]
    wrong = [factor for factor in factors if not 0 <= factor < math.inf]
    expect(not wrong, "a schedule of finite factors >= 0", next(iter(wrong), None))
    text = ",".join(f"{factor:.9g}" for factor in factors)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"first": factors[0], "last": factors[-1], "sha256": digest}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | bool | int | float | None) else repr(value)
