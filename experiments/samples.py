"""The samples of a run, read and seen through a frozen layer once for all runs that share them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Self

import dpspan
from dpspan.public.data import PublicData
from dpspan.public.patches import PatchFeatures
from experiments.data import AnyData, Data
from experiments.images import Images
from experiments.patches import PatchesModel, seen_by
from experiments.runner import Place
from experiments.schema import Row


@dataclass(frozen=True)
class Samples:
    """All of a run's data, and the private ones on its device, without copies of public ones."""

    data: Data
    private: Images
    before: PublicData | None  # for pre-training
    layer: PatchFeatures | None

    @property
    def declared(self) -> list[tuple[PublicData, str]]:
        """Public data that are used outside of the engine, and what for."""
        found = [] if self.before is None else [(self.before, "pre-training, with labels")]
        if self.layer is not None:
            found.append((self.layer.public, type(self.layer).__name__))
        return found


@dataclass(frozen=True)
class Choice:
    """Which samples a run has."""

    said: str  # by the sections, which have no hash of their own
    seed: int
    hold_out: bool
    place: Place
    section: AnyData = field(compare=False)
    row: Row = field(compare=False)

    @classmethod
    def of(cls, section: AnyData, row: Row, seed: int, hold_out: bool, place: Place) -> Self:
        """Equal for rows that differ in what comes after the samples only."""
        said = repr((section, row.model, row.pretraining, sorted(row.public)))
        return cls(said, seed, hold_out, place, section, row)


@lru_cache(maxsize=1)  # a search has one seed, and so have runs that follow each other
def samples_of(choice: Choice) -> Samples:
    """Read them, and let the row's frozen layer see them, if it has one."""
    row, place = choice.row, choice.place
    data = choice.section.load(place.data, seed=choice.seed, hold_out=choice.hold_out)
    before = row.pretraining.load(place.data, data.private.x) if row.pretraining else None
    public = [data.public[name] for name in sorted(row.public)]
    private = data.without([*public, *([] if before is None else [before])]).to(place.device)
    if not isinstance(row.model, PatchesModel):
        return Samples(data, private, before, None)
    source = data.public[row.model.public]
    learnt = {**row.model.settings, "seed": choice.seed, "device": place.device}
    layer = dpspan.PatchFeatures.learn(source, **learnt)
    private = seen_by(layer, private)
    data = replace(
        data,
        private=private,
        held_out=seen_by(layer, data.held_out.to(place.device)),
        test=seen_by(layer, data.test.to(place.device)),
        public={name: dpspan.encode_public(layer, each) for name, each in data.public.items()},
    )
    return Samples(data, private, before, layer)
