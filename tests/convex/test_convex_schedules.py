"""Clips by public constants, and the refusal of a clip found by looking."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from dpspan.convex.estimators import configuration
from dpspan.convex.fitting import ConstantClip, Envelope, schedule_of


def test_schedules() -> None:
    assert [ConstantClip(clip=2.0).at(t) for t in (1, 50)] == [2.0, 2.0]
    falling = Envelope(start=4.0, decay=0.5)
    assert [falling.at(t) for t in (1, 4, 16)] == [4.0, 2.0, 1.0]
    assert schedule_of(1) == ConstantClip(clip=1.0)
    for number in (np.float64(0.5), np.float32(0.5), np.float16(0.5)):
        assert schedule_of(number) == ConstantClip(clip=0.5)
    assert schedule_of(np.int64(2)) == ConstantClip(clip=2.0)
    for schedule in (ConstantClip(clip=np.float32(2)), Envelope(start=np.int64(2))):  # type: ignore[arg-type]
        json.dumps(configuration(schedule))
    assert schedule_of(falling) is falling


@pytest.mark.parametrize("looked", ["auto", "median", None, [1.0], np.array(1.0)])
def test_a_clip_inferred_from_records_is_refused(looked) -> None:
    with pytest.raises(ValueError, match="inferred from private records"):
        schedule_of(looked)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_clips_are_positive_numbers(bad: float) -> None:
    for make in (lambda: ConstantClip(clip=bad), lambda: Envelope(start=bad)):
        with pytest.raises(ValueError, match="Expected"):
            make()


def test_a_truth_value_is_no_clip() -> None:
    with pytest.raises(ValueError, match="Expected clip to be a number, got True"):
        schedule_of(True)
