"""Training on another, public file before the first private step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dpspan.config.training import AffineSection
from dpspan.section import Count, Positive, Section
from experiments.data import Data, inputs_like, labels, read
from experiments.runner import Place


class Pretraining(Section):
    """Adam on another file, with that file's labels; layers of another shape then start anew."""

    file: str
    classes: Count = 10
    samples: Count | None = None
    epochs: Count = 3
    batch_size: Count = 250
    learning_rate: Positive = 1e-3
    augment: AffineSection | None = None


def pretrained(
    section: Pretraining,
    build: Callable[[Data], nn.Module],
    data: Data,
    seed: int,
    place: Place,
) -> dict[str, Tensor]:
    """The weights after the other file; `build` makes a model for data of so many classes."""
    x, y = (part[: section.samples] for part in read(place.data, section.file, "train"))
    images, targets = inputs_like(x, data.private.x).to(place.device), labels(y).to(place.device)
    augment = section.augment.build() if section.augment else None
    torch.manual_seed(seed)
    model = build(replace(data, classes=section.classes)).to(place.device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=section.learning_rate)
    for _ in range(section.epochs):
        for part in torch.randperm(len(images), device=place.device).split(section.batch_size):
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
