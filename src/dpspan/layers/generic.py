"""Any other module with parameters of its own, by torch.func.

The module runs once, vectorised over samples, with a copy of its parameters per sample: plain
autograd then brings each copy its own sample's gradient. Nothing runs twice, so dropout and other
randomness are the same in the output and in the gradient. The price is that the rows of the whole
module, everything below it included, are instantiated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten


def per_sample_forward(
    module: nn.Module,
    parameters: dict[str, Tensor],
    samples: int,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> Any:
    """The module's output, with `parameters` (samples, *shape) in place of its own."""
    leaves, structure = tree_flatten((arguments, keywords))
    batched = [isinstance(leaf, Tensor) and leaf.shape[:1] == (samples,) for leaf in leaves]
    template: list[Any] = []  # the output with its tensors replaced, seen while tracing

    def one_sample(own: dict[str, Tensor], tensors: list[Tensor]) -> list[Tensor]:
        remaining = iter(tensors)
        # The module sees a batch of one: what it does to the batch dimension stays true.
        filled = [
            next(remaining).unsqueeze(0) if is_batched else leaf
            for leaf, is_batched in zip(leaves, batched, strict=True)
        ]
        positional, named = tree_unflatten(filled, structure)
        outputs, output_structure = tree_flatten(functional_call(module, own, positional, named))
        template[:] = [[None if isinstance(o, Tensor) else o for o in outputs], output_structure]
        return [output.squeeze(0) for output in outputs if isinstance(output, Tensor)]

    private = [leaf for leaf, is_batched in zip(leaves, batched, strict=True) if is_batched]
    tensors = iter(torch.vmap(one_sample, randomness="different")(parameters, private))
    others, output_structure = template
    return tree_unflatten([next(tensors, o) if o is None else o for o in others], output_structure)
