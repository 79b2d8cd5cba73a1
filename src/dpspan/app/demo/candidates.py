"""How close the public candidates are: asked of public data for nothing, of private data for ε."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import Dataset

from dpspan.accounting.ledger import Ledger
from dpspan.app.demo.settings import CHOICE_EPSILON
from dpspan.app.run.folder import RunFolder, read_json
from dpspan.app.run.from_config import choose_once
from dpspan.choose import Choice, choose_public, gsd, unprivate_captured_energy
from dpspan.public.data import PublicData

RANK, MECHANISM = 16, "permute-and-flip"


@dataclass(frozen=True, kw_only=True)
class Nearness:
    """A candidate beside public scans that stand in for the private ones."""

    name: str
    samples: int
    gsd: float
    captured_energy: float


def rank_on_stand_in(
    model: nn.Module, stand_in: Tensor, candidates: Mapping[str, Tensor]
) -> list[Nearness]:
    """Nearest first. Every sample is public, the stand-in too, so this may be shown."""
    loss = nn.CrossEntropyLoss()
    rows = [
        Nearness(
            name=name,
            samples=len(data),
            gsd=gsd(model, loss, stand_in, data, rank=RANK),
            captured_energy=float(
                unprivate_captured_energy(model, loss, stand_in, data, rank=RANK).mean()
            ),
        )
        for name, data in candidates.items()
    ]
    return sorted(rows, key=lambda row: row.gsd)


def table(rows: list[Nearness]) -> Table:
    """For rich to print."""
    shown = Table(
        title="How close is each candidate?",
        caption="asked of public scans (ε = 0); GSD: 0 same directions, 1 none shared",
    )
    shown.add_column("candidate")
    for heading in ("samples", "GSD ↓", "captured energy ↑"):
        shown.add_column(heading, justify="right")
    for row in rows:
        shown.add_row(row.name, str(row.samples), f"{row.gsd:.3f}", f"{row.captured_energy:.3f}")
    return shown


def save(path: Path, rows: list[Nearness], *, stand_in: str) -> None:
    """For the report."""
    content = {"stand_in": stand_in, "rank": RANK, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def choose(
    out: Path, model: nn.Module, private: Dataset[Any], candidates: Mapping[str, Tensor]
) -> dict[str, Any]:
    """What the private records choose for ε, or have chosen, as in `choice.json`."""
    folder = RunFolder(out)
    if folder.choice.exists() and not folder.ledger.exists():  # 0.1's demo: a ledger in the choice
        folder.write_json(folder.ledger, read_json(folder.choice)["ledger"])
    asked = {
        "settings": {"mechanism": MECHANISM, "rank": RANK},
        "candidates": {n: PublicData.of(c, name=n).digest for n, c in candidates.items()},
    }

    def chosen(ledger: Ledger) -> Choice:
        return choose_public(
            model,
            nn.CrossEntropyLoss(),
            private,
            candidates,
            ledger=ledger,
            epsilon=CHOICE_EPSILON,
            rank=RANK,
            mechanism=MECHANISM,
            records=len(private),  # type: ignore[arg-type]
        )

    return choose_once(folder, asked, chosen)
