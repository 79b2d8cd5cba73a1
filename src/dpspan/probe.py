"""One look at the running model before its first private step: does it keep samples apart?

Which dimension of a layer's input is the batch, and whether a module lets one sample see another,
cannot be read off a module in general. So the model is run on the first few samples of a batch and
again on fewer of them: every layer must see as many as went in, and no module may give a sample
another output because its neighbours are gone. What is compared never leaves this function except
as an error to the operator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves, tree_map

from dpspan.errors import UnsupportedModule

_FEW, _FEWER = 4, 2


def probe(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], samples: int) -> None:
    """Raise `UnsupportedModule` if a module of the model mixes samples or moves the batch."""
    few = min(_FEW, samples)
    fewer = few // 2 if samples < _FEW else _FEWER
    with torch.no_grad(), _without_randomness(model):
        whole = _run(model, _first(few, samples, args), _first(few, samples, kwargs))
        again = _run(model, _first(few, samples, args), _first(few, samples, kwargs))
        part = _run(model, _first(fewer, samples, args), _first(fewer, samples, kwargs))
    for (path, module, x), (_, _, y), (other, _, z) in zip(whole, again, part, strict=False):
        name = f"'{path}' ({type(module).__name__})" if path else type(module).__name__
        # Random by other means than dropout, or a forward pass that depends on the data: nothing
        # to compare from here on.
        if path != other or not torch.equal(x.nan_to_num(), y.nan_to_num()):
            return
        if x.shape[0] != few or z.shape[0] != fewer:
            if x.shape == z.shape and x.shape[0] == 1 and not _differ(x, z):
                continue  # the same whatever the batch holds: positions, for example
            raise UnsupportedModule(
                f"{name} gave an output of first dimension {x.shape[0]} for {few} samples and "
                f"{z.shape[0]} for {fewer}: the first dimension must be the batch everywhere. "
                "Build layers with batch_first=True, give shared inputs a batch dimension of 1 "
                "(positions.unsqueeze(0)), and do not fold other dimensions into the batch."
            )
        if _differ(x[:fewer], z):
            raise UnsupportedModule(
                f"{name} gives a sample another output when other samples leave the batch: it "
                "mixes samples, so no sample's gradient can be bounded. Replace it by a layer that "
                "treats samples one by one (GroupNorm or LayerNorm instead of batch statistics)."
            )


def _differ(x: Tensor, y: Tensor) -> bool:
    """By more than another batch size's rounding could explain."""
    x, y = x.nan_to_num().double(), y.nan_to_num().double()
    return bool(((x - y).abs() > 1e-3 * (x.abs().amax() + y.abs())).any()) if x.numel() else False


def _first(count: int, samples: int, tree: Any) -> Any:
    def cut(leaf: Any) -> Any:
        is_batch = isinstance(leaf, Tensor) and leaf.shape[:1] == (samples,)
        return leaf[:count] if is_batch else leaf

    return tree_map(cut, tree)


def _run(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, nn.Module, Tensor]]:
    """Every module's output tensors, in the order in which they came."""
    seen: list[tuple[str, nn.Module, Tensor]] = []
    handles = []
    for path, module in model.named_modules():

        def note(m: nn.Module, _: Any, output: Any, path: str = path) -> None:
            tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.dim()]
            seen.extend((path, m, t) for t in tensors)

        handles.append(module.register_forward_hook(note))
    try:
        model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return seen


@contextmanager
def _without_randomness(model: nn.Module) -> Iterator[None]:
    """Dropout off, so that runs can be compared; everything else, and the RNG, as it is."""
    dropouts = [m for m in model.modules() if isinstance(m, _DropoutNd) and m.training]
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda and p.device.index})
    with torch.random.fork_rng(devices):
        for module in dropouts:
            module.training = False
        try:
            yield
        finally:
            for module in dropouts:
                module.training = True
