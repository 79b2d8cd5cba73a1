"""Functions that change nothing on the way forward, and do something on the way back."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpspan.gradients.numerics import full_precision


class Tap(torch.autograd.Function):
    """The identity, with an ear on its gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, heard: Callable[[Tensor], None]) -> Tensor:
        ctx.heard = heard
        return x.data  # not a view: the layers behind may work in place on it

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        ctx.heard(grad)
        return None, grad, None


class Scaled(torch.autograd.Function):
    """The identity, in at least float32, on whose way back gradients are multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.dtype = scale, x.dtype
        return full_precision(x.clone())  # what follows may work in place on it

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad * ctx.scale).to(ctx.dtype), None
