"""Does closeness tell which public data are worth most? GSD and captured energy against GEP.

    python -m experiments.choosing --data FOLDER --device cuda --jobs 4

FOLDER holds .npz files with x_train, y_train (and x_test, y_test): fashion_mnist, mnist,
emnist_letters, kmnist, notmnist and usps for private Fashion-MNIST; cifar10, tinyimagenet32, svhn32
and mnist for private CIFAR-10. Each candidate gives 2,000 unlabelled images. Those of the private
dataset itself are its first 2,000 test images; accuracy is measured on the other test images.

For every candidate: GSD, captured energy, Task2Vec and transport distance with the paper's probe
network and with the model that is trained, and the accuracy that GEP reaches with it at ε = 2.
Beside them DP-SGD, which needs no public data, and what `choose_public` picks at ε = 0.1. At the
end Spearman's correlation of each measure with accuracy. The learning rate is searched with the
private dataset's own public images, judged by held-out training images, and used for all of them;
its cost in privacy is not in ε.

Every finished run is a line of a .jsonl file in --out; a run that is already there is not repeated.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader

import dpspan
from dpspan.choose import ProbeNetwork, choose_public, rank_public
from dpspan.mechanisms import Method
from dpspan.models import PaperCNN, ResNet20
from experiments.images import Images, accuracy, collate
from experiments.runner import Results, best_of, execute, spread

EPSILON, DELTA, CHOICE_EPSILON, RANK = 2.0, 1e-5, 0.1, 16
PUBLIC, HELD_OUT, BATCH, TUNING_SEED = 2000, 5000, 1000, 1000
NONE, NOISE = "no public data", "uniform noise"
MEASURES = {"gsd": "GSD", "captured_energy": "energy", "task2vec": "Task2Vec", "transport": "OT"}


@dataclass(frozen=True)
class Task:
    """A private dataset: its candidates by name (and file), the model, and GEP's settings."""

    file: str
    channels: int
    side: int
    candidates: dict[str, str]
    model: Callable[[], nn.Module]
    epochs: int
    basis: int  # directions that GEP uses
    groups: int
    rates: tuple[float, ...]


TASKS = {
    "fashion_mnist": Task(
        file="fashion_mnist",
        channels=1,
        side=28,
        candidates={
            "Fashion-MNIST test": "fashion_mnist",
            "MNIST": "mnist",
            "EMNIST letters": "emnist_letters",
            "KMNIST": "kmnist",
            "notMNIST": "notmnist",
            "USPS": "usps",
            NOISE: NOISE,
        },
        model=PaperCNN,
        epochs=30,
        basis=200,
        groups=1,
        rates=(0.02, 0.05, 0.1, 0.2),
    ),
    "cifar10": Task(
        file="cifar10",
        channels=3,
        side=32,
        candidates={
            "CIFAR-10 test": "cifar10",
            "Tiny-ImageNet": "tinyimagenet32",
            "SVHN": "svhn32",
            "MNIST as RGB": "mnist",
            NOISE: NOISE,
        },
        model=ResNet20,
        epochs=50,
        basis=1000,
        groups=3,
        rates=(0.1,),  # GEP's own
    ),
}


@dataclass(frozen=True)
class Scale:
    """How large everything is; smaller to try the script out."""

    records: int  # at most
    samples: int
    epochs: int  # 0: the task's


@dataclass(frozen=True)
class Comparison:
    """All candidates of a private dataset, seen by one model."""

    task: str
    model: str  # probe or real
    seed: int
    scale: Scale


@dataclass(frozen=True)
class Training:
    """One run of GEP with a candidate, or of DP-SGD."""

    task: str
    candidate: str
    rate: float
    seed: int
    scale: Scale

    @property
    def tuning(self) -> bool:
        """Whether it is part of the search."""
        return self.seed == TUNING_SEED


# -- data -----------------------------------------------------------------------------------------


def pixels(x: np.ndarray, task: Task) -> Tensor:
    """Images of any size and colour in the form of the private ones, from −1 to 1."""
    images = torch.tensor(x, dtype=torch.float32) / 127.5 - 1
    images = images.unsqueeze(1) if images.dim() == 3 else images.permute(0, 3, 1, 2)
    if images.shape[1] != task.channels:
        images = images.mean(1, keepdim=True).expand(-1, task.channels, -1, -1)
    if images.shape[-1] != task.side:
        images = interpolate(images, (task.side, task.side), mode="bilinear", antialias=True)
    return images.contiguous()


def read(folder: Path, file: str, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of one file."""
    path = folder / f"{file}.npz"
    if not path.exists():
        raise FileNotFoundError(f"{path} not found: put {file}.npz with x_train, … there.")
    with np.load(path) as content:
        return content[f"x_{part}"], content[f"y_{part}"]


def candidate(task: Task, name: str, folder: Path, samples: int) -> Tensor:
    """The public images of one candidate."""
    if name == NOISE:
        shape = (samples, task.channels, task.side, task.side)
        return 2 * torch.rand(shape, generator=torch.Generator().manual_seed(0)) - 1
    file = task.candidates[name]
    images, _ = read(folder, file, "test" if file == task.file else "train")
    return pixels(images[:samples], task)


def private_and_test(task: Task, folder: Path, scale: Scale, tuning: bool) -> tuple[Images, Images]:
    """Training images, and test images that no candidate holds."""
    x, y = read(folder, task.file, "train")
    if tuning:
        test = x[-HELD_OUT:], y[-HELD_OUT:]
        x, y = x[:-HELD_OUT], y[:-HELD_OUT]
    else:
        test = tuple(part[PUBLIC:] for part in read(folder, task.file, "test"))
    parts = [(pixels(a[: scale.records], task), b[: scale.records]) for a, b in ((x, y), test)]
    private, unseen = (Images(a, torch.tensor(b).long()) for a, b in parts)
    return private, unseen


def apart(private: Images, public: Tensor) -> Images:
    """The private images that are not copies of public ones."""
    kept = dpspan.without_public(private, public, collate).indices
    return Images(private.x[kept], private.y[kept])


# -- runs -----------------------------------------------------------------------------------------


def compare(run: Comparison, folder: Path, device: str) -> dict[str, Any]:
    """The table of one model, without privacy, and a private choice."""
    start = time.perf_counter()
    torch.set_num_threads(1)
    task = TASKS[run.task]
    torch.manual_seed(run.seed)
    probe = partial(ProbeNetwork, channels=task.channels, classes=10, seed=run.seed)
    model = (probe() if run.model == "probe" else task.model()).to(device)
    public = {name: candidate(task, name, folder, run.scale.samples) for name in task.candidates}
    private, _ = private_and_test(task, folder, run.scale, tuning=False)
    for images in public.values():
        private = apart(private, images)
    criterion = nn.CrossEntropyLoss()
    ranking = rank_public(
        model,
        criterion,
        private,
        public,
        rank=RANK,
        samples=run.scale.samples,
        transport=run.model == "probe",  # once: it does not depend on the model
        seed=run.seed,
    )
    choice = choose_public(
        model,
        criterion,
        DataLoader(private, batch_size=256, collate_fn=collate),
        public,
        ledger=dpspan.Ledger(),
        epsilon=CHOICE_EPSILON,
        rank=RANK,
        samples=run.scale.samples,
        sample_rate=min(1.0, 2 * run.scale.samples / len(private)),
    )
    return {
        **asdict(run),
        "unprivate_ranking": ranking.to_dict(),
        "choice": choice.name,
        "choice_epsilon": CHOICE_EPSILON,
        "seconds": time.perf_counter() - start,
    }


def method_of(run: Training, task: Task, public: Tensor | None) -> Method:
    """GEP as its authors set it (clips 5 and 2), or DP-SGD."""
    if public is None:
        return dpspan.DPSGD(clip=5.0)
    return dpspan.GEP(
        public=public,
        rank=min(task.basis, run.scale.samples),
        clip=5.0,
        residual_clip=2.0,
        groups=task.groups,
        solver=dpspan.PowerIteration(),
    )


def train(run: Training, folder: Path, device: str) -> dict[str, Any]:
    """One run through the engine at ε = 2; what it reached."""
    start = time.perf_counter()
    torch.set_num_threads(1)
    task = TASKS[run.task]
    torch.manual_seed(run.seed)
    public = None
    private, test = private_and_test(task, folder, run.scale, run.tuning)
    if run.candidate != NONE:
        public = candidate(task, run.candidate, folder, run.scale.samples)
        private = apart(private, public)
    model, criterion = task.model().to(device), nn.CrossEntropyLoss()
    epochs = run.scale.epochs or task.epochs
    engine = dpspan.PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), run.rate, 0.9, weight_decay=2e-4),
        data_loader=DataLoader(
            private.to(device), batch_size=min(BATCH, len(private) // 4), collate_fn=collate
        ),
        criterion=criterion,
        target_epsilon=EPSILON,
        target_delta=DELTA,
        epochs=epochs,
        method=method_of(run, task, public),
    )
    milestones = [epochs // 2, 3 * epochs // 4]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, 0.1)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        schedule.step()
    return {
        **asdict(run),
        "accuracy": accuracy(model, test.to(device)),
        "epsilon": engine.get_epsilon(DELTA),
        "delta": DELTA,
        "seconds": time.perf_counter() - start,
        "certificate": engine.certificate(DELTA),
    }


# -- what comes out -------------------------------------------------------------------------------


def summary(
    name: str, comparisons: Sequence[dict[str, Any]], trainings: Sequence[dict[str, Any]]
) -> Table:
    """Means over seeds, and Spearman's correlation of every measure with accuracy."""
    reached = {
        each: [row["accuracy"] for row in trainings if row["candidate"] == each]
        for each in (*TASKS[name].candidates, NONE)
    }
    columns = {
        (model, key): {
            each: statistics.mean(values)
            for each in TASKS[name].candidates
            if (values := _values(comparisons, model, key, each))
        }
        for model in ("probe", "real")
        for key in MEASURES
    }
    columns = {heading: values for heading, values in columns.items() if values}
    shown = Table(title=f"private {name}, ε = {EPSILON:g}", caption="mean over seeds")
    shown.add_column("public data")
    shown.add_column("accuracy %", justify="right")
    for model, key in columns:
        shown.add_column(f"{MEASURES[key]}\n{model}", justify="right")
    for each in sorted(reached, key=lambda e: -statistics.mean(reached[e] or [0.0])):
        cells = [f"{c[each]:.3f}" if each in c else "—" for c in columns.values()]
        shown.add_row(each, spread(reached[each]), *cells)
    shown.add_section()
    correlations = []
    for values in columns.values():
        known = [each for each in values if reached[each]]
        if len(known) < 3:
            correlations.append("—")
            continue
        means = [statistics.mean(reached[each]) for each in known]
        correlations.append(f"{spearmanr([values[each] for each in known], means)[0]:+.2f}")
    shown.add_row("Spearman's ρ with accuracy", "", *correlations)
    for model in ("probe", "real"):
        picked = [row["choice"] for row in comparisons if row["model"] == model]
        shown.add_row(f"chosen at ε = {CHOICE_EPSILON:g}, {model}", ", ".join(map(str, picked)))
    return shown


def _values(rows: Sequence[dict[str, Any]], model: str, key: str, name: str) -> list[float]:
    return [
        row[f"unprivate_{key}"]
        for comparison in rows
        if comparison["model"] == model
        for row in comparison["unprivate_ranking"]["rows"]
        if row["name"] == name and row[f"unprivate_{key}"] is not None
    ]


def main() -> None:
    """Compare, search, train, and show a table for each private dataset."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with .npz files")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--records", type=int, default=10**9, help="at most so many private")
    parser.add_argument("--samples", type=int, default=PUBLIC, help="of each candidate")
    parser.add_argument("--epochs", type=int, default=0, help="instead of the task's")
    parser.add_argument("--out", type=Path, default=Path("runs/choosing"))
    options = parser.parse_args()
    scale = Scale(options.records, min(options.samples, PUBLIC), options.epochs)
    compared = Results(options.out / "comparisons.jsonl")
    trained = Results(options.out / "trainings.jsonl")
    shared = {"folder": options.data, "device": options.device}
    comparisons = [
        Comparison(task, model, seed, scale)
        for task in options.tasks
        for model in ("probe", "real")
        for seed in range(options.seeds)
    ]
    execute(comparisons, compared, partial(compare, **shared), options.jobs, "distances")

    def searched(task: str, method: str) -> list[Training]:
        """The search of GEP (with the private data's own test images), or of DP-SGD."""
        public = NONE if method == NONE else next(iter(TASKS[task].candidates))
        rates = TASKS[task].rates
        return [Training(task, public, rate, TUNING_SEED, scale) for rate in rates]

    search = [
        run
        for task in options.tasks
        for method in (NONE, "GEP")
        if len(TASKS[task].rates) > 1
        for run in searched(task, method)
    ]
    execute(search, trained, partial(train, **shared), options.jobs, "search")
    final = [
        Training(task, each, best_of(searched(task, each), trained), seed, scale)
        for task in options.tasks
        for each in (*TASKS[task].candidates, NONE)
        for seed in range(options.seeds)
    ]
    execute(final, trained, partial(train, **shared), options.jobs, "training")
    console = Console()
    console.width = max(console.width, 120)
    for task in options.tasks:
        rows = [row for run in comparisons if run.task == task and (row := compared.of(run))]
        runs = [row for run in final if run.task == task and (row := trained.of(run))]
        console.print(summary(task, rows, runs))


if __name__ == "__main__":
    main()
