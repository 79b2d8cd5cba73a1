"""What the loss is made of, read off autograd's graph when backward() is called on it.

For a loss that the training loop computes by itself there is no module to ask. The model's outputs
are handed to the loop as a tensor subclass that tells of the backward() at the end of what is
computed from them, and is a plain tensor in everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from dpspan.untouched import shuffled

# Of one scalar input, which they hand on as it is but for its shape, sign or type.
_HAND_ON = ("View", "UnsafeView", "Squeeze", "Unsqueeze", "Alias", "Clone", "ToCopy", "Neg")
_REDUCTIONS = {1: "mean", 2: "sum"}  # torch's numbers of them


def tell_of_backward(outputs: Any, tell: Callable[[Tensor], None]) -> tuple[Any, list[Tensor]]:
    """The outputs with every tensor that needs a gradient replaced, and what stands behind them."""
    behind: list[Tensor] = []

    class Output(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is Tensor.backward:
                with torch._C.DisableTorchFunctionSubclass():
                    tell(args[0])
            result = super().__torch_function__(func, types, args, kwargs or {})
            with torch._C.DisableTorchFunctionSubclass():
                return tree_map_only(cls, _plain_if_constant, result)

        def __reduce_ex__(self, protocol: Any) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def one(x: Tensor) -> Tensor:
        if not x.requires_grad:
            return x
        behind.append(x.view_as(x))  # new: the hooks on x hear of the loop's backward pass only
        return behind[-1].as_subclass(Output)

    return tree_map_only(Tensor, one, outputs), behind


def _plain_if_constant(x: Tensor) -> Tensor:
    return x if x.requires_grad else x.as_subclass(Tensor)


def mixes(loss: Tensor, outputs: Sequence[Tensor], samples: int) -> bool:
    """Whether the gradient at some samples' outputs depends on the outputs of others.

    Seen by differentiating twice; where that is impossible, nothing is seen.
    """
    outputs = [x for x in outputs if x.dim() and len(x) and len(x) % samples == 0]
    if samples < 2 or not outputs:
        return False
    kept = shuffled(samples) < samples // 2
    rows = [kept.repeat_interleave(len(x) // samples).to(x.device) for x in outputs]
    try:
        with torch.enable_grad():
            slopes = torch.autograd.grad(loss, outputs, create_graph=True, allow_unused=True)
            # Squared, since plain sums of slopes may be constant (those of a softmax are zero).
            terms = [
                g[r].double().square().sum()
                for g, r in zip(slopes, rows, strict=True)
                if g is not None and g.requires_grad
            ]
            if not terms:
                return False
            bends = torch.autograd.grad(
                torch.stack(terms).sum(), outputs, retain_graph=True, allow_unused=True
            )
    except (RuntimeError, NotImplementedError):
        return False
    own = others = 0.0
    for bend, r in zip(bends, rows, strict=True):
        if bend is not None:
            size = bend.nan_to_num(0, 0, 0).abs()
            own, others = max(own, float(size[r].max())), max(others, float(size[~r].max()))
    return others > 1e-5 * own


def reductions(loss: Tensor, samples: int) -> set[str | None]:
    """How the terms of the loss treat the batch: 'mean', 'sum', None where the graph is silent."""
    return _reductions(loss.grad_fn, samples)


def _reductions(node: Any, samples: int) -> set[str | None]:
    kind = type(node).__name__.rstrip("0123456789").removesuffix("Backward")
    inputs = [below for below, _ in getattr(node, "next_functions", ()) if below is not None]
    if getattr(node, "_saved_reduction", None) in _REDUCTIONS:
        return {_of_torch_loss(node, samples)}
    if kind == "Mean":
        return {"mean" if node._saved_self_sym_numel % samples == 0 else None}
    if kind == "Sum":
        scaled = bool(inputs) and type(inputs[0]).__name__.startswith(("Mul", "Div"))
        return {None if scaled else "sum"}
    if kind in ("Add", "Sub") or (kind in _HAND_ON and len(inputs) == 1):
        return {found for below in inputs for found in _reductions(below, samples)}
    if kind in ("Mul", "Div") and len(inputs) == 1:
        factor = _factor(node)
        by_samples = bool(factor) and factor % samples == 0
        scaled = {  # divided by the samples, or by all entries of them, a sum is a mean
            "sum": "mean" if kind == "Div" and by_samples else None,
            "mean": None if kind == "Mul" and by_samples else "mean",
            None: None,
        }
        return {None if factor is None else scaled[f] for f in _reductions(inputs[0], samples)}
    return {None}


def _of_torch_loss(node: Any, samples: int) -> str | None:
    reduction = _REDUCTIONS[node._saved_reduction]
    if getattr(node, "_saved_weight", None) is not None:
        return None
    total = getattr(node, "_saved_total_weight", None)
    if reduction == "mean" and total is not None and float(total) != node._saved_target.numel():
        return None  # some entries are ignored
    return reduction if node._saved_self.numel() % samples == 0 else None


def _factor(node: Any) -> float | None:
    """The constant by which a scalar is multiplied or divided."""
    for name in ("_saved_other", "_saved_self"):
        value = getattr(node, name, None)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad:
            return float(value)
    return None
