"""Samples in memory, read a whole batch at a time; augmented copies of images."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset


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
