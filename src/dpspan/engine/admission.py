"""Who may take part in a private run: the model, its loss, its optimizer, and public data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpspan.engine.collation import check_collation
from dpspan.gradients.capture import captures_on
from dpspan.mechanisms.base import Mechanism, Method
from dpspan.model.criterion import check_criterion
from dpspan.model.validation import refuse_wrappers, validate
from dpspan.public.data import PublicData
from dpspan.public.overlap import encodings, refuse_overlap
from dpspan.public.patches import PatchFeatures
from dpspan.public.warm_start import WarmStart
from dpspan.support.processes import refuse_several_processes


def check_parts(
    module: nn.Module, optimizer: Optimizer, criterion: nn.Module | None, loss_reduction: str
) -> None:
    """Refuse a model, an optimizer or a loss for which the guarantee would not hold."""
    refuse_several_processes()
    refuse_wrappers(module)
    check_criterion(criterion, loss_reduction, module)
    validate(module)
    check_device(module)
    check_optimizer(optimizer, module)
    hooks = optimizer._optimizer_step_pre_hooks.values()
    taken = any(getattr(hook, "makes_steps_private", False) for hook in hooks)
    if captures_on(module) or taken:
        raise ValueError(
            "The model or the optimizer belongs to another private run: call detach() on its "
            "engine first, or build new ones."
        )


def check_device(module: nn.Module) -> None:
    """Refuse a device without float64 (Apple's MPS): norms and noise are computed in it."""
    for name, parameter in module.named_parameters():
        try:
            parameter.new_zeros(1, dtype=torch.float64)
        except (TypeError, RuntimeError) as error:
            raise ValueError(
                f"Parameter '{name}' is on {parameter.device}, which has no float64. "
                "Norms and noise need it: move the model to the CPU or to a CUDA device."
            ) from error


def check_optimizer(optimizer: Optimizer, module: nn.Module) -> None:
    """Refuse an optimizer that would move parameters which the private step does not cover."""
    known = set(module.parameters())
    for index, group in enumerate(optimizer.param_groups):
        if any(parameter not in known for parameter in group["params"]):
            raise ValueError(
                f"Parameter group {index} of the optimizer holds a parameter that is not part of "
                "the model, so its gradient is not private. Build the optimizer from "
                "model.parameters() (after dpspan.fix)."
            )


class PublicUse(NamedTuple):
    """Public data, and what a run does with them."""

    data: PublicData
    purpose: str
    compared: bool = False  # with the private records already, when those were encoded

    def __str__(self) -> str:
        return f"'{self.data.name}' ({self.purpose})"


def public_uses(
    method: Method, mechanism: Mechanism, module: nn.Module, private: Any
) -> list[PublicUse]:
    """Everything public behind a run: the method's data, and what frozen layers were made of."""
    by_method = f"{type(method).__name__}: public gradients"
    layers = [part for part in module.modules() if isinstance(part, PatchFeatures)]
    return [
        *(PublicUse(data, by_method) for data in mechanism.public),
        *(PublicUse(layer.public, type(layer).__name__) for layer in layers),
        *(PublicUse(each.public, each.layer, compared=True) for each in encodings(private)),
    ]


def keep_apart(
    uses: list[PublicUse], private: DataLoader[Any], warn: Callable[[str], None]
) -> None:
    """Refuse public samples that are private records, and a collate_fn that mixes records."""
    for use in uses:
        if not use.compared:
            refuse_overlap(use.data, private.dataset, private.collate_fn)
    check_collation(private, warn)


def warmed_up(
    warm_start: WarmStart, module: nn.Module, criterion: nn.Module | None, private: DataLoader[Any]
) -> PublicUse:
    """Train the model on public data, once they are known to be apart from the private ones."""
    data = PublicData.of(warm_start.data)
    refuse_overlap(data, private.dataset, private.collate_fn)
    result = dataclasses.replace(warm_start, data=data).run(module, criterion)
    return PublicUse(data, warm_start.summary(result))
