"""Clips by public constants, averages, and the refusal of a clip found by looking."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from dpspan.convex.descent import Average
from dpspan.convex.schedules import ConstantClip, Envelope, GivenClips, schedule_of


def test_schedules() -> None:
    assert [ConstantClip(clip=2.0).at(t) for t in (1, 50)] == [2.0, 2.0]
    falling = Envelope(start=4.0, decay=0.5, end=1.0)
    assert [falling.at(t) for t in (1, 4, 16, 100)] == [4.0, 2.0, 1.0, 1.0]
    assert [GivenClips(clips=(3.0, 1.0)).at(t) for t in (1, 2, 9)] == [3.0, 1.0, 1.0]
    assert schedule_of(1) == ConstantClip(clip=1.0)
    for number in (np.float64(0.5), np.float32(0.5), np.float16(0.5)):
        assert schedule_of(number) == ConstantClip(clip=0.5)
    assert schedule_of(np.int64(2)) == ConstantClip(clip=2.0)
    for schedule in (ConstantClip(clip=np.float32(2)), Envelope(start=np.int64(2))):  # type: ignore[arg-type]
        json.dumps(schedule.describe())
    assert schedule_of(falling) is falling


@pytest.mark.parametrize("looked", ["auto", "median", None, [1.0], np.array(1.0)])
def test_a_clip_inferred_from_records_is_refused(looked) -> None:
    with pytest.raises(ValueError, match="inferred from private records"):
        schedule_of(looked)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_clips_are_positive_numbers(bad: float) -> None:
    for make in (
        lambda: ConstantClip(clip=bad),
        lambda: Envelope(start=bad),
        lambda: GivenClips(clips=(1.0, bad)),
    ):
        with pytest.raises(ValueError, match="Expected"):
            make()


def test_a_truth_value_is_no_clip() -> None:
    with pytest.raises(ValueError, match="Expected clip to be a number, got True"):
        schedule_of(True)


@pytest.mark.parametrize(("share", "kept"), [(1.0, 10), (0.5, 5), (0.25, 3), (0.0, 1), (0.01, 1)])
def test_the_average_is_of_the_last_iterates(share: float, kept: int) -> None:
    iterates = np.random.default_rng(0).standard_normal((10, 3))
    average = Average(10, share)
    for iterate in iterates:
        average.add(iterate)
    np.testing.assert_allclose(average.value, iterates[-kept:].mean(0), atol=1e-14)
