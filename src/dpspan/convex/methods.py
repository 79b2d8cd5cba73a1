"""The methods by name; docs/tables.md compares them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from dpspan.convex.adagrad import NoisyAdaGrad
from dpspan.convex.arrays import Array
from dpspan.convex.fitting import Fit
from dpspan.convex.gradient_descent import GradientDescent
from dpspan.convex.oracles import PublicFeatures
from dpspan.convex.preconditioners import FromNoisyGradients, Released


class Method(Protocol):
    """A frozen dataclass of public configuration that minimises a loss privately."""

    @property
    def steps(self) -> int:
        """How many Gaussian mechanisms a fit is."""

    def minimise(self, fit: Fit) -> Array:
        """The parameters released by a fit; charges `steps` steps to its ledger."""

    def describe(self) -> dict[str, Any]:
        """The configuration, for the certificate."""


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
            f"NoisyAdaGrad(...), got {given!r}."
        )
    return METHODS[given]
