"""Which modules cannot be trained privately as they are, and how to fix them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from dpspan.errors import UnsupportedModule

_FIX = "dpspan.fix(model) (in a configuration `fix: true` below `model`)"


def validate(model: nn.Module) -> None:
    """Raise `UnsupportedModule` naming every module that private training must refuse.

    Examples:
        >>> import dpspan
        >>> from torch import nn
        >>> dpspan.validate(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)))
        >>> dpspan.validate(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
        Traceback (most recent call last):
        dpspan.errors.UnsupportedModule: ...
    """
    problems = [
        f"{path or 'the model itself'} ({type(module).__name__}): {problem}"
        for path, module in model.named_modules()
        for problem in _problems(module)
    ]
    if not any(p.requires_grad for p in model.parameters()):
        problems.append("the model has no trainable parameter: unfreeze what is to be trained")
    if problems:
        raise UnsupportedModule(
            "This model cannot be trained privately as it is:\n  - " + "\n  - ".join(problems)
        )


def _problems(module: nn.Module) -> Iterator[str]:
    trainable = any(p.requires_grad for p in module.parameters())
    if any(is_lazy(p) for p in module.parameters(recurse=False)):
        yield "its parameters are not initialised: run the model once on sample input first"
    if any(p.is_complex() for p in module.parameters(recurse=False)):
        yield "its parameters are complex: use real ones, two numbers for one"
    if isinstance(module, _BatchNorm):
        yield (
            "in training it normalises each sample by the others in the batch, so no sample's "
            "gradient can be bounded; a frozen one is refused too, since model.train() would wake "
            f"it up: {_FIX} puts GroupNorm in its place"
        )
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        yield (
            "its running statistics are averages of private data without noise: build it with "
            f"track_running_stats=False, or use {_FIX}"
        )
    if isinstance(module, nn.RNNBase) and trainable:
        yield (
            f"its fused kernel hides the per-sample gradients: {_FIX} puts the equivalent DP layer "
            "in its place"
        )
    elif getattr(module, "batch_first", True) is False:
        yield "its batch is the second dimension: build it with batch_first=True"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        if module.max_norm is not None:
            yield "max_norm rewrites the rows that a batch uses, without noise: set it to None"
        if module.scale_grad_by_freq:
            yield "scale_grad_by_freq mixes the samples of a batch: set it to False"
    if getattr(module.get_extra_state, "__func__", None) is not nn.Module.get_extra_state:
        yield (
            "its get_extra_state puts into state_dict, and so into every saved model, what nobody "
            "adds noise to: remove that method, or keep such state outside the model"
        )


def fix(model: nn.Module) -> nn.Module:
    """A copy of the model in which every module that can be replaced by a private one is.

    BatchNorm becomes GroupNorm (with the affine weights it had), InstanceNorm loses its running
    statistics, LSTM and GRU become Opacus' layers of the same parameters.

    Examples:
        >>> import dpspan
        >>> from torch import nn
        >>> type(dpspan.fix(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))[1]).__name__
        'GroupNorm'
    """
    model = copy.deepcopy(model)
    made: dict[nn.Module, nn.Module] = {}  # a module used in two places stays one module
    for path, module in list(model.named_modules(remove_duplicate=False)):
        replace = next((f for kind, f in _FIXES if isinstance(module, kind)), None)
        if module not in made:
            made[module] = replace(module) if replace is not None else module
            like = next(module.parameters(), torch.empty(0))
            if made[module] is not module:
                made[module].to(device=like.device, dtype=like.dtype).train(module.training)
        replacement = made[module]
        if replacement is module:
            continue
        if path == "":
            return replacement
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, replacement)
    return model


def _fix_batch_norm(module: nn.Module) -> nn.Module:
    assert isinstance(module, _BatchNorm)
    channels = module.num_features
    # On (n, channels) inputs a group must hold several channels, or it would normalise each
    # number by itself.
    groups = 1 if isinstance(module, nn.BatchNorm1d) else math.gcd(32, channels)
    return _keep_affine(module, nn.GroupNorm(groups, channels, module.eps, module.affine))


def _fix_instance_norm(module: nn.Module) -> nn.Module:
    assert isinstance(module, _InstanceNorm)
    if not module.track_running_stats:
        return module
    without = type(module)(module.num_features, eps=module.eps, affine=module.affine)
    return _keep_affine(module, without)


def _fix_recurrent(module: nn.Module) -> nn.Module:
    from opacus.validators import ModuleValidator  # here: importing Opacus takes a second

    fixer: Callable[[nn.Module], nn.Module] | None = ModuleValidator.FIXERS.get(type(module))
    return module if fixer is None else fixer(module)


def _keep_affine(module: nn.Module, replacement: nn.Module) -> nn.Module:
    for name, parameter in module.named_parameters(recurse=False):
        new = replacement.get_parameter(name)
        new.data = parameter.detach().clone()
        new.requires_grad_(parameter.requires_grad)
    return replacement


_FIXES: tuple[tuple[type[nn.Module], Callable[[nn.Module], nn.Module]], ...] = (
    (_BatchNorm, _fix_batch_norm),
    (_InstanceNorm, _fix_instance_norm),
    (nn.RNNBase, _fix_recurrent),
)
