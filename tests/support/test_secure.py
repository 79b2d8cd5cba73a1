"""Cryptographic random numbers: their laws, and that no seed of anybody's brings them back."""

from __future__ import annotations

import math
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy import stats

from dpspan.support.secure import SecureGenerator

RARE = 1e-6  # a keyed draw is always the same: these bounds hold once and for all


def ks_bound(count: int) -> float:
    """Dvoretzky, Kiefer and Wolfowitz: a distance that one draw in a million exceeds."""
    return math.sqrt(math.log(2 / RARE) / (2 * count))


def test_normal_numbers_are_normal() -> None:
    n = 400_000
    x = SecureGenerator([1]).standard_normal(n)
    assert stats.kstest(x, "norm").statistic < ks_bound(n)
    low, high = stats.chi2(n).ppf([RARE / 2, 1 - RARE / 2])
    assert low < float(x @ x) < high
    z = -stats.norm.ppf(RARE / 2)
    assert abs(x.mean()) < z / math.sqrt(n)
    assert abs(float((x**4).mean()) - 3) < z * math.sqrt(96 / n)
    for apart in (1, 2, 3, 1 << 15):  # within a number's draws, and from block to block
        assert abs(float(x[apart:] @ x[:-apart])) < z * math.sqrt(n)
    for at in (3.0, 4.0):
        law = stats.binom(n, 2 * stats.norm.sf(at))
        assert law.ppf(RARE) <= int((np.abs(x) > at).sum()) <= law.isf(RARE)


def test_fewer_draws_would_be_found() -> None:
    """The bound above can fail: noise a hundredth too small is beyond it."""
    n = 400_000
    x = 0.99 * SecureGenerator([1]).standard_normal(n)
    assert float(x @ x) < stats.chi2(n).ppf(RARE / 2)


def test_there_are_tails_beyond_what_one_draw_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = SecureGenerator()
    monkeypatch.setattr("dpspan.support.secure.os.urandom", lambda count: b"\xff" * count)
    assert generator.standard_normal(1)[0] > 16  # one draw ends at 8.2
    monkeypatch.setattr("dpspan.support.secure.os.urandom", lambda count: b"\x00" * count)
    assert generator.standard_normal(1)[0] < -16
    assert 0 < generator.random(1)[0] < 2**-52


def test_uniform_numbers_and_whole_ones() -> None:
    generator, n = SecureGenerator([2]), 200_000
    u = generator.random(n)
    assert 0 < u.min() < u.max() < 1
    assert stats.kstest(u, "uniform").statistic < ks_bound(n)
    counts = np.bincount(generator.integers(7, size=n), minlength=8)
    assert counts[7] == 0
    assert stats.chisquare(counts[:7]).pvalue > RARE


def test_shapes_and_places_to_write_to() -> None:
    generator = SecureGenerator([3])
    assert generator.standard_normal((4, 5)).shape == (4, 5)
    out = np.zeros(100_000)
    assert generator.standard_normal(out=out) is out
    assert np.count_nonzero(out) == len(out)


def test_a_key_fixes_the_numbers_and_nothing_else_does() -> None:
    first, again = (SecureGenerator((5, 1)).random(3) for _ in range(2))
    assert (first == again).all()
    assert not set(SecureGenerator((5, 2)).random(3)) & set(first)
    stream = SecureGenerator((5, 1))
    assert not set(stream.random(3)) & set(stream.random(3))
    drawn = set()
    for _ in range(4):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        drawn |= set(SecureGenerator().standard_normal(3))
    assert len(drawn) == 12


def test_no_torch_is_needed() -> None:
    code = "import sys; from dpspan.support import secure; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
