"""Is the loss a sum (or mean) of one term per sample? Where it can be seen, it is checked."""

from __future__ import annotations

from collections.abc import Callable
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


def watch(
    criterion: nn.Module, loss_reduction: str, *, samples: Callable[[], int]
) -> RemovableHandle:
    """Check on real batches that the loss splits into samples.

    Every batch is checked until one has passed; after that only those in which a mean leaves
    something out by its ignore_index, which is when it mixes samples.
    """
    passed = False
    ignored = getattr(criterion, "ignore_index", None) if loss_reduction == "mean" else None

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
        nonlocal passed
        given = (*args, *kwargs.values())
        tensors = [x for x in given if isinstance(x, Tensor) and x.dim()]
        if len(tensors) != 2 or len(given) != 2 or not torch.is_grad_enabled():
            return
        if not isinstance(output, Tensor):
            return
        if len(tensors[0]) < 2 or len(tensors[0]) != len(tensors[1]):
            return
        if passed and (ignored is None or not bool((tensors[1] == ignored).any())):
            return
        entries, batch = len(tensors[0]), samples()
        # Tokens of all samples in one row are cut between samples, not inside one.
        per_sample = entries // batch if batch > 1 and entries % batch == 0 else 1
        half = per_sample * (entries // per_sample // 2)
        with torch.no_grad():
            first, second = (
                type(module).forward(
                    module,
                    *(x[part] for x in args),
                    **{name: x[part] for name, x in kwargs.items()},
                )
                for part in (slice(None, half), slice(half, None))
            )
            if output.dim():  # reduction='none': one loss per entry
                apart, together = torch.cat([first, second]), output
            elif loss_reduction == "mean":
                apart, together = first * half + second * (entries - half), output * entries
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
        passed = True

    return criterion.register_forward_hook(check, with_kwargs=True)
