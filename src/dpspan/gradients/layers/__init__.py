"""How each family of layers turns its input and output gradient into per-sample gradients."""

from collections.abc import Callable, Iterator

from torch import Tensor, nn
from torch.nn.utils import parametrize

from dpspan.gradients.layers.conv import conv_terms
from dpspan.gradients.layers.embedding import embedding_terms
from dpspan.gradients.layers.linear import linear_terms
from dpspan.gradients.layers.norm import channel_norm_terms, trailing_norm_terms
from dpspan.gradients.layers.recurrent import method_of
from dpspan.gradients.layers.standardised import StandardisedConv2d, standardised_terms
from dpspan.gradients.layers.terms import Term

Rule = Callable[[nn.Module, Tensor, Tensor], Iterator[tuple[str, Term]]]

_RULES: dict[tuple[type[nn.Module], ...], Rule] = {
    (StandardisedConv2d,): standardised_terms,  # before those of its base
    (nn.Linear,): linear_terms,
    (nn.Conv1d, nn.Conv2d, nn.Conv3d): conv_terms,
    (nn.Embedding,): embedding_terms,
    (nn.LayerNorm, nn.RMSNorm): trailing_norm_terms,
    (nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d): channel_norm_terms,
}

# The methods that make up the forward pass of these classes.
_FORWARD_METHODS = ("forward", "_conv_forward", "_apply_instance_norm", "_handle_no_batch_input")


def rule_for(module: nn.Module) -> Rule | None:
    """The rule of a module that computes what its torch class computes, else None.

    A subclass keeps it with an unchanged forward pass, and a module without one of its own.
    """
    for kinds, rule in _RULES.items():
        if isinstance(module, kinds):
            names = {name for name, _ in module.named_parameters()}
            plain = names <= {"weight", "bias"} and not any(True for _ in module.children())
            return rule if plain and any(_runs_as(module, kind) for kind in kinds) else None
    return None


def own_parameters(module: nn.Module) -> Iterator[str]:
    """Names of a module's parameters, with those of lists, dicts and parametrizations it holds."""
    yield from module._parameters
    for name, child in module.named_children():
        holds = isinstance(child, nn.ParameterList | nn.ParameterDict)
        if holds or (name == "parametrizations" and parametrize.is_parametrized(module)):
            yield from (f"{name}.{own}" for own, _ in child.named_parameters())


def _runs_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    return isinstance(module, kind) and all(
        method_of(module, name) is getattr(kind, name, None) for name in _FORWARD_METHODS
    )
