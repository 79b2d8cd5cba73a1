"""The model that a configuration describes, on its device."""

import copy
import math
import pickle
import pkgutil
import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from dpspan.app.config import Config
from dpspan.app.config.sections import (
    AnyModel,
    CheckpointSection,
    OwnSection,
    WideResNetSection,
)
from dpspan.app.data import Loaded
from dpspan.choose import ProbeNetwork
from dpspan.model.networks import MLP, PaperCNN, ResNet20, WideResNet
from dpspan.model.trainable import train_only
from dpspan.model.validation import fix, standardised
from dpspan.support.checks import expect


def new_model(config: Config, like: Loaded) -> nn.Module:
    """The model for samples like these with new weights, from torch's generator."""
    model = draw_model(config.model, like)
    if config.trainable is not None:
        model = train_only(model, config.trainable.built())
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("The model's parameters are all frozen: unfreeze what is to be trained.")
    return model


def draw_model(section: AnyModel, data: Loaded) -> nn.Module:
    """The network for samples like these, with random weights from torch's generator."""
    if isinstance(section, OwnSection):
        model: nn.Module = _imported(section.factory)(**section.arguments)
        wanted = f"{section.factory} to return a torch module"
        expect(isinstance(model, nn.Module), wanted, type(model))  # itself it may be data
    elif section.name in ("mlp", "logistic", "linear"):
        model = MLP(math.prod(data.shape), getattr(section, "hidden", ()), data.outputs)
    elif isinstance(section, WideResNetSection):
        _image_shape(section.name, data, channels=3)
        model = WideResNet(depth=section.depth, widen=section.widen, classes=data.outputs)
    elif section.name == "resnet20":
        _image_shape(section.name, data, channels=3)
        model = ResNet20(classes=data.outputs)
    elif section.name == "probe":
        channels, seed = _image_shape(section.name, data)[0], int(torch.randint(2**31, ()))
        model = ProbeNetwork(channels=channels, classes=data.outputs, seed=seed)
    else:
        channels, height, width = _image_shape(section.name, data)
        if height != width or height < 14:
            raise ValueError(
                f"Expected square images of at least 14 × 14 pixels for the model cnn, got "
                f"{height} × {width}. Resize them, or use mlp or a factory of your own."
            )
        model = PaperCNN(classes=data.outputs, channels=channels, size=height)
    if isinstance(section, CheckpointSection):
        load_weights(model, section.weights)
    model = fix(model) if section.fix else model
    return standardised(model) if section.standardised else model


def _image_shape(name: str, data: Loaded, channels: int | None = None) -> tuple[int, ...]:
    if len(data.shape) != 3 or channels not in (None, data.shape[0]):
        kind = "images" if channels is None else f"images of {channels} channels"
        raise ValueError(
            f"Expected {kind}, shape ({channels or 'channels'}, height, width), for the model "
            f"{name}, got samples of shape {data.shape}. Use mlp, or a factory of your own."
        )
    return data.shape


def _imported(reference: str) -> Any:
    module_name, _, name = reference.partition(":")
    expect(bool(module_name and name), "a factory such as 'package.module:function'", reference)
    folder = str(Path.cwd())  # where a command looks for no modules, unlike `python -m`
    sys.path.insert(0, folder)
    try:
        found = pkgutil.resolve_name(reference)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"Cannot import '{module_name}' for the model: {error}. It must be installed, or "
            f"lie in the folder that dpspan is started in, {folder}."
        ) from error
    except AttributeError:
        raise ValueError(f"'{module_name}' has no '{name}': correct the model's factory.") from None
    finally:
        sys.path.remove(folder)
    expect(callable(found), f"{reference} to be a function or a class", found)
    return found


def load_weights(model: nn.Module, path: Path) -> None:
    """Put weights into a model, with nothing executed; ValueError if they do not fit."""
    if not path.exists():
        raise FileNotFoundError(f"There are no weights at {path}.")
    try:
        if path.suffix == ".safetensors":
            safetensors.torch.load_model(model, path)  # knows about tied weights
            return
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(loaded, dict):  # which may be data: the type is enough
            raise ValueError(f"Expected a state_dict in {path}, got a {type(loaded).__name__}.")
        model.load_state_dict(loaded)
    except RuntimeError as error:
        what = f"The weights in {path} do not fit {type(model).__name__}"
        raise ValueError(f"{what}: {error}") from error
    except (safetensors.SafetensorError, pickle.UnpicklingError, EOFError):
        cure = "Save model.state_dict() as safetensors"  # its own words may quote the file
        raise ValueError(f"{path} holds no weights that can be read safely. {cure}.") from None


def _rehearse(model: nn.Module, like: Loaded, device: torch.device) -> None:
    """Run a copy on two samples of zeros, which are nobody's: mistakes are found before the run."""
    zeros = torch.zeros(2, *like.shape, dtype=like.tensors[0].dtype, device=device)
    try:
        with torch.no_grad():
            output = copy.deepcopy(model).eval()(zeros)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"The model cannot take samples of shape {like.shape}: {error}") from error
    if isinstance(output, Tensor) and output.shape != (2, like.outputs):
        raise ValueError(
            f"Expected the model to give {like.outputs} numbers for a sample, one for each of "
            "data.classes, or one for data.target, got an output of shape "
            f"{tuple(output.shape)} for 2 samples."
        )


def device_of(config: Config) -> torch.device:
    """Where to train."""
    name = config.training.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        what = "device to be auto, cpu or a device that is there, such as cuda:0"
        raise ValueError(f"Expected {what}, got {name!r}.") from error
