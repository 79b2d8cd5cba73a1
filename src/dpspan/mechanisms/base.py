"""What a method is to the engine: public configuration, and a mechanism made from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

from torch import Tensor, nn

from dpspan.gradients.operator import PerSampleGradients
from dpspan.mechanisms.noise import Noise
from dpspan.public.data import PublicData

Sums = dict[str, Tensor]


def _silent(_: str) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a method gets to know of the run it will be part of; nothing of it is private."""

    model: nn.Module
    criterion: nn.Module | None = None  # the loss, for gradients of public samples
    steps_per_epoch: int = 1
    expected_batch_size: float = 1.0  # the configured one: the size that was drawn is private
    max_physical_batch_size: int | None = None
    warn: Callable[[str], None] = _silent  # to the operator and the certificate


def check_one_clip(method: str, own: float | None, given: float) -> None:
    """Refuse a `max_grad_norm` beside another clip."""
    if own not in (None, given):
        raise ValueError(
            f"Expected one clip, got clip={own} in {method} and max_grad_norm={given}. Give one of "
            "the two."
        )


class Mechanism(Protocol):
    """What one step computes from a batch and what it releases.

    `clipped_sum` is a sum over samples, so pieces of a batch, and processes, simply add up; noise
    comes once, in `release`. Adding or removing one sample moves the sums by at most a sensitivity
    that `release` covers with noise worth one Gaussian mechanism of the given noise multiplier.
    """

    def carriers(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """The carriers (L, R) of parameters whose gradients this step needs only through them.

        `clipped_sum` then gets `Left(name)` and `Right(name)` in place of 'name'.
        """

    def clipped_sum(self, gradients: PerSampleGradients) -> Sums:
        """Sums of clipped quantities over the samples of one piece; touches private data."""

    def release(self, total: Sums, noise: Noise, noise_multiplier: float) -> Sums:
        """The noisy sum of gradients by parameter name; all that leaves a step."""

    @property
    def public(self) -> tuple[PublicData, ...]:
        """The public data that the mechanism uses; the engine keeps it apart from the private."""

    def diagnostics(self) -> list[dict[str, Any]]:
        """What the mechanism noted while training; public or released things only."""

    def state_dict(self) -> dict[str, Any]:
        """What the mechanism carries from step to step; released or public things only."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`."""


class Method(Protocol):
    """A frozen dataclass of public configuration, `dpspan.DPSGD(clip=1.0)` for example."""

    def with_clip(self, clip: float) -> Self:
        """This method with the clip given as `max_grad_norm`, refused if it has another one."""

    def bind(self, setting: Setting) -> Mechanism:
        """The mechanism for this run."""

    def describe(self) -> dict[str, Any]:
        """The configuration as JSON, for the certificate and to recognise a checkpoint."""
