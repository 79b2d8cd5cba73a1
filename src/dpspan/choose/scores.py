"""What each private record makes of each candidate, added up exactly.

Nothing here is private by itself: `selection` draws from the sums with ε-DP.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from dpspan.choose.energy import energies
from dpspan.choose.subspaces import PIECE, Loss
from dpspan.model.per_sample import per_sample_gradients
from dpspan.public.data import move
from dpspan.public.losses import SampleCriterion
from dpspan.subspaces.subspace import Subspace
from dpspan.support.randomness import seeded

UNIT = 2**24  # scores are counted in whole numbers of 1/UNIT, so that their sums are exact


class Score:
    """s_ij of a batch of records: (n, candidates) float64, between 0 and 1.

    Each batch meets the model and the loss as they were: on copies, so that nothing that a batch
    leaves in them reaches the next. Batches of fewer than `piece` records are filled up with
    repetitions, since the last bits of a result depend on the size of the batch.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Loss, subspaces: Sequence[Subspace], *, piece: int = PIECE
    ) -> None:
        if isinstance(loss_fn, nn.Module):
            loss_fn = SampleCriterion(loss_fn, instead="loss_fn=")
        self._model_and_loss = model, loss_fn
        self._subspaces, self._piece = subspaces, piece
        self._device = next(model.parameters()).device
        self.candidates = len(subspaces)

    def __call__(self, inputs: Any, labels: Any | None, *, seed: int = 0) -> Tensor:
        batch = move((inputs,) if labels is None else (inputs, labels), self._device)
        count = len(tree_leaves(batch)[0])
        rows = torch.arange(max(count, self._piece), device=self._device) % count
        model, loss = copy.deepcopy(self._model_and_loss)
        with torch.enable_grad(), seeded(seed):
            filled = tree_map_only(Tensor, lambda leaf: leaf[rows], batch)
            gradients = per_sample_gradients(model, loss, *filled, check=False)
        return energies(gradients, self._subspaces)[:count].cpu()


def totals(score: Score, batches: Iterable[tuple[Any, Any]], threshold: float | None) -> list[int]:
    """q_j in whole numbers: exact, in any order of the records."""
    constants = torch.tensor([] if threshold is None else [threshold], dtype=torch.float64)
    sums = torch.zeros(score.candidates + len(constants), dtype=torch.int64)
    for inputs, labels in batches:
        scores = score(inputs, labels)
        scores = torch.cat([scores, constants.expand(len(scores), -1)], dim=1)
        sums += (scores * UNIT).long().sum(0)
    result: list[int] = sums.tolist()
    return result
