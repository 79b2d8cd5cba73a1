"""Checks of arguments: what is taken, and the sentence with which the rest is refused."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from dpspan.support.checks import check_count, check_number, check_positive, check_seed


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
