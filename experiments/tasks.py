"""What the papers' methods are tried on: data, model and the recipe of every row of a table."""

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

from dpspan import DPSGD, GEP, RGP, BiasedGEP, PowerIteration
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

    method: Callable[[Tensor | None], Method] | None  # of the public images
    rates: tuple[float, ...] | str
    batch: int
    epochs: int
    optimizer: Callable[..., torch.optim.Optimizer]
    freeze: Callable[[nn.Module], None] = train_all
    views: int = 1  # randomly shifted and mirrored copies of an image, their gradients averaged
    averaging: float = 0.0  # of the weights over steps, exponential; 0: the last ones
    paper: Mapping[float | None, float] = field(default_factory=dict)  # by ε

    def describe(self) -> dict[str, Any]:
        """What a result was made with, besides the method, which is on its certificate."""
        return {
            "batch": self.batch,
            "epochs": self.epochs,
            "schedule": "linear to 0, by epoch",
            "trained": self.freeze.__name__,
            "views": self.views,
            "averaging": self.averaging,
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
    epsilons: tuple[float, ...] = (8.0,)
    public: Callable[[Path, str], Tensor] | None = None
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
    "non-private": TEXT(method=None, rates=(1e-4, 3e-4), batch=128, epochs=3, paper={None: 93.4}),
    "linear probe, DP-SGD": TEXT(
        method=lambda _: DPSGD(clip=1.0), rates=(1e-2, 3e-2), freeze=train_head
    ),
    "DP-SGD": TEXT(method=lambda _: DPSGD(clip=1.0), rates=(1e-3, 2e-3), paper={8.0: 82.3}),
    "RGP-random, rank 1": TEXT(
        method=lambda _: RGP(rank=1, clip=1.0, carriers="random"),
        rates="RGP, rank 1",
        paper={8.0: 87.8},
    ),
    "RGP, rank 1": TEXT(
        method=lambda _: RGP(rank=1, clip=1.0), rates=(1e-3, 2e-3), paper={8.0: 91.5}
    ),
    "RGP, rank 4": TEXT(method=lambda _: RGP(rank=4, clip=1.0), rates="RGP, rank 8"),
    "RGP, rank 8": TEXT(method=lambda _: RGP(rank=8, clip=1.0), rates=(1e-3, 2e-3)),
    # Larger batches and more epochs: the noise of a step falls, and each run costs five times more
    "DP-SGD, 8000 x 25": TEXT(
        method=lambda _: DPSGD(clip=1.0), rates=(3e-3,), batch=8000, epochs=25
    ),
    "RGP, rank 8, 8000 x 25": TEXT(
        method=lambda _: RGP(rank=8, clip=1.0), rates=(2e-3,), batch=8000, epochs=25
    ),
}

SGD = partial(torch.optim.SGD, momentum=0.9)
RESNET = partial(Recipe, batch=1000, epochs=15, optimizer=SGD)
RESNET20 = {
    "DP-SGD": RESNET(method=lambda _: DPSGD(clip=1.0), rates=(0.1, 0.3, 1.0)),
    "RGP-random, rank 8": RESNET(
        method=lambda _: RGP(rank=8, clip=1.0, carriers="random"), rates="RGP, rank 8"
    ),
    "RGP, rank 8": RESNET(method=lambda _: RGP(rank=8, clip=1.0), rates=(0.1, 0.3, 1.0)),
    "RGP, rank 16, left only": RESNET(
        method=lambda _: RGP(rank=16, clip=1.0, left_only=True), rates="RGP, rank 8"
    ),
}
WRN = partial(Recipe, batch=1000, epochs=10, optimizer=SGD)
WRN28 = {
    "DP-SGD": WRN(method=lambda _: DPSGD(clip=1.0), rates=(1.0,), paper={8.0: 55.9}),
    "RGP-random, rank 8": WRN(
        method=lambda _: RGP(rank=8, clip=1.0, carriers="random"), rates=(1.0,), paper={8.0: 51.0}
    ),
    "RGP, rank 8": WRN(method=lambda _: RGP(rank=8, clip=1.0), rates=(1.0,), paper={8.0: 63.4}),
}


def tiny_images(folder: Path, device: str) -> Tensor:
    """2,000 Tiny-ImageNet images, without labels."""
    path = folder / "tinyimagenet32.npz"
    if not path.exists():
        raise FileNotFoundError(f"{path} not found: x_train with at least 2,000 images.")
    with np.load(path) as file:
        x = torch.from_numpy(file["x_train"][:2000])
    return (x.permute(0, 3, 1, 2) / 127.5 - 1).to(device)


def shifted(x: Tensor, views: int) -> Tensor:
    """(n·views, …): each image several times, mirrored or not and moved by up to 4 pixels."""
    n, channels, height, width = x.shape
    padded = torch.nn.functional.pad(x, (4, 4, 4, 4), mode="reflect")
    count = n * views
    down, right = torch.randint(0, 9, (2, count, 1), device=x.device)
    rows = down + torch.arange(height, device=x.device)
    columns = torch.arange(width, device=x.device)
    mirrored = torch.rand(count, 1, device=x.device) < 0.5
    columns = right + torch.where(mirrored, columns.flip(0), columns)
    image = torch.arange(n, device=x.device).repeat_interleave(views)
    channel = torch.arange(channels, device=x.device)
    return padded[
        image[:, None, None, None],
        channel[None, :, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]


def gep(public: Tensor | None, kind: type[GEP | BiasedGEP] = GEP, **settings: Any) -> Method:
    """GEP as its authors ran it: three groups, 1,000 directions, clips 5 and 2, random labels."""
    shared = {"public": public, "rank": 1000, "groups": 3, "clip": 5.0}
    return kind(**shared, solver=PowerIteration(), **settings)


IMAGES = partial(Recipe, batch=1000, epochs=50, optimizer=partial(SGD, weight_decay=2e-4))
GEP_CIFAR10 = {
    "DP-SGD": IMAGES(
        method=lambda _: DPSGD(clip=1.0),
        rates=(0.3, 1.0, 2.0),
        paper={2.0: 43.6, 5.0: 52.2, 8.0: 56.4},
    ),
    "B-GEP": IMAGES(
        method=partial(gep, kind=BiasedGEP), rates="GEP", paper={2.0: 50.3, 5.0: 59.5, 8.0: 63.0}
    ),
    "GEP": IMAGES(
        method=partial(gep, residual_clip=2.0),
        rates=(0.1, 0.2, 0.4),
        paper={2.0: 59.7, 5.0: 70.1, 8.0: 74.9},
    ),
    "DP-SGD, 8 views": IMAGES(
        method=lambda _: DPSGD(clip=1.0), rates=(1.0, 2.0), views=8, averaging=0.99
    ),
    "GEP, 8 views": IMAGES(
        method=partial(gep, residual_clip=2.0, leftover=True),
        rates=(0.2, 0.4),
        views=8,
        averaging=0.99,
    ),
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
    "gep-cifar10": Task(
        title="CIFAR-10, ResNet-20, 2,000 Tiny-ImageNet images",
        paper="paper",
        load=load_cifar10,
        build=ResNet20,
        epsilons=(2.0, 5.0, 8.0),
        public=tiny_images,
        recipes=GEP_CIFAR10,
    ),
    "wrn28-4": Task(
        title="CIFAR-10, WRN-28-4",
        paper="paper",
        load=load_cifar10,
        build=WideResNet,
        recipes=WRN28,
    ),
}
