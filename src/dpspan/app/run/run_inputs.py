"""From a configuration to the data and the model that it names."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from dpspan.accounting.promises import warn_of_weaknesses
from dpspan.app.config import Config
from dpspan.app.data import Loaded, load
from dpspan.app.data.source import Source
from dpspan.model.trainable import Trainable, train_only
from dpspan.public.data import PublicData
from dpspan.public.patches import PatchFeatures, encode, encode_public
from dpspan.support.randomness import seeded

_SECRET = "This message depends on private data: do not publish it."


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run is made of. The model is at the weights that it starts from."""

    private: Loaded
    public: Mapping[str, PublicData]
    test: Loaded | None
    model: nn.Module
    layer: PatchFeatures | None  # what all of these data have been through


def make_parts(config: Config, *, features: Path | None = None) -> Parts:
    """Read the data and build the model; refuse what would make the guarantee an empty one.

    A frozen layer is read from the file `features`; without one it is learnt.
    """
    device = device_of(config)
    private = _load("data.private", config.data.private, config, labelled=True)
    public = {name: _load_public(name, config, private) for name in config.data.public}
    test = None
    if config.data.test is not None:
        test = _load("data.test", config.data.test, config, labelled=True, like=private)
        _check_test(test, private, declared_public=config.data.test_is_public)
    count = config.data.records or len(private.dataset)  # stated, or told by the sampling rate
    warn_of_weaknesses(config.budget.epsilon, config.budget.delta, count)
    layer = _layer(config, public, device, features)
    if layer is not None:
        private = encode_loaded(layer, private)
        public = {name: encode_public(layer, data) for name, data in public.items()}
        test = None if test is None else encode_loaded(layer, test)
    with seeded(config.training.seed):
        model = new_model(config, private).to(device)
        _rehearse(model, private, device)
    return Parts(private=private, public=public, test=test, model=model, layer=layer)


def new_model(config: Config, like: Loaded) -> nn.Module:
    """The model for samples like these with new weights, from torch's generator."""
    model, trainable = config.model.draw(like), trainable_of(config)
    if trainable is not None:
        model = train_only(model, trainable)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "Expected a model with something to train, got one whose parameters are all frozen: "
            "unfreeze what is to be trained."
        )
    return model


def trainable_of(config: Config) -> Trainable | None:
    """What is trained of the model; None for all of it."""
    return None if config.trainable is None else config.trainable.build()


def _layer(
    config: Config, public: Mapping[str, PublicData], device: torch.device, kept: Path | None
) -> PatchFeatures | None:
    """The frozen layer, if there is one: kept in a file, or learnt now.

    Learnt again on another machine it would be another one, if only in its last digits and signs.
    """
    section, seed = config.features, config.training.seed
    if section is None:
        return None
    data = public[section.public]
    if kept is None:
        return section.learn(data, seed=seed, device=device)
    layer = PatchFeatures.load(kept, data)
    if layer.settings != {**section.settings, "seed": seed}:
        raise ValueError(
            f"{kept} was learnt with other settings than the section `features`, or another seed. "
            "Go back to those, or choose another output folder."
        )
    return layer.to(device)


def encode_loaded(layer: PatchFeatures, loaded: Loaded) -> Loaded:
    """Private records or test samples as the layer sees them."""
    encoded = encode(layer, loaded.dataset)
    return replace(loaded, dataset=encoded, shape=tuple(encoded.tensors[0].shape[1:]))


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
    if like is not None and source.scaling != config.data.private.scaling:
        _warn(
            f"{where} and data.private differ in scale, mean or std. If both files hold the same "
            "kind of numbers, write the same constants in both"
        )
    return loaded


def _load_public(name: str, config: Config, private: Loaded) -> PublicData:
    source = config.data.public[name]
    loaded = _load(f"data.public.{name}", source, config, labelled=False, like=private)
    if copies := loaded.copies_of(private):
        raise ValueError(
            f"{len(copies)} of the {len(loaded.dataset)} samples of data.public.{name} also occur "
            f"in the private data (exact copies, e.g. sample {copies[0]}), however the two are "
            "scaled. If private records got into the public data, give other public data. If these "
            f"records really are public, remove them from the private data. {_SECRET}"
        )
    return PublicData.of(loaded.tensors, name=name)


def _check_test(test: Loaded, private: Loaded, *, declared_public: bool) -> None:
    """What is measured on private records is not public, whatever was declared."""
    copies = test.copies_of(private)
    if not copies:
        return
    count = f"{len(copies)} of the {len(test.dataset)} samples"
    found = f"{count} of data.test also occur in the private data"
    if declared_public:
        raise ValueError(
            f"{found} (exact copies, e.g. sample {copies[0]}), so results on them are not public. "
            "If private records got into the test data, take them out there. If these records "
            "really are public, or just happen to have the same values, take them out of the "
            f"private data. Or leave test_is_public out: results are then not shown. {_SECRET}"
        )
    _warn(f"{found}: they say nothing about new records, and an audit must not use them. {_SECRET}")


def _rehearse(model: nn.Module, like: Loaded, device: torch.device) -> None:
    """Run a copy on two samples of zeros: a mistake in the model is found before anything is kept.

    No private value is used.
    """
    zeros = torch.zeros(2, *like.shape, dtype=like.tensors[0].dtype, device=device)
    try:
        with torch.no_grad():
            output = copy.deepcopy(model).eval()(zeros)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"The model cannot take samples of shape {like.shape}: {error}") from error
    if isinstance(output, Tensor) and output.shape != (2, like.classes):
        raise ValueError(
            f"Expected the model to give {like.classes} numbers for a sample, one for each of "
            f"data.classes, got an output of shape {tuple(output.shape)} for 2 samples."
        )


def _warn(message: str) -> None:
    warnings.warn(f"dpspan: {message.removesuffix('.')}.", stacklevel=2)


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
