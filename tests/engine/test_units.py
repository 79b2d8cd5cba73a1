"""The unit of privacy: all records of one id are drawn, clipped and protected together."""

from __future__ import annotations

import copy
import datetime
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import dpspan
from dpspan import (
    DPSGD,
    GEP,
    PDPSGD,
    RGP,
    BiasedGEP,
    Budget,
    CaptureError,
    Ledger,
    MirrorDescent,
    PrivacyEngine,
)
from dpspan.accounting.events import step_event
from dpspan.engine.sampling import PartitionDraw, PoissonDraw, PrivateLoader
from dpspan.mechanisms.noise import Noise
from dpspan.model.guard import keeps_order
from dpspan.support.units import Units

CLIP, Z = 0.1, 2.0
SIZES = (1, 5, 3, 20, 2)
PUBLIC = torch.randn(12, 6, generator=torch.Generator().manual_seed(12345), dtype=torch.float64)
METHODS = {
    "dpsgd": lambda: DPSGD(clip=CLIP),
    "automatic": lambda: DPSGD(clip=CLIP, clipping=dpspan.AutomaticClipping()),
    "pdpsgd": lambda: PDPSGD(public=PUBLIC, rank=4, clip=CLIP),
    "gep": lambda: GEP(public=PUBLIC, rank=4, clip=CLIP, residual_clip=0.05),
    "biased-gep": lambda: BiasedGEP(public=PUBLIC, rank=4, clip=CLIP),
    "rgp": lambda: RGP(rank=1, clip=CLIP),
    "mirror": lambda: MirrorDescent(
        public=(PUBLIC, torch.arange(12) % 2), clip=CLIP, mixing=dpspan.ConstantMixing(share=0.5)
    ),
}


def ids_of(sizes: Any) -> list[str]:
    return [f"patient {unit}" for unit, size in enumerate(sizes) for _ in range(size)]


def table(sizes: Any = SIZES, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), 6, generator=g, dtype=torch.float64)
    return x, (x.sum(1) > 0).long()


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()


class Listening(Noise):
    """Notes what is released and with how much noise, of which it adds none."""

    def __init__(self) -> None:
        super().__init__(0)
        self.heard: list[tuple[Tensor, float]] = []

    def add(self, parts: Any, std: float) -> Any:
        self.heard.append((torch.cat([p.flatten() for p in parts.values()]).clone(), std))
        return dict(parts)


def train(
    x: Tensor, y: Tensor, *, model: nn.Module | None = None, views: int = 1, **changes: Any
) -> tuple[PrivacyEngine, nn.Module, list[tuple[Tensor, float]]]:
    """An epoch, by default of one step with everybody in it."""
    model, engine = model or network(), PrivacyEngine(debug_seed=0)
    arguments = {
        "noise_multiplier": Z,
        "method": DPSGD(clip=CLIP),
        "sample_rate": 1.0,
        "expected_batch_size": 4,
        **changes,
    }
    criterion = nn.CrossEntropyLoss()
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=4),
        criterion=criterion,
        views=views,
        **arguments,
    )
    noise = engine._run._noise = Listening()
    for inputs, labels in loader:
        optimizer.zero_grad()
        rows = inputs.repeat_interleave(views, 0)
        criterion(model(rows), labels.repeat_interleave(views)).backward()
        optimizer.step()
    return engine, model, noise.heard


def oracle(model: nn.Module, x: Tensor, y: Tensor, ids: list[Any], clip: float = CLIP) -> Tensor:
    """One unit at a time, by plain autograd: the mean gradient of its records, clipped."""
    total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for unit in dict.fromkeys(ids):
        own = [place for place, each in enumerate(ids) if each == unit]
        loss = nn.functional.cross_entropy(model(x[own]), y[own])
        parts = torch.autograd.grad(loss, list(model.parameters()))
        gradient = torch.cat([part.flatten() for part in parts])
        if gradient.isfinite().all():
            total += gradient * min(1.0, clip / max(float(gradient.norm()), 1e-300))
    return total


# -- what a step is -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_physical_batch_size": 20},
        {"views": 3},
        {"views": 3, "max_physical_batch_size": 24},
        {"poisson_sampling": False},
    ],
)
@pytest.mark.parametrize("order", ["together", "scattered"])
def test_a_step_is_the_sum_of_the_units_clipped_means(changes: dict[str, Any], order: str) -> None:
    x, y = table()
    ids = ids_of(SIZES)
    if order == "scattered":
        places = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))
        x, y, ids = x[places], y[places], [ids[i] for i in places]
    expected = oracle(network(), x, y, ids)
    engine, _, [(total, std)] = train(x, y, unit=ids, records_per_unit=20, **changes)
    assert std == Z * CLIP
    assert torch.allclose(total, expected, rtol=1e-9, atol=1e-12)
    assert engine.ledger.steps == 1


@pytest.mark.parametrize(
    "unit",
    [
        lambda ids: np.array(ids),
        lambda ids: tuple(ids),
        lambda ids: torch.tensor([int(i[8:]) for i in ids]),
        lambda ids: [np.int64(i[8:]) for i in ids],
        lambda ids: [(i, datetime.date(2026, 1, 1)) for i in ids],
        lambda ids: lambda record: record[2],  # a tensor of one number
    ],
    ids=["array", "tuple", "tensor", "numpy numbers", "pairs", "function"],
)
def test_ids_come_in_many_forms(unit: Any) -> None:
    x, y = table()
    ids = ids_of(SIZES)
    numbers = torch.tensor([int(i[8:]) for i in ids])
    engine = PrivacyEngine()
    dataset = TensorDataset(x, y, numbers)
    model = network()
    *_, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(dataset, batch_size=2),
        noise_multiplier=1.0,
        unit=unit(ids),
    )
    assert loader.draw == PoissonDraw(records=5, sample_rate=2 / 5, steps_per_epoch=2)


def test_no_more_records_of_a_unit_than_asked_for_and_each_time_others() -> None:
    sizes = (1, 50, 3)
    x = torch.arange(54.0)[:, None]
    units = Units.of(ids_of(sizes), 4, records=54)
    draw = PoissonDraw(records=3, sample_rate=1.0, steps_per_epoch=40)
    loader = PrivateLoader(DataLoader(x, batch_size=3), draw, units=units)
    seen = [batch.flatten().tolist() for batch in loader]
    assert all(len(batch) == 1 + 4 + 3 for batch in seen)
    large = [frozenset(record for record in batch if 1 <= record < 51) for batch in seen]
    assert all(len(each) == 4 for each in large)
    assert len(set(large)) > 30  # of 230,300 possible ones
    # Each of 50 is drawn with probability 4/50 in each of 40 steps: missed by all of them with
    # probability 0.036, so 18 of 50 or more are missed with one of 1e-12.
    assert len(set().union(*large)) > 50 - 18


def test_which_records_a_unit_brings_does_not_depend_on_the_others() -> None:
    one, other = (Units.of(ids_of((30, *rest)), 4, records=30 + sum(rest)) for rest in ([], [40]))
    for step in range(1, 20):
        assert one.drawn(0, [7, step]) == other.drawn(0, [7, step])
    assert one.drawn(0, [7, 1]) != one.drawn(0, [7, 2])


def test_a_unit_is_neither_divided_by_pieces_nor_by_processes() -> None:
    sizes = (1, 5, 3, 7, 2, 2, 6, 4)
    ids = ids_of(sizes)
    x = torch.arange(float(len(ids)))[:, None]
    for world in (1, 2, 3):
        pieces: list[list[Any]] = []
        for rank in range(world):
            units = Units.of(ids, 5, records=len(ids))
            draw = PoissonDraw(records=len(sizes), sample_rate=0.7, steps_per_epoch=30)
            loader = PrivateLoader(DataLoader(x, batch_size=3), draw, 6, seed=1, units=units)
            loader._processes.rank, loader._processes.world = rank, world
            told: list[Any] = []
            loader.on_piece = told.append
            own = []
            for batch in loader:
                piece, records = told.pop(), batch.flatten().long().tolist()
                assert len(records) <= 6
                if not piece.samples:
                    assert piece.units is None
                    continue
                assert sum(piece.units) == piece.samples == len(records)
                parts = torch.tensor(records).split(list(piece.units))
                whose = [{ids[i] for i in part} for part in parts]
                assert all(len(each) == 1 for each in whose)
                for part, (owner,) in zip(parts, whose, strict=True):
                    assert len(part) == min(5, sizes[int(owner[8:])])
                own += [(loader.position - piece.last, owner) for (owner,) in whose]
            assert len(own) == len(set(own))  # once in a step
            pieces.append(own)
        together = [each for own in pieces for each in own]
        assert len(together) == len(set(together))
        if world == 1:
            drawn = set(together)
        assert set(together) == drawn  # whoever is drawn does not depend on the processes


def test_partition_sampling_takes_each_unit_once() -> None:
    units = Units.of(ids_of(SIZES), 3, records=sum(SIZES))
    loader = PrivateLoader(
        DataLoader(torch.arange(float(sum(SIZES)))[:, None], batch_size=2),
        PartitionDraw(records=5, batches=3),
        units=units,
    )
    told: list[Any] = []
    loader.on_piece = told.append
    list(loader)
    assert sorted(n for piece in told for n in piece.units or ()) == [1, 2, 3, 3, 3]


# -- sensitivity, by brute force ------------------------------------------------------------------


def distance(one: Any, other: Any) -> float:
    """Between two releases, in standard deviations of their noise."""
    assert [std for _, std in one] == [std for _, std in other]
    parts = zip(one, other, strict=True)
    return sum(float(((a - b) / std).square().sum()) for (a, std), (b, _) in parts) ** 0.5


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=8, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    newcomer=st.integers(1, 9),
    huge=st.sampled_from([1.0, 1e3, 1e-4]),
    broken=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_whole_unit_moves_a_release_by_one_clip_at_most(
    name: str, sizes: list[int], newcomer: int, huge: float, broken: bool, seed: int
) -> None:
    """Whatever its records are and however many: by 1/z of the noise, for every method."""
    x, y = table([*sizes, newcomer], seed)
    ids, kept = ids_of([*sizes, newcomer]), sum(sizes)
    x[kept:] = huge * x[kept:].abs()  # of one mind, so that they add up
    y[kept:] = 1
    if broken:
        x[kept] = torch.nan
    method = METHODS[name]()
    options = {"method": method, "records_per_unit": 4}
    _, _, with_it = train(x, y, unit=ids, **options)
    _, _, without = train(x[:kept], y[:kept], unit=ids[:kept], **options)
    assert all(value.isfinite().all() for value, _ in with_it)
    assert distance(with_it, without) <= 1 / Z * (1 + 1e-6)
    if broken and newcomer <= 4:  # else it may not have been drawn
        assert distance(with_it, without) <= 1e-6


def test_by_records_the_same_unit_moves_it_by_many_clips() -> None:
    """What the test above would find if units were not clipped once."""
    x, y = table((2, 9))
    x[2:], y[2:] = 1e3, 1
    *_, with_it = train(x, y)
    *_, without = train(x[:2], y[:2])
    assert distance(with_it, without) == pytest.approx(9 / Z, rel=1e-6)


def test_another_unit_does_not_change_what_a_unit_gives() -> None:
    """In pieces, too: of which the loss is a mean over others' records."""
    x, y = table()
    ids = ids_of(SIZES)
    *_, [(alone, _)] = train(x[:1], y[:1], unit=ids[:1])
    *_, [(rest, _)] = train(x[1:], y[1:], unit=ids[1:], max_physical_batch_size=20)
    *_, [(both, _)] = train(x, y, unit=ids, records_per_unit=20, max_physical_batch_size=20)
    *_, [(largest, _)] = train(x[1:], y[1:], unit=ids[1:], records_per_unit=20)
    assert torch.allclose(both, alone + largest, atol=1e-12)
    assert not torch.allclose(rest, largest)  # sixteen of twenty records of one unit


# -- what is said and kept ------------------------------------------------------------------------


def with_epsilon(sizes: Any, **changes: Any) -> PrivacyEngine:
    x, y = table(sizes)
    model, engine = network(), PrivacyEngine(debug_seed=0)
    arguments = {"target_epsilon": 3.0, "target_delta": 1e-3, "epochs": 2, **changes}
    engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=20),
        **arguments,
    )
    return engine


def test_rate_and_epsilon_are_those_of_units() -> None:
    """Golden: 100 units of 1 to 50 records, 20 a batch.

    dp-accounting says that z = 1.0153 is ε = 2.9994. By records there are 2,550, and a smaller z
    protects each of them, but not the fifty of one patient.
    """
    sizes = [1 + unit % 50 for unit in range(100)]
    by_unit, by_record = with_epsilon(sizes, unit=ids_of(sizes)), with_epsilon(sizes)
    assert by_unit.plan.sampling == PoissonDraw(records=100, sample_rate=0.2, steps_per_epoch=5)
    assert by_unit.noise_multiplier == pytest.approx(1.0153, abs=2e-4)
    assert by_record.noise_multiplier == pytest.approx(0.5431, abs=2e-4)


def test_delta_is_compared_with_the_number_of_units() -> None:
    with pytest.warns(UserWarning, match=r"every unit with that probability.*number of units"):
        engine = with_epsilon([1] * 2000, target_delta=6e-4, unit=ids_of([1] * 2000))
    assert any("number of units" in warning for warning in engine.certificate()["warnings"])


def test_the_certificate_and_the_plan_speak_of_units() -> None:
    x, y = table()
    engine, *_ = train(x, y, unit=ids_of(SIZES), sample_rate=None, expected_batch_size=None)
    document = engine.certificate(1e-5)
    assert document["adjacency"] == "add or remove one unit: every record of one id"
    assert document["training"]["records_per_unit"] == 16
    assert document["discloses_number_of_records"]
    assert any(w.startswith("the number of private units is") for w in document["warnings"])
    assert "unit        all records of one id, of which a step uses at most 16" in str(engine.plan)
    plain, *_ = train(x, y)
    assert plain.certificate(1e-5)["adjacency"] == "add or remove one record"
    assert "records_per_unit" not in plain.certificate(1e-5)["training"]
    assert "unit " not in str(plain.plan)


def test_a_ledger_is_of_records_or_of_units() -> None:
    x, y = table()
    ledger = Ledger()
    ledger.charge(step_event(1.0, 0.5))
    with pytest.raises(ValueError, match=r"about each record, .* protects each unit"):
        PrivacyEngine(ledger=ledger).make_private(
            module=(model := network()),
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=4),
            noise_multiplier=1.0,
            unit=ids_of(SIZES),
        )
    engine, *_ = train(x, y, unit=ids_of(SIZES))
    state = engine.ledger.state_dict()
    assert Ledger.from_state(state).adjacency == engine.ledger.adjacency
    with pytest.raises(ValueError, match="about each record"):
        ledger.load_state_dict(state)
    with pytest.raises(ValueError, match="about each unit"):
        Ledger.from_state(state).protect("record")
    with pytest.raises(ValueError, match="what is protected to be one of"):
        Ledger.from_state({**state, "unit": "patient"})
    assert Ledger(budget=Budget(epsilon=1.0, delta=1e-5)).unit == "record"


def test_a_run_of_units_goes_on_as_one() -> None:
    x, y = table()
    engine, *_ = train(x, y, unit=ids_of(SIZES), sample_rate=0.5)
    state = copy.deepcopy(engine.state_dict())
    again, *_ = train(x, y, unit=ids_of(SIZES), sample_rate=0.5)
    again.load_state_dict(state)
    assert again.ledger.steps == 4
    other, *_ = train(x, y, sample_rate=0.5)
    with pytest.raises(ValueError, match="records_per_unit is 16 there, None here"):
        other.load_state_dict(state)


def test_copies_among_public_data_are_told_by_units() -> None:
    x, y = table()
    public = torch.cat([PUBLIC, x[1:4], x[7:8]])  # of the second unit and of the third
    with pytest.raises(ValueError, match=r"4 of the 16 samples.*as records of 2 units.*their ids"):
        train(x, y, unit=ids_of(SIZES), method=BiasedGEP(public=public, rank=4, clip=CLIP))


# -- refusals -------------------------------------------------------------------------------------

TODAY = datetime.date(2026, 1, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids: ids[:-1], "one id in unit for each of the 31 records, got 30"),
        (lambda ids: "patient", "Expected unit to hold one id for each record"),
        (lambda ids: [*ids[:-1], None], "Record 30 has no id in unit"),
        (lambda ids: [*range(30), float("nan")], "Record 30 has no id in unit"),
        (lambda ids: np.array([*range(30), np.nan]), "Record 30 has no id in unit"),
        (lambda ids: ["", *ids[1:]], "Record 0 has no id in unit"),
        (lambda ids: [*ids[:-1], 7], "are of several kinds"),
        (lambda ids: [*ids[:-1], b"p7"], "are of several kinds"),
        (lambda ids: [*((i, "7") for i in range(30)), (30, 7)], "are of several kinds"),
        (lambda ids: [*[(7,)] * 30, 7], "are of several kinds"),
        (lambda ids: [*[TODAY] * 30, datetime.datetime(2026, 1, 1)], "are of several kinds"),
        (lambda ids: [*ids[:-1], ("a", None)], "Record 30 has no id in unit"),
        (lambda ids: lambda record: None, "Record 0 has no id in unit"),
    ],
)
def test_ids_that_leave_a_record_to_nobody_are_refused(change: Any, message: str) -> None:
    x, y = table()
    with pytest.raises(ValueError, match=message):
        train(x, y, unit=change(ids_of(SIZES)))


@pytest.mark.parametrize("each", [[1], {1}, object(), torch.zeros(2), np.zeros(2)])
def test_ids_that_cannot_be_compared_are_refused(each: Any) -> None:
    x, y = table()
    with pytest.raises(TypeError, match=r"numbers or texts.*for record 30"):
        train(x, y, unit=[*ids_of(SIZES)[:-1], each])


def test_settings_that_do_not_go_together_are_refused() -> None:
    x, y = table()
    unit = ids_of(SIZES)
    with pytest.raises(ValueError, match="unit= and cuda_graphs=True"):
        train(x, y, unit=unit, cuda_graphs=True)
    with pytest.raises(ValueError, match=r"max_physical_batch_size of at least 16.*got 8"):
        train(x, y, unit=unit, max_physical_batch_size=8)
    with pytest.raises(ValueError, match="records_per_unit to be an integer"):
        train(x, y, unit=unit, records_per_unit=0)
    with pytest.raises(ValueError, match=r"draw.records 5, the units's, got 31"):
        PrivateLoader(
            DataLoader(x, batch_size=2),
            PoissonDraw(records=31, sample_rate=0.5, steps_per_epoch=2),
            units=Units.of(unit, 16, records=31),
        )


def test_a_loop_that_changes_the_order_is_refused() -> None:
    x, y = table()
    model, engine = network(), PrivacyEngine(debug_seed=0)
    *_, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=5),
        noise_multiplier=1.0,
        unit=ids_of(SIZES),
    )
    with pytest.raises(CaptureError, match=r"into another order.*another unit than its own"):
        for inputs, _ in loader:
            model(inputs.flip(0))


@pytest.mark.parametrize("views", [1, 3])
def test_what_is_seen_of_an_order(views: int) -> None:
    given = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    rows = given.repeat_interleave(views, 0)
    assert keeps_order(given, rows, views)
    assert keeps_order(given, rows.flip(0), views) is False
    assert keeps_order(given, rows + 0.1 * torch.randn(rows.shape), views)
    assert keeps_order(given, torch.randn(rows.shape), views) is None
    assert keeps_order(given, rows.double(), views) is None
    assert keeps_order(torch.ones(40), torch.ones(40 * views), views) is None
    labels = torch.arange(40) % 2  # another number of each record, as often 1 as this one
    assert keeps_order(labels, (1 - labels).repeat_interleave(views), views) is None


def test_a_loop_whose_order_cannot_be_seen_is_on_the_certificate() -> None:
    x, y = table()
    model, engine = network(), PrivacyEngine(debug_seed=0)
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(x.float(), y), batch_size=5),
        noise_multiplier=1.0,
        unit=ids_of(SIZES),
    )
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs.double()), labels).backward()
        optimizer.step()
    with pytest.warns(UserWarning, match="unit=: it could not be checked that the rows"):
        engine.certificate(1e-5)
    clean, *_ = train(x, y, unit=ids_of(SIZES))
    assert not any("keep their order" in each for each in clean.certificate(1e-5)["warnings"])


class Sentences(Dataset[Any]):
    """Of several lengths."""

    def __len__(self) -> int:
        return 31

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        g = torch.Generator().manual_seed(place)
        return torch.randn(2 + place % 5, generator=g, dtype=torch.float64), place % 2


def padded(records: list[Any]) -> Any:
    rows = [nn.functional.pad(x, (0, 6 - len(x))) for x, _ in records]
    return default_collate([(row, y) for row, (_, y) in zip(rows, records, strict=True)])


def longest_first(records: list[Any]) -> Any:
    return padded(sorted(records, key=lambda record: -len(record[0])))


def masked(records: list[Any]) -> Any:
    x, y = padded(records)
    return x * (torch.rand_like(x) > 0.5), y


@pytest.mark.parametrize("collate", [padded, longest_first, masked])
def test_a_collate_fn_has_to_keep_the_order(collate: Any) -> None:
    model, engine = network(), PrivacyEngine(debug_seed=0)

    def start() -> None:
        engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(Sentences(), batch_size=5, collate_fn=collate),
            noise_multiplier=1.0,
            unit=ids_of(SIZES),
        )

    if collate is longest_first:
        with pytest.raises(ValueError, match=r"collate_fn .* puts records into another order"):
            start()
        return
    start()
    told = any("keep the order of records" in warning for warning in engine.ledger.warnings)
    assert not told  # labels show it where inputs are masked at random
