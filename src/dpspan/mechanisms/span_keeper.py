"""The subspace of the present step: when it is renewed, and what is noted about it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpspan.mechanisms.base import Sums
from dpspan.public.data import PublicData
from dpspan.subspaces.sources import GroupedSubspace, SpanSource
from dpspan.subspaces.subspace import stable_rank


class SpanKeeper:
    """Counts the steps of a run and keeps its present subspace.

    The subspace depends on the step's number, public data and released weights only, so all pieces
    of a batch (and all processes) see the same one.
    """

    def __init__(self, source: SpanSource, *, refresh: int, products: float, diagnose: int) -> None:
        self._source, self._refresh, self._products = source, refresh, products
        self._diagnose = diagnose
        self._span: GroupedSubspace | None = None
        self._number = -1  # of the present subspace
        self._earlier: GroupedSubspace | None = None
        self._notes: list[dict[str, Any]] = []
        self.step = 0

    @property
    def public(self) -> tuple[PublicData, ...]:
        """The public data behind the subspaces."""
        return self._source.public

    def span(self) -> GroupedSubspace:
        """The subspace of the present step."""
        number = self.step // self._refresh
        if self._span is None or number != self._number:
            # Let go first: two subspaces at once would take twice the memory.
            self._earlier, self._span = (self._span if self._diagnosing else None), None
            self._span = self._source.span(number, products=self._products * self._refresh)
            self._number = number
        return self._span

    def finish(self, embedding: Tensor, gradient: Sums, noise_energy: dict[str, float]) -> None:
        """The step's result is known: note what there is to note, and count the step.

        `embedding` and `gradient` are noisy: what has been released may be looked at for nothing.
        """
        assert self._span is not None
        if self._diagnosing:
            self._notes.append(self._note(self._span, embedding, gradient, noise_energy))
        self.step += 1

    @property
    def _diagnosing(self) -> bool:
        return self._diagnose > 0 and self.step % self._diagnose == 0

    def _note(
        self,
        span: GroupedSubspace,
        embedding: Tensor,
        gradient: Sums,
        noise_energy: dict[str, float],
    ) -> dict[str, Any]:
        note: dict[str, Any] = {"step": self.step, "noise_energy": noise_energy}
        note["released_energy"] = {
            "embedding": _energy(embedding),
            "gradient": torch.stack([_energy(value) for value in gradient.values()]).sum(),
        }
        parts = list(span.parts.values())
        note["rank"] = [part.live for part in parts]
        note["eigenvalues"] = [part.eigenvalues for part in parts]
        note["stable_rank"] = [stable_rank(part.eigenvalues) for part in parts]
        if self._earlier is not None:
            pairs = zip(parts, self._earlier.parts.values(), strict=True)
            note["drift"] = [part.drift(earlier) for part, earlier in pairs]
        self._earlier = None
        return note

    def notes(self) -> list[dict[str, Any]]:
        """All notes as plain numbers and lists."""
        plain: list[dict[str, Any]] = [_plain(note) for note in self._notes]
        return plain

    def state_dict(self) -> dict[str, Any]:
        """The step, and which public data the run uses."""
        return {"step": self.step, "public": [data.digest for data in self.public]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from that step; its subspace is computed anew."""
        if state.keys() != {"step", "public"} or not isinstance(state["step"], int):
            raise ValueError(
                f"Expected a method's state with step and public, got {sorted(state)}."
            )
        if state["public"] != [data.digest for data in self.public]:
            raise ValueError(
                "The state does not fit this run: it was saved with other public data. Pass the "
                "same public data as then."
            )
        self.step, self._span, self._number = state["step"], None, -1


def _energy(value: Tensor) -> Tensor:
    return value.double().square().sum()


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
