"""DP gradient descent and noisy AdaGrad, and the methods by name; docs/tables.md compares them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import numpy as np

from dpspan.convex.arrays import Array
from dpspan.convex.descent import Descent, descend
from dpspan.convex.fitting import Fit
from dpspan.convex.oracles import Everything, PublicFeatures, SubspaceOracle
from dpspan.convex.preconditioners import (
    FromNoisyGradients,
    Preconditioner,
    Released,
    ReleasedSecondMoment,
)
from dpspan.support.checks import check_count, check_number, expect, shown


def _check(method: Descent) -> None:
    check_count("steps", method.steps)
    rate, radius = method.learning_rate, method.radius
    expect(check_number("learning_rate", rate) > 0, "learning_rate > 0", rate)
    positive = radius is None or 0 < check_number("radius", radius) < float("inf")
    expect(positive, "radius to be None, or > 0 and finite", radius)
    expect(0 <= check_number("average", method.average) <= 1, "0 <= average <= 1", method.average)


@dataclass(frozen=True, kw_only=True)
class GradientDescent:
    """DP-GD; constrained with a `radius`, projected (the convex PDP-SGD) with a `subspace`.

    Examples:
        >>> from dpspan.convex import GradientDescent, PrivateLogisticRegression
        >>> model = PrivateLogisticRegression(epsilon=1.0, method=GradientDescent(radius=5.0))
    """

    steps: int = 30
    learning_rate: float = 3.0
    radius: float | None = None
    subspace: SubspaceOracle = field(default_factory=Everything)
    average: float = 0.5

    def __post_init__(self) -> None:
        _check(self)

    def minimise(self, fit: Fit) -> Array:
        """The parameters released by a fit, (P,)."""
        return descend(self, fit)

    def describe(self) -> dict[str, Any]:
        """Name and configuration, for the certificate."""
        return _described(self)


@dataclass(frozen=True, kw_only=True)
class NoisyAdaGrad:
    """Noisy AdaGrad; `preconditioner` says where H_t comes from.

    Examples:
        >>> from dpspan.convex import NoisyAdaGrad, PrivateLogisticRegression, PublicFeatures
        >>> method = NoisyAdaGrad(steps=50, subspace=PublicFeatures(rank=20))
        >>> model = PrivateLogisticRegression(epsilon=1.0, method=method)
    """

    steps: int = 30
    learning_rate: float = 1.0
    radius: float | None = None
    subspace: SubspaceOracle = field(default_factory=Everything)
    preconditioner: Preconditioner = field(default_factory=FromNoisyGradients)
    average: float = 0.5

    def __post_init__(self) -> None:
        _check(self)
        # It sees gradients without noise, so it has to be one whose noise is accounted for.
        known = isinstance(
            self.preconditioner, Released | ReleasedSecondMoment | FromNoisyGradients
        )
        expect(known, "preconditioner to be one of dpspan.convex", self.preconditioner)

    def minimise(self, fit: Fit) -> Array:
        """The parameters released by a fit, (P,)."""
        return descend(self, fit, self.preconditioner)

    def describe(self) -> dict[str, Any]:
        """Name and configuration, for the certificate."""
        return _described(self)


Method: TypeAlias = GradientDescent | NoisyAdaGrad
METHODS: Mapping[str, Method] = {
    "gd": GradientDescent(),
    "constrained": GradientDescent(radius=5.0),
    "projected": GradientDescent(subspace=PublicFeatures()),
    "adagrad": NoisyAdaGrad(),
    "adagrad-diagonal": NoisyAdaGrad(preconditioner=FromNoisyGradients(diagonal=True)),
    "adagrad-released": NoisyAdaGrad(preconditioner=Released()),
    "projected-adagrad": NoisyAdaGrad(subspace=PublicFeatures()),
    "projected-adagrad-released": NoisyAdaGrad(
        subspace=PublicFeatures(), preconditioner=Released()
    ),
}


def method_of(given: str | Method) -> Method:
    """The method meant by a name or an object; others would see records and answer for nothing."""
    if isinstance(given, GradientDescent | NoisyAdaGrad):
        return given
    if not isinstance(given, str) or given not in METHODS:
        names = ", ".join(repr(name) for name in METHODS)
        raise ValueError(
            f"Expected method to be one of {names}, a GradientDescent(...) or a "
            f"NoisyAdaGrad(...), got {shown(given)}."
        )
    return METHODS[given]


def _described(method: Method) -> dict[str, Any]:
    values = {one.name: getattr(method, one.name) for one in fields(method)}
    return {"name": type(method).__name__, **{name: _plain(v) for name, v in values.items()}}


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):  # a learning rate from np.logspace, say
        return value.item()
    return value.describe() if hasattr(value, "describe") else value
