"""One look at the running model before its first private step: does it keep samples apart?

Which dimension of a layer's input is the batch, and whether a module lets one sample see another,
cannot be read off a module in general. So the step is rehearsed on the batch as it is, and again
with half of its samples exchanged, under the same random numbers: the per-sample gradients of the
other half must not change. What is compared never leaves this module except as an error or a
warning to the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map

from dpspan.capture import Capture
from dpspan.errors import UnsupportedModule

Call = tuple[tuple[Any, ...], dict[str, Any]]


def probe(
    capture: Capture, call: Call, samples: int, *, views: int = 1, mean_loss: bool = True
) -> set[str]:
    """Raise `UnsupportedModule` if a sample's gradient depends on other samples.

    Each sample is `views` rows of the input.

    Returns the names of buffers that the model changes, but in the same way whatever the samples
    are (a step counter, a cache of positions).
    """
    rows, kept = samples * views, samples // 2
    half = kept * views
    other = _replaced(call, rows, lambda x: torch.cat([x[:half], x[: rows - half].flip(0)]))
    before = {name: b.clone() for name, b in capture.model.named_buffers()}
    norms, after = _rehearse(capture, call, rows, mean_loss)
    again, _ = _rehearse(capture, call, rows, mean_loss)
    if _differ(norms, again):
        raise NotComparable("it draws random numbers that a seed does not control")
    exchanged, _ = _rehearse(capture, other, rows, mean_loss)
    if _differ(norms[:kept], exchanged[:kept]):
        raise UnsupportedModule(
            f"{_culprit(capture.model, call, other, half)} lets the gradient of a sample depend on "
            "the other samples of the batch, so it cannot be bounded: it mixes samples. Replace "
            "batch statistics by layers that treat samples one by one (GroupNorm, LayerNorm), make "
            "a loss inside the model a mean of one loss per sample, keep the batch in the first "
            "dimension of every layer's input, and give inputs that all samples share a first "
            "dimension of 1 without reducing it again."
        )
    changed = {n for n, b in after.items() if n not in before or not torch.equal(b, before[n])}
    if not changed:
        return set()
    # Exchanged samples might leave a maximum as it is; a blank batch would not.
    _, blank = _rehearse(capture, _replaced(call, rows, torch.zeros_like), rows, mean_loss)
    return {name for name in changed if name in blank and torch.equal(after[name], blank[name])}


def _replaced(call: Call, rows: int, replace: Callable[[Tensor], Tensor]) -> Call:
    """The call with every input that has the batch in front replaced."""

    def one(leaf: Any) -> Any:
        is_batch = isinstance(leaf, Tensor) and leaf.shape[:1] == (rows,)
        return replace(leaf) if is_batch else leaf

    replaced: Call = tree_map(one, call, is_leaf=is_packed)
    return replaced


def is_packed(x: Any) -> bool:
    """Whether it is a packed sequence, in whose parts no sample can be exchanged."""
    return isinstance(x, PackedSequence)


class NotComparable(Exception):
    """Two runs of the model cannot be compared, so nothing can be said."""


def _rehearse(
    capture: Capture, call: Call, rows: int, mean_loss: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Norms of the per-sample gradients of a made-up loss, and the buffers after the run.

    The loss is not linear, or its gradients might not depend on the samples at all: the sine of
    every output, weighed by a fixed random number. A loss that the model returns counts as it is.
    """
    model = capture.model
    with _untouched(model), capture.rehearsal(), torch.enable_grad():
        args, kwargs = call
        outputs = [x for x in tree_leaves(model(*args, **kwargs)) if isinstance(x, Tensor)]
        terms = [
            (rows * x if mean_loss else x)
            if x.dim() == 0
            else (x.sin() * torch.rand(x.shape[1:], device=x.device)).sum()
            for x in outputs
            if x.requires_grad and x.shape[:1] in ((), (rows,))
        ]
        if not terms:
            raise NotComparable("no output of it has the batch in front and needs a gradient")
        torch.stack([term.double() for term in terms]).sum().backward()
        after = {name: b.clone() for name, b in model.named_buffers()}
        return capture.gradients().norms(), after


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Run under one fixed seed; random numbers and buffers are as before afterwards."""
    saved = []
    for module in model.modules():
        present = [b for b in module._buffers.values() if b is not None and not b.is_inference()]
        saved.append((module, dict(module._buffers), [(b, b.clone()) for b in present]))
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    try:
        with torch.random.fork_rng(devices):
            torch.manual_seed(0)
            yield
    finally:  # whatever happened: a rehearsal must not leave private data behind
        with torch.no_grad():
            for module, buffers, contents in saved:
                module._buffers.clear()
                module._buffers.update(buffers)
                for buffer, content in contents:
                    buffer.copy_(content)


def _differ(x: Tensor, y: Tensor) -> bool:
    """By more than rounding could explain."""
    x, y = x.nan_to_num().double(), y.nan_to_num().double()
    if x.shape != y.shape or not x.numel():
        return x.shape != y.shape
    return bool(((x - y).abs() > 1e-3 * (x.abs().amax() + y.abs())).any())


def _culprit(model: nn.Module, call: Call, other: Call, half: int) -> str:
    """The first module whose output for the first samples changes with the others, by name."""
    first, second = _outputs(model, call), _outputs(model, other)
    for (path, module, x), (_, _, y) in zip(first, second, strict=False):
        if path and _differ(x[:half], y[:half]):
            return f"'{path}' ({type(module).__name__})"
    return type(model).__name__


def _outputs(model: nn.Module, call: Call) -> list[tuple[str, nn.Module, Tensor]]:
    """Every module's output tensors, in the order in which they came, under one fixed seed."""
    seen: list[tuple[str, nn.Module, Tensor]] = []
    handles = []
    for path, module in model.named_modules():

        def note(m: nn.Module, _: Any, output: Any, path: str = path) -> None:
            tensors = (t for t in tree_leaves(output) if isinstance(t, Tensor) and t.dim())
            seen.extend((path, m, t) for t in tensors)

        handles.append(module.register_forward_hook(note))
    try:
        with torch.no_grad(), _untouched(model):
            args, kwargs = call
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return seen
