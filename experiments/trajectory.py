"""A subspace of the directions in which a warm start moved: PDP-SGD and GEP in it.

A network that is trained moves in few directions, and they are the principal directions of the
weights that it went through. Here these are the weights of a warm start on public data, taken every
so many of its minibatches, less their mean. Nothing private is in them: the warm start is over
before the first record is drawn, and the subspace stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

import dpspan
from dpspan.app.config.methods import MethodSection
from dpspan.app.section import Count, Positive
from dpspan.gradients.capture import Capture
from dpspan.gradients.layers.terms import Rows
from dpspan.gradients.operator import PerSampleGradients
from dpspan.mechanisms.base import Method, Setting
from dpspan.public.data import PublicData
from dpspan.public.warm_start import WarmStartResult
from dpspan.subspaces.sources import GroupedSubspace
from dpspan.subspaces.subspace import Subspace


@dataclass(eq=False)
class Trajectory:
    """The weights of a model, every so many minibatches of a warm start."""

    every: int = 20
    weights: list[dict[str, Tensor]] = field(default_factory=list, repr=False)

    def add(self, model: nn.Module) -> None:
        """Keep the present weights."""
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.weights.append({name: p.detach().clone() for name, p in trained})


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedWarmStart(dpspan.WarmStart):
    """A warm start that keeps its trajectory, and is the same otherwise, to the last bit."""

    trajectory: Trajectory = field(repr=False)

    def run(self, model: nn.Module, criterion: nn.Module | None) -> WarmStartResult:
        if self.validation:
            raise ValueError("Expected validation: 0, as the search has a trajectory of its own.")
        self.trajectory.weights.clear()
        names = (each.name for each in fields(dpspan.WarmStart))
        plain = dpspan.WarmStart(**{name: getattr(self, name) for name in names})
        minibatches = 0

        def watched(inputs: Any) -> Any:
            nonlocal minibatches
            if minibatches % self.trajectory.every == 0:
                self.trajectory.add(model)
            minibatches += 1
            return inputs if self.augment is None else self.augment(inputs)

        result = replace(plain, augment=watched).run(model, criterion)
        self.trajectory.add(model)
        return result


class TrajectorySpan:
    """The principal directions of a trajectory; a source of subspaces that never changes."""

    def __init__(self, setting: Setting, trajectory: Trajectory, data: Any, rank: int) -> None:
        self._trajectory, self._rank = trajectory, rank
        parameter = next(p for p in setting.model.parameters() if p.requires_grad)
        self._like = parameter.detach()
        self.public = (PublicData.of(data),)
        self._fixed: GroupedSubspace | None = None

    def span(
        self, refresh: int, *, products: float, capture: Capture | None = None
    ) -> GroupedSubspace:
        """Made when it is first asked for: by then the warm start is over."""
        if self._fixed is None:
            self._fixed = self._made()
        return self._fixed

    def _made(self) -> GroupedSubspace:
        seen = self._trajectory.weights
        if len(seen) <= self._rank:
            raise ValueError(
                f"Expected a warm start with a trajectory of more than {self._rank} weights, got "
                f"{len(seen)}: give it more epochs, or lower rank or every."
            )
        shapes, rows = {}, {}
        for name, first in seen[0].items():
            values = torch.stack([weights[name] for weights in seen])
            shapes[name] = first.shape
            rows[name] = [Rows(values - values.mean(0))]
        moves = PerSampleGradients(shapes, rows, len(seen), like=self._like)
        subspace = Subspace.from_gradients(moves, self._rank).explicit()
        return GroupedSubspace({tuple(shapes): subspace})


@dataclass(frozen=True, kw_only=True)
class InTrajectory(Method):
    """What both methods have: where the subspace comes from."""

    trajectory: Trajectory = field(default_factory=Trajectory, compare=False)
    public: Any = field(repr=False, compare=False)
    rank: int | None = None

    def recorded(self, phase: dpspan.WarmStart | None) -> RecordedWarmStart:
        """The warm start that this run's subspace comes from."""
        if phase is None:
            raise ValueError("Expected a warm_start: the subspace is that of its trajectory.")
        said = {each.name: getattr(phase, each.name) for each in fields(dpspan.WarmStart)}
        return RecordedWarmStart(**said, trajectory=self.trajectory)

    def source(self, setting: Setting) -> Any:
        """In place of public gradients."""
        assert self.rank is not None
        return TrajectorySpan(setting, self.trajectory, self.public, self.rank)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "subspace": "weights along the warm start"}


@dataclass(frozen=True, kw_only=True)
class TrajectoryPDPSGD(InTrajectory, dpspan.PDPSGD):
    """PDP-SGD."""


@dataclass(frozen=True, kw_only=True)
class TrajectoryGEP(InTrajectory, dpspan.GEP):
    """GEP."""


class TrajectorySection(MethodSection):
    """What both say; `every`: so many minibatches lie between two weights."""

    public: str | None = None
    rank: Count
    every: Count = 20

    def _told(self, public: PublicData | None) -> dict[str, Any]:
        told = {key: value for key, value in self.arguments().items() if key != "every"}
        return {**told, "public": public, "trajectory": Trajectory(self.every)}


class TrajectoryPDPSGDSection(TrajectorySection):
    """PDP-SGD in the subspace of the warm start's trajectory."""

    name: Literal["trajectory-pdpsgd"] = "trajectory-pdpsgd"

    def build(self, public: PublicData | None, *, steps: int) -> Method:
        return TrajectoryPDPSGD(**self._told(public))


class TrajectoryGEPSection(TrajectorySection):
    """GEP in the subspace of the warm start's trajectory."""

    name: Literal["trajectory-gep"] = "trajectory-gep"
    residual_clip: Positive | None = None

    def build(self, public: PublicData | None, *, steps: int) -> Method:
        return TrajectoryGEP(**self._told(public))


AnyTrajectoryMethod = TrajectoryPDPSGDSection | TrajectoryGEPSection
