"""LayerNorm, RMSNorm, GroupNorm and InstanceNorm: an affine map of a normalised input."""

from collections.abc import Callable, Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from dpspan.gradients.layers.terms import Rows, Term


def trailing_norm_terms(module: nn.Module, x: Tensor, grad: Tensor) -> Iterator[tuple[str, Term]]:
    """Terms of a LayerNorm's or RMSNorm's weight and bias."""
    assert isinstance(module, nn.LayerNorm | nn.RMSNorm)
    layer_norm, dims = isinstance(module, nn.LayerNorm), len(module.normalized_shape)
    normalise: Callable[..., Tensor] = F.layer_norm if layer_norm else F.rms_norm

    def total(x: Tensor) -> Tensor:
        """The sum over everything between the sample and what is normalised."""
        return x.flatten(1, -dims - 1).sum(1) if x.dim() > dims + 1 else x

    yield "weight", Rows(total(normalise(x, module.normalized_shape, eps=module.eps) * grad))
    if layer_norm:  # an RMSNorm has no bias
        yield "bias", Rows(total(grad))


def channel_norm_terms(module: nn.Module, x: Tensor, grad: Tensor) -> Iterator[tuple[str, Term]]:
    """Terms of a GroupNorm's or InstanceNorm's weight and bias."""
    if isinstance(module, nn.GroupNorm):
        normalised = F.group_norm(x, module.num_groups, eps=module.eps)
    else:
        assert isinstance(module, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d)
        normalised = F.instance_norm(x, eps=module.eps)
    for name, rows in (("weight", normalised * grad), ("bias", grad)):
        yield name, Rows(rows.flatten(2).sum(2) if rows.dim() > 2 else rows)
