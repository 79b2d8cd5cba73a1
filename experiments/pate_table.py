"""PATE beside DP-SGD on the same features, where public images have no labels.

    python -m experiments pate --data FOLDER

All train linear models behind one frozen layer, of patches of the public images. PATE is searched
among numbers of teachers and of queries and students, DP-SGD among learning rates.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import product
from typing import Annotated, Any, Literal

import numpy as np
import torch
from dp_accounting import GaussianDpEvent
from pydantic import Field
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import dpspan
from dpspan.accounting.calibration import calibrate_event
from dpspan.accounting.ledger import Ledger
from dpspan.accounting.promises import Budget
from dpspan.app.config.sections import LinearSection
from dpspan.app.section import Count, Counts, Numbers, Positive, Section, Share, Texts
from dpspan.support.secure import SecureGenerator
from experiments.anchors import Anchor
from experiments.images import Images, collate
from experiments.patches import PatchesModel
from experiments.pate import Student, answer, count_votes, learn_teachers, parts_of
from experiments.pate_data import Samples, Setting, Source, features_of, samples_of
from experiments.runner import Place, Results, execute, spread
from experiments.schema import digest_of, stated

Array = np.ndarray[Any, Any]
SEARCH_SEED, CLASSES = 1000, 10
PATE, DPSGD = "PATE", "DP-SGD"
PassedOn = Annotated[float, Field(ge=0, lt=1)]


class LinearTraining(Section):
    """DP-SGD of the linear layer; the learning rate, with momentum 0.9, falls to zero."""

    epochs: Count
    batch_size: Count
    clip: Positive


class PateExperiment(Section):
    """Which settings at which ε, the features, and what each row is searched among.

    Of `queries` those for which a setting has too few images are left out.
    """

    kind: Literal["pate"] = "pate"
    title: str
    paper: str
    about: str
    notes: Texts = ()
    others: Annotated[tuple[Anchor, ...], Field(strict=False)] = ()
    settings: dict[str, Setting] = Field(min_length=1)
    features: PatchesModel
    training: LinearTraining
    epsilons: Numbers
    delta: Share
    seeds: Count
    teachers: Counts
    queries: Counts
    passed_on: Annotated[tuple[PassedOn, ...], Field(strict=False, min_length=1)]
    rates: Numbers

    def digest(self, setting: str) -> str:
        """Of what all rows of a setting depend on."""
        parts = self.settings[setting], self.features, self.training
        return digest_of({"parts": [stated(part) for part in parts], "delta": self.delta})

    def grid(self, setting: str, row: str) -> list[tuple[int, int, float, float]]:
        """Teachers, queries, share passed on and learning rate of each try; 0 is none."""
        if row == DPSGD:
            return [(0, 0, 0.0, rate) for rate in self.rates]
        most = self.settings[setting].public.samples or max(self.queries)
        asked = [queries for queries in self.queries if queries <= most]
        return [(*point, 0.0) for point in product(self.teachers, asked, self.passed_on)]


@dataclass(frozen=True)
class Run:
    """One model, of PATE or of DP-SGD."""

    setting: str
    row: str
    target: float
    teachers: int
    queries: int
    passed_on: float
    rate: float
    seed: int
    tuning: bool
    settings: str  # their digest


Scores = Callable[[Array], Array]  # of features


def work(run: Run, experiment: PateExperiment, place: Place) -> dict[str, Any]:
    """A run in a process of its own."""
    place.configure()
    setting = experiment.settings[run.setting]
    source = Source(features_of(place.data, experiment.features, setting), run.tuning)
    samples = samples_of(source)
    if run.row == DPSGD:
        scores, found = _dpsgd(run, experiment, samples)
    else:
        scores, found = _pate(run, experiment.delta, source)
    right = scores(samples.judged_x).argmax(1) == samples.judged_y
    return {
        **asdict(run),
        "accuracy": float(right.mean()),
        "delta": experiment.delta,
        "records": len(samples.x),
        **found,
        "made": place.provenance(),
    }


@lru_cache(maxsize=1)  # runs that differ in what is asked follow each other
def votes_of(source: Source, teachers: int, seed: int) -> Array:
    """Of all teachers on all public images; of those that are not asked about nobody learns."""
    samples = samples_of(source)
    parts = parts_of(samples.prints, teachers, seed)
    seen = samples.unwhitened(samples.x)
    learnt = learn_teachers(seen, samples.y, parts, teachers, CLASSES)
    return count_votes(learnt, samples.unwhitened(samples.public))


@lru_cache(maxsize=1)
def student_of(source: Source) -> Student:
    """Of the public images alone."""
    samples = samples_of(source)
    return Student(samples.public, samples.unwhitened(samples.public))


@lru_cache
def noise_of(queries: int, epsilon: float, delta: float) -> float:
    """The noise multiplier of each answer."""
    return calibrate_event(GaussianDpEvent, queries, Budget(epsilon=epsilon, delta=delta))


def _pate(run: Run, delta: float, source: Source) -> tuple[Scores, dict[str, Any]]:
    samples = samples_of(source)
    votes = votes_of(source, run.teachers, run.seed)
    z = noise_of(run.queries, run.target, delta)
    ledger = Ledger(budget=Budget(epsilon=run.target, delta=delta))
    answers = answer(votes[: run.queries], z, ledger, SecureGenerator())
    weights = student_of(source).learn(answers, CLASSES, passed_on=run.passed_on)
    found = {
        "epsilon": ledger.epsilon(),
        "noise_multiplier": z,
        "answers": np.bincount(answers, minlength=CLASSES).tolist(),
        "answers_right": float((answers == samples.known[: run.queries]).mean()),
        "unprivate_votes_right": float((votes.argmax(1) == samples.known).mean()),
        "unprivate_agreement": float((votes.max(1) / run.teachers).mean()),
    }
    return lambda x: x @ weights, found


def _dpsgd(run: Run, experiment: PateExperiment, samples: Samples) -> tuple[Scores, dict[str, Any]]:
    training = experiment.training
    torch.manual_seed(run.seed)
    records = Images(torch.from_numpy(samples.x), torch.from_numpy(samples.y))
    head = nn.Linear(samples.x.shape[1], CLASSES)
    engine = dpspan.PrivacyEngine()
    known = len(samples.public)
    engine.ledger.declare_public("public images", samples.digest, known, detail="PatchFeatures")
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=head,
        optimizer=torch.optim.SGD(head.parameters(), lr=run.rate, momentum=0.9),
        data_loader=DataLoader(records, training.batch_size, shuffle=True, collate_fn=collate),
        criterion=nn.CrossEntropyLoss(),
        method=dpspan.DPSGD(clip=training.clip),
        target_epsilon=run.target,
        target_delta=experiment.delta,
        epochs=training.epochs,
    )
    schedule = LambdaLR(optimizer, lambda epoch: LinearSection().factor(epoch, training.epochs))
    criterion = nn.CrossEntropyLoss()
    for _ in range(training.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        schedule.step()
    weights, bias = (p.detach().numpy() for p in (head.weight, head.bias))
    found = {"epsilon": engine.get_epsilon(experiment.delta)}
    return lambda x: x @ weights.T + bias, found


def tries(experiment: PateExperiment, setting: str, row: str, target: float) -> list[Run]:
    """The search of a cell."""
    digest = experiment.digest(setting)
    return [
        Run(setting, row, target, *point, SEARCH_SEED, True, digest)
        for point in experiment.grid(setting, row)
    ]


def reported(
    experiment: PateExperiment, setting: str, row: str, target: float, results: Results
) -> list[Run]:
    """The runs of a cell, at the best of its search; none if that is not over."""
    made = [(results.of(run), run) for run in tries(experiment, setting, row, target)]
    scores = {run: found["accuracy"] for found, run in made if found is not None}
    if len(scores) < len(made):
        return []
    best = max(scores, key=lambda run: scores[run])
    return [replace(best, seed=seed, tuning=False) for seed in range(experiment.seeds)]


def run(experiment: PateExperiment, results: Results, place: Place) -> None:
    """Setting by setting: search, and make every run that is missing."""
    task = partial(work, experiment=experiment, place=place)
    for setting in experiment.settings:
        cells = list(product([setting], [PATE, DPSGD], experiment.epsilons))
        search = [each for cell in cells for each in tries(experiment, *cell)]
        execute(_in_turn(search), results, task, place.jobs, f"{setting}: search")
        final = [each for cell in cells for each in reported(experiment, *cell, results)]
        execute(_in_turn(final), results, task, place.jobs, f"{setting}: runs")


def _in_turn(runs: Sequence[Run]) -> list[Run]:
    """Runs that share teachers one after the other."""
    return sorted(runs, key=lambda run: (run.seed, run.teachers))


def page(experiment: PateExperiment, results: Results) -> str:
    """For each setting a table of rows by ε, and what PATE's runs were like."""
    heads = ["", *(f"ε = {target:g}" for target in experiment.epsilons)]
    lines: list[str] = []
    for setting in experiment.settings:
        lines += [f"**{setting}**", "", _line(heads), "|---" * len(heads) + "|"]
        for row in (PATE, DPSGD):
            found = [_cell(experiment, setting, row, e, results) for e in experiment.epsilons]
            lines.append(_line([row, *found]))
        lines += [_line(["public images alone, without labels", *["—"] * (len(heads) - 1)]), ""]
        lines += [*_about_teachers(experiment, setting, results), ""]
    return "\n".join(lines)


def _cell(
    experiment: PateExperiment, setting: str, row: str, target: float, results: Results
) -> str:
    runs = reported(experiment, setting, row, target, results)
    made = [found for each in runs if (found := results.of(each)) is not None]
    if not made:
        return "—"
    marks = "\\*" if at_an_end(experiment, runs[0]) else ""
    marks += " †" if len(made) < experiment.seeds else ""
    return spread(found["accuracy"] for found in made) + marks


def at_an_end(experiment: PateExperiment, chosen: Run) -> bool:
    """Whether another grid might have had better; all of a setting's images are no such end."""
    if chosen.row == DPSGD:
        return chosen.rate in (min(experiment.rates), max(experiment.rates))
    at_end = chosen.teachers in (min(experiment.teachers), max(experiment.teachers))
    at_end = at_end or chosen.passed_on == max(experiment.passed_on)
    asked = [queries for _, queries, *_ in experiment.grid(chosen.setting, chosen.row)]
    images = experiment.settings[chosen.setting].public.samples
    most = chosen.queries == max(asked) != images
    return at_end or most or chosen.queries == min(asked)


def _about_teachers(experiment: PateExperiment, setting: str, results: Results) -> list[str]:
    """What was chosen, and how good votes and answers were; a line for each ε."""
    lines = []
    for target in experiment.epsilons:
        runs = reported(experiment, setting, PATE, target, results)
        made = [found for each in runs if (found := results.of(each)) is not None]
        if not made:
            continue
        agreed, voted, answered = (
            f"{100 * statistics.mean(found[key] for found in made):.1f} %"
            for key in ("unprivate_agreement", "unprivate_votes_right", "answers_right")
        )
        text = (
            f"- PATE at ε = {target:g}: {runs[0].teachers:,} teachers, {runs[0].queries:,} answers "
            f"(passed on with {runs[0].passed_on:g}). {agreed} of the teachers agree on an image"
        )
        if experiment.settings[setting].same_source:
            text += f", and are right on {voted} of the images; of the noisy answers {answered} are"
        lines.append(f"{text}.")
    return lines


def _line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(texts) + " |"
