"""One look at the running model before its first private step: does it keep samples apart?

Which dimension of a layer's input is the batch, and whether a module lets one sample see another,
cannot be read off a module in general. So the model is run three times on a few samples of the
batch, with the same random numbers: as they are, with the last of them exchanged, and without the
last. No module may give the first samples another output because their neighbours changed, and
every module must see as many samples as went in. What is compared never leaves this module except
as an error to the operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dpspan.errors import UnsupportedModule

_FEW = 4

Outputs = list[tuple[str, nn.Module, Tensor]]


def probe(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    samples: int,
    *,
    mean_loss: bool = True,
) -> None:
    """Raise `UnsupportedModule` if a module of the model mixes samples or moves the batch.

    A model that returns its own loss, a tensor without dimensions, is checked to be the mean (or
    the sum) of its samples' losses.
    """
    few = min(_FEW, samples)
    half = few // 2

    def run(cut: Callable[[Tensor], Tensor]) -> Outputs:
        def of_batch(leaf: Any) -> Any:
            is_batch = isinstance(leaf, Tensor) and leaf.shape[:1] == (samples,)
            return cut(leaf[:few]) if is_batch else leaf

        return _run(model, *tree_map(of_batch, (args, kwargs)))

    whole = run(lambda x: x)
    exchanged = run(lambda x: torch.cat([x[:half], x[: few - half].flip(0)]))
    first, second = run(lambda x: x[:half]), run(lambda x: x[half:])

    for (path, module, x), (_, _, y), (other, _, z) in zip(whole, exchanged, first, strict=False):
        name = f"'{path}' ({type(module).__name__})" if path else type(module).__name__
        if path != other:  # a forward pass that depends on the data: nothing to compare any more
            return
        if x.dim() == 0:
            continue
        if x.shape[0] != few or z.shape[0] != half:
            if x.shape == z.shape and x.shape[0] == 1 and not _differ(x, y):
                continue  # the same whatever the batch holds: positions, for example
            raise UnsupportedModule(
                f"{name} gave an output of first dimension {x.shape[0]} for {few} samples and "
                f"{z.shape[0]} for {half}: the first dimension must be the batch everywhere. "
                "Build layers with batch_first=True, give shared inputs a batch dimension of 1 "
                "(positions.unsqueeze(0)), and do not fold other dimensions into the batch."
            )
        if _differ(x[:half], y[:half]):
            raise UnsupportedModule(
                f"{name} gives a sample another output when other samples of the batch change: it "
                "mixes samples, so no sample's gradient can be bounded. Replace it by a layer that "
                "treats samples one by one (GroupNorm or LayerNorm instead of batch statistics)."
            )
    _check_loss(whole, first, second, few, half, mean_loss)


def _check_loss(
    whole: Outputs, first: Outputs, second: Outputs, few: int, half: int, mean_loss: bool
) -> None:
    """A loss that the model itself returns must split into samples."""
    losses = [
        [x for path, _, x in outputs if path == "" and x.dim() == 0 and x.is_floating_point()]
        for outputs in (whole, first, second)
    ]
    weights = (few, half, few - half) if mean_loss else (1, 1, 1)
    for together, one, other in zip(*losses, strict=False):
        total, a, b = (w * x for w, x in zip(weights, (together, one, other), strict=True))
        if _differ(total, a + b):
            raise UnsupportedModule(
                "The loss that the model returns mixes samples: it is not the "
                f"{'mean' if mean_loss else 'sum'} of its samples' losses (a mean over all tokens "
                "that are not ignored is not). Compute one loss per sample outside the model, "
                "then take the mean."
            )


def _differ(x: Tensor, y: Tensor) -> bool:
    """By more than rounding could explain."""
    x, y = x.nan_to_num().double(), y.nan_to_num().double()
    if x.shape != y.shape or not x.numel():
        return x.shape != y.shape
    return bool(((x - y).abs() > 1e-3 * (x.abs().amax() + y.abs())).any())


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outputs:
    """Every module's output tensors, in the order in which they came, under one fixed seed."""
    seen: Outputs = []
    handles = []
    for path, module in model.named_modules():

        def note(m: nn.Module, _: Any, output: Any, path: str = path) -> None:
            seen.extend((path, m, t) for t in tree_leaves(output) if isinstance(t, Tensor))

        handles.append(module.register_forward_hook(note))
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    try:
        with torch.no_grad(), torch.random.fork_rng(devices):
            torch.manual_seed(0)
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return seen
