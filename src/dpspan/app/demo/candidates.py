"""How close the public candidates are: asked of public data for nothing, of private data for ε."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpspan.accounting.ledger import Ledger
from dpspan.app.demo.settings import CHOICE_EPSILON
from dpspan.app.run.folder import RunFolder, read_json
from dpspan.app.run.from_config import choose_once
from dpspan.choose import Choice, choose_public, gsd, unprivate_captured_energy
from dpspan.public.data import PublicData

RANK, MECHANISM = 16, "permute-and-flip"


def rank_on_stand_in(
    out: Path, model: nn.Module, stand_in: Tensor, candidates: Mapping[str, Tensor]
) -> Table:
    """Nearest first, kept for the report. Every sample is public, the stand-in too: show it."""
    loss, rows = nn.CrossEntropyLoss(), []
    for name, data in candidates.items():
        energy = unprivate_captured_energy(model, loss, stand_in, data, rank=RANK).mean()
        distance = gsd(model, loss, stand_in, data, rank=RANK)
        row = {"name": name, "samples": len(data), "gsd": distance}
        rows.append({**row, "captured_energy": float(energy)})
    rows.sort(key=lambda row: row["gsd"])
    folder, about = RunFolder(out), f"{len(stand_in)} of the opt-in scans"
    content = {"stand_in": about, "rank": RANK, "rows": rows}
    folder.write_json(out / "candidates.json", content)
    shown = Table(
        title="How close is each candidate?",
        caption="asked of public scans (ε = 0); GSD: 0 same directions, 1 none shared",
    )
    shown.add_column("candidate")
    for heading in ("samples", "GSD ↓", "captured energy ↑"):
        shown.add_column(heading, justify="right")
    for row in rows:
        numbers = (f"{row['gsd']:.3f}", f"{row['captured_energy']:.3f}")
        shown.add_row(row["name"], str(row["samples"]), *numbers)
    return shown


def choose(
    out: Path, model: nn.Module, private: TensorDataset, candidates: Mapping[str, Tensor]
) -> dict[str, Any]:
    """What the private records choose for ε, or have chosen, as in `choice.json`."""
    folder = RunFolder(out)
    if folder.choice.exists() and not folder.ledger.exists():  # 0.1's demo: a ledger in the choice
        folder.write_json(folder.ledger, read_json(folder.choice)["ledger"])
    digests = {name: PublicData.of(data, name=name).digest for name, data in candidates.items()}
    settings = {"mechanism": MECHANISM, "rank": RANK}

    def chosen(ledger: Ledger) -> Choice:
        loss, price = nn.CrossEntropyLoss(), {"epsilon": CHOICE_EPSILON, "records": len(private)}
        return choose_public(model, loss, private, candidates, ledger=ledger, **price, **settings)

    return choose_once(folder, {"settings": settings, "candidates": digests}, chosen)
