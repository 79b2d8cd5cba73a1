"""Private records and unlabelled public images, as a frozen layer of public patches sees them.

Features are kept in the temporary folder of the machine, as encoding takes minutes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dpspan
from dpspan.app.section import Section
from dpspan.public.data import PublicData
from dpspan.public.fingerprints import fingerprints
from experiments.data import HELD_OUT, OtherFile, inputs_like, labels, read
from experiments.images import Images, collate
from experiments.patches import PatchesModel, seen_by
from experiments.schema import digest_of, stated

Array = np.ndarray[Any, Any]


class Setting(Section):
    """A private file, and public images, whose labels no run sees.

    Where test images are public they are the first ones after a shuffle; the others are tested on.
    """

    file: str
    public: OtherFile

    @property
    def same_source(self) -> bool:
        """Whether test images of the private file are public."""
        return (self.public.file, self.public.part) == (self.file, "test")


@dataclass(frozen=True)
class Pictures:
    """The images of a setting; `known` are labels of the public ones, to judge answers by.

    They mean something where public images are of the private classes.
    """

    private: Images
    public: Tensor
    known: Array
    test: Images

    @classmethod
    def of(cls, folder: Path, setting: Setting) -> Pictures:
        """Read; private copies of public images are left out."""
        x, y = read(folder, setting.file, "train")
        test_x, test_y = read(folder, setting.file, "test")
        a, own = read(folder, setting.public.file, setting.public.part)
        tested, chosen = np.arange(len(test_x)), np.arange(len(a))[: setting.public.samples]
        if setting.same_source:
            shuffled = np.random.default_rng(0).permutation(len(test_x))
            chosen, tested = np.split(shuffled, [len(chosen)])
        # Of small images in grey: the one form that the experiment's files have.
        like = torch.empty(1, 1, *x.shape[1:3])
        public = inputs_like(a[chosen], like)
        private = Images(inputs_like(x, like), labels(y))
        kept = dpspan.without_public(private, PublicData.of(public), collate).indices
        return cls(
            private=Images(private.x[kept], private.y[kept]),
            public=public,
            known=np.asarray(own[chosen]).ravel().astype(np.int64),
            test=Images(inputs_like(test_x[tested], like), labels(test_y[tested])),
        )


@dataclass(frozen=True)
class Source:
    """Which samples a run has: a file of features, and whether training images are held out."""

    features: Path
    hold_out: bool


@dataclass(frozen=True)
class Samples:
    """Features. `prints` are the private images' fingerprints, `digest` is the public images'."""

    x: Array
    y: Array
    prints: Sequence[bytes]
    public: Array
    known: Array
    judged_x: Array
    judged_y: Array
    digest: str

    def unwhitened(self, x: Array) -> Array:
        """With the first directions the longest again, as is better for few records.

        Nothing private is used: the lengths are the public images' spread.
        """
        scaled = x * self.public.std(0)
        found: Array = scaled / np.linalg.norm(scaled, axis=1, keepdims=True)
        return found


def features_of(folder: Path, features: PatchesModel, setting: Setting) -> Path:
    """The file of a setting, made if it is not there yet."""
    said = {"features": stated(features), "setting": stated(setting)}
    path = Path(tempfile.gettempdir()) / f"dpspan-{dpspan.__version__}-{digest_of(said)}.npz"
    if not path.exists():
        pictures = Pictures.of(folder, setting)
        layer = dpspan.PatchFeatures.learn(pictures.public, **features.settings)
        public = Images(pictures.public, torch.from_numpy(pictures.known))
        parts = [
            seen_by(layer, each).x.numpy() for each in (pictures.private, public, pictures.test)
        ]
        keep(path, pictures, *parts)
    return path


def keep(path: Path, pictures: Pictures, x: Array, public: Array, test_x: Array) -> None:
    """Write the file; a part of one is never taken for it."""
    unfinished = path.with_name(f"unfinished-{path.name}")
    prints = np.frombuffer(b"".join(fingerprints(pictures.private.x)), np.uint8)
    np.savez(
        unfinished,
        x=x,
        y=pictures.private.y.numpy(),
        prints=prints.reshape(len(x), -1),
        public=public,
        known=pictures.known,
        test_x=test_x,
        test_y=pictures.test.y.numpy(),
        digest=PublicData.of(pictures.public).digest,
    )
    unfinished.replace(path)


@lru_cache(maxsize=1)
def samples_of(source: Source) -> Samples:
    """Judged by held-out training images, or by the test images."""
    with np.load(source.features) as file:
        x, y, prints = file["x"], file["y"], file["prints"]
        public, known, digest = file["public"], file["known"], str(file["digest"])
        judged_x, judged_y = file["test_x"], file["test_y"]
    if source.hold_out:
        order = np.random.default_rng(0).permutation(len(x))
        judged_x, judged_y = x[order[:HELD_OUT]], y[order[:HELD_OUT]]
        x, y, prints = (each[order[HELD_OUT:]] for each in (x, y, prints))
    known_by = [each.tobytes() for each in prints]
    return Samples(x, y, known_by, public, known, judged_x, judged_y, digest)
