"""Which public data are nearest: an experiment that has measures of distance beside accuracy."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader

import dpspan
from dpspan.app.section import Count, Positive, Section
from dpspan.choose import ProbeNetwork, choose_public, rank_public
from dpspan.choose.probe import PIECE, Probe
from dpspan.choose.probe import drawn as drawn_samples
from dpspan.public.data import PublicData, Samples
from experiments.images import collate
from experiments.patches import drawn
from experiments.runner import Place, Results, execute
from experiments.schema import TrainingExperiment, digest_of, stated
from experiments.task2vec import fisher_embedding, task2vec_distance
from experiments.transport import has_classes, transport_distance

MODELS = ("probe", "real")
MEASURES = {"gsd": "GSD", "captured_energy": "energy", "task2vec": "Task2Vec", "transport": "OT"}


class Distances(Section):
    """Top directions, samples of each dataset, seeds of models and samples, ε of the choice."""

    rank: Count = 16
    samples: Count = 2000
    seeds: Count = 3
    choice_epsilon: Positive = 0.1


class ChoosingExperiment(TrainingExperiment):
    """Rows that differ in their public data alone, and what each measure says of those."""

    kind: Literal["choosing"] = "choosing"
    distances: Distances

    def distance_digest(self) -> str:
        """Of what distances depend on, besides model kind and seed."""
        settings = {
            "data": stated(self.data)
            | {"public": {name: stated(data) for name, data in self.data.public.items()}},
            "model": stated(self.model),
            "distances": stated(self.distances) | {"seeds": None},
        }
        return digest_of(settings)


@dataclass(frozen=True)
class Comparison:
    """All candidates, seen by one model: the paper's probe network or the one that is trained."""

    experiment: str
    model: str
    settings: str  # a digest of data, model and distances
    seed: int


def measure(
    name: str, experiment: ChoosingExperiment, results: Results, place: Place, seeds: int | None
) -> None:
    """Make every comparison that is missing."""
    settings = experiment.distance_digest()
    runs = [
        Comparison(name, model, settings, seed)
        for seed in range(seeds or experiment.distances.seeds)
        for model in MODELS
    ]
    work = partial(compare, experiment=experiment, place=place)
    execute(runs, results, work, place.jobs, f"{name}: distances")


def compare(run: Comparison, experiment: ChoosingExperiment, place: Place) -> dict[str, Any]:
    """The table of one model, without privacy, and a private choice."""
    start = time.perf_counter()
    place.configure()
    settings = experiment.distances
    data = experiment.data.load(place.data, seed=run.seed, hold_out=False)
    torch.manual_seed(run.seed)
    model: nn.Module = drawn(experiment.model, data, run.seed)
    if run.model == "probe":
        model = ProbeNetwork(channels=data.shape[0], classes=data.classes, seed=run.seed)
    private = data.without(data.public.values())
    ranking = rank_public(
        model.to(place.device),
        nn.CrossEntropyLoss(),
        private,
        data.public,
        rank=settings.rank,
        samples=settings.samples,
        seed=run.seed,
    ).to_dict()
    others: dict[str, Callable[..., dict[str, float]]]
    others = {"task2vec": partial(task2vec, model)}
    if run.model == "probe":  # once: it does not depend on the model
        others["transport"] = transport
    for measured, distance in others.items():
        found = distance(private, data.public, samples=settings.samples, seed=run.seed)
        for row in ranking["rows"]:
            row[f"unprivate_{measured}"] = found[row["name"]]
    choice = choose_public(
        model,
        nn.CrossEntropyLoss(),
        DataLoader(private, batch_size=256, collate_fn=collate),
        data.public,
        ledger=dpspan.Ledger(),
        epsilon=settings.choice_epsilon,
        rank=settings.rank,
        samples=settings.samples,
        sample_rate=min(1.0, 2 * settings.samples / len(private)),
    )
    return {
        **asdict(run),
        "unprivate_ranking": ranking,
        "choice": choice.name,
        "seconds": time.perf_counter() - start,
        "made": place.provenance(),
    }


def task2vec(
    model: nn.Module, private: object, public: Mapping[str, object], *, samples: int, seed: int
) -> dict[str, float]:
    """The distance of each candidate by Fisher information, of the same samples and labels."""
    probe = Probe.of(model, nn.CrossEntropyLoss(), seed=seed, piece=PIECE)
    mine, candidates = _drawn(private, public, samples=samples, seed=seed)
    own = fisher_embedding(probe.gradients(mine))
    return {
        name: task2vec_distance(own, fisher_embedding(probe.gradients(each)))
        for name, each in candidates.items()
    }


def transport(
    private: object, public: Mapping[str, object], *, samples: int, seed: int
) -> dict[str, float]:
    """The optimal-transport distance of each candidate, of the same samples."""
    mine, candidates = _drawn(private, public, samples=samples, seed=seed)
    labelled = all(each.labelled and has_classes(each) for each in (mine, *candidates.values()))
    return {
        name: transport_distance(mine, each, labelled=labelled) for name, each in candidates.items()
    }


def _drawn(
    private: object, public: Mapping[str, object], *, samples: int, seed: int
) -> tuple[Samples, dict[str, PublicData]]:
    """The samples that `rank_public` draws."""
    mine = drawn_samples(private, samples, seed=seed, name="private", kind=Samples)
    candidates = {
        name: drawn_samples(source, samples, seed=seed, name=name, kind=PublicData)
        for name, source in public.items()
    }
    return mine, candidates
