"""Per-sample gradients of two samples as they are recorded, against plain autograd.

Done once for a model of which the layers alone do not tell that recording them is exact. The loss
is made up: the sine of every number that the model gives for a sample, each weighed differently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpspan.gradients.numerics import full_precision

_RELATIVE, _ABSOLUTE = 1e-2, 1e-4  # of the parameter's gradient and of the whole gradient
_COARSE = 30  # times that where half precision or TF32 may be about


def made_up_losses(output: Any, rows: int, views: int) -> Tensor | None:
    """One loss per sample; of a model that gives nothing but a loss, that loss; or nothing."""
    tensors = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    flat = [full_precision(x).reshape(rows, -1) for x in tensors if x.dim() and len(x) == rows]
    if flat:
        numbers = torch.cat(flat, dim=1) if len(flat) > 1 else flat[0]
        weights = torch.linspace(-1, 2, numbers.shape[1]).to(numbers)
        return (numbers.sin() * weights).sum(1).view(-1, views).sum(1)
    scalars = [full_precision(x) for x in tensors if not x.dim()]
    return torch.stack(scalars).sum() if scalars else None


def plain_gradients(losses: Tensor, parameters: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """The gradient of each loss."""
    return [
        torch.autograd.grad(
            loss, parameters, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        for loss in losses.view(-1)
    ]


def differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Iterator[str]:
    """The parameters of which the gradient found is not the one expected, up to rounding."""
    coarse = any(x.element_size() < 4 or x.is_cuda for x in expected.values())
    coarse |= torch.is_autocast_enabled("cpu")
    slack = _COARSE if coarse else 1
    whole = torch.stack([x.double().norm() for x in expected.values()]).norm()
    for name, x in expected.items():
        error = (found[name].double() - x.double()).norm()
        if bool(error > slack * (_RELATIVE * x.double().norm() + _ABSOLUTE * whole)):
            yield name
