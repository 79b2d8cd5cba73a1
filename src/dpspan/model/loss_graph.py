"""What the loss is made of, read off autograd's graph when backward() is called on it.

For a loss that the training loop computes by itself there is no module to ask. The model's outputs
are handed to the loop as a tensor subclass that tells of the backward() at the end of what is
computed from them, and is a plain tensor in everything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from dpspan.support.untouched import shuffled

# They hand on what they get, but for its shape or type.
_HAND_ON = (
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "Squeeze",
    "Unsqueeze",
    "Alias",
    "Clone",
    "ToCopy",
)
_REDUCTIONS = {1: "mean", 2: "sum"}  # torch's numbers of them
_SCALED_SUM = "scaled sum"  # by 1 / samples perhaps, or by something else


class Output(Tensor):
    """What is computed of the model's outputs, as long as it needs a gradient."""

    tell: Callable[[Tensor], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` on plain tensors, and pass on whom to tell."""
        outputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, cls)]
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.backward and outputs:
                outputs[0].tell(outputs[0])
            if all(kind in (cls, Tensor, nn.Parameter) for kind in types):
                result = func(*args, **(kwargs or {}))
                return tree_map_only(Tensor, lambda x: _telling(x, outputs), result)
            args, kwargs = tree_map_only(cls, _plain, (args, kwargs or {}))
        return func(*args, **kwargs)  # another subclass decides, and nobody is told

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return _plain(self).__reduce_ex__(protocol)


def tell_of_backward(outputs: Any, tell: Callable[[Tensor], None]) -> tuple[Any, list[Tensor]]:
    """The outputs with every tensor that needs a gradient replaced, and what stands behind them."""
    behind: list[Tensor] = []

    def one(x: Tensor) -> Tensor:
        if not x.requires_grad:
            return x
        behind.append(x.view_as(x))  # new: the hooks on x hear of the loop's backward pass only
        output = behind[-1].as_subclass(Output)
        output.tell = tell
        return output

    return tree_map_only(Tensor, one, outputs), behind


def _telling(x: Tensor, outputs: Sequence[Output]) -> Tensor:
    if not x.requires_grad or not outputs:
        return _plain(x)
    told = x if isinstance(x, Output) else x.as_subclass(Output)
    told.tell = outputs[0].tell
    return told


def _plain(x: Tensor) -> Tensor:
    return x.as_subclass(Tensor) if isinstance(x, Output) else x


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
    found = _reductions(_behind(loss.grad_fn), samples)
    return {None if kind == _SCALED_SUM else kind for kind in found}


def _reductions(node: Any, samples: int) -> set[str | None]:
    kind, inputs = _kind(node), _inputs(node)
    if getattr(node, "_saved_reduction", None) in _REDUCTIONS:
        return {_of_torch_loss(node, samples)}
    if (
        kind in ("Mean", "Sum")
        and _kind(inputs[0]) == "Stack"
        and len(_inputs(inputs[0])) % samples
    ):
        kind, inputs = "Add", _inputs(inputs[0])  # several losses, not those of the samples
    if kind == "Mean":
        return {"mean" if node._saved_self_sym_numel % samples == 0 else None}
    if kind == "Sum":
        return {_SCALED_SUM if _kind(inputs[0]) in ("Mul", "Div") else "sum"}
    if kind in ("Add", "Sub") or (kind == "Neg" and inputs):
        return {found for below in inputs for found in _reductions(below, samples)}
    if kind in ("Mul", "Div") and len(inputs) == 1:
        factor = _factor(node) or math.nan
        by_samples = factor % samples == 0
        mean = math.isfinite(factor) and not (kind == "Mul" and by_samples)
        become: dict[str | None, str | None] = {"mean": "mean" if mean else None}
        if kind == "Div" and by_samples:  # by the samples, or by all entries of them
            become |= {"sum": "mean", _SCALED_SUM: "mean"}
        return {become.get(found) for found in _reductions(inputs[0], samples)}
    return {None}


def _kind(node: Any) -> str:
    return type(node).__name__.rstrip("0123456789").removesuffix("Backward")


def _inputs(node: Any) -> list[Any]:
    below = (_behind(below) for below, _ in getattr(node, "next_functions", ()))
    return [node for node in below if node is not None]


def _behind(node: Any) -> Any:
    while node is not None and _kind(node) in _HAND_ON:
        node = node.next_functions[0][0]
    return node


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
