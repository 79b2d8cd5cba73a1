"""Which parameters of a pre-trained model are trained, and which stay as they are.

DP-SGD adds noise to every parameter that is trained, so its energy grows with their number: a small
set that still adapts the model is often the better one. The set must not depend on private data.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol, TypeVar, runtime_checkable

from torch import nn

from dpspan.support.checks import check_count, expect

Model = TypeVar("Model", bound=nn.Module)


@runtime_checkable
class Trainable(Protocol):
    """A set of parameters."""

    def names(self, model: nn.Module) -> set[str]:
        """The names of its parameters in this model."""


def train_only(model: Model, trainable: Trainable) -> Model:
    """Freeze everything but this set, in place; the model with what the set adds to it.

    Build the optimizer afterwards: adapters are new parameters.
    """
    if isinstance(trainable, LoRA):
        trainable.adapt(model)
    chosen = chosen_parameters(model, trainable)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in chosen)
    return model


def chosen_parameters(model: nn.Module, trainable: Trainable) -> set[nn.Parameter]:
    """The parameters of the set; one of tied parameters stands for all of them."""
    names = trainable.names(model)
    named = model.named_parameters(remove_duplicate=False)
    chosen = {parameter for name, parameter in named if name in names}
    if not chosen:
        raise ValueError(f"{trainable!r} chooses no parameter of this model: take another set.")
    return chosen


@dataclass(frozen=True)
class LastLayers:
    """The last layers, in the order in which the model registers them.

    A layer is an innermost module with parameters, norm layers too. Parameters that a larger module
    holds beside its layers (a class token) belong to none: `Named` takes them.
    """

    count: int = 1

    def __post_init__(self) -> None:
        check_count("count", self.count)

    def names(self, model: nn.Module) -> set[str]:
        layers = _layers(model)
        if self.count > len(layers):
            raise ValueError(
                f"Expected at most the {len(layers)} layers that the model has, got {self!r}."
            )
        return set().union(*layers[-self.count :])


@dataclass(frozen=True)
class FirstAndLast:
    """The first layer, which meets the new inputs, and the last, which meets the new labels.

    The first layer of a language model is its embedding, most of its parameters.
    """

    def names(self, model: nn.Module) -> set[str]:
        layers = _layers(model)
        return layers[0] | layers[-1] if layers else set()


@dataclass(frozen=True)
class Named:
    """The modules and parameters of these names, `Named(("fc", "layer3.0.conv1.weight"))`."""

    paths: tuple[str, ...]

    def __post_init__(self) -> None:
        _check_paths("paths", self.paths)

    def names(self, model: nn.Module) -> set[str]:
        return _below(model, self.paths)


@dataclass(frozen=True, kw_only=True)
class BiasOnly:
    """Every bias (BitFit, Ben Zaken et al. 2022), and in full the modules named in `also`.

    A head for new classes belongs into `also`: its biases alone cannot tell inputs apart.
    """

    also: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_paths("also", self.also)

    def names(self, model: nn.Module) -> set[str]:
        """The biases, by their names: `bias`, `in_proj_bias`, `bias_ih_l0`."""
        biases = {name for name in _all_names(model) if "bias" in name.split(".")[-1].split("_")}
        return biases | _below(model, self.also)


# They read weights of layers inside without a call (the latter in evaluation): no adapter counts.
_READS_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Low-rank adapters beside frozen layers (Hu et al. 2022), by peft (the extra `lora`).

    Args:
        rank: r of the adapters.
        alpha: the adapters count alpha / rank; by default as much as they are, alpha = rank.
        targets: the layers that get one (Linear or Conv2d), by their paths or the ends of these,
            `("query", "value")`; by default every Linear outside of `also`.
        also: modules that are trained in full, the head for example.
    """

    rank: int = 8
    alpha: int | None = None
    targets: tuple[str, ...] | None = None
    also: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_count("rank", self.rank)
        if self.alpha is not None:
            check_count("alpha", self.alpha)
        if self.targets is not None:
            _check_paths("targets", self.targets)
            expect(self.targets != (), "targets to be one layer or more", self.targets)
        _check_paths("also", self.also)

    def names(self, model: nn.Module) -> set[str]:
        return _adapters(model) | _below(model, self.also)

    def adapt(self, model: nn.Module) -> None:
        """Put the adapters in; the model stays of its class, its state_dict has new keys."""
        if find_spec("peft") is None:
            raise ModuleNotFoundError("LoRA needs the package peft: pip install 'dpspan[lora]'.")
        if _adapters(model):
            raise ValueError("The model has LoRA adapters already: start from the model without.")
        paths = self._paths(model)
        _refuse_shared(model, paths)
        from peft import LoraConfig, inject_adapter_in_model

        alpha = self.rank if self.alpha is None else self.alpha
        exactly = "|".join(map(re.escape, paths))  # a list would match the ends of other paths too
        config = LoraConfig(r=self.rank, lora_alpha=alpha, target_modules=exactly)
        inject_adapter_in_model(config, model)

    def _paths(self, model: nn.Module) -> list[str]:
        """The layers that get an adapter."""
        _below(model, self.also)  # first, or its error would come after the model was changed
        layers = {  # inside the model: there is no place for an adapter around it
            path: module
            for path, module in model.named_modules()
            if isinstance(module, nn.Linear | nn.Conv2d) and path and not _is_below(path, self.also)
        }
        around = [path for path, m in model.named_modules() if isinstance(m, _READS_WEIGHTS)]
        unseen = {path for path in layers if _is_below(path, around) or "" in around}
        seen = [path for path in layers if path not in unseen]
        if self.targets is None:
            paths = [path for path in seen if isinstance(layers[path], nn.Linear)]
            if not paths:
                raise ValueError(
                    "The model has no Linear layer that could get a LoRA adapter: name its Conv2d "
                    "layers in targets, or train another set."
                )
            return paths
        chosen: set[str] = set()
        for target in self.targets:
            found = {path for path in layers if f".{path}".endswith(f".{target}")}
            if not found or found & unseen:
                where = f" ({min(found & unseen)} is read, not called)" if found else ""
                raise ValueError(
                    f"Expected targets to be Linear or Conv2d layers outside of `also`, which the "
                    f"model calls, got '{target}'{where}. Layers that can get an adapter: "
                    f"{_some(seen)}."
                )
            chosen |= found
        return sorted(chosen)


def _layers(model: nn.Module, path: str = "") -> list[set[str]]:
    """Parameter names of each layer, in order; one of torch's that has layers inside is one."""
    own = any(True for _ in model.parameters(recurse=False))
    inner = [layer for name, child in model.named_children() for layer in _layers(child, name)]
    if own and (not inner or type(model).__module__.startswith("torch.nn.")):
        inner = [_all_names(model)]
    prefix = f"{path}." if path else ""
    return [{f"{prefix}{name}" for name in layer} for layer in inner]


def _all_names(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters(remove_duplicate=False)}


def _below(model: nn.Module, paths: Iterable[str]) -> set[str]:
    """The parameters at and below the paths; each must be there."""
    everything, chosen = _all_names(model), set()
    for path in paths:
        found = {name for name in everything if _is_below(name, (path,))}
        if not found:
            raise ValueError(
                f"The model has no parameter at '{path}'. Its modules are "
                f"{_some(name for name, _ in model.named_modules() if name)}."
            )
        chosen |= found
    return chosen


def _is_below(name: str, paths: Iterable[str]) -> bool:
    return any(name == path or name.startswith(f"{path}.") for path in paths)


def _adapters(model: nn.Module) -> set[str]:
    return {name for name in _all_names(model) if {"lora_A", "lora_B"} & set(name.split("."))}


def _refuse_shared(model: nn.Module, paths: Iterable[str]) -> None:
    """An adapter takes the place of a layer in one module, by one name."""
    places = [child for module in model.modules() for child in module._modules.values()]
    for path in paths:
        layer = model.get_submodule(path)
        if sum(child is layer for child in places) > 1:
            named = model.named_modules(remove_duplicate=False)
            raise ValueError(
                f"{_some(name for name, module in named if module is layer)} are one layer, and "
                "only the first would get a LoRA adapter: leave it out of targets, or train it in "
                "full with also."
            )


def _some(names: Iterable[str], most: int = 12) -> str:
    """The first names, for an error."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return (", ".join(listed[:most]) or "none") + more


def _check_paths(name: str, value: object) -> None:
    texts = isinstance(value, tuple) and all(isinstance(path, str) and path for path in value)
    expect(texts, f"{name} to be a tuple of names, such as ('classifier',)", value)
