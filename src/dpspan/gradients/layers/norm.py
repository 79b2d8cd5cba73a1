"""LayerNorm, RMSNorm, GroupNorm and InstanceNorm: an affine map of a normalised input."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from dpspan.gradients.layers.terms import Rows, Term


def _trailing(x: Tensor, dims: int) -> Tensor:
    """Sum over everything between the sample and the last `dims` dimensions."""
    return x.flatten(1, -dims - 1).sum(1) if x.dim() > dims + 1 else x


def _channels(x: Tensor) -> Tensor:
    """Sum over everything behind the channels."""
    return x.flatten(2).sum(2) if x.dim() > 2 else x


def layer_norm_terms(module: nn.Module, x: Tensor, grad: Tensor) -> Iterator[tuple[str, Term]]:
    """Terms of a LayerNorm's weight and bias."""
    assert isinstance(module, nn.LayerNorm)
    shape = module.normalized_shape
    normalised = F.layer_norm(x, shape, eps=module.eps)
    yield "weight", Rows(_trailing(normalised * grad, len(shape)))
    yield "bias", Rows(_trailing(grad, len(shape)))


def rms_norm_terms(module: nn.Module, x: Tensor, grad: Tensor) -> Iterator[tuple[str, Term]]:
    """Term of an RMSNorm's weight."""
    assert isinstance(module, nn.RMSNorm)
    shape = module.normalized_shape
    normalised = F.rms_norm(x, shape, eps=module.eps)
    yield "weight", Rows(_trailing(normalised * grad, len(shape)))


def group_norm_terms(module: nn.Module, x: Tensor, grad: Tensor) -> Iterator[tuple[str, Term]]:
    """Terms of a GroupNorm's weight and bias."""
    assert isinstance(module, nn.GroupNorm)
    normalised = F.group_norm(x, module.num_groups, eps=module.eps)
    yield "weight", Rows(_channels(normalised * grad))
    yield "bias", Rows(_channels(grad))


def instance_norm_terms(module: nn.Module, x: Tensor, grad: Tensor) -> Iterator[tuple[str, Term]]:
    """Terms of an InstanceNorm's weight and bias."""
    assert isinstance(module, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d)
    normalised = F.instance_norm(x, eps=module.eps)
    yield "weight", Rows(_channels(normalised * grad))
    yield "bias", Rows(_channels(grad))
