"""What RGP is tried on: data, model and the recipe of every row of a table."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dpspan import DPSGD, RGP
from dpspan.mechanisms import Method
from dpspan.models import ResNet20, WideResNet
from experiments.images import Images

HELD_OUT = 5000


def train_all(model: nn.Module) -> None:
    """Every parameter."""


def train_matrices(model: nn.Module) -> None:
    """The encoder's matrices and the head, as in the paper; embeddings, norms and biases stay."""
    for name, parameter in model.named_parameters():
        matrix = parameter.dim() == 2 and "embeddings" not in name
        parameter.requires_grad_(matrix or name.startswith("head"))


def train_head(model: nn.Module) -> None:
    """The head alone: a linear probe."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head"))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one row of a table is trained; without a method, without privacy.

    `rates` are the learning rates to search among, or the row whose rate is taken.
    """

    method: Method | None
    rates: tuple[float, ...] | str
    batch: int
    epochs: int
    optimizer: Callable[..., torch.optim.Optimizer]
    freeze: Callable[[nn.Module], None] = train_all
    paper: float | None = None

    def describe(self) -> dict[str, Any]:
        """What a result was made with."""
        return {
            "method": None if self.method is None else self.method.describe(),
            "batch": self.batch,
            "epochs": self.epochs,
            "schedule": "linear to 0, by epoch",
            "trained": self.freeze.__name__,
        }


class Data(NamedTuple):
    """What is trained on; training samples held out for searches and attacks; test samples."""

    train: Images
    held_out: Images
    test: Images


@dataclass(frozen=True, kw_only=True)
class Task:
    """A data set, a model, and the rows of its table."""

    title: str
    paper: str
    load: Callable[[Path, int | None], Data]
    build: Callable[[], nn.Module]
    recipes: Mapping[str, Recipe] = field(default_factory=dict)


def split(data: Images, test: Images, limit: int | None) -> Data:
    """Hold out a fixed random part of the training data.

    A search is judged by it, and an attack takes it for the non-members: the test data of SST-2
    are whole sentences and its training data phrases, which an attack would tell apart.
    """
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(data)))[:limit]
    kept = len(order) - min(HELD_OUT, len(order) // 5)
    train, held_out = (Images(data.x[part], data.y[part]) for part in (order[:kept], order[kept:]))
    return Data(train, held_out, test)


class MeanPooled(nn.Module):
    """MiniLM with the pooling it was trained with, the mean over tokens, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        from dpspan.text import minilm_encoder

        self.encoder = minilm_encoder()
        self.head = nn.Linear(self.encoder.config.hidden_size, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of token ids, 0 where a sentence has ended."""
        real = (tokens != 0).long()
        states = self.encoder(input_ids=tokens, attention_mask=real).last_hidden_state
        weights = (real / real.sum(1, keepdim=True)).to(states.dtype)
        scores: Tensor = self.head(torch.einsum("nt,ntd->nd", weights, states))
        return scores


def load_sst2(folder: Path, limit: int | None) -> Data:
    """Sentences as token ids of one fixed length, so that no record shapes another's batch.

    32 tokens hold 94.5 % of the training phrases whole; 64 hold all development sentences.
    """
    parts = (("train", 32), ("dev", 64))
    return split(*(_sentences(folder / f"sst2_{n}.tsv.gz", k) for n, k in parts), limit)


def _sentences(path: Path, length: int) -> Images:
    from dpspan.text import minilm_tokenizer

    if not path.exists():
        raise FileNotFoundError(f"{path} not found: sentences and labels, tab-separated.")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    tokens = minilm_tokenizer()(
        [row["sentence"] for row in rows],
        padding="max_length",
        truncation=True,
        max_length=length,
        return_tensors="pt",
    )["input_ids"]
    return Images(tokens, torch.tensor([int(row["label"]) for row in rows]))


def load_cifar10(folder: Path, limit: int | None) -> Data:
    """CIFAR-10 without augmentation, pixels from −1 to 1."""
    path = folder / "cifar10.npz"
    if not path.exists():
        raise FileNotFoundError(f"{path} not found: x_train, y_train, x_test, y_test.")
    with np.load(path) as file:
        parts = [
            Images(
                torch.from_numpy(file[f"x_{name}"]).permute(0, 3, 1, 2) / 127.5 - 1,
                torch.from_numpy(file[f"y_{name}"]).long().flatten(),
            )
            for name in ("train", "test")
        ]
    return split(*parts, limit)


ADAM = partial(torch.optim.Adam, betas=(0.9, 0.98))
TEXT = partial(Recipe, batch=4000, epochs=10, optimizer=ADAM, freeze=train_matrices)
SST2 = {
    "non-private": TEXT(method=None, rates=(1e-4, 3e-4), batch=128, epochs=3, paper=93.4),
    "linear probe, DP-SGD": TEXT(method=DPSGD(clip=1.0), rates=(1e-2, 3e-2), freeze=train_head),
    "DP-SGD": TEXT(method=DPSGD(clip=1.0), rates=(1e-3, 2e-3), paper=82.3),
    "RGP-random, rank 1": TEXT(
        method=RGP(rank=1, clip=1.0, carriers="random"), rates="RGP, rank 1", paper=87.8
    ),
    "RGP, rank 1": TEXT(method=RGP(rank=1, clip=1.0), rates=(1e-3, 2e-3), paper=91.5),
    "RGP, rank 4": TEXT(method=RGP(rank=4, clip=1.0), rates="RGP, rank 8"),
    "RGP, rank 8": TEXT(method=RGP(rank=8, clip=1.0), rates=(1e-3, 2e-3)),
    # Larger batches and more epochs: the noise of a step falls, and each run costs five times more
    "DP-SGD, 8000 x 25": TEXT(method=DPSGD(clip=1.0), rates=(3e-3,), batch=8000, epochs=25),
    "RGP, rank 8, 8000 x 25": TEXT(
        method=RGP(rank=8, clip=1.0), rates=(2e-3,), batch=8000, epochs=25
    ),
}

SGD = partial(torch.optim.SGD, momentum=0.9)
RESNET = partial(Recipe, batch=1000, epochs=15, optimizer=SGD)
RESNET20 = {
    "DP-SGD": RESNET(method=DPSGD(clip=1.0), rates=(0.1, 0.3, 1.0)),
    "RGP-random, rank 8": RESNET(
        method=RGP(rank=8, clip=1.0, carriers="random"), rates="RGP, rank 8"
    ),
    "RGP, rank 8": RESNET(method=RGP(rank=8, clip=1.0), rates=(0.1, 0.3, 1.0)),
    "RGP, rank 16, left only": RESNET(
        method=RGP(rank=16, clip=1.0, left_only=True), rates="RGP, rank 8"
    ),
}
WRN = partial(Recipe, batch=1000, epochs=10, optimizer=SGD)
WRN28 = {
    "DP-SGD": WRN(method=DPSGD(clip=1.0), rates=(1.0,), paper=55.9),
    "RGP-random, rank 8": WRN(
        method=RGP(rank=8, clip=1.0, carriers="random"), rates=(1.0,), paper=51.0
    ),
    "RGP, rank 8": WRN(method=RGP(rank=8, clip=1.0), rates=(1.0,), paper=63.4),
}

TASKS = {
    "sst2": Task(
        title="SST-2, MiniLM-L6",
        paper="paper, BERT-base",
        load=load_sst2,
        build=MeanPooled,
        recipes=SST2,
    ),
    "resnet20": Task(
        title="CIFAR-10, ResNet-20",
        paper="paper",
        load=load_cifar10,
        build=ResNet20,
        recipes=RESNET20,
    ),
    "wrn28-4": Task(
        title="CIFAR-10, WRN-28-4",
        paper="paper",
        load=load_cifar10,
        build=WideResNet,
        recipes=WRN28,
    ),
}
