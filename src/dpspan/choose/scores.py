"""What each private record makes of each candidate, added up exactly.

Nothing here is private by itself: `selection` draws from the sums with ε-DP.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from dpspan.choose.energy import energies
from dpspan.choose.subspaces import PIECE, Loss
from dpspan.errors import UnsupportedModule
from dpspan.per_sample import per_sample_gradients
from dpspan.public import move
from dpspan.randomness import seeded
from dpspan.sample_losses import SampleCriterion, call
from dpspan.sampling import PoissonDraw, PrivateLoader, records_of
from dpspan.subspace import Subspace

UNIT = 2**24  # scores are counted in whole numbers of 1/UNIT, so that their sums are exact
_TOLERANCE = 1e-3
_LABEL_KEYS = ("labels", "label")


class Score:
    """s_ij of a batch of records: (n, candidates) float64, between 0 and 1."""

    def __init__(self, model: nn.Module, loss_fn: Loss, subspaces: Sequence[Subspace]) -> None:
        self._model, self._subspaces = model, subspaces
        self._loss = _by_criterion(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn
        self._device = next(model.parameters()).device
        self.candidates = len(subspaces)

    def __call__(self, inputs: Any, labels: Any, *, seed: int = 0) -> Tensor:
        inputs, labels = move(inputs, self._device), move(labels, self._device)
        with torch.enable_grad(), seeded(self._model, seed):
            gradients = per_sample_gradients(self._model, self._loss, inputs, labels)
        return energies(gradients, self._subspaces).cpu()

    def check_company(self, inputs: Any, labels: Any, scores: Tensor) -> None:
        """Refuse a model in which a record's score depends on the records beside it.

        Half of them again, in another order and with other random numbers.
        """
        chosen = torch.arange(len(scores) // 2, len(scores)).flip(0)
        if len(scores) < 2:
            return

        def part(leaf: Tensor) -> Tensor:
            return leaf[chosen] if leaf.shape[:1] == (len(scores),) else leaf

        again = self(*(tree_map_only(Tensor, part, x) for x in (inputs, labels)), seed=1)
        if bool(((again - scores[chosen]).abs() > _TOLERANCE).any()):
            raise UnsupportedModule(
                "A record's gradient depends on the other records of its batch or on random "
                "numbers, even in evaluation mode, so no record's influence on the choice is "
                "bounded. Replace layers and losses that mix samples, or use a ProbeNetwork. This "
                "message depends on private data: do not publish it."
            )


def _by_criterion(criterion: nn.Module) -> Loss:
    by_sample = SampleCriterion(criterion, instead="loss_fn=")

    def losses(model: nn.Module, inputs: Any, labels: Any) -> Tensor:
        outputs = by_sample.outputs(call(model, inputs), len(tree_leaves(labels)[0]))
        return by_sample.means(by_sample.entries(outputs, labels), outputs, labels)

    return losses


def totals(score: Score, batches: Iterator[tuple[Any, Any]], threshold: float | None) -> list[int]:
    """q_j in whole numbers: exact, in any order of the records."""
    constants = torch.tensor([] if threshold is None else [threshold], dtype=torch.float64)
    sums = torch.zeros(score.candidates + len(constants), dtype=torch.int64)
    for number, (inputs, labels) in enumerate(batches):
        scores = score(inputs, labels)
        if number == 0:
            score.check_company(inputs, labels, scores)
        scores = torch.cat([scores, constants.expand(len(scores), -1)], dim=1)
        sums += (scores * UNIT).long().sum(0)
    result: list[int] = sums.tolist()
    return result


# -- private records ----------------------------------------------------------------------------


def private_loader(private: Any) -> DataLoader[Any]:
    """A loader over the private records, whatever they came as."""
    if isinstance(private, tuple | list) and all(isinstance(x, Tensor) for x in private):
        private = TensorDataset(*private)
    if isinstance(private, Dataset):
        private = DataLoader(private, batch_size=PIECE)
    if isinstance(private, DataLoader | PrivateLoader):
        records_of(private)  # refuses what cannot be sampled record by record
    if not isinstance(private, DataLoader):
        raise TypeError(
            f"Cannot read private records from a {type(private).__name__}: give a DataLoader, a "
            "map-style Dataset, or tensors (inputs, labels)."
        )
    return private


def sampled_batches(
    loader: DataLoader[Any], sample_rate: float, piece: int
) -> Iterator[tuple[Any, Any]]:
    """The records of a Poisson sample, each with its label."""
    dataset: Any = loader.dataset
    draw = PoissonDraw(records=len(dataset), sample_rate=sample_rate, steps_per_epoch=1)
    (chosen,) = draw.epoch(np.random.default_rng())  # by OS entropy: who is in it is a secret
    if not len(chosen):
        return
    for batch in DataLoader(
        Subset(dataset, chosen.tolist()),
        batch_size=piece,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        generator=torch.Generator(),  # torch's own stays as it is
    ):
        yield _inputs_and_labels(batch)


def _inputs_and_labels(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, Mapping):
        inputs = {key: value for key, value in batch.items() if key not in _LABEL_KEYS}
        labels = [value for key, value in batch.items() if key in _LABEL_KEYS]
        if len(labels) == 1 and inputs:
            return inputs, labels[0]
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise ValueError(
        "Expected private batches of (inputs, labels), or mappings with the labels under 'labels': "
        "private gradients are those of training, with the records' own labels."
    )
