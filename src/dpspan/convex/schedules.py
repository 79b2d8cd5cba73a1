"""The clip of each step, from public constants: C_t bounds the gradient of one record at step t."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any, Protocol, runtime_checkable

from dpspan.support.checks import check_number, expect, shown


@runtime_checkable
class ClipSchedule(Protocol):
    """What the clip is at step t = 1, 2, …; it knows nothing but t."""

    def at(self, step: int) -> float:
        """C_t."""

    def describe(self) -> dict[str, Any]:
        """The configuration, for the certificate."""


@dataclass(frozen=True, kw_only=True)
class ConstantClip:
    """The same clip at every step."""

    clip: float

    def __post_init__(self) -> None:
        _check_positive("clip", self.clip)

    def at(self, step: int) -> float:
        return self.clip

    def describe(self) -> dict[str, Any]:
        return {"name": "ConstantClip", "clip": float(self.clip)}


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """C_t = start·t^(−decay), never below `end`: the paper's envelope of falling gradients.

    All three are public constants. With noise in proportion, every step costs the same.
    """

    start: float
    decay: float = 0.25
    end: float = 0.0

    def __post_init__(self) -> None:
        _check_positive("start", self.start)
        expect(check_number("decay", self.decay) >= 0, "decay >= 0", self.decay)
        expect(check_number("end", self.end) >= 0, "end >= 0", self.end)

    def at(self, step: int) -> float:
        return max(float(self.start * step**-self.decay), self.end)

    def describe(self) -> dict[str, Any]:
        numbers = {name: float(number) for name, number in asdict(self).items()}
        return {"name": "Envelope", **numbers}


@dataclass(frozen=True, kw_only=True)
class GivenClips:
    """One clip a step, found on public data, say; the last one stays."""

    clips: tuple[float, ...]

    def __post_init__(self) -> None:
        expect(len(self.clips) > 0, "clips to hold at least one number", self.clips)
        for clip in self.clips:
            _check_positive("each of clips", clip)

    def at(self, step: int) -> float:
        return self.clips[min(step, len(self.clips)) - 1]

    def describe(self) -> dict[str, Any]:
        return {"name": "GivenClips", "clips": [float(clip) for clip in self.clips]}


def _check_positive(name: str, value: float) -> None:
    expect(0 < check_number(name, value) < float("inf"), f"{name} > 0 and finite", value)


def schedule_of(given: float | ClipSchedule) -> ClipSchedule:
    """The schedule meant by a number or an object; one inferred from records is refused."""
    if isinstance(given, Real):
        return ConstantClip(clip=float(check_number("clip", given)))
    if isinstance(given, type) or not isinstance(given, ClipSchedule):
        raise ValueError(
            f"Expected clip to be a number or a schedule of numbers, got {shown(given)}. A clip "
            "inferred from private records (their median norm, say) would release them without "
            "noise: choose it in advance, or on public data."
        )
    return given
