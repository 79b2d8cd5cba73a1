"""The demo's settings, and where they come from.

The scene (ε, epochs, batch size, how many scans and printed digits), ranks and clips were set by
hand, after trials measured on a part of the private digits; a real user's ε would have to cover
such trials. Learning rates, which decide between methods, come from printed digits alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from dpspan.app.comparison import Contender
from dpspan.mechanisms import DPSGD, GEP, PDPSGD, RGP, Method
from dpspan.public.warm_start import WarmStart

EPSILON, DELTA, CHOICE_EPSILON = 1.0, 1e-5, 0.1
BATCH, EPOCHS = 256, 20
OPT_IN, RENDERED, TEST = 100, 300, 360
RANK, CLIP, RESIDUAL_CLIP, CARRIERS = 40, 1.0, 0.2, 2

WARM = WarmStart(data=None, max_epochs=60, learning_rate=3e-3, patience=10)

# Learning rates from scratch and after the warm start, as experiments/demo_rates.py found them.
RATES = {"DP-SGD": (0.5, 0.25), "PDP-SGD": (4.0, 1.0), "GEP": (1.0, 0.5), "RGP": (1.0, 1.0)}


def network() -> nn.Module:
    """A small convolutional network with GroupNorm, 5,114 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def contenders(
    *, public: object, start: WarmStart | None, paid: Mapping[str, Any] | None
) -> list[Contender]:
    """Each method from scratch and after the warm start; subspaces come from unlabelled data."""
    methods: dict[str, Method] = {
        "DP-SGD": DPSGD(clip=CLIP),
        "PDP-SGD": PDPSGD(public=public, rank=RANK, clip=CLIP, diagnose=10),
        "GEP": GEP(public=public, rank=RANK, clip=CLIP, residual_clip=RESIDUAL_CLIP, diagnose=10),
        "RGP": RGP(rank=CARRIERS, clip=CLIP),
    }
    cold = [
        Contender(
            name=name,
            method=method,
            learning_rate=RATES[name][0],
            paid=paid if isinstance(method, PDPSGD | GEP) else None,
        )
        for name, method in methods.items()
    ]
    assert start is not None  # the printed digits have labels
    warm = [dataclasses.replace(c.warmed(start), learning_rate=RATES[c.name][1]) for c in cold]
    return [*cold, *warm]
