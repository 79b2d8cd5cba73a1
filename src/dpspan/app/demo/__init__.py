"""`make demo`: what public data is worth, on real digits, in less than three minutes.

Nothing is downloaded. The private records are scikit-learn's handwritten digits. Four public
candidates: scans of the same kind that some people agreed to publish (nobody has labelled them),
digits in matplotlib's fonts (labelled, but printed), patches of two photographs, and noise. All
methods get the same ε; the tables are what came out: one where ε is small and public data are worth
a lot, and one where it is large and they are not.

The scene (ε, epochs, batch size, how many scans and printed digits), ranks and clips were set by
hand, after trials measured on a part of the private digits; a real user's ε would have to cover
such trials. Learning rates, which decide between methods, come from printed digits alone.
"""

import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpspan.accounting.promises import Budget
from dpspan.app.comparison import Comparison, Contender, Task, compare, locked, verdicts
from dpspan.app.config import ReportSection
from dpspan.app.demo import data
from dpspan.app.report import render
from dpspan.app.run.folder import RunFolder, read_json
from dpspan.app.run.from_config import choose_once
from dpspan.app.run.training import rehearse
from dpspan.choose import choose_public, rank_public
from dpspan.mechanisms import DPSGD, GEP, PDPSGD, RGP, Method
from dpspan.public.data import PublicData
from dpspan.public.patches import PatchFeatures
from dpspan.public.warm_start import WarmStart

GSD_RANK, MECHANISM = 16, "permute-and-flip"
EPSILON, LARGE_EPSILON, DELTA, CHOICE_EPSILON = 0.5, 8.0, 1e-5, 0.05
BATCH, EPOCHS = 256, 20
OPT_IN, RENDERED, TEST = 100, 300, 360
RANK, CLIP, RESIDUAL_CLIP, CARRIERS, PATCHES_CLIP = 40, 1.0, 0.2, 2, 0.5
FILTERS, DIRECTIONS = 120, 40
PATCHES = "patches + DP-SGD"
_GSD = "asked of public scans (ε = 0); GSD: 0 same directions, 1 none shared"
WARM = WarmStart(data=None, max_epochs=60, learning_rate=3e-3, patience=10)

# Learning rates from scratch and after the warm start, as experiments/demo_rates.py found them.
RATES: dict[float, dict[str, tuple[float, float]]] = {
    EPSILON: {
        "DP-SGD": (0.125, 0.125),
        "PDP-SGD": (0.5, 0.25),
        "GEP": (0.5, 0.25),
        "RGP": (0.5, 0.125),
        PATCHES: (4.0, 8.0),
    },
    LARGE_EPSILON: {"DP-SGD": (2.0, 1.0), PATCHES: (16.0, 16.0)},  # more is level
}


def network() -> nn.Module:
    """A small convolutional network with GroupNorm, 5,114 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def contenders(
    *,
    epsilon: float,
    public: PublicData,
    start: WarmStart | None,
    paid: Mapping[str, Any] | None,
) -> list[Contender]:
    """Each method from scratch and after the warm start; subspaces come from unlabelled data."""
    assert start is not None  # the printed digits have labels
    subspace: dict[str, Any] = {"public": public, "rank": RANK, "clip": CLIP, "diagnose": 10}
    methods: dict[str, Method] = {
        "DP-SGD": DPSGD(clip=CLIP),
        "PDP-SGD": PDPSGD(**subspace),
        "GEP": GEP(**subspace, residual_clip=RESIDUAL_CLIP),
        "RGP": RGP(rank=CARRIERS, clip=CLIP),
        PATCHES: DPSGD(clip=PATCHES_CLIP),
    }
    linear = functools.partial(_on_patches, _layer(public, PublicData.of(start.data)))
    both = []
    for name, (cold, warm) in RATES[epsilon].items():
        own = paid if name in ("PDP-SGD", "GEP", PATCHES) else None
        scratch = Contender(
            name=name,
            method=methods[name],
            learning_rate=cold,
            model=linear if name == PATCHES else None,
            paid=own,
        )
        both += [scratch, dataclasses.replace(scratch.warmed(start), learning_rate=warm)]
    return sorted(both, key=lambda contender: contender.warm_start is not None)


def _layer(*public: PublicData) -> PatchFeatures:
    """Features that all public images have in common; nobody has to label them."""
    images = torch.cat([piece.inputs for data in public for piece in data.pieces()])
    learn = functools.partial(PatchFeatures.learn, size=(3, 4, 5), mirror=False, progress=False)
    return learn(images, filters=FILTERS, directions=DIRECTIONS)


def _on_patches(layer: PatchFeatures) -> nn.Module:
    """410 weights behind a layer that is frozen."""
    return nn.Sequential(layer, nn.Linear(DIRECTIONS, 10))


def run(
    out: Path,
    console: Console,
    *,
    epsilon: float = EPSILON,
    epochs: int = EPOCHS,
    seeds: int = 3,
    jobs: int | None = None,
) -> Comparison:
    """Rank, choose, compare, report."""
    began = time.perf_counter()
    digits, printed = data.handwritten(opt_in=OPT_IN, test=TEST), data.rendered(RENDERED, seed=0)
    console.print(
        f"[bold]dpspan demo[/]: {len(digits.private):,} private handwritten digits, {TEST} others "
        f"to measure on (declared public), ε = {epsilon:g}, δ = {DELTA:g}.\n"
        f"Public: {OPT_IN} opt-in scans without labels, {RENDERED} printed digits with labels, "
        "patches of photographs, noise."
    )
    about = ReportSection(
        title="The demo: private handwritten digits",
        purpose="To show what public data are worth where private records must be protected.",
        data=f"{len(digits.private):,} scans of handwritten digits, as scikit-learn has them.",
    )
    labelled = PublicData.of(printed, name="printed digits")
    task = Task(
        model=network,
        private=digits.private,
        test=digits.test,
        batch_size=BATCH,
        epochs=epochs,
        budget=Budget(epsilon=epsilon, delta=DELTA),
        public=labelled,
        warm_start=dataclasses.replace(WARM, data=labelled),
        test_is_public=True,
    )
    with locked(out):
        RunFolder(out).write_about(about)
        public = _chosen(out, console, task.new_model(0), digits, printed[0])
    paid = read_json(RunFolder(out).ledger)
    offered = functools.partial(contenders, public=public, start=task.start, paid=paid)
    shared: dict[str, Any] = {
        "seeds": range(seeds),
        "jobs": jobs or min(2, os.cpu_count() or 1),
        "console": console,
    }
    comparison = compare(task, offered(epsilon=EPSILON), out=out, **shared)
    console.print(comparison)
    for sentence in (*verdicts(comparison), _if_labelled(task, digits.opt_in, seeds, comparison)):
        console.print(f"• {sentence}")
    more = dataclasses.replace(task, budget=Budget(epsilon=LARGE_EPSILON, delta=DELTA))
    beside = out.with_name(f"{out.name}-large-epsilon")
    large = compare(more, offered(epsilon=LARGE_EPSILON), out=beside, **shared)
    lesson = "less noise, and public data are worth less"
    console.print(f"\n[bold]The same with ε = {LARGE_EPSILON:g}[/]: {lesson}.", large)
    for sentence in verdicts(large):
        console.print(f"• {sentence}")
    pages = [render([folder], folder / "report.html") for folder in (out, beside)]
    console.print(f"{time.perf_counter() - began:.0f} s in all. To read on: {pages[0]}, {pages[1]}")
    return comparison


def _chosen(
    out: Path, console: Console, model: nn.Module, digits: data.Digits, printed: Tensor
) -> PublicData:
    """Rank the public data by public scans, and choose among them by the private digits."""
    scans, half = digits.opt_in.tensors[0], OPT_IN // 2
    near = {"opt-in scans": scans[half:], **_others(printed, half)}
    console.print(_rank_on_stand_in(out, model, scans[:half], near))
    candidates = {"opt-in scans": scans, **_others(printed, OPT_IN)}
    choice = _choose(out, model, digits.private, candidates)
    console.print(
        f"The private digits themselves chose, for ε = {choice['epsilon']:g}: "
        f"[bold]{choice['chosen']}[/]. {choice['note']}\n"
    )
    return PublicData.of(candidates[choice["chosen"]], name=choice["chosen"])


def _rank_on_stand_in(
    out: Path, model: nn.Module, stand_in: Tensor, candidates: Mapping[str, Tensor]
) -> Table:
    """Nearest first, kept for the report. Every sample is public, the stand-in too: show it."""
    columns = (Column(h, justify="right") for h in ("samples", "GSD ↓", "captured energy ↑"))
    shown = Table("candidate", *columns, title="How close is each candidate?", caption=_GSD)
    rows = []
    ranking = rank_public(model, nn.CrossEntropyLoss(), stand_in, candidates, rank=GSD_RANK)
    for row in ranking.rows:
        near = {"gsd": row.unprivate_gsd, "captured_energy": row.unprivate_captured_energy}
        rows.append({"name": row.name, "samples": row.samples, **near})
        shown.add_row(row.name, str(row.samples), *(f"{value:.3f}" for value in near.values()))
    asked = {"stand_in": f"{len(stand_in)} of the opt-in scans", "rank": GSD_RANK}
    RunFolder(out).write_json(out / "candidates.json", {**asked, "rows": rows})
    return shown


def _choose(
    out: Path, model: nn.Module, private: TensorDataset, candidates: Mapping[str, Tensor]
) -> dict[str, Any]:
    """What the private records choose for ε, or have chosen, as in `choice.json`."""
    folder = RunFolder(out)
    if folder.choice.exists() and not folder.ledger.exists():  # 0.1's demo: a ledger in the choice
        folder.write_json(folder.ledger, read_json(folder.choice)["ledger"])
    digests = {n: PublicData.of(images, name=n).digest for n, images in candidates.items()}
    settings: dict[str, Any] = {"mechanism": MECHANISM, "rank": GSD_RANK}
    price: dict[str, Any] = {"epsilon": CHOICE_EPSILON, "records": len(private)}
    asked = functools.partial(choose_public, model, nn.CrossEntropyLoss(), private, candidates)
    choose = functools.partial(asked, **price, **settings)
    return choose_once(folder, {"settings": settings, "candidates": digests}, choose)


def _others(printed: Tensor, count: int) -> dict[str, Tensor]:
    return {
        "printed digits": printed[:count],
        "photographs": data.photographs(count, seed=0),
        "noise": data.noise(count, seed=0),
    }


def _if_labelled(task: Task, opt_in: TensorDataset, seeds: int, comparison: Comparison) -> str:
    """The lesson beside the table: labels for the scans would be worth so much."""
    free = Contender(name="opt-in scans", warm_start=dataclasses.replace(WARM, data=opt_in))
    accuracies = [rehearse(task, free, seed, 0.0, 0.0) for seed in range(seeds)]
    best = max((row for row in comparison.rows if row.private), key=lambda row: row.mean)
    ahead = statistics.mean(accuracies) - best.mean
    return (
        f"Had somebody labelled the {len(opt_in)} opt-in scans, training on them alone would have "
        f"reached {statistics.mean(accuracies):.1%} at ε = 0 ({min(accuracies):.1%} … "
        f"{max(accuracies):.1%}): {100 * abs(ahead):.1f} points {'more' if ahead > 0 else 'less'} "
        f"than the best private row, “{best.name}”."
    )
