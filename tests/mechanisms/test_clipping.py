"""Clipping rules cannot break the clip, whoever wrote them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dpspan.mechanisms.clipping import AutomaticClipping, FlatClipping, clip_factors
from dpspan.support.checks import describe

norm_lists = st.lists(st.floats().map(abs), min_size=1, max_size=8)  # with NaN and infinity


@dataclass(frozen=True)
class Rogue:
    value: float

    def factor(self, norm: Tensor, clip: float) -> Tensor:
        return torch.full_like(norm, self.value)


@settings(deadline=None)
@given(norm_lists, st.floats(1e-3, 1e3), st.floats())
def test_no_rule_exceeds_the_clip(values: list[float], clip: float, rogue: float) -> None:
    norms = torch.tensor(values, dtype=torch.float64)
    for rule in (FlatClipping(), AutomaticClipping(), Rogue(rogue)):
        factors = clip_factors(rule, norms, clip)
        assert torch.isfinite(factors).all()
        assert (factors >= 0).all()
        finite = torch.isfinite(norms)
        assert (factors[~finite] == 0).all()
        assert (factors[finite] * norms[finite] <= clip * (1 + 1e-12)).all()


class Collective:
    """Would clip everybody by the largest norm of the batch: one newcomer would move all."""

    def factor(self, norm: Tensor, clip: float) -> Tensor:
        return clip / norm.max()


def test_a_rule_cannot_look_at_other_samples() -> None:
    norms = torch.tensor([1.0, 2.0, 100.0]).double()
    factors = clip_factors(Collective(), norms, 1.0)
    assert torch.allclose(factors, 1 / norms)
    assert describe(Collective()) == "Collective"
    assert describe(AutomaticClipping()) == "AutomaticClipping(stability=0.01)"


def test_flat_clipping_leaves_short_gradients_alone() -> None:
    factors = clip_factors(FlatClipping(), torch.tensor([0.0, 0.5, 2.0, 4.0]).double(), 2.0)
    assert factors.tolist() == [1.0, 1.0, 1.0, 0.5]


def test_automatic_clipping_normalises() -> None:
    norms = torch.tensor([1e-6, 1.0, 1e6]).double()
    lengths = clip_factors(AutomaticClipping(stability=0.01), norms, 3.0) * norms
    assert torch.allclose(lengths, 3 * norms / (norms + 0.01))
    assert math.isclose(float(lengths[2]), 3.0, rel_tol=1e-6)


def test_stability_must_be_positive() -> None:
    with pytest.raises(ValueError, match="Expected stability > 0 and finite, got 0"):
        AutomaticClipping(stability=0)
