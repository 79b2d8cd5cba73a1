"""Any other module with parameters of its own, by torch.func.

The module runs once, vectorised over samples, with a copy of its parameters per sample: plain
autograd then brings each copy its own sample's gradient. Nothing runs twice, so dropout and other
randomness are the same in the output and in the gradient. The price is that the rows of the whole
module, everything below it included, are instantiated.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpspan.gradients.layout import SHARED

_TENSOR = object()


def per_sample_forward(
    module: nn.Module,
    forward: Callable[..., Any],
    parameters: dict[str, Tensor],
    call: tuple[tuple[Any, ...], dict[str, Any]],
    inputs: Sequence[int],
    outputs: Mapping[tuple[int, int], int],
) -> Any:
    """The output of `forward`, with `parameters` (samples, *shape) in place of the module's own.

    `inputs` says of each leaf of the call which dimension is the batch, or a negative number, and
    `outputs` the same of each tensor it gives, by its number and dimensions. An output that all
    samples share is given once for each, in front, where it broadcasts.

    `forward` is called as it is, without the module's hooks: those run around this function.
    """
    leaves, structure = tree_flatten(call)
    placed = list(zip(leaves, inputs, strict=True))
    pads = any(getattr(part, "padding_idx", None) is not None for part in module.modules())
    mended = _PlainEmbedding() if pads else nullcontext()
    template: list[Any] = []  # the output with its tensors replaced, seen while tracing
    places: list[int] = []  # of the batch in the output's tensors

    def one_sample(own: dict[str, Tensor], tensors: list[Tensor]) -> list[Tensor]:
        remaining = iter(tensors)
        # The module sees a batch of one: what it does to the batch dimension stays true.
        filled = [leaf if place < 0 else next(remaining).unsqueeze(place) for leaf, place in placed]
        positional, named = tree_unflatten(filled, structure)
        with exchanged(module, own), mended:
            given, output_structure = tree_flatten(forward(*positional, **named))
        template[:] = [[_TENSOR if isinstance(o, Tensor) else o for o in given], output_structure]
        tensors_out = [output for output in given if isinstance(output, Tensor)]
        places[:] = []
        for number, output in enumerate(tensors_out):
            place = outputs.get((number, output.dim()), 0)
            places.append(max(0, place))
            if place != SHARED and output.shape[places[-1] : places[-1] + 1] != (1,):
                raise ValueError("an output of it has no batch dimension in front.")
            if place != SHARED:
                tensors_out[number] = output.squeeze(places[-1])
        return tensors_out

    private = [leaf.movedim(place, 0) for leaf, place in placed if place >= 0]
    # Of the attention kernels only the plain one has what is asked for here: the gradient of a
    # mask that is learned, and one run for all samples.
    with sdpa_kernel(SDPBackend.MATH), _no_fast_path():
        tensors = torch.vmap(one_sample, randomness="different")(parameters, private)
    moved = (x.movedim(0, place) for x, place in zip(tensors, places, strict=True))
    others, output_structure = template
    return tree_unflatten([next(moved) if o is _TENSOR else o for o in others], output_structure)


@contextmanager
def _no_fast_path() -> Iterator[None]:
    """torch's encoder layers would not notice under torch.func that a gradient is wanted."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def exchanged(module: nn.Module, own: dict[str, Tensor]) -> AbstractContextManager[None]:
    """The module with other parameters meanwhile, under all the names that they have.

    Taken back last in, first out: a part with two names would be left with the others otherwise.
    """
    found: AbstractContextManager[None] = _reparametrize_module(
        module, own, tie_weights=True, stack_weights=True
    )
    return found


class _PlainEmbedding(TorchFunctionMode):
    """F.embedding by plain means: torch.func forgets padding_idx for all samples but the first."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.embedding:
            return func(*args, **kwargs)
        index, weight, *rest = args
        padding = rest[0] if rest else kwargs.get("padding_idx")
        out = F.embedding(index, weight)
        if padding is None:
            return out
        ignored = (index == padding % weight.shape[0]).unsqueeze(-1)
        return torch.where(ignored, out.detach(), out)
