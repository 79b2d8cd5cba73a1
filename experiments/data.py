"""The `data` section of an experiment: private, public, held-out and test samples from a folder."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import interpolate

import dpspan
from dpspan.app.section import Count, Section
from dpspan.model.text import minilm_tokenizer
from dpspan.public.data import PublicData
from experiments.images import Images, collate

Array = np.ndarray[Any, Any]
HELD_OUT = 5000


@dataclass(frozen=True)
class Data:
    """What a run is made of. `held_out` are training samples that it does not train on."""

    private: Images
    held_out: Images
    test: Images
    public: Mapping[str, PublicData]
    classes: int

    @property
    def outputs(self) -> int:
        """Of a model for a sample."""
        return self.classes

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return tuple(self.private.x.shape[1:])

    @property
    def labelled(self) -> bool:
        """As models want to know it."""
        return True

    def without(self, public: Iterable[PublicData]) -> Images:
        """The private samples that are not copies of samples in these public data."""
        private = self.private
        for each in public:
            kept = dpspan.without_public(private, each, collate).indices
            private = Images(private.x[kept], private.y[kept])
        return private


class OtherFile(Section):
    """The first samples of another file."""

    source: Literal["file"] = "file"
    file: str
    part: Literal["train", "val", "test"] = "train"
    samples: Count | None = None
    labelled: bool = False


class OptIn(Section):
    """Some of the private file's own training samples; the others are the private ones."""

    source: Literal["opt-in"] = "opt-in"
    samples: Count
    labelled: bool = False


class UniformNoise(Section):
    """No images at all."""

    source: Literal["noise"] = "noise"
    samples: Count
    labelled: Literal[False] = False


AnyPublic = Annotated[OtherFile | OptIn | UniformNoise, Field(discriminator="source")]


class ImagesSection(Section):
    """Images, or vectors of features, in .npz files with x_train, y_train, x_test, y_test.

    With `records` each seed has a random part of the training images; without, all of them are
    private. `held_out` of the others (without `records`: of all, where a run is part of a search
    or is attacked) are what a search is judged by. What is public in the test part is not
    tested on.
    """

    name: Literal["images"] = "images"
    file: str
    classes: Count = 10
    records: Count | None = None
    held_out: Count = HELD_OUT
    public: dict[str, AnyPublic] = Field(default_factory=dict)

    def load(self, folder: Path, *, seed: int, hold_out: bool) -> Data:
        """The samples of one run; `hold_out` keeps training samples back in any case."""
        x, y = read(folder, self.file, "train")
        varies = self.records is not None or any(p.source == "opt-in" for p in self.public.values())
        order = np.random.default_rng(seed if varies else 0).permutation(len(x))
        taken = self.taken
        known = {x[i].tobytes() for i in order[:taken]}
        rest = np.array([i for i in order[taken:] if not taken or x[i].tobytes() not in known])
        count = self.records or len(rest) - (self.held_out if hold_out else 0)
        private, held_out = rest[:count], rest[count : count + self.held_out]
        x_test, y_test = (part[self.tested_from :] for part in read(folder, self.file, "test"))
        like = _inputs(x[:1])
        public, used = {}, 0
        for name, section in self.public.items():
            if section.source == "opt-in":
                chosen = order[used : used + section.samples]
                used += section.samples
                inputs, own = _inputs(x[chosen]), y[chosen]
            elif section.source == "noise":
                shape, generator = like.shape[1:], torch.Generator().manual_seed(0)
                inputs = 2 * torch.rand(section.samples, *shape, generator=generator) - 1
                own = None
            else:
                a, own = read(folder, section.file, section.part)
                inputs, own = inputs_like(a[: section.samples], like), own[: section.samples]
            tensors = (inputs, labels(own)) if section.labelled else inputs
            public[name] = PublicData.of(tensors, name=name)
        return Data(
            Images(_inputs(x[private]), labels(y[private])),
            Images(_inputs(x[held_out]), labels(y[held_out])),
            Images(_inputs(x_test), labels(y_test)),
            public,
            self.classes,
        )

    @property
    def taken(self) -> int:
        """Training images that are public, and so not private in any row."""
        return sum(p.samples for p in self.public.values() if isinstance(p, OptIn))

    @property
    def tested_from(self) -> int:
        """The first test image that is not public."""
        same = [p for p in self.public.values() if isinstance(p, OtherFile)]
        return max(
            (p.samples or 0 for p in same if (p.file, p.part) == (self.file, "test")), default=0
        )


class Sst2Section(Section):
    """Sentences as token ids of one fixed length, so that no record shapes another's batch.

    32 tokens hold 94.5 % of the training phrases whole; 64 hold all development sentences. These
    are the test data.
    """

    name: Literal["sst2"] = "sst2"
    train_length: Count = 32
    test_length: Count = 64
    held_out: Count = HELD_OUT
    classes: Literal[2] = 2
    public: dict[str, AnyPublic] = Field(default_factory=dict, max_length=0)
    taken: ClassVar[int] = 0
    tested_from: ClassVar[int] = 0

    def load(self, folder: Path, *, seed: int, hold_out: bool) -> Data:
        """The samples of one run."""
        sentences = _sentences(folder / "sst2_train.tsv.gz", self.train_length)
        order = torch.from_numpy(np.random.default_rng(0).permutation(len(sentences)))
        count = len(order) - (self.held_out if hold_out else 0)
        parts = (
            Images(sentences.x[part], sentences.y[part]) for part in (order[:count], order[count:])
        )
        return Data(*parts, _sentences(folder / "sst2_dev.tsv.gz", self.test_length), {}, 2)


AnyData = Annotated[ImagesSection | Sst2Section, Field(discriminator="name")]


def read(folder: Path, file: str, part: str) -> tuple[Array, Array]:
    """Inputs and labels of one part of a file."""
    path = folder / f"{file}.npz"
    if not path.exists():
        raise FileNotFoundError(f"{path} not found: put {file}.npz with x_{part}, y_{part} there.")
    with np.load(path) as content:
        return content[f"x_{part}"], content[f"y_{part}"]


def _inputs(x: Array) -> Tensor:
    """Pixels from −1 to 1, channels first; numbers that are no pixels as they are."""
    if x.dtype != np.uint8:
        return torch.tensor(x, dtype=torch.float32)
    images = torch.from_numpy(x) / 127.5 - 1
    return images.unsqueeze(1) if images.dim() == 3 else images.permute(0, 3, 1, 2).contiguous()


def labels(y: Array) -> Tensor:
    """Class numbers."""
    return torch.tensor(y).long().flatten()


def inputs_like(x: Array, like: Tensor) -> Tensor:
    """Images of any size and colour in the form of other ones."""
    images = _inputs(x)
    if images.shape[1:] == like.shape[1:]:
        return images
    channels, *size = like.shape[1:]
    if images.shape[1] != channels:
        images = images.mean(1, keepdim=True).expand(-1, channels, -1, -1)
    if list(images.shape[2:]) != size:
        images = interpolate(images, size, mode="bilinear", antialias=True)
    return images.contiguous()


@lru_cache(maxsize=2)
def _sentences(path: Path, length: int) -> Images:
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
