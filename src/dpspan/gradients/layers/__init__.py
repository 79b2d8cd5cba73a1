"""How each family of layers turns its input and output gradient into per-sample gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from dpspan.gradients.layers.conv import conv_terms
from dpspan.gradients.layers.embedding import embedding_terms
from dpspan.gradients.layers.linear import linear_terms
from dpspan.gradients.layers.norm import (
    group_norm_terms,
    instance_norm_terms,
    layer_norm_terms,
    rms_norm_terms,
)
from dpspan.gradients.layers.terms import Term

Rule = Callable[[nn.Module, Tensor, Tensor], Iterator[tuple[str, Term]]]

_RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear_terms,
    nn.Conv1d: conv_terms,
    nn.Conv2d: conv_terms,
    nn.Conv3d: conv_terms,
    nn.Embedding: embedding_terms,
    nn.LayerNorm: layer_norm_terms,
    nn.RMSNorm: rms_norm_terms,
    nn.GroupNorm: group_norm_terms,
    nn.InstanceNorm1d: instance_norm_terms,
    nn.InstanceNorm2d: instance_norm_terms,
    nn.InstanceNorm3d: instance_norm_terms,
}

# The methods that make up the forward pass of these classes.
_FORWARD_METHODS = ("forward", "_conv_forward", "_apply_instance_norm", "_handle_no_batch_input")


def rule_for(module: nn.Module) -> Rule | None:
    """The rule of a module that computes what its torch class computes, else None.

    A subclass keeps the rule only if it inherits the forward pass unchanged, and a module only if
    nobody has given it a forward pass of its own.
    """
    for kind, rule in _RULES.items():
        if (
            isinstance(module, kind)
            and all(_inherits(module, kind, name) for name in _FORWARD_METHODS)
            and {name for name, _ in module.named_parameters()} <= {"weight", "bias"}
            and not any(True for _ in module.children())
        ):
            return rule
    return None


def _inherits(module: nn.Module, kind: type[nn.Module], method: str) -> bool:
    unchanged = getattr(type(module), method, None) is getattr(kind, method, None)
    return unchanged and method not in vars(module)


__all__ = ["Rule", "Term", "rule_for"]
