"""From a configuration to the things it names: data, model, method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from dpspan.config import Config
from dpspan.data import Loaded, load
from dpspan.data.source import Source
from dpspan.public import PublicData
from dpspan.run.batches import in_batches
from dpspan.sampling import PoissonDraw
from dpspan.trainable import Trainable, train_only


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run is made of. The model is at the weights that it starts from."""

    private: Loaded
    public: Mapping[str, PublicData]
    test: Loaded | None
    model: nn.Module
    trainable: Trainable | None
    device: torch.device

    def loader(self, batch_size: int) -> DataLoader[Any]:
        """The private data in batches."""
        return in_batches(self.private.tensors, batch_size)


def make_parts(config: Config) -> Parts:
    """Read the data and build the model."""
    device = device_of(config)
    private = _load("data.private", config.data.private, config, labelled=True)
    public = {name: _load_public(name, config, private) for name in config.data.public}
    test = None
    if config.data.test is not None:
        test = _load("data.test", config.data.test, config, labelled=True, like=private)
    with torch.random.fork_rng():
        torch.manual_seed(config.training.seed)
        model = new_model(config, private)
    return Parts(
        private=private,
        public=public,
        test=test,
        model=model.to(device),
        trainable=trainable_of(config),
        device=device,
    )


def new_model(config: Config, like: Loaded) -> nn.Module:
    """The model for samples like these with new weights, from torch's generator."""
    model, trainable = config.model.draw(like), trainable_of(config)
    return model if trainable is None else train_only(model, trainable)


def trainable_of(config: Config) -> Trainable | None:
    """What is trained of the model; None for all of it."""
    return None if config.trainable is None else config.trainable.build()


def sampling(config: Config, parts: Parts) -> PoissonDraw:
    """Poisson sampling at the rate batch size / records."""
    records = config.data.records or len(parts.private.dataset)
    rate = min(1.0, config.training.batch_size / records)
    return PoissonDraw.one_pass(records=len(parts.private.dataset), sample_rate=rate)


def _load(
    where: str, source: Source, config: Config, *, labelled: bool, like: Loaded | None = None
) -> Loaded:
    loaded = load(source, classes=config.data.classes)
    if labelled and not loaded.labelled:
        raise ValueError(f"Expected labels in {where}, got inputs only: name where its labels are.")
    if like is not None and loaded.shape != like.shape:
        raise ValueError(
            f"Expected samples of shape {like.shape}, that of the private data, in {where}, got "
            f"{loaded.shape}."
        )
    return loaded


def _load_public(name: str, config: Config, private: Loaded) -> PublicData:
    source = config.data.public[name]
    loaded = _load(f"data.public.{name}", source, config, labelled=False, like=private)
    return PublicData.of(loaded.tensors, name=name)


def device_of(config: Config) -> torch.device:
    """Where to train."""
    name = config.training.device
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"Expected device to be auto, cpu or a device that is there, such as cuda:0, got "
            f"{name!r}."
        ) from error
    return device
