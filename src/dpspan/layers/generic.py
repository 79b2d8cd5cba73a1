"""Any other module with parameters of its own, by torch.func.

The module runs once, vectorised over samples, with a copy of its parameters per sample: plain
autograd then brings each copy its own sample's gradient. Nothing runs twice, so dropout and other
randomness are the same in the output and in the gradient. The price is that the rows of the whole
module, everything below it included, are instantiated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_unflatten

_TENSOR = object()


def per_sample_forward(
    module: nn.Module,
    forward: Callable[..., Any],
    parameters: dict[str, Tensor],
    samples: int,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> Any:
    """The output of `forward`, with `parameters` (samples, *shape) in place of the module's own.

    `forward` is called as it is, without the module's hooks: those run around this function.
    """
    leaves, structure = tree_flatten((arguments, keywords))
    # An attention mask (T, T) is the same for every sample, even where T = n.
    mask, padding = keywords.get("attn_mask"), keywords.get("key_padding_mask")
    shared = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
    batched = [
        isinstance(leaf, Tensor) and leaf.shape[:1] == (samples,) and leaf is not shared
        for leaf in leaves
    ]
    for leaf, is_batched in zip(leaves, batched, strict=True):
        square = is_batched and leaf.shape == (samples, samples) and leaf is not padding
        if square and any(isinstance(other, Tensor) and other.dim() > 2 for other in leaves):
            raise ValueError(
                f"an input of shape ({samples}, {samples}) may be a mask or a batch: pass masks by "
                "the keywords attn_mask and key_padding_mask."
            )
    if not any(batched):
        raise ValueError(f"none of its inputs has the batch, {samples} samples, in front.")
    template: list[Any] = []  # the output with its tensors replaced, seen while tracing

    def one_sample(own: dict[str, Tensor], tensors: list[Tensor]) -> list[Tensor]:
        remaining = iter(tensors)
        # The module sees a batch of one: what it does to the batch dimension stays true.
        filled = [
            next(remaining).unsqueeze(0) if is_batched else leaf
            for leaf, is_batched in zip(leaves, batched, strict=True)
        ]
        positional, named = tree_unflatten(filled, structure)
        with _reparametrize_module(module, own, tie_weights=True):
            outputs, output_structure = tree_flatten(forward(*positional, **named))
        template[:] = [[_TENSOR if isinstance(o, Tensor) else o for o in outputs], output_structure]
        tensors_out = [output for output in outputs if isinstance(output, Tensor)]
        if any(output.shape[:1] != (1,) for output in tensors_out):
            raise ValueError("an output of it has no batch dimension in front.")
        return [output.squeeze(0) for output in tensors_out]

    private = [leaf for leaf, is_batched in zip(leaves, batched, strict=True) if is_batched]
    tensors = iter(torch.vmap(one_sample, randomness="different")(parameters, private))
    others, output_structure = template
    return tree_unflatten([next(tensors) if o is _TENSOR else o for o in others], output_structure)
