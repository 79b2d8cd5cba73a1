"""Would RGP suit a model? How low the rank of its gradients is, and what carriers miss of them.

The figures 2 and 3 of the RGP paper. Everything here comes from gradients without noise: on private
data it is for the operator's eyes, and no ledger counts it. On public data it is free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpspan.mechanisms.carried_weights import carried_weights
from dpspan.mechanisms.carriers import History, principal, unprivate_projection_residual
from dpspan.support.checks import check_count, expect


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """How one weight's gradient G lends itself to carriers of rank r.

    Attributes:
        stable_rank: ‖G‖_F²/‖G‖², between 1 and the rank of G.
        self_residual: the share of ‖G‖_F that G's own r top directions miss: the least possible.
        history_residual: the share that the directions of the update so far miss; None without one.
    """

    stable_rank: float
    self_residual: float
    history_residual: float | None


def unprivate_low_rank(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *batch: object,
    rank: int,
    first: Mapping[str, Tensor] | None = None,
    layers: Callable[[str], bool] | None = None,
    seed: int = 0,
) -> dict[str, LowRank]:
    """For each weight that `RGP(rank=rank)` would carry, how well carriers fit its gradient.

    Args:
        model: as it is now; its weights' `grad` is left alone.
        loss_fn: `loss_fn(model, *batch)` gives one loss per sample; the gradient is of their mean.
        batch: what `loss_fn` takes.
        rank: r, of the carriers.
        first: weights at the beginning of training, by name (a copy of `state_dict()` will do);
            with them, also what carriers from the history would miss.
        layers: which weights, as for `RGP`.
        seed: of the numbers that the power method starts from.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from dpspan.mechanisms.low_rank import unprivate_low_rank
        >>> def loss(model, x, y):
        ...     return nn.functional.cross_entropy(model(x), y, reduction="none")
        >>> public = torch.randn(50, 8), torch.arange(50) % 8
        >>> found = unprivate_low_rank(nn.Linear(8, 8), loss, *public, rank=2)
        >>> list(found), 1 <= found["weight"].stable_rank <= 8
        (['weight'], True)
    """
    check_count("rank", rank)
    weights = carried_weights(model, rank, layers)
    loss = loss_fn(model, *batch).mean()
    expect(bool(loss.isfinite()), "a finite loss", float(loss.detach()))
    gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64)

    found = {}
    for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
        if gradient is None or not gradient.any():  # no part in the loss: nothing to measure
            continue
        g, history = gradient.double().cpu().flatten(1), None
        if first is not None:
            expect(name in first, f"first to hold the weight '{name}'", sorted(first))
            now, then = (w.detach().double().cpu().flatten(1) for w in (weight, first[name]))
            # Step 1 of a warm-up of 1: the directions of the update, not of the weight.
            (carrier,) = History().carriers([now], [then], rank, 1, draw)
            history = float(unprivate_projection_residual(g, carrier))
        found[name] = LowRank(
            stable_rank=float(g.square().sum() / torch.linalg.matrix_norm(g, 2).square()),
            self_residual=float(unprivate_projection_residual(g, principal(g, rank))),
            history_residual=history,
        )
    return found
