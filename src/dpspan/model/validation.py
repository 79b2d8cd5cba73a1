"""Which modules cannot be trained privately as they are, and how to fix them."""

import copy
import logging
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from dpspan.gradients.layers.recurrent import is_of_opacus, is_recurrent
from dpspan.gradients.layers.standardised import StandardisedConv2d
from dpspan.support.errors import UnsupportedModule

_logger = logging.getLogger(__name__)

_SHARDED = "FullyShardedDataParallel"  # to import it takes long
_OF_OPACUS = ("DPLSTM", "DPGRU", "DPRNN")  # its layers that have a counterpart in torch
_FIX = "dpspan.fix(model) (in a configuration `fix: true` below `model`)"


def validate(model: nn.Module) -> None:
    """Raise `UnsupportedModule` naming every module that private training must refuse."""
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
    if _is_lazy(module):
        yield "its parameters are not initialised: run the model once on sample input first"
        return
    if any(p.is_complex() for p in module.parameters(recurse=False)):
        yield "its parameters are complex: use real ones, two numbers for one"
    if isinstance(module, _BatchNorm):
        cure = f"{_FIX} puts GroupNorm in its place"
        if _replacement(module) is None:
            cure = "its forward pass is not torch's, so put GroupNorm in its place yourself"
        yield (
            "in training it normalises each sample by the others in the batch, so no sample's "
            "gradient can be bounded; a frozen one is refused too, since model.train() would wake "
            f"it up: {cure}"
        )
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        also = "" if _replacement(module) is None else f", or use {_FIX}"
        yield (
            "its running statistics are averages of private data without noise: build it with "
            f"track_running_stats=False{also}"
        )
    if isinstance(module, nn.RNNBase):
        if trainable and not is_recurrent(module):
            yield (
                "its forward pass or its weights are not those of torch's class, whose fused "
                "kernel hides the per-sample gradients: make an unchanged torch layer a child of "
                "your module and call that"
            )
    elif is_of_opacus(module):
        if trainable:
            cure = f"{_FIX} puts" if type(module).__name__ in _OF_OPACUS else "use"
            yield (
                "it holds its parameters twice, as Opacus needs it: "
                f"{cure} torch's layer in its place"
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
    statistics, Opacus' recurrent layers become torch's of the same parameters, which need no
    replacement. Each replacement is logged.
    """
    model = copy.deepcopy(model)
    made: dict[nn.Module, nn.Module] = {}  # a module used in two places stays one module
    for path, module in list(model.named_modules(remove_duplicate=False)):
        new = made.get(module) or _replacement(module)
        if new is None:
            continue
        if module not in made:
            made[module] = new.train(module.training)
            for name, p in module.named_parameters(recurse=False):
                setattr(new, name, nn.Parameter(p.detach().clone(), p.requires_grad))
            _logger.info("fix: %s: %s becomes %s", path or "the model itself", module, new)
        if path == "":
            return new
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, new)
    return model


def standardised(model: nn.Module) -> nn.Module:
    """A copy of the model whose nn.Conv2d use their weights' directions: `StandardisedConv2d`."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if type(module) is nn.Conv2d:
            module.__class__ = StandardisedConv2d  # of the same attributes
    return model


def _is_lazy(module: nn.Module) -> bool:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(is_lazy(tensor) for tensor in own)


def _replacement(module: Any) -> Any:
    """The module that takes its place; None where there is none, or none is needed."""
    if _is_lazy(module):
        return None
    if is_of_opacus(module):
        if type(module).__name__ not in _OF_OPACUS:
            return None
        kind = getattr(nn, type(module).__name__.removeprefix("DP"))
        names = ("num_layers", "bias", "batch_first", "dropout", "bidirectional")
        options = {name: getattr(module, name) for name in names} | module.cell_params
        return kind(module.input_size, module.hidden_size, **options)
    forward = getattr(module.forward, "__func__", None)
    if forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        # On (n, channels) inputs a group must hold several channels, or it would normalise each
        # number by itself. The same goes for images of one pixel, as global pooling leaves them:
        # there a group of one channel gives a constant, and one of two a sign.
        channels, flat = module.num_features, isinstance(module, nn.BatchNorm1d)
        fitting = (g for g in (2, 4, 8, 16, 32) if channels % g == 0 and 4 * g <= channels)
        groups = 1 if flat else max(fitting, default=1)
        return nn.GroupNorm(groups, channels, module.eps, module.affine)
    if forward is _InstanceNorm.forward and module.track_running_stats:
        fixed = copy.deepcopy(module)
        fixed.track_running_stats = False
        fixed.running_mean = fixed.running_var = fixed.num_batches_tracked = None
        return fixed
    return None


def refuse_wrappers(model: nn.Module) -> None:
    """UnsupportedModule if the model, or a part of it, is wrapped for several devices."""
    for path, module in model.named_modules():
        name = type(module).__name__
        if isinstance(module, DistributedDataParallel | DataParallel) or name == _SHARDED:
            _refuse(name, path or "the model itself")


def refuse_wrapped_call(called: nn.Module) -> None:
    """UnsupportedModule if what is called now was wrapped for several devices since."""
    # While one of them calls its module, torch knows it by this name.
    if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        _refuse(DistributedDataParallel.__name__, "the model")
    if getattr(called, "_is_replica", False):  # as one GPU of several gets it
        _refuse(DataParallel.__name__, "the model")


def _refuse(wrapper: str, what: str) -> None:
    raise UnsupportedModule(
        f"{what} is wrapped in {wrapper}, which adds up gradients before they are clipped. Pass "
        "the module inside it to make_private, and leave it so: where torch.distributed is "
        "initialised, several processes train it together as it is (or sharded by fully_shard)."
    )
