"""The `model` section: a built-in network, a factory of the user's, or weights with their class."""

from __future__ import annotations

import importlib
import math
import pickle
import sys
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

import dpspan
from dpspan.app.config.section import Count, Counts, File, Section

if TYPE_CHECKING:
    from torch import nn

    from dpspan.app.data import Loaded


class ModelSection(Section):
    """What all models have; `fix` replaces layers that mix samples, BatchNorm for example."""

    fix: bool = False

    @abstractmethod
    def make(self, data: Loaded) -> nn.Module:
        """The network as it is, with random weights from torch's generator."""

    def draw(self, data: Loaded) -> nn.Module:
        """The network for samples like these, with random weights from torch's generator."""
        model = self.make(data)
        return dpspan.fix(model) if self.fix else model

    def build(self, data: Loaded, *, seed: int) -> nn.Module:
        """The same network for the same seed."""
        import torch

        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.draw(data)


class LogisticSection(ModelSection):
    """Logistic regression."""

    name: Literal["logistic"] = "logistic"

    def make(self, data: Loaded) -> nn.Module:
        from dpspan.model.networks import MLP

        return MLP(math.prod(data.shape), (), data.classes)


class MlpSection(ModelSection):
    """Fully connected network."""

    name: Literal["mlp"] = "mlp"
    hidden: Counts = (128,)

    def make(self, data: Loaded) -> nn.Module:
        from dpspan.model.networks import MLP

        return MLP(math.prod(data.shape), self.hidden, data.classes)


class CnnSection(ModelSection):
    """The papers' small CNN."""

    name: Literal["cnn"] = "cnn"

    def make(self, data: Loaded) -> nn.Module:
        channels, height, width = _image_shape(self.name, data)
        if height != width or height < 14:
            raise ValueError(
                f"Expected square images of at least 14 × 14 pixels for the model cnn, got "
                f"{height} × {width}. Resize them, or use mlp or a factory of your own."
            )
        from dpspan.model.networks import PaperCNN

        return PaperCNN(classes=data.classes, channels=channels, size=height)


class ResNet20Section(ModelSection):
    """ResNet-20 with GroupNorm."""

    name: Literal["resnet20"] = "resnet20"

    def make(self, data: Loaded) -> nn.Module:
        _image_shape(self.name, data, channels=3)
        from dpspan.model.networks import ResNet20

        return ResNet20(classes=data.classes)


class WideResNetSection(ModelSection):
    """Wide ResNet with GroupNorm; WRN-28-4 by default."""

    name: Literal["wide-resnet"] = "wide-resnet"
    depth: Count = 28
    widen: Count = 4

    def make(self, data: Loaded) -> nn.Module:
        _image_shape(self.name, data, channels=3)
        from dpspan.model.networks import WideResNet

        return WideResNet(depth=self.depth, widen=self.widen, classes=data.classes)


class ProbeSection(ModelSection):
    """The GSD paper's probe network."""

    name: Literal["probe"] = "probe"

    def make(self, data: Loaded) -> nn.Module:
        import torch

        from dpspan.choose import ProbeNetwork

        channels, *_ = _image_shape(self.name, data)
        seed = int(torch.randint(2**31, ()))
        return ProbeNetwork(channels=channels, classes=data.classes, seed=seed)


class FactorySection(ModelSection):
    """A function or class of the user's, `package.module:name`, called with `arguments`."""

    name: Literal["factory"] = "factory"
    factory: str
    arguments: dict[str, Any] = Field(default_factory=dict)

    def make(self, data: Loaded) -> nn.Module:
        return _called(self.factory, self.arguments)


class CheckpointSection(ModelSection):
    """Weights (safetensors, or a state_dict that torch saved) with the class that takes them.

    They must not come from training on the private data: nothing would account for that.
    """

    name: Literal["checkpoint"] = "checkpoint"
    weights: File
    factory: str
    arguments: dict[str, Any] = Field(default_factory=dict)

    def make(self, data: Loaded) -> nn.Module:
        model = _called(self.factory, self.arguments)
        try:
            load_weights(model, self.weights)
        except RuntimeError as error:
            raise ValueError(
                f"The weights in {self.weights} do not fit {self.factory}: {error}"
            ) from error
        return model


AnyModel = Annotated[
    LogisticSection
    | MlpSection
    | CnnSection
    | ResNet20Section
    | WideResNetSection
    | ProbeSection
    | FactorySection
    | CheckpointSection,
    Field(discriminator="name"),
]


def load_weights(model: nn.Module, path: Path) -> None:
    """Put weights into a model, with nothing executed; RuntimeError if they do not fit."""
    import safetensors.torch
    import torch

    if not path.exists():
        raise FileNotFoundError(f"There are no weights at {path}.")
    try:
        if path.suffix == ".safetensors":
            safetensors.torch.load_model(model, path)  # knows about tied weights
            return
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (safetensors.SafetensorError, pickle.UnpicklingError, EOFError):
        raise ValueError(  # whose own words may quote the file
            f"{path} holds no weights that can be read safely. Save model.state_dict() as "
            "safetensors."
        ) from None
    if not isinstance(loaded, dict):
        raise ValueError(f"Expected a state_dict in {path}, got a {type(loaded).__name__}.")
    model.load_state_dict(loaded)


def _image_shape(name: str, data: Loaded, channels: int | None = None) -> tuple[int, int, int]:
    fits = len(data.shape) == 3 and channels in (None, data.shape[0])
    if not fits:
        kind = "images" if channels is None else f"images of {channels} channels"
        raise ValueError(
            f"Expected {kind}, shape ({channels or 'channels'}, height, width), for the model "
            f"{name}, got samples of shape {data.shape}. Use mlp, or a factory of your own."
        )
    first, height, width = data.shape
    return first, height, width


def _called(reference: str, arguments: dict[str, Any]) -> nn.Module:
    from torch import nn

    made = _imported(reference)(**arguments)
    if not isinstance(made, nn.Module):
        raise TypeError(
            f"Expected {reference} to return a torch module, got a {type(made).__name__}."
        )
    return made


def _imported(reference: str) -> Any:
    module_name, _, name = reference.partition(":")
    if not module_name or not name:
        raise ValueError(
            f"Expected a factory such as 'package.module:function', got {reference!r}."
        )
    with _working_folder_first():
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"Cannot import '{module_name}' for the model: {error}. It must be installed, or "
                f"lie in the folder that dpspan is started in, {Path.cwd()}."
            ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"'{module_name}' has no '{name}': correct the model's factory.")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"Expected {reference} to be a function or a class, got {found!r}.")
    return found


@contextmanager
def _working_folder_first() -> Iterator[None]:
    """A command does not look for modules where it was started, unlike `python -m`."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
