"""The `model` section (a built-in network, a factory of the user's, or weights with their class),
and the `features` section (a frozen layer that the model comes after)."""

from __future__ import annotations

import importlib
import math
import operator
import pickle
import sys
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

import dpspan
from dpspan.app.section import Count, Counts, File, Section
from dpspan.support.checks import expect

if TYPE_CHECKING:
    import torch
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


class NetworkSection(ModelSection):
    """Logistic regression, the papers' small CNN, ResNet-20 with GroupNorm, or GSD's probe."""

    name: Literal["logistic", "cnn", "resnet20", "probe"]

    def make(self, data: Loaded) -> nn.Module:
        import torch

        from dpspan.choose import ProbeNetwork
        from dpspan.model.networks import MLP, PaperCNN, ResNet20

        if self.name == "logistic":
            return MLP(math.prod(data.shape), (), data.classes)
        if self.name == "resnet20":
            _image_shape(self.name, data, channels=3)
            return ResNet20(classes=data.classes)
        channels, height, width = _image_shape(self.name, data)
        if self.name == "probe":
            seed = int(torch.randint(2**31, ()))
            return ProbeNetwork(channels=channels, classes=data.classes, seed=seed)
        if height != width or height < 14:
            raise ValueError(
                f"Expected square images of at least 14 × 14 pixels for the model cnn, got "
                f"{height} × {width}. Resize them, or use mlp or a factory of your own."
            )
        return PaperCNN(classes=data.classes, channels=channels, size=height)


class MlpSection(ModelSection):
    """Fully connected network."""

    name: Literal["mlp"] = "mlp"
    hidden: Counts = (128,)

    def make(self, data: Loaded) -> nn.Module:
        from dpspan.model.networks import MLP

        return MLP(math.prod(data.shape), self.hidden, data.classes)


class WideResNetSection(ModelSection):
    """Wide ResNet with GroupNorm; WRN-28-4 by default."""

    name: Literal["wide-resnet"] = "wide-resnet"
    depth: Count = 28
    widen: Count = 4

    def make(self, data: Loaded) -> nn.Module:
        from dpspan.model.networks import WideResNet

        _image_shape(self.name, data, channels=3)
        return WideResNet(depth=self.depth, widen=self.widen, classes=data.classes)


def _image_shape(name: str, data: Loaded, channels: int | None = None) -> tuple[int, ...]:
    if len(data.shape) != 3 or channels not in (None, data.shape[0]):
        kind = "images" if channels is None else f"images of {channels} channels"
        raise ValueError(
            f"Expected {kind}, shape ({channels or 'channels'}, height, width), for the model "
            f"{name}, got samples of shape {data.shape}. Use mlp, or a factory of your own."
        )
    return data.shape


class _OwnSection(ModelSection):
    """A function or class of the user's, `package.module:name`, called with `arguments`."""

    factory: str
    arguments: dict[str, Any] = Field(default_factory=dict)

    def make(self, data: Loaded) -> nn.Module:
        from torch import nn

        made = _imported(self.factory)(**self.arguments)
        expect(isinstance(made, nn.Module), f"{self.factory} to return a torch module", made)
        model: nn.Module = made
        return model


def _imported(reference: str) -> Any:
    module_name, _, name = reference.partition(":")
    expect(bool(module_name and name), "a factory such as 'package.module:function'", reference)
    folder = str(Path.cwd())  # where a command looks for no modules, unlike `python -m`
    sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"Cannot import '{module_name}' for the model: {error}. It must be installed, or "
            f"lie in the folder that dpspan is started in, {folder}."
        ) from error
    finally:
        sys.path.remove(folder)
    try:
        found = operator.attrgetter(name)(module)
    except AttributeError:
        raise ValueError(f"'{module_name}' has no '{name}': correct the model's factory.") from None
    expect(callable(found), f"{reference} to be a function or a class", found)
    return found


class FactorySection(_OwnSection):
    """With the weights that the factory gives it."""

    name: Literal["factory"] = "factory"


class CheckpointSection(_OwnSection):
    """With weights from a file: safetensors, or a state_dict that torch saved.

    They must not come from training on the private data: nothing would account for that.
    """

    name: Literal["checkpoint"] = "checkpoint"
    weights: File

    def make(self, data: Loaded) -> nn.Module:
        model = super().make(data)
        load_weights(model, self.weights)
        return model


AnyModel = Annotated[
    NetworkSection | MlpSection | WideResNetSection | FactorySection | CheckpointSection,
    Field(discriminator="name"),
]


def load_weights(model: nn.Module, path: Path) -> None:
    """Put weights into a model, with nothing executed; ValueError if they do not fit."""
    import safetensors.torch
    import torch

    if not path.exists():
        raise FileNotFoundError(f"There are no weights at {path}.")
    try:
        if path.suffix == ".safetensors":
            safetensors.torch.load_model(model, path)  # knows about tied weights
            return
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        expect(isinstance(loaded, dict), f"a state_dict in {path}", loaded)
        model.load_state_dict(loaded)
    except RuntimeError as error:
        what = f"The weights in {path} do not fit {type(model).__name__}"
        raise ValueError(f"{what}: {error}") from error
    except (safetensors.SafetensorError, pickle.UnpicklingError, EOFError):
        raise ValueError(  # whose own words may quote the file
            f"{path} holds no weights that can be read safely. Save model.state_dict() as "
            "safetensors."
        ) from None


class PatchesSection(Section):
    """`PatchFeatures` of the public data of that name, whose labels are not used."""

    name: Literal["patches"] = "patches"
    public: str
    filters: Count = 1200
    size: Annotated[Counts, Field(min_length=1)] = (4, 6, 9)
    grid: Count | Annotated[Counts, Field(min_length=1)] = 2
    threshold: Annotated[float, Field(ge=0, lt=100)] = 0.25
    mirror: bool = True
    power: Annotated[float, Field(gt=0, le=1)] = 0.6
    directions: Count = 1000
    whitening: Annotated[float, Field(ge=0, le=1)] = 0.75
    views: Count = 3

    @property
    def settings(self) -> dict[str, Any]:
        """What the layer is learnt with."""
        keys = set(PatchesSection.model_fields) - {"name", "public"}
        return self.model_dump(mode="json", include=keys)

    def learn(
        self, public: dpspan.PublicData, *, seed: int, device: torch.device | str
    ) -> dpspan.PatchFeatures:
        return dpspan.PatchFeatures.learn(public, **self.settings, seed=seed, device=device)
