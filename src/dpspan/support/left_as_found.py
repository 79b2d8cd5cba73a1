"""A model is run on the side, and left as it was found, together with all random numbers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpspan.support.randomness import RandomState, seeded

Mode = Literal["as found", "without dropout", "evaluation"]


@contextmanager
def left_as_found(
    model: nn.Module, start: int | RandomState | None = None, *, mode: Mode = "as found"
) -> Iterator[Callable[[], None]]:
    """Whatever happens, modes, attributes, buffers and random numbers are as before afterwards.

    A run on private data must leave nothing in them. The model runs on copies of its buffers, since
    those are watched for being written to. Parameters and their gradients are not looked after.

    Args:
        model: what is run.
        start: random numbers are drawn from this seed, or as they were at this time, and again
            from there when the function given is called; by default they go on.
        mode: "without dropout" keeps everything in training mode, so that two runs can be compared.
    """
    modules = [(m, m.training, _attributes(m), dict(m._buffers)) for m in model.modules()]
    copies = {buffer: buffer.clone() for buffer in model.buffers()}  # what is shared stays shared
    # Contents, too: something may write to a buffer through another reference to it.
    tensors = {*copies, *plain_tensors(model).values()}
    tensors = {x for x in tensors if x.grad_fn is None and not x.is_inference()}
    contents = [(x, x.clone(), x._version) for x in tensors]
    try:
        for module, training, attributes, buffers in modules:
            own = [(name, x) for name, x in attributes.items() if isinstance(x, Tensor)]
            vars(module).update({name: copies.get(x, x) for name, x in own})
            module._buffers.update({n: b if b is None else copies[b] for n, b in buffers.items()})
            module.training = training and mode != "evaluation"
        dropout: Any = _KeepAll if mode == "without dropout" else nullcontext
        with seeded(start) as restart, dropout():
            yield restart
    finally:
        for module, training, attributes, buffers in modules:
            for name in _attributes(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            module.training = training
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for tensor, content, version in contents:
                if tensor._version != version:
                    tensor.copy_(content)
                else:  # written past autograd, if at all: to look first would wait for a GPU
                    tensor.data.copy_(content)


@contextmanager
def meanwhile(thing: object, **values: Any) -> Iterator[None]:
    """The attributes of a thing have these values meanwhile."""
    before = {name: getattr(thing, name) for name in values}
    vars(thing).update(values)
    try:
        yield
    finally:
        vars(thing).update(before)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """But for a forward pass of its own, which is where gradients are recorded."""
    return {name: value for name, value in vars(module).items() if name != "forward"}


def plain_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Tensors that are attributes, neither parameters nor buffers, by their path."""
    return {
        f"{path}.{name}" if path else name: value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, Tensor)
    }


class _KeepAll(TorchDispatchMode):
    """Dropout keeps everything."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept = args[1] if len(args) > 1 else 0.5
        if func is torch.ops.aten.bernoulli_.float:
            return args[0].fill_(kept)  # which dropout divides by the same number
        if func is torch.ops.aten.bernoulli.p:
            return torch.full_like(args[0], kept)
        if func is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        return func(*args, **(kwargs or {}))
