"""What a method is to the engine: public configuration, and a mechanism made from it."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dpspan.gradients.capture import Capture
from dpspan.gradients.operator import PerSampleGradients, SmallGradient
from dpspan.mechanisms.clipping import AdaptiveClipping, ClippingRule, FlatClipping
from dpspan.mechanisms.noise import Noise
from dpspan.public.data import PublicData
from dpspan.support.checks import check_count, check_positive, describe
from dpspan.support.distributed import Processes

EMBEDDING = SmallGradient("embedding")  # names the coordinates in a subspace

# Sums over samples: of gradients by the parameter's name, of what carriers keep of a weight (`Left`
# and `Right`), or of embeddings. What is no parameter has a type of its own: names may be anything.
Sums = dict[str, Tensor]
Gradient = dict[str, Tensor]  # by parameter


def of_parameters(sums: Sums) -> Gradient:
    """The sums that are of parameters' gradients in full."""
    return {name: value for name, value in sums.items() if not isinstance(name, SmallGradient)}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a method gets to know of the run it will be part of; nothing of it is private."""

    model: nn.Module
    criterion: nn.Module | None = None  # the loss, for gradients of public samples
    steps_per_epoch: int = 1
    expected_batch_size: float = 1.0  # the configured one: the size that was drawn is private
    max_physical_batch_size: int | None = None
    warn: Callable[[str], None] = lambda _: None  # to the operator and the certificate
    processes: Processes = field(default_factory=Processes)  # those that train the model together


class Mechanism(Protocol):
    """What one step computes from a batch, what it releases, and what it makes of that.

    `clipped_sum` is a sum over samples, so pieces of a batch, and processes, simply add up; noise
    comes once, in `release`. Adding or removing one sample moves the sums by at most a sensitivity
    that `release` covers with noise worth one Gaussian mechanism of the given noise multiplier.
    `gradient` sees what was released and nothing else: it is post-processing.
    """

    public: tuple[PublicData, ...] = ()  # what it uses; the engine keeps it apart from the private
    # Whether all that `clipped_sum` reads besides its argument keeps its place in memory from step
    # to step, so that it can be recorded as a CUDA graph.
    stays_in_place: bool = False

    def carriers(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """The carriers (L, R) of parameters whose gradients this step needs only through them.

        `clipped_sum` then gets `Left(name)` and `Right(name)` in place of a parameter's name.
        """
        return {}

    def prepare(self, capture: Capture | None = None) -> None:
        """The public pass of this step, if one is due; through `capture`, the run's own."""
        return

    def clipped_sum(self, gradients: PerSampleGradients) -> Sums:
        """Sums of clipped quantities over the samples of one piece; touches private data."""
        ...

    def release(self, total: Sums, noise: Noise, noise_multiplier: float) -> Sums:
        """The sums of a whole batch with noise, by the same names: all that leaves a step.

        Of several processes the first alone is asked, and the others get what it released; so this
        is no place for state that `gradient` needs.
        """
        ...

    def gradient(self, released: Sums) -> Gradient:
        """What the optimizer gets (times the expected batch size), and the end of the step."""
        return of_parameters(released)

    def diagnostics(self) -> list[dict[str, Any]]:
        """What the mechanism noted while training; public or released things only."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """What the mechanism carries from step to step; released or public things only."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`."""
        return


@dataclass(frozen=True, kw_only=True)
class Method:
    """Public configuration: a clip C, a rule for clip factors, and what subclasses add."""

    counts: ClassVar[Mapping[str, int]] = {}  # fields that are whole numbers: the least they may be
    positive: ClassVar[tuple[str, ...]] = ("clip",)  # fields that are numbers above 0, or None
    adapts: ClassVar[bool] = False  # whether its clip may move during the run

    clip: float | None = None
    clipping: ClippingRule = field(default_factory=FlatClipping)

    def __post_init__(self) -> None:
        for name in self.positive:
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        for name, least in self.counts.items():
            object.__setattr__(self, name, check_count(name, getattr(self, name), least=least))
        if isinstance(self.clipping, AdaptiveClipping) and not self.adapts:
            raise ValueError(
                f"{type(self).__name__} has a fixed clip: AdaptiveClipping is for DPSGD and "
                "MirrorDescent. Use FlatClipping() or AutomaticClipping()."
            )

    def bind(self, setting: Setting) -> Mechanism:
        """The mechanism for this run."""
        raise NotImplementedError

    @property
    def clip_norm(self) -> float:
        """C, 1 if none was given."""
        return 1.0 if self.clip is None else self.clip

    def with_clip(self, clip: float) -> Self:
        """This method with the clip given as `max_grad_norm`, refused if it has another one."""
        if self.clip not in (None, clip):
            raise ValueError(
                f"Expected one clip, got clip={self.clip} in {type(self).__name__} and "
                f"max_grad_norm={clip}. Give one of the two."
            )
        return dataclasses.replace(self, clip=clip)

    def describe(self) -> dict[str, Any]:
        """As JSON, for certificate and checkpoint; public data are in the ledger, by digest."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        for name in ("public", "diagnose"):  # do not decide what is released
            values.pop(name, None)
        values["clip"] = self.clip_norm
        plain = {
            name: value if isinstance(value, int | float | str | None) else describe(value)
            for name, value in values.items()
        }
        return {"method": type(self).__name__, **plain}


class SteppedMechanism(Mechanism):
    """A mechanism that counts its steps, and makes notes every so many of them."""

    def __init__(self, *, diagnose: int = 0) -> None:
        self.step = 0
        self._diagnose = diagnose  # 0: never
        self._notes: list[dict[str, Any]] = []

    @property
    def _diagnosing(self) -> bool:
        return self._diagnose > 0 and self.step % self._diagnose == 0

    def diagnostics(self) -> list[dict[str, Any]]:
        """The notes as plain numbers and lists."""
        return [tree_map_only(Tensor, Tensor.tolist, note) for note in self._notes]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "public": [data.digest for data in self.public]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        mine = self.state_dict()
        if state.keys() != mine.keys():
            names = " and ".join(mine)
            raise ValueError(f"Expected a method's state with {names}, got {sorted(state)}.")
        step = check_count("a method's step", state["step"], least=0)
        if state["public"] != mine["public"]:
            raise ValueError(
                "The state does not fit this run: it was saved with other public data. Pass the "
                "same public data as then."
            )
        self.step = step
