"""A choice by units: whoever has many records has one voice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpspan import Ledger, choose_public
from dpspan.accounting.picking import pick
from dpspan.choose import selection
from dpspan.choose.selection import UNIT


def records(sizes: list[int], seed: int) -> tuple[Tensor, Tensor, list[int]]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), 6, generator=g, dtype=torch.float64)
    ids = [unit for unit, size in enumerate(sizes) for _ in range(size)]
    return x, torch.arange(len(x)) % 3, ids


def sums_of(x: Tensor, y: Tensor, **changes: Any) -> tuple[list[int], Ledger, str]:
    """What the choice is drawn by."""
    seen: list[list[int]] = []

    def remembered(mechanism: str, sums: list[int], *rest: Any) -> int:
        seen.append(list(sums))
        return pick(mechanism, sums, *rest)

    g = torch.Generator().manual_seed(12345)
    public = {n: torch.randn(20, 6, generator=g, dtype=torch.float64) * s for n, s in NAMES.items()}
    torch.manual_seed(0)
    ledger = Ledger()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "pick", remembered)
        choice = choose_public(
            nn.Linear(6, 3).double(),
            nn.CrossEntropyLoss(),
            (x, y),
            public,
            ledger=ledger,
            rank=3,
            threshold=0.5,
            piece=8,
            **changes,
        )
    [sums] = seen
    return sums, ledger, choice.note


NAMES = {"near": 1.0, "far": 30.0}


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    newcomer=st.integers(1, 12),
    broken=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_whole_unit_raises_each_sum_by_one_at_most(
    sizes: list[int], newcomer: int, broken: bool, seed: int
) -> None:
    x, y, ids = records([*sizes, newcomer], seed)
    kept = sum(sizes)
    if broken:
        x[kept] = torch.nan
    with_it, ledger, _ = sums_of(x, y, unit=ids, records_per_unit=12)
    without, _, _ = sums_of(x[:kept], y[:kept], unit=ids[:kept], records_per_unit=12)
    slack = 1e-6 * UNIT  # records are scored in other company
    assert all(-slack <= a - b <= UNIT + slack for a, b in zip(with_it, without, strict=True))
    assert with_it[-1] - without[-1] == UNIT // 2  # no public data: the threshold, once a unit
    assert ledger.unit == "unit"


def test_the_score_of_a_unit_is_the_mean_of_its_records() -> None:
    x, y, ids = records([4, 1, 3], 5)
    together, _, _ = sums_of(x, y, unit=ids)
    alone = torch.tensor([sums_of(x[i : i + 1], y[i : i + 1])[0] for i in range(len(x))])
    means = torch.stack([part.double().mean(0) for part in alone.split([4, 1, 3])]).sum(0)
    assert torch.allclose(torch.tensor(together).double(), means, atol=10 + 1e-6 * UNIT)
    by_record, ledger, note = sums_of(x, y, records=1000)
    assert torch.allclose(torch.tensor(by_record).double(), alone.sum(0).double(), atol=10 + 20)
    assert ledger.unit == "record"
    assert "1,000 records" in note


def test_what_is_said_is_about_units_and_one_ledger_is_about_one_kind() -> None:
    x, y, ids = records([4, 1, 3], 5)
    _, ledger, note = sums_of(x, y, unit=lambda record: int(record[0][0] > 0), records=1000)
    assert "1,000 units" in note
    _, _, unsaid = sums_of(x, y, unit=ids)
    assert "number of units" in unsaid
    with pytest.raises(ValueError, match="about each unit"):
        choose_public(
            nn.Linear(6, 3).double(),
            nn.CrossEntropyLoss(),
            (x, y),
            {"a": x[:2] + 1, "b": x[:2] - 1},
            ledger=ledger,
        )


def test_no_more_records_of_a_unit_than_asked_for() -> None:
    x, y, ids = records([50, 2], 1)
    read = selection.sampled_batches(
        selection.private_loader((x, y)), 1.0, 8, selection.Units.of(ids, 5, records=52)
    )
    owners = torch.cat([owner for _, _, owner in read])
    assert owners.bincount().tolist() == [5, 2]
