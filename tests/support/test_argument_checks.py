"""Checks of arguments: what is taken, and the sentence with which the rest is refused."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

import numpy as np
import pytest

from dpspan import DPSGD, Contender, RandomSubspace, Search
from dpspan.engine.sampling import PoissonDraw
from dpspan.support.checks import (
    check_count,
    check_fraction,
    check_number,
    check_positive,
    check_seed,
    check_share,
)


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_a_count_is_any_integer_and_comes_back_as_a_plain_int(value: Any) -> None:
    assert check_count("rank", value) == 3
    assert type(check_count("rank", value)) is int


@pytest.mark.parametrize("value", [0, -1, True, np.True_, 1.0, "1", None])
def test_nothing_else_is_a_count(value: Any) -> None:
    message = f"Expected rank to be an integer of at least 1, got {value!r}."
    with pytest.raises(ValueError, match=re.escape(message) if value is not np.True_ else "rank"):
        check_count("rank", value)


def test_a_count_may_start_elsewhere() -> None:
    assert check_count("start", 0, least=0) == 0
    with pytest.raises(ValueError, match="start to be an integer of at least 0, got -1"):
        check_count("start", -1, least=0)


def test_a_seed_fits_every_generator() -> None:
    assert check_seed(2**63 - 1) == 2**63 - 1
    for value in (-1, 2**63, 1.0, False):
        with pytest.raises(ValueError, match=r"Expected seed to be .*, got "):
            check_seed(value)


@pytest.mark.parametrize("value", ["1", None, True, math.nan, [1.0]])
def test_what_is_not_a_number_is_refused_by_a_sentence_not_a_type_error(value: Any) -> None:
    for check in (check_number, check_positive):
        with pytest.raises(ValueError, match="Expected clip to be a number, got"):
            check("clip", value)


@pytest.mark.parametrize("value", [0, -1.0, math.inf])
def test_only_finite_numbers_above_zero_are_positive(value: float) -> None:
    assert check_positive("clip", np.float32(0.5)) == 0.5
    with pytest.raises(ValueError, match=f"Expected clip > 0 and finite, got {value}"):
        check_positive("clip", value)


@pytest.mark.parametrize("value", [0, 1.5, -0.1])
def test_a_share_is_above_zero_and_at_most_one(value: float) -> None:
    assert check_share("sample_rate", 1) == 1.0
    with pytest.raises(ValueError, match=f"Expected 0 < sample_rate <= 1, got {value}"):
        check_share("sample_rate", value)


@pytest.mark.parametrize("value", [0, 1.0, -0.1])
def test_a_fraction_is_strictly_between(value: float) -> None:
    assert check_fraction("delta", 0.5) == 0.5
    with pytest.raises(ValueError, match=f"Expected 0 < delta < 1, got {value}"):
        check_fraction("delta", value)


CONTENDER = partial(Contender, name="x", method=DPSGD(clip=1.0), learning_rate=0.1)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: PoissonDraw(records=10, sample_rate="0.1", steps_per_epoch=1), "sample_rate"),
        (lambda: PoissonDraw.one_pass(records=10, sample_rate=True), "sample_rate"),
        (lambda: PoissonDraw.one_pass(records=10, sample_rate=0), "sample_rate"),
        (lambda: Search(share="x"), "share"),
        (lambda: RandomSubspace(rank=2, seed=-1), "seed"),
        (lambda: CONTENDER(low_pass=2), "low_pass"),
        (lambda: CONTENDER(average_weights="0.9"), "average_weights"),
        (lambda: CONTENDER(views="2"), "views"),
        (lambda: CONTENDER(views=0), "views"),
    ],
)
def test_arguments_are_checked_where_they_are_given(make: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"Expected (0 < )?{name}\b"):
        make()
