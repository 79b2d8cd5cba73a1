"""Whether gradients are of low rank: known matrices, and the figures' quantities on a real run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpspan.mechanisms.low_rank import unprivate_low_rank
from helpers.training import data, network


def linear_loss(model: nn.Module, directions: Tensor) -> Tensor:
    """A loss whose gradient is the mean of the given matrices."""
    return (directions * model.weight).sum((1, 2))


def test_a_gradient_of_known_spectrum() -> None:
    torch.manual_seed(0)
    model = nn.Linear(20, 12, bias=False).double()
    u, v = (torch.linalg.qr(torch.randn(n, 3, dtype=torch.float64)).Q for n in (12, 20))
    g = u @ torch.diag(torch.tensor([4.0, 2.0, 1.0]).double()) @ v.T
    found = unprivate_low_rank(model, linear_loss, g[None], rank=1)["weight"]
    assert found.stable_rank == pytest.approx((16 + 4 + 1) / 16)
    assert found.self_residual == pytest.approx((5 / 21) ** 0.5)
    assert found.history_residual is None
    assert unprivate_low_rank(model, linear_loss, g[None], rank=3)["weight"].self_residual < 1e-12


def test_an_update_along_the_gradient_carries_it() -> None:
    torch.manual_seed(0)
    model = nn.Linear(20, 12, bias=False).double()
    first = {"weight": model.weight.detach().clone()}
    g = torch.randn(12, 2, dtype=torch.float64) @ torch.randn(2, 20, dtype=torch.float64)
    with torch.no_grad():
        model.weight -= 0.1 * g
    found = unprivate_low_rank(model, linear_loss, g[None], rank=2, first=first)["weight"]
    assert found.history_residual == pytest.approx(0, abs=1e-10)
    with torch.no_grad():  # an update that has nothing to do with the gradient
        model.weight.copy_(first["weight"] + torch.randn(12, 20))
    other = unprivate_low_rank(model, linear_loss, g[None], rank=2, first=first)["weight"]
    assert other.history_residual is not None
    assert 0.5 < other.history_residual <= 1


def test_a_network_keeps_its_gradients_and_frozen_weights_are_left_out() -> None:
    torch.manual_seed(0)
    model = network()
    x, y = data(40).tensors
    losses = lambda m, x, y: F.cross_entropy(m(x), y, reduction="none")  # noqa: E731
    names = set(unprivate_low_rank(model, losses, x, y, rank=1))
    assert names
    assert all(p.grad is None for p in model.parameters())
    frozen = sorted(names)[0]
    dict(model.named_parameters())[frozen].requires_grad_(False)
    if len(names) > 1:
        assert set(unprivate_low_rank(model, losses, x, y, rank=1)) == names - {frozen}


def test_errors_say_what_is_wrong() -> None:
    model = nn.Linear(20, 12, bias=False)
    with pytest.raises(ValueError, match="Expected first to hold the weight 'weight'"):
        unprivate_low_rank(model, linear_loss, torch.ones(1, 12, 20), rank=1, first={})
    with pytest.raises(ValueError, match="Expected a finite loss"):
        unprivate_low_rank(model, linear_loss, torch.full((1, 12, 20), torch.inf), rank=1)
    with pytest.raises(ValueError, match="rank"):
        unprivate_low_rank(model, linear_loss, torch.ones(1, 12, 20), rank=0)
