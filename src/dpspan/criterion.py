"""Is the loss a sum (or mean) of one term per sample? Where it can be seen, it is checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def check_reduction(criterion: nn.Module | None, loss_reduction: str) -> None:
    """Refuse a criterion whose reduction is not the one the engine undoes."""
    if loss_reduction not in ("mean", "sum"):
        raise ValueError(f"Expected loss_reduction 'mean' or 'sum', got {loss_reduction!r}.")
    reduction = getattr(criterion, "reduction", None)
    if reduction in ("mean", "sum") and reduction != loss_reduction:
        raise ValueError(
            f"{type(criterion).__name__} has reduction='{reduction}' but loss_reduction is "
            f"'{loss_reduction}': per-sample gradients would be off by the batch size. Pass "
            f"loss_reduction='{reduction}'."
        )
    if reduction == "batchmean" and loss_reduction != "mean":
        raise ValueError("reduction='batchmean' goes with loss_reduction='mean'.")
    class_weights = isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss)
    if class_weights and reduction == "mean" and getattr(criterion, "weight", None) is not None:
        raise ValueError(
            f"{type(criterion).__name__} with class weights and reduction='mean' divides by the "
            "weights of the whole batch, so every sample's gradient depends on the others. Use "
            "reduction='sum' with loss_reduction='sum'."
        )


def watch(criterion: nn.Module, loss_reduction: str) -> RemovableHandle:
    """Check on real batches that the loss splits into samples.

    The first batch is checked as it comes. A loss with an ignore_index over sequences is checked
    every time, since it mixes samples only where something is ignored.
    """
    every_time = getattr(criterion, "reduction", None) == "mean" and hasattr(
        criterion, "ignore_index"
    )
    done = False

    def check(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        nonlocal done
        tensors = all(isinstance(arg, Tensor) and arg.dim() for arg in args) and len(args) == 2
        if not tensors or not torch.is_grad_enabled() or len(args[0]) < 2:
            return
        if done and not (every_time and args[1].dim() > 1):
            return
        done = True
        samples, half = len(args[0]), len(args[0]) // 2
        with torch.no_grad():
            first = type(module).forward(module, *(arg[:half] for arg in args))
            second = type(module).forward(module, *(arg[half:] for arg in args))
            if output.dim():  # reduction='none': one loss per entry
                apart, together = torch.cat([first, second]), output
            elif loss_reduction == "mean":
                apart, together = first * half + second * (samples - half), output * samples
            else:
                apart, together = first + second, output
            close = torch.allclose(apart, together, rtol=1e-3, atol=1e-6, equal_nan=True)
        if not close:
            raise ValueError(
                f"The loss ({type(module).__name__}) mixes samples: the loss of a batch is not the "
                f"{loss_reduction} of the losses of its samples, so no sample's gradient can be "
                "bounded. (A mean over the tokens that are not ignored does this: average over "
                "each sample's tokens first.) Make it one loss per sample, then take the mean."
            )

    return criterion.register_forward_hook(check)
