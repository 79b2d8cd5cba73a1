"""Datasets compared by their gradients, NOT PRIVATELY: nothing here adds noise.

Gradient subspace distance (GSD): G_priv, G_pub are per-sample gradients with random labels at the
initial weights, V their top k right singular vectors, θ the principal angles between the two spans:

    GSD = √(k − Σ cos²θ) / √k    (the paper's Definition 3 lacks the √k that its numbers have)

All of it is for the operator's eyes: whoever picks by it releases more than ε says. `choose_public`
picks privately.
"""

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from dpspan.accounting.ledger import Ledger
from dpspan.choose.probe import PIECE, Loss, Probe, drawn, energies, principal_subspace
from dpspan.gradients.numerics import plain_arithmetic
from dpspan.public.data import PublicData, Samples
from dpspan.subspaces.subspace import Subspace
from dpspan.support.checks import expect

_WARNING = "NOT PRIVATE: computed from private records without noise, for the operator's eyes only"
LOOKED_AT = "unprivate: public data were ranked by private data, without noise"
_PRIVATE = "private"


def gsd(
    model: nn.Module,
    loss_fn: Loss,
    private_batch: object,
    public_batch: object,
    rank: int = 16,
    *,
    seed: int = 0,
    piece: int = PIECE,
) -> float:
    """The distance of two batches, 0 (same subspace) to 1 (orthogonal ones). NOT private.

    Args:
        model: at the weights that training starts from, or a `ProbeNetwork`; run in
            evaluation mode, on a copy.
        loss_fn: a criterion, for which both sides get random labels of the model's classes, or a
            function (model, inputs[, labels]) → one loss per sample, by the labels there are.
        private_batch: inputs, (inputs,), (inputs, labels), a mapping, a Dataset or a DataLoader.
        public_batch: the same.
        rank: k; ValueError if one side's gradients span fewer directions.
        seed: of the random labels, the same for both sides.
        piece: samples run through the model at a time.
    """
    probe = Probe.of(model, loss_fn, seed=seed, piece=piece)
    private = Samples.of(private_batch, name="private")
    public = PublicData.of(public_batch, name="public")
    first, second = (  # the gradients of one are gone before those of the other are computed
        principal_subspace(probe.gradients(data), rank, of=data.name, fewer=False)
        for data in (private, public)
    )
    return subspace_distance(first, second)


@plain_arithmetic()
def subspace_distance(first: Subspace, second: Subspace) -> float:
    """√(1 − Σ cos²θ / k) of two subspaces of the same rank k with their bases written out.

    In float64 from here on: 1 − cos² of a small angle would be lost in float32. The bases are
    taken as they are, not as orthonormal as they should be.
    """
    k, same = first.dimensions, f"another subspace of rank {first.dimensions}"
    expect(second.dimensions == k, same, second.dimensions)
    gram = torch.zeros(2 * k, 2 * k, dtype=torch.float64, device=first.gradients.device)
    for name in first.gradients.shapes:
        terms = [basis.gradients.term(name) for basis in (first, second)]
        rows = torch.cat([term.rows(0, k) for term in terms]).double()
        gram += rows @ rows.T
    # Σ cos²θ is the trace of A⁻¹ C B⁻¹ Cᵀ, of the blocks [[A, C], [Cᵀ, B]].
    across: Tensor = torch.linalg.solve(gram[:k, :k], gram[:k, k:])
    back: Tensor = torch.linalg.solve(gram[k:, k:], gram[k:, :k])
    return float((1 - (across * back.T).sum() / k).clamp(0, 1).sqrt())


@dataclass(frozen=True, kw_only=True)
class UnprivateRow:
    """What is known about one candidate; each number depends on private records."""

    name: str
    samples: int
    unprivate_gsd: float
    unprivate_captured_energy: float  # mean over the private sample


@dataclass(frozen=True, kw_only=True)
class UnprivateRanking:
    """Candidates, nearest first by GSD; `unprivate_pairs[a][b]` is the GSD of any two datasets."""

    rows: tuple[UnprivateRow, ...]
    rank: int
    unprivate_pairs: dict[str, dict[str, float]] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; says that it is not private."""
        return {"private": False, "warning": _WARNING, **asdict(self)}

    def __rich__(self) -> Table:
        shown = Table(title=f"Public candidates, k = {self.rank} (NOT PRIVATE)", caption=_WARNING)
        shown.add_column("candidate")
        for heading in ("samples", "GSD ↓", "captured energy ↑"):
            shown.add_column(heading, justify="right")
        for row in self.rows:
            found = row.unprivate_gsd, row.unprivate_captured_energy
            shown.add_row(row.name, f"{row.samples:,}", *(f"{value:.3f}" for value in found))
        return shown

    def __str__(self) -> str:
        console = Console(width=110, color_system=None)
        with console.capture() as capture:
            console.print(self)
        return capture.get()


def rank_public(
    model: nn.Module,
    loss_fn: Loss,
    private: object,
    candidates: Mapping[str, object],
    *,
    rank: int = 16,
    samples: int = 2000,
    seed: int = 0,
    piece: int = PIECE,
    ledger: Ledger | None = None,
) -> UnprivateRanking:
    """Compare public candidates with private data, without privacy, and say so.

    `model`, `loss_fn` and `piece` are as for `gsd`.

    Args:
        private: the private data; at most `samples` of it are looked at.
        candidates: public datasets by name.
        rank: k, how many directions of each are compared.
        samples: how many samples of each dataset.
        seed: of the samples that are drawn and of their random labels.
        ledger: where to note that this was looked at; the numbers themselves never go there.
    """
    expect(bool(candidates), "at least 1 public candidate", 0)
    if _PRIVATE in candidates:
        raise ValueError(f"Expected no candidate of the name {_PRIVATE!r}: rename it.")
    probe = Probe.of(model, loss_fn, seed=seed, piece=piece)
    data = {
        name: drawn(source, samples, seed=seed, name=name, kind=PublicData)
        for name, source in candidates.items()
    }
    if ledger is not None:
        ledger.warn(LOOKED_AT)
    mine = drawn(private, samples, seed=seed, name=_PRIVATE, kind=Samples)
    subspaces = {
        each.name: principal_subspace(probe.gradients(each), rank, of=each.name, fewer=False)
        for each in (mine, *data.values())
    }
    own = probe.gradients(mine, own_labels=True)
    captured = energies(own, [subspaces[name] for name in data]).mean(0).tolist()
    pairs: dict[str, dict[str, float]] = {name: {name: 0.0} for name in subspaces}
    for a, b in itertools.combinations(subspaces, 2):
        pairs[a][b] = pairs[b][a] = subspace_distance(subspaces[a], subspaces[b])
    rows = [
        UnprivateRow(
            name=name,
            samples=each.count,
            unprivate_gsd=pairs[_PRIVATE][name],
            unprivate_captured_energy=energy,
        )
        for (name, each), energy in zip(data.items(), captured, strict=True)
    ]
    rows.sort(key=lambda row: row.unprivate_gsd)
    return UnprivateRanking(rows=tuple(rows), rank=rank, unprivate_pairs=pairs)
