"""Training on another, public file before the first private step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dpspan.app.config.sections import RandomAffineSection
from dpspan.app.section import Count, Positive, Section
from dpspan.public.data import PublicData
from experiments.data import inputs_like, labels, read


class Pretraining(Section):
    """Adam on another file, with that file's labels; layers of another shape then start anew."""

    file: str
    classes: Count = 10
    samples: Count | None = None
    epochs: Count = 3
    batch_size: Count = 250
    learning_rate: Positive = 1e-3
    augment: RandomAffineSection | None = None

    @property
    def name(self) -> str:
        """What records call these data."""
        return f"{self.file}, pre-training"

    def load(self, folder: Path, like: Tensor) -> PublicData:
        """The samples, in the form of other ones, with their labels."""
        x, y = (part[: self.samples] for part in read(folder, self.file, "train"))
        return PublicData.of((inputs_like(x, like), labels(y)), name=self.name)


def pretrained(
    section: Pretraining,
    samples: PublicData,
    model: nn.Module,
    seed: int,
    device: str,
) -> dict[str, Tensor]:
    """The weights after training a model for those classes on the samples."""
    images, targets = (part.to(device) for part in samples.batches[0][:2])
    augment = section.augment.built() if section.augment else None
    torch.manual_seed(seed)
    model = model.to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=section.learning_rate)
    for _ in range(section.epochs):
        for part in torch.randperm(len(images), device=device).split(section.batch_size):
            seen = images[part] if augment is None else augment(images[part])
            optimizer.zero_grad()
            cross_entropy(model(seen), targets[part]).backward()
            optimizer.step()
    return {name: weight.cpu() for name, weight in model.state_dict().items()}


def load_common(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Weights of the same shape; all others keep their own."""
    own = model.state_dict()
    fitting = {n: weights[n] if weights[n].shape == w.shape else w for n, w in own.items()}
    model.load_state_dict(fitting)
