"""DP-SGD: the tests of the privacy contract that catch real bugs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from dpspan import DPSGD, AutomaticClipping, FlatClipping, per_sample_gradients
from dpspan.gradients.layers.linear import Outer
from dpspan.gradients.layers.terms import Rows
from dpspan.gradients.operator import PerSampleGradients
from dpspan.mechanisms import Setting
from dpspan.mechanisms.noise import Noise
from helpers.oracle import per_sample_matrix
from helpers.problems import loss_per_sample, make
from helpers.subspaces import flat, stepped

CLIP = 1.5


def mechanism(clipping: object = None) -> object:
    return DPSGD(clip=CLIP, clipping=clipping or FlatClipping()).bind(
        Setting(model=nn.Linear(1, 1))
    )


def rows(values: Tensor) -> PerSampleGradients:
    """Gradients given as rows, cut into a matrix and a vector."""
    n = len(values)
    shapes = {"w": torch.Size((3, 4)), "b": torch.Size((values.shape[1] - 12,))}
    terms = {"w": [Rows(values[:, :12].view(n, 3, 4))], "b": [Rows(values[:, 12:])]}
    return PerSampleGradients(shapes, terms, n, like=values)


def outer(a: Tensor, b: Tensor) -> PerSampleGradients:
    """Gradients given as sequences of outer products (ghost norm, book-keeping)."""
    shape = torch.Size((b.shape[2], a.shape[2]))
    return PerSampleGradients({"w": shape}, {"w": [Outer(a, b)]}, len(a), like=a)


def test_clipped_sum_is_the_formula() -> None:
    model, x = make("mlp")
    oracle = per_sample_matrix(model, loss_per_sample, x)
    expected = (oracle * (CLIP / oracle.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)
    total = mechanism().clipped_sum(per_sample_gradients(model, loss_per_sample, x))
    assert torch.allclose(flat(total), expected, atol=1e-10)


# -- sensitivity, by brute force ------------------------------------------------------------------

special = st.sampled_from([0.0, 1e-38, 1e-20, 1.0, 1e4, 1e18, 1e25, 3e38, math.inf, math.nan])


@settings(max_examples=150, deadline=None)
@given(
    scales=st.lists(special, min_size=1, max_size=5),
    newcomer=special,
    direction=st.integers(0, 2**16),
    automatic=st.booleans(),
    sequence=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_adding_one_sample_moves_the_sum_by_at_most_the_clip(
    scales: list[float],
    newcomer: float,
    direction: int,
    automatic: bool,
    sequence: int,
    dtype: torch.dtype,
) -> None:
    g = torch.Generator().manual_seed(direction)
    rule = AutomaticClipping() if automatic else FlatClipping()
    factors = torch.tensor([*scales, newcomer], dtype=dtype)
    n = len(factors)

    values = torch.randn(n, 20, generator=g, dtype=dtype) * factors[:, None]
    with_newcomer = flat(mechanism(rule).clipped_sum(rows(values))).double()
    without = flat(mechanism(rule).clipped_sum(rows(values[:-1]))).double()
    check_sensitivity(with_newcomer, without, n, dtype)

    a = torch.randn(n, sequence, 6, generator=g, dtype=dtype) * factors.sqrt()[:, None, None]
    b = torch.randn(n, sequence, 5, generator=g, dtype=dtype) * factors.sqrt()[:, None, None]
    with_newcomer = flat(mechanism(rule).clipped_sum(outer(a, b))).double()
    without = flat(mechanism(rule).clipped_sum(outer(a[:-1], b[:-1]))).double()
    check_sensitivity(with_newcomer, without, n, dtype)


def check_sensitivity(one: Tensor, other: Tensor, samples: int, dtype: torch.dtype) -> None:
    # What is left is the rounding of adding up `samples` vectors of length ≤ CLIP.
    rounding = 4 * samples * CLIP * torch.finfo(dtype).eps
    assert torch.isfinite(one).all()
    assert torch.isfinite(other).all()
    assert float((one - other).norm()) <= CLIP + rounding


def test_cancelling_sequences_stay_within_the_clip() -> None:
    """A sequence whose terms nearly cancel: a ghost norm without slack would clip too little."""
    torch.manual_seed(0)
    for trial in range(40):
        a = torch.randn(1, 1, 40).expand(1, 6, 40).contiguous() * 300
        b = torch.randn(1, 6, 60) * 300
        b[:, -1] = -b[:, :-1].sum(1) + 10.0 ** (-trial / 10) * torch.randn(1, 60)
        exact = outer(a.double(), b.double()).matrix()
        weights = torch.ones(1, dtype=torch.float64)
        bound = outer(a, b).norm_bounds()
        factor = torch.minimum(weights, CLIP / bound)
        assert float((factor[:, None] * exact).norm()) <= CLIP


@pytest.mark.parametrize(("small", "large"), [(2.6e-23, 6e20), (3e-22, 1e21), (1e-25, 1e24)])
@pytest.mark.parametrize("sequence", [1, 3])
def test_underflow_hides_nothing(small: float, large: float, sequence: int) -> None:
    """‖a‖² vanishes in float32 while ‖a‖‖b‖ does not."""
    torch.manual_seed(0)
    a = small * torch.randn(4, sequence, 784).sign()
    b = large * torch.randn(4, sequence, 10).sign()
    total = flat(mechanism().clipped_sum(outer(a[:1], b[:1])))
    assert float(total.double().norm()) <= CLIP * (1 + 1e-6)


def test_no_clip_factor_without_limit() -> None:
    tiny = AutomaticClipping(stability=1e-30)
    total = flat(mechanism(tiny).clipped_sum(rows(torch.full((1, 20), 1e-23))))
    assert float(total.norm()) <= CLIP
    small = DPSGD(clip=1.3e-7).bind(Setting(model=nn.Linear(1, 1)))
    total = flat(small.clipped_sum(rows(torch.full((1, 20), 3e37))))
    assert float(total.double().norm()) <= 1.3e-7 * (1 + 1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_sample_contributes_nothing(bad: float) -> None:
    model, x = make("mlp")
    clean = flat(mechanism().clipped_sum(per_sample_gradients(model, loss_per_sample, x)))
    poisoned = torch.cat([x, torch.full_like(x[:1], bad)])
    total = flat(mechanism().clipped_sum(per_sample_gradients(model, loss_per_sample, poisoned)))
    assert torch.allclose(total, clean, atol=1e-12)


# -- the law of the noise -------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [0, 1, 400])
def test_noise_law(samples: int) -> None:
    """On zero gradients the release is noise alone: normal, white, of std z·C, whatever n is."""
    z, steps, size = 0.7, 2000, 20
    noise = Noise(seed=samples)
    total = mechanism().clipped_sum(rows(torch.zeros(samples, size)))
    draws = [flat(stepped(mechanism(), total, noise, z)) for _ in range(steps)]
    N = (torch.stack(draws) / (z * CLIP)).double()
    count = steps * size
    # Each statistic is (nearly) normal with the given standard error; |·| < 5.5 standard errors
    # fails with probability below 4e-8 per check.
    assert abs(float(N.mean())) < 5.5 / math.sqrt(count)
    assert abs(float(N.var()) - 1) < 5.5 * math.sqrt(2 / count)
    assert stats.kstest(N.flatten().numpy(), "norm").pvalue > 1e-6
    covariance = N.T @ N / steps
    off_diagonal = covariance - torch.diag(torch.diag(covariance))
    assert float(off_diagonal.abs().max()) < 5.5 / math.sqrt(steps)
    assert float((torch.diag(covariance) - 1).abs().max()) < 5.5 * math.sqrt(2 / steps)
    lagged = (N[1:] * N[:-1]).sum() / math.sqrt((steps - 1) * size)
    assert abs(float(lagged)) < 5.5


def test_noise_scales_with_clip_and_multiplier() -> None:
    total = {"w": torch.zeros(200_000)}
    for clip, z in ((0.1, 3.0), (5.0, 0.5)):
        bound = DPSGD(clip=clip).bind(Setting(model=nn.Linear(1, 1)))
        std = float(stepped(bound, total, Noise(seed=1), z)["w"].std())
        assert abs(std / (clip * z) - 1) < 5.5 / math.sqrt(2 * 200_000)


def test_noise_is_fresh() -> None:
    like = torch.zeros(1000)
    assert not torch.equal(Noise().normal(like, 1.0), Noise().normal(like, 1.0))
    noise = Noise()
    first, second = noise.normal(like, 1.0), noise.normal(like, 1.0)
    assert abs(float((first * second).mean())) < 5.5 / math.sqrt(1000)
    torch.manual_seed(0)
    one = Noise().normal(like, 1.0)
    torch.manual_seed(0)
    assert not torch.equal(one, Noise().normal(like, 1.0))  # torch's global seed plays no part


# -- configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [0.0, -1.0, math.inf, math.nan])
def test_clip_must_be_positive(clip: float) -> None:
    with pytest.raises(ValueError, match=r"Expected clip (> 0|to be a number)"):
        DPSGD(clip=clip)


def test_clip_and_max_grad_norm() -> None:
    assert DPSGD().with_clip(2.0).clip == 2.0
    assert DPSGD(clip=2.0).with_clip(2.0).clip == 2.0
    with pytest.raises(ValueError, match=r"clip=1.0 in DPSGD and max_grad_norm=2.0"):
        DPSGD(clip=1.0).with_clip(2.0)
    with pytest.raises(ValueError, match=r"Expected clip (> 0|to be a number)"):
        DPSGD().with_clip(0.0)
    assert DPSGD().describe()["clip"] == 1.0
