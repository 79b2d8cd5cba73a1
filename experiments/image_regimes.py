"""The map of regimes for images: a training experiment at several numbers of private records.

    python -m experiments regimes-images --data FOLDER --jobs 2

Each map has rows that know equally much: no public data, images without labels, or labelled ones.
`simple` names the rows that stand for what needs no paper.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from dpspan.app.section import Counts, Share
from experiments.data import ImagesSection
from experiments.leads import Map, Spot, cells_of, leads_table, means_table, plot
from experiments.runner import Place, Results
from experiments.schema import TrainingExperiment
from experiments.sweep import cell_runs, sweep


class ImageRegimesExperiment(TrainingExperiment):
    """Every row at every target and number of records, of which a batch has `sample_rate`."""

    kind: Literal["image regimes"] = "image regimes"  # type: ignore[assignment]
    data: ImagesSection
    records: Counts
    sample_rate: Share
    maps: dict[str, Map] = Field(min_length=1)

    @model_validator(mode="after")
    def _rows_exist(self) -> Self:
        named = {row for each in self.maps.values() for row in (*each.simple, *each.ours)}
        if wrong := named ^ set(self.rows):
            message = f"maps: Expected every row, and nothing else; {sorted(wrong)} differ."
            raise PydanticCustomError("refused", "{message}", {"message": message})
        return self

    def at(self, records: int) -> TrainingExperiment:
        """With so many private records."""
        data = self.data.model_copy(update={"records": records})
        size = {"batch_size": round(self.sample_rate * records)}
        return self.model_copy(
            update={"data": data, "training": self.training.model_copy(update=size)}
        )


def run(
    name: str,
    experiment: ImageRegimesExperiment,
    results: Results,
    place: Place,
    rows: list[str] | None,
    seeds: int | None,
    targets: list[float] | None,
) -> None:
    """Few records first: what is cut short has whole lines of the map."""
    for records in experiment.records:
        sweep(name, experiment.at(records), results, place, rows, seeds, targets)


def measured(
    name: str, experiment: ImageRegimesExperiment, at: Spot, results: Results
) -> dict[str, dict[tuple[str, int], float]]:
    """In per cent, of the rows of which every seed is there."""
    records, epsilon = at
    found = {}
    for row in experiment.rows:
        runs = cell_runs(name, experiment.at(records), row, epsilon, results)
        if len(runs) >= experiment.seeds:
            scores = {("", run["seed"]): 100 * run[experiment.metric] for run in runs}
            found[row] = {key: v for key, v in scores.items() if key[1] < experiment.seeds}
    return found


def page(name: str, experiment: ImageRegimesExperiment, results: Results, docs: Path) -> str:
    """A table for each map, one picture of all, and the mean accuracy of every row."""
    records, epsilons = experiment.records, experiment.targets.values
    places = [(n, epsilon) for n in records for epsilon in epsilons]
    known = {at: found for at in places if (found := measured(name, experiment, at, results))}
    records = tuple(n for n in records if any(at[0] == n for at in known))
    maps = {title: cells_of(each, known) for title, each in experiment.maps.items()}
    lines = []
    for title, cells in maps.items():
        lines += [f"**{title}**", "", *leads_table(records, epsilons, cells), ""]
    for epsilon in epsilons:
        lines += ["", *means_table(epsilon, known, "mean accuracy in %")]
    plot(records, epsilons, {t: cells for t, cells in maps.items() if cells}, docs / f"{name}.png")
    lines += ["", f"![who is ahead, by records, ε and public data]({name}.png)"]
    return "\n".join(lines) + "\n"
