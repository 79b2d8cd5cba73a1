"""Would RGP suit a model? How low the rank of its gradients is, and what carriers miss of them.

The figures 2 and 3 of the RGP paper. Everything here comes from gradients without noise: on private
data it is for the operator's eyes, and no ledger counts it. On public data it is free.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpspan.mechanisms.carriers import Carrier, History, carried_weights, carriers_of
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

    `loss_fn(model, *batch)` gives one loss per sample; the gradient is of their mean, and the
    weights' `grad` is left alone. With `first`, the weights at the beginning of training by name
    (a copy of `state_dict()` will do), also what carriers from the history would miss. `layers`
    chooses weights as for `RGP`; `seed` is of the numbers that the power method starts from.
    """
    check_count("rank", rank)
    weights = carried_weights(model, rank, layers)
    loss = loss_fn(model, *batch).mean()
    expect(bool(loss.isfinite()), "a finite loss", float(loss.detach()))
    gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    carriers: dict[str, Carrier] = {}
    if first is not None:
        for name in weights:
            expect(name in first, f"first to hold the weight '{name}'", sorted(first))
        now, then = ({name: _matrix(w[name]) for name in weights} for w in (weights, first))
        # Step 1 of a warm-up of 1: the directions of the update, not of the weight.
        carriers = carriers_of(now, then, History(), rank, step=1, seed=seed)
    found = {}
    for name, gradient in zip(weights, gradients, strict=True):
        if gradient is None or not gradient.any():  # no part in the loss: nothing to measure
            continue
        g = _matrix(gradient)
        energy = torch.linalg.svdvals(g).square()
        missed = float(unprivate_projection_residual(g, carriers[name])) if carriers else None
        found[name] = LowRank(
            stable_rank=float(energy.sum() / energy[0]),
            self_residual=float((energy[rank:].sum() / energy.sum()).sqrt()),
            history_residual=missed,
        )
    return found


def _matrix(weight: Tensor) -> Tensor:
    return weight.detach().double().cpu().flatten(1)


def unprivate_projection_residual(g: Tensor, carrier: Carrier) -> Tensor:
    """‖(I − LLᵀ) G (I − RᵀR)‖/‖G‖: what carriers miss of a gradient (the paper's figure 3)."""
    kept = carrier.reconstruct(g @ carrier.right.T, carrier.left.T @ g)
    norm: Tensor = torch.linalg.matrix_norm(g - kept) / torch.linalg.matrix_norm(g)
    return norm
