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
from dpspan.choose import choose_public, gsd, unprivate_captured_energy
from dpspan.public.data import PublicData
from dpspan.support.files import replacing

RANK = 16


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


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What the private records chose, and what it cost."""

    name: str
    epsilon: float
    note: str
    paid: dict[str, Any]  # the state of the ledger that holds the choice


def choose_once(
    path: Path,
    model: nn.Module,
    private: Dataset[Any],
    candidates: Mapping[str, Tensor],
    *,
    epsilon: float,
    records: int,
) -> Chosen:
    """Choose privately, or read what was chosen: to choose again would be one more release."""
    if not path.exists():
        ledger = Ledger()
        choice = choose_public(
            model,
            nn.CrossEntropyLoss(),
            private,
            candidates,
            ledger=ledger,
            epsilon=epsilon,
            rank=RANK,
            records=records,
        )
        content = {
            "chosen": choice.name,
            "epsilon": choice.epsilon,
            "note": choice.note,
            "asked": {
                "settings": {"mechanism": choice.mechanism, "rank": RANK},
                "candidates": {n: PublicData.of(c, name=n).digest for n, c in candidates.items()},
            },
            "ledger": ledger.state_dict(),
        }
        with replacing(path, what="the choice of public data") as temporary:
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            temporary.write_text(text, encoding="utf-8")
    content = json.loads(path.read_text(encoding="utf-8"))
    return Chosen(
        name=content["chosen"],
        epsilon=content["epsilon"],
        note=content["note"],
        paid=content["ledger"],
    )
