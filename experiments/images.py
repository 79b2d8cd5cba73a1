"""MNIST-like data from a folder of .npz files (x_train, y_train, x_test, y_test)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


@dataclass(frozen=True)
class Split:
    """A private set, public samples that are not in it, and a test set; all on one device."""

    private: Images
    public: tuple[Tensor, Tensor]
    test: Images


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Images and labels in memory, read a whole batch at a time."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def to(self, device: str) -> Images:
        """The same on a device."""
        return Images(self.x.to(device), self.y.to(device))

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Images and labels."""
        return self.x, self.y

    def first(self, count: int) -> Images:
        """The first samples."""
        return Images(self.x[:count], self.y[:count])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices, device=self.x.device)
        return self.x[chosen], self.y[chosen]


def collate(batch: tuple[Tensor, Tensor] | list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """A batch that was read at once is one already."""
    if isinstance(batch, tuple):
        return batch
    x, y = zip(*batch, strict=True)
    return torch.stack(x), torch.stack(y)


def accuracy(model: nn.Module, data: Images) -> float:
    """The share of samples that are told right, in evaluation mode."""
    training = model.training
    model.eval()
    with torch.no_grad():
        right = [
            (model(x).argmax(1) == y).sum()
            for x, y in zip(data.x.split(500), data.y.split(500), strict=True)
        ]
    model.train(training)
    return float(torch.stack(right).sum()) / len(data)


def load(
    folder: Path, name: str, *, private: int, public: int, seed: int, device: str, tuning: bool
) -> Split:
    """A random private and public part of the training images, disjoint also in content.

    With `tuning`, the test set is another part of the training images: settings are never chosen
    by the images that results are reported on.
    """
    path = folder / f"{name}.npz"
    if not path.exists():
        raise FileNotFoundError(f"{path} not found: put {name}.npz with x_train, … there.")
    with np.load(path) as file:
        x, y, x_test, y_test = (file[k] for k in ("x_train", "y_train", "x_test", "y_test"))
    order = np.random.default_rng(seed).permutation(len(x))
    # Fashion-MNIST holds a few images twice: the public ones must not be among the private.
    chosen_public = order[:public]
    known = {x[i].tobytes() for i in chosen_public}
    rest = np.array([i for i in order[public:] if x[i].tobytes() not in known])
    if tuning:
        held_out = rest[private : private + 5000]
        x_test, y_test = x[held_out], y[held_out]
    return Split(
        _images(x[rest[:private]], y[rest[:private]], device),
        (_images(x[chosen_public], y[chosen_public], device).x, torch.tensor(y[chosen_public])),
        _images(x_test, y_test, device),
    )


def _images(x: np.ndarray, y: np.ndarray, device: str) -> Images:
    pixels = torch.tensor(x, dtype=torch.float32).unsqueeze(1) / 255
    return Images(((pixels - 0.5) / 0.5).to(device), torch.tensor(y).long().to(device))
