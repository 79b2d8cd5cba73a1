"""Public candidates in a table, by how close they are to a private sample. NOT PRIVATE.

Everything in a ranking depends on private records without noise: it is for the operator's eyes.
Whoever picks by it releases more than ε says; `choose_public` is the private way to pick.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from torch import Tensor, nn

from dpspan.accounting.ledger import Ledger
from dpspan.choose.energy import energies, own_gradients
from dpspan.choose.gsd import full_subspace, subspace_distance
from dpspan.choose.samples import combined, drawn
from dpspan.choose.subspaces import PIECE, Loss, evaluated, sample_gradients
from dpspan.choose.task2vec import fisher_embedding, task2vec_distance
from dpspan.choose.transport import has_classes, transport_distance
from dpspan.public.data import PublicData, Samples
from dpspan.subspaces.subspace import Subspace

_WARNING = "NOT PRIVATE: computed from private records without noise, for the operator's eyes only"
LOOKED_AT = "unprivate: public data were ranked by private data, without noise"
_PRIVATE = "private"


@dataclass(frozen=True, kw_only=True)
class UnprivateRow:
    """What is known about one candidate; each number depends on private records."""

    name: str
    samples: int
    unprivate_gsd: float
    unprivate_captured_energy: float  # mean over the private sample
    unprivate_task2vec: float
    unprivate_transport: float | None


@dataclass(frozen=True, kw_only=True)
class UnprivateRanking:
    """Candidates, nearest first by GSD; `unprivate_pairs[a][b]` is the GSD of any two datasets."""

    rows: tuple[UnprivateRow, ...]
    rank: int
    unprivate_pairs: dict[str, dict[str, float]] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; says that it is not private."""
        return {"private": False, "warning": _WARNING, **asdict(self)}

    def to_json(self) -> str:
        """`to_dict()` as a text."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def table(self) -> Table:
        """For rich to print."""
        with_transport = any(row.unprivate_transport is not None for row in self.rows)
        shown = Table(title=f"Public candidates, k = {self.rank} (NOT PRIVATE)", caption=_WARNING)
        shown.add_column("candidate")
        headings = ["samples", "GSD ↓", "captured energy ↑", "Task2Vec ↓"]
        for heading in [*headings, "transport ↓"] if with_transport else headings:
            shown.add_column(heading, justify="right")
        for row in self.rows:
            cells = [
                f"{row.samples:,}",
                f"{row.unprivate_gsd:.3f}",
                f"{row.unprivate_captured_energy:.3f}",
                f"{row.unprivate_task2vec:.3f}",
            ]
            if row.unprivate_transport is not None:
                cells.append(f"{row.unprivate_transport:.1f}")
            shown.add_row(row.name, *cells)
        return shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.table()

    def __str__(self) -> str:
        console = Console(width=110, color_system=None)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()

    def plot(self, path: str | Path) -> Path:
        """Bars of GSD and captured energy, as a picture."""
        from dpspan.choose.pictures import bars

        columns = {
            "GSD (smaller is closer)": [row.unprivate_gsd for row in self.rows],
            "captured energy": [row.unprivate_captured_energy for row in self.rows],
        }
        return bars(Path(path), [row.name for row in self.rows], columns, title=_WARNING)

    def cluster_map(self, path: str | Path) -> Path:
        """The GSD of all pairs of datasets, the private sample among them, as a picture."""
        from dpspan.choose.pictures import cluster_map

        names = list(self.unprivate_pairs)
        values = [[self.unprivate_pairs[a][b] for b in names] for a in names]
        return cluster_map(Path(path), names, values, title=_WARNING)


def rank_public(
    model: nn.Module,
    loss_fn: Loss,
    private: object,
    candidates: Mapping[str, object],
    *,
    rank: int = 16,
    samples: int = 2000,
    combinations: Sequence[Sequence[str]] = (),
    transport: bool = False,
    seed: int = 0,
    piece: int = PIECE,
    ledger: Ledger | None = None,
) -> UnprivateRanking:
    """Compare public candidates with private data, without privacy, and say so.

    Args:
        model: at the weights that training starts from, or a `ProbeNetwork`; run in
            evaluation mode, on a copy.
        loss_fn: a criterion, or a function (model, inputs[, labels]) → one loss per sample.
        private: the private data; at most `samples` of it are looked at.
        candidates: public datasets by name.
        rank: k, how many directions of each are compared.
        samples: how many samples of each dataset.
        combinations: names of candidates to try together, [("a", "b")] for example.
        transport: add the optimal-transport distance (the extra `choose`).
        seed: of the samples that are drawn and of their random labels.
        piece: samples run through the model at a time.
        ledger: where to note that this was looked at; the numbers themselves never go there.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> import dpspan
        >>> model, criterion = nn.Linear(8, 3), nn.CrossEntropyLoss()
        >>> records = torch.randn(100, 8)  # ones that you may look at
        >>> candidates = {"same": records, "other": torch.ones(50, 8)}
        >>> table = dpspan.rank_public(model, criterion, records, candidates, rank=2)
        >>> [row.name for row in table.rows]
        ['same', 'other']
    """
    model = evaluated(model)
    data = _candidates(candidates, combinations, samples, seed)
    if ledger is not None:
        ledger.warn(LOOKED_AT)
    mine = drawn(private, samples, seed=seed, name=_PRIVATE, kind=Samples)
    portraits = {
        name: _portrait(model, loss_fn, each, rank, seed, piece)
        for name, each in {_PRIVATE: mine, **data}.items()
    }
    own = own_gradients(model, loss_fn, mine, seed=seed, piece=piece)
    captured = energies(own, [portraits[name].subspace for name in data]).mean(0).tolist()
    del own
    pairs: dict[str, dict[str, float]] = {name: {name: 0.0} for name in portraits}
    for a, b in itertools.combinations(portraits, 2):
        apart = subspace_distance(portraits[a].subspace, portraits[b].subspace)
        pairs[a][b] = pairs[b][a] = apart
    labelled = transport and all(each.labelled and has_classes(each) for each in data.values())
    labelled = labelled and mine.labelled and has_classes(mine)
    own_fisher = portraits[_PRIVATE].fisher
    rows = [
        UnprivateRow(
            name=name,
            samples=each.count,
            unprivate_gsd=pairs[_PRIVATE][name],
            unprivate_captured_energy=energy,
            unprivate_task2vec=task2vec_distance(own_fisher, portraits[name].fisher),
            unprivate_transport=(
                transport_distance(mine, each, labelled=labelled) if transport else None
            ),
        )
        for (name, each), energy in zip(data.items(), captured, strict=True)
    ]
    rows.sort(key=lambda row: row.unprivate_gsd)
    return UnprivateRanking(rows=tuple(rows), rank=rank, unprivate_pairs=pairs)


@dataclass(frozen=True)
class _Portrait:
    """What is kept of a dataset when its gradients are gone."""

    subspace: Subspace
    fisher: Tensor


def _portrait(
    model: nn.Module, loss_fn: Loss, data: Samples, rank: int, seed: int, piece: int
) -> _Portrait:
    gradients = sample_gradients(model, loss_fn, data, seed=seed, piece=piece)
    fisher = fisher_embedding(gradients)
    return _Portrait(full_subspace(gradients, rank, of=data.name), fisher)


def _candidates(
    candidates: Mapping[str, object], together: Sequence[Sequence[str]], samples: int, seed: int
) -> dict[str, PublicData]:
    if not candidates:
        raise ValueError("Expected at least 1 public candidate, got none.")
    if _PRIVATE in candidates:
        raise ValueError(f"Expected no candidate of the name {_PRIVATE!r}: rename it.")
    unknown = sorted({name for names in together for name in names} - set(candidates))
    if unknown:
        raise ValueError(f"Expected combinations of the names of candidates, got {unknown}.")
    data = {
        name: drawn(source, samples, seed=seed, name=name, kind=PublicData)
        for name, source in candidates.items()
    }
    for names in together:
        joint = " + ".join(names)
        if joint in data:
            raise ValueError(
                f"Expected one candidate of the name {joint!r}, got that combination beside it: "
                "rename the candidate, or leave the combination out."
            )
        data[joint] = combined([data[name] for name in names], samples, seed=seed, name=joint)
    return data
