"""The sampler is half of the privacy proof: its law is tested, not only its shape."""

from __future__ import annotations

import copy
import json
import math
import multiprocessing
import os
import pickle
import time
from collections import UserDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from dpspan.engine.plan import plan_sampling
from dpspan.engine.sampling import (
    BatchMemoryManager,
    Draw,
    PartitionDraw,
    Piece,
    PoissonDraw,
    PrivateLoader,
    records_of,
)
from dpspan.support.randomness import FreshWorker

# Every statistical test has this chance to fail under the right law. The seeds are fixed.
P_VALUE = 1e-6


def seeded(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def inclusion(draw: Draw, generator: np.random.Generator) -> Tensor:
    """One epoch as a 0/1 matrix, steps × records; counts, so that duplicates would show."""
    rows = [torch.bincount(b, minlength=draw.records) for b in draw.epoch(generator)]
    return torch.stack(rows).double()


def assert_law(observed: np.ndarray, pmf: np.ndarray) -> None:
    """Chi-square test of integers against a pmf on 0..len-1, rare values taken together."""
    counts, expected = np.bincount(observed, minlength=len(pmf)), pmf * len(observed)
    common = expected >= 5
    observed_bins = [*counts[common], counts[~common].sum()]
    expected_bins = [*expected[common], expected[~common].sum()]
    assert stats.chisquare(observed_bins, expected_bins).pvalue > P_VALUE


def assert_uncorrelated(rows: Tensor, others: Tensor | None = None) -> None:
    """Sample correlations of independent 0/1 variables: √steps·r is standard normal."""
    a = (rows - rows.mean(0)) / rows.std(0, correction=0)
    b = a if others is None else (others - others.mean(0)) / others.std(0, correction=0)
    z = (a.T @ b / math.sqrt(len(a))).numpy()
    z = z[np.triu_indices(len(z), 1)] if others is None else z.flatten()
    assert np.abs(z).max() < stats.norm.isf(P_VALUE / 2 / z.size)  # no pair stands out
    assert stats.chi2.sf((z**2).sum(), z.size) > P_VALUE  # nor are all a little correlated
    assert abs(z.sum()) / math.sqrt(z.size) < stats.norm.isf(P_VALUE / 2)  # nor with one sign


# --- the draws ----------------------------------------------------------------------------------


def test_poisson_batch_sizes_are_binomial():
    draw = PoissonDraw(records=100, sample_rate=0.07, steps_per_epoch=20_000)
    sizes = np.array([len(batch) for batch in draw.epoch(seeded(0))])
    assert len(sizes) == 20_000
    assert_law(sizes, stats.binom.pmf(np.arange(101), 100, 0.07))


def test_poisson_includes_records_independently_and_equally():
    draw = PoissonDraw(records=40, sample_rate=0.3, steps_per_epoch=5_000)
    generator = seeded(1)
    first, second = inclusion(draw, generator), inclusion(draw, generator)
    assert first.max() == 1  # no record twice in a batch
    rate_z = (first.sum(0) - 5_000 * 0.3) / math.sqrt(5_000 * 0.3 * 0.7)
    assert stats.chi2.sf((rate_z**2).sum(), 40) > P_VALUE
    assert_uncorrelated(first)  # across records
    assert_uncorrelated(first[:-1], first[1:])  # across steps
    assert_uncorrelated(first, second)  # across epochs


def test_poisson_resolves_rates_below_a_float32_uniform():
    # 8e7 draws: 0.008 inclusions expected; a float32 uniform is 0 with 2^-24, which makes 4.8.
    draw = PoissonDraw(records=2_000_000, sample_rate=1e-10, steps_per_epoch=40)
    assert sum(len(batch) for batch in draw.epoch(seeded(2))) == 0


def test_poisson_rate_one_takes_everyone():
    draw = PoissonDraw.one_pass(records=50, sample_rate=1.0)
    assert [batch.tolist() for batch in draw.epoch(seeded(3))] == [list(range(50))]


@pytest.mark.parametrize(("rate", "steps"), [(1.0, 1), (0.8, 1), (0.6, 2), (0.01, 100)])
def test_one_pass_has_one_over_q_steps(rate, steps):
    assert PoissonDraw.one_pass(records=10, sample_rate=rate).steps_per_epoch == steps


def test_partition_takes_every_record_once_per_epoch():
    draw = PartitionDraw(records=101, batches=7)
    generator = seeded(4)
    for _ in range(20):
        batches = inclusion(draw, generator)
        assert batches.shape == (7, 101)
        assert (batches.sum(0) == 1).all()


def test_partition_sizes_are_multinomial_and_choices_independent():
    records, batches, epochs = 30, 4, 5_000
    draw, generator = PartitionDraw(records=records, batches=batches), seeded(5)
    drawn = torch.stack([inclusion(draw, generator) for _ in range(epochs)])
    sizes = drawn.sum(2).long().numpy()
    for batch in range(batches):  # binomial margins: equal-sized batches would fail
        assert_law(sizes[:, batch], stats.binom.pmf(np.arange(records + 1), records, 1 / batches))
    # cov(n_i, n_j) = -n/B²; of a product of two sizes the variance is estimated.
    centred = sizes - records / batches
    products = centred[:, 0] * centred[:, 1]
    z = (products.mean() + records / batches**2) / (products.std() / math.sqrt(epochs))
    assert abs(z) < stats.norm.isf(P_VALUE / 2)
    assert_uncorrelated(drawn[:, 0])  # across records
    assert_uncorrelated(drawn[:-1, 0], drawn[1:, 0])  # across epochs


@pytest.mark.parametrize("records", [2, 17, 1_000])
def test_partition_without_the_last_record_moves_no_other(records):
    with_it = PartitionDraw(records=records, batches=5).epoch(seeded(6))
    without = PartitionDraw(records=records - 1, batches=5).epoch(seeded(6))
    for a, b in zip(with_it, without, strict=True):
        assert [i for i in a.tolist() if i != records - 1] == b.tolist()


def test_repr_hides_the_number_of_records():
    assert "12345" not in repr(PoissonDraw.one_pass(records=12345, sample_rate=0.5))
    assert "12345" not in repr(PartitionDraw(records=12345, batches=2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: PoissonDraw.one_pass(records=3, sample_rate=1.5),
            r"Expected 0 < sample_rate <= 1, got 1\.5\.",
        ),
        (
            lambda: PoissonDraw.one_pass(records=3, sample_rate=0.0),
            r"Expected 0 < sample_rate <= 1, got 0\.0\.",
        ),
        (
            lambda: PoissonDraw(records=3, sample_rate=math.nan, steps_per_epoch=1),
            r"Expected sample_rate to be a number, got nan\.",
        ),
        (
            lambda: PoissonDraw(records=0, sample_rate=0.5, steps_per_epoch=1),
            "Expected records to be an integer of at least 1, got 0",
        ),
        (
            lambda: PoissonDraw(records=3, sample_rate=0.5, steps_per_epoch=0),
            "Expected steps_per_epoch to be an integer of at least 1, got 0",
        ),
        (
            lambda: PartitionDraw(records=0, batches=1),
            "Expected records to be an integer",
        ),
        (
            lambda: PartitionDraw(records=3, batches=0),
            "Expected batches to be an integer",
        ),
    ],
)
def test_impossible_draws_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- the loader ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scripted:
    """A draw that is known in advance."""

    independent_steps = True
    script: tuple[tuple[int, ...], ...]
    records: int

    @property
    def steps_per_epoch(self) -> int:
        return len(self.script)

    def epoch(self, generator: np.random.Generator) -> Iterator[Tensor]:
        return (torch.tensor(batch, dtype=torch.int64) for batch in self.script)


# Empty steps at the start, in the middle (two in a row) and at the end.
SCRIPT = ((), (3, 1, 4), (), (), (5,), (0, 2, 6, 7, 8), ())
SIZES = [len(batch) for batch in SCRIPT]
HANDED = [size or 1 for size in SIZES]  # a stand-in is a batch of one record


class Numbers(Dataset[Any]):
    """Record i is whatever `make(i)` says."""

    def __init__(self, records: int, make=int) -> None:
        self.records, self.make = records, make

    def __len__(self) -> int:
        return self.records

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def scripted(make=int, **options: Any) -> tuple[PrivateLoader, list[Piece]]:
    """A loader of SCRIPT and the list of pieces it announces."""
    pieces: list[Piece] = []
    loader = PrivateLoader(
        DataLoader(Numbers(9, make), batch_size=3, **options),
        Scripted(SCRIPT, records=9),
    )
    loader.on_piece = pieces.append
    return loader, pieces


def poisson(records=20, rate=0.2, steps=6, seed=None, **options: Any) -> PrivateLoader:
    return PrivateLoader(
        DataLoader(TensorDataset(torch.arange(records)), batch_size=2),
        PoissonDraw(records=records, sample_rate=rate, steps_per_epoch=steps),
        seed=seed,
        **options,
    )


def lists(loader: PrivateLoader) -> list[list[int]]:
    """The records of each piece, without the stand-ins."""
    pieces: list[Piece] = []
    loader.on_piece = pieces.append
    return [batch.tolist() if pieces[-1].samples else [] for (batch,) in loader]


@settings(max_examples=150, deadline=None)
@given(
    records=st.integers(1, 30),
    parameter=st.integers(1, 12),
    rate=st.none() | st.floats(0.01, 1.0),
    limit=st.none() | st.integers(1, 8),
    seed=st.integers(0, 2**32),
)
def test_pieces_make_up_the_logical_batches(records, parameter, rate, limit, seed):
    draw: Draw = (
        PartitionDraw(records=records, batches=parameter)
        if rate is None
        else PoissonDraw(records=records, sample_rate=rate, steps_per_epoch=parameter)
    )
    pieces: list[Piece] = []
    loader = PrivateLoader(
        DataLoader(TensorDataset(torch.arange(records))),
        draw,
        max_physical_batch_size=limit,
        seed=seed,
    )
    loader.on_piece = pieces.append
    logical: list[list[int]] = []
    open_batch = False
    for handed, (batch,) in enumerate(loader, start=1):
        assert len(pieces) == handed  # announced right before, never earlier
        piece = pieces[-1]
        assert (piece.samples or 1) == len(batch) <= (limit or records)
        assert piece.first is not open_batch
        if piece.first:
            logical.append([])
        else:
            assert piece.samples > 0
        if piece.samples:
            logical[-1] += batch.tolist()
        else:
            assert piece.first
            assert piece.last
            assert batch.tolist() == [0]
        open_batch = not piece.last
        if open_batch:
            assert piece.samples == limit  # no more pieces than needed
    assert not open_batch
    assert sum(piece.last for piece in pieces) == len(loader) == parameter
    first_pass = np.random.default_rng([seed, 1])
    assert logical == [batch.tolist() for batch in draw.epoch(first_pass)]


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Encoding(UserDict):  # what a Hugging Face BatchEncoding is
    pass


@dataclass(frozen=True)
class Batch:
    x: Tensor
    y: Tensor
    names: list[str]


class Opaque:
    def __init__(self, items: list[Any]) -> None:
        self.items = items


def record(i: int) -> tuple[Tensor, int, str]:
    return torch.full((2, 3), float(i + 1)), i, f"record {i}"


COLLATES = {
    "list": lambda items: default_collate(items),  # [tensor, tensor, tuple of str]
    "tuple": lambda items: tuple(default_collate(items)[:2]),
    "tensor": lambda items: default_collate(items)[0],
    "dict": lambda items: {"x": default_collate(items)[0], "names": [i[2] for i in items]},
    "mapping": lambda items: Encoding(x=default_collate(items)[0], y=default_collate(items)[1]),
    "namedtuple": lambda items: Pair(*default_collate(items)[:2]),
    "dataclass": lambda items: Batch(*default_collate(items)[:2], [i[2] for i in items]),
    "numpy": lambda items: (np.stack([i[0].numpy() for i in items]), [i[1] for i in items]),
    "custom": Opaque,
    "identity": lambda items: items,
    "constants": lambda items: (default_collate(items)[0], "task", 0.5, None, torch.ones(10)),
    "several rows per record": lambda items: torch.cat([i[0] for i in items]),
    "samples not in front": lambda items: default_collate(items)[0].movedim(0, -1),
    "packed": lambda items: torch.nn.utils.rnn.pack_sequence([i[0] for i in items]),
}


def flat(batch: Any) -> list[Any]:
    """The leaves of a batch in order, containers named by their type."""
    if isinstance(batch, Mapping):
        inner = [leaf for key in batch for leaf in (key, *flat(batch[key]))]
    elif isinstance(batch, list | tuple):
        inner = [leaf for item in batch for leaf in flat(item)]
    elif isinstance(batch, Tensor | np.ndarray):
        return [type(batch), tuple(batch.shape), str(batch.dtype), batch.tolist()]
    elif isinstance(batch, Batch | Opaque):
        inner = flat(vars(batch))
    else:
        return [batch]
    return [type(batch), *inner]


@pytest.mark.parametrize("kind", COLLATES)
def test_an_empty_step_hands_over_a_batch_like_any_other(kind):
    collate = COLLATES[kind]
    loader, pieces = scripted(record, collate_fn=collate)
    batches = list(loader)
    assert pieces == [
        Piece(size, max(1, size), padded=False, first=True, last=True, most=size) for size in SIZES
    ]
    for indices, batch in zip(SCRIPT, batches, strict=True):
        assert flat(batch) == flat(collate([record(i) for i in indices or (0,)]))


def test_loops_that_fail_on_length_zero_run_through_every_step():
    loader, _ = scripted(record)
    for x, y, names in loader:
        rows = x.view(len(x), -1)
        assert rows.shape == (len(names), 6)
        assert rows.mean().isfinite()
        assert y.max() < 9


def test_stand_ins_survive_users_who_change_them():
    loader, pieces = scripted(
        record, collate_fn=lambda items: {"x": default_collate(items)[0], "items": Opaque(items)}
    )
    for batch in loader:
        x, opaque = batch.pop("x"), batch.pop("items")
        assert len(x) == len(opaque.items) == (pieces[-1].samples or 1)
        assert (x > 0).all()
        opaque.items.clear()
        x.zero_()


def test_stand_ins_with_a_collate_that_changes_its_records():
    stored = [{"x": i, "y": i} for i in range(9)]

    def collate(items):
        labels = [item.pop("y") for item in items]
        return {"x": torch.tensor([item["x"] for item in items]), "y": torch.tensor(labels)}

    loader, _ = scripted(lambda i: dict(stored[i]), collate_fn=collate)
    assert [len(batch["y"]) for batch in loader] == HANDED


def test_stand_ins_are_made_only_when_needed():
    def refuse_zero(i):
        assert i != 0
        return i

    loader = PrivateLoader(DataLoader(Numbers(4, refuse_zero)), Scripted(((1, 2), (3,)), records=4))
    assert [batch.tolist() for batch in loader] == [[1, 2], [3]]


def test_steps_are_drawn_when_they_are_due():
    drawn: list[int] = []

    class Watched(Scripted):
        def epoch(self, generator: np.random.Generator) -> Iterator[Tensor]:
            for batch in super().epoch(generator):
                drawn.append(len(batch))
                yield batch

    draw = Watched(((0,), (1,), (), (2,), (0,)), records=3)
    loader = PrivateLoader(DataLoader(Numbers(3)), draw)
    assert [len(drawn) for _ in loader] == [1, 2, 3, 4, 5]


def test_a_full_script_of_empty_steps():
    loader = PrivateLoader(DataLoader(Numbers(2)), Scripted(((),) * 5, records=2))
    assert [batch.tolist() for batch in loader] == [[0]] * 5


def test_the_users_settings_are_kept():
    options: dict[str, Any] = {
        "num_workers": 2,
        "pin_memory": True,
        "timeout": 30,
        "worker_init_fn": print,
        "multiprocessing_context": "spawn",
        "prefetch_factor": 3,
        "persistent_workers": True,
        "generator": torch.Generator(),
        "collate_fn": tuple,
    }
    user = DataLoader(Numbers(9), batch_size=3, shuffle=True, **options)
    loader = PrivateLoader(user, Scripted(SCRIPT, records=9))
    assert loader._inner.worker_init_fn == FreshWorker(options.pop("worker_init_fn"))
    for name in [*options, "dataset"]:
        assert getattr(loader._inner, name) == getattr(user, name), name
    assert loader.dataset is user.dataset
    assert loader.collate_fn is tuple
    assert loader.batch_size is None


# --- workers ------------------------------------------------------------------------------------


def slow_start(i: int) -> tuple[int, int]:
    time.sleep(0.05 if i in (1, 3) else 0)  # the first batch comes last
    return i, os.getpid()


@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_each_batch_is_announced_by_its_own_piece(workers, limit):
    loader, pieces = scripted(slow_start, num_workers=workers)
    loader.max_physical_batch_size = limit
    steps: list[tuple[int, ...]] = []
    for handed, (batch, pids) in enumerate(loader, start=1):
        assert len(pieces) == handed
        assert (pieces[-1].samples or 1) == len(batch)
        # A stand-in is made where every batch is.
        assert (os.getpid() in pids.tolist()) is (workers == 0)
        drawn = tuple(batch.tolist()) if pieces[-1].samples else ()
        steps = [*steps, drawn] if pieces[-1].first else [*steps[:-1], steps[-1] + drawn]
    assert tuple(steps) == SCRIPT


def test_leaving_an_epoch_leaves_no_workers():
    before = set(multiprocessing.active_children())
    loader, pieces = scripted(num_workers=2)
    for _ in loader:
        if len(pieces) == 2:
            assert len(set(multiprocessing.active_children()) - before) == 2
            break
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize("how", ["break", "close", "the loop raises", "on_piece raises"])
@pytest.mark.parametrize("workers", [0, 2])
def test_leaving_an_epoch_lets_go_of_its_draw(how, workers):
    closed: list[bool] = []

    class Watched(Scripted):
        def epoch(self, generator: np.random.Generator) -> Iterator[Tensor]:
            try:
                yield from super().epoch(generator)
            finally:
                closed.append(True)

    announced: list[Piece] = []

    def on_piece(piece: Piece) -> None:
        announced.append(piece)
        if how == "on_piece raises" and len(announced) == 2:
            raise KeyError(how)

    before = set(multiprocessing.active_children())
    loader = PrivateLoader(
        DataLoader(Numbers(9), num_workers=workers, persistent_workers=workers > 0),
        # Long enough that no worker's prefetching gets to the end of the draw.
        Watched(((1, 2), (3,)) * 20, records=9),
    )
    loader.on_piece = on_piece
    if how == "break":
        for _ in loader:
            break
    elif how == "close":
        batches = iter(loader)
        next(batches)
        batches.close()
    else:
        with pytest.raises(KeyError, match=how):
            for _ in loader:
                if how == "the loop raises":
                    raise KeyError(how)
    assert closed == [True]
    assert loader.position == 1
    loader.on_piece = lambda piece: None
    assert [len(batch) for batch in loader] == [2, 1] * 20  # and the next epoch is whole
    del loader
    assert set(multiprocessing.active_children()) <= before


def test_persistent_workers_serve_every_epoch_even_after_a_break():
    before = set(multiprocessing.active_children())
    loader, pieces = scripted(slow_start, num_workers=2, persistent_workers=True)
    seen: set[int] = set()
    for epoch in range(3):
        pieces.clear()
        steps = []
        for batch, pids in loader:
            if pieces[-1].samples:
                seen |= set(pids.tolist())
                assert pieces[-1].samples == len(batch)
            steps.append(tuple(batch.tolist()) if pieces[-1].samples else ())
            if epoch == 0 and len(steps) == 2:
                break
        assert tuple(steps) == (SCRIPT[:2] if epoch == 0 else SCRIPT)
    assert 1 <= len(seen) <= 2  # new workers for each epoch would be more
    del loader
    assert set(multiprocessing.active_children()) <= before


# --- epochs, freshness, resuming ----------------------------------------------------------------


def test_two_loaders_and_two_epochs_differ():
    one, two = poisson(rate=0.5, records=200), poisson(rate=0.5, records=200)
    drawn = [lists(one), lists(one), lists(two), lists(two)]
    assert len({str(batch) for epoch in drawn for batch in epoch}) == 4 * 6


def test_what_is_charged_is_what_is_drawn():
    """The plan charges by the draw that it was made with."""
    loader = poisson(rate=0.5)
    with pytest.raises(AttributeError):
        loader.draw = PoissonDraw(records=loader.draw.records, sample_rate=1.0, steps_per_epoch=2)


@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_loader_is_not_copied(twin):
    """Two that know one secret draw the same batches, and two steps on one sample cost more."""
    with pytest.raises(TypeError, match="the same batches"):
        twin(poisson())


def test_a_seed_makes_a_run_repeatable():
    assert lists(poisson(seed=7)) == lists(poisson(seed=7))
    assert lists(poisson(seed=7)) != lists(poisson(seed=8))
    assert lists(poisson(seed=7)) != lists(poisson(seed=7 + 2**32))  # torch's would be the same


def test_position_counts_handed_steps_and_epoch_those_that_are_over():
    at_piece: list[int] = []
    loader = poisson(rate=0.9, max_physical_batch_size=3)
    loader.on_piece = lambda piece: at_piece.append(loader.position) if piece.first else None
    for _ in range(2):
        steps = [loader.position for _ in loader]
        assert sorted(set(steps)) == [0, 1, 2, 3, 4, 5, 6]  # 0: inside the first step
        assert steps == sorted(steps)
    assert at_piece == [0, 1, 2, 3, 4, 5] * 2
    assert (loader.epoch, loader.position) == (2, 0)


def test_passes_count_iterations_and_are_never_set_back():
    loader = PrivateLoader(
        DataLoader(TensorDataset(torch.arange(50))), PartitionDraw(records=50, batches=5)
    )
    seen: list[tuple[int, int]] = []
    loader.on_piece = lambda piece: seen.append((loader.passes, loader.epoch))
    start = loader.state_dict()
    assert loader.passes == 0
    list(loader)
    loader.load_state_dict(start)
    list(loader)
    loader.load_state_dict(start)
    next(iter(loader))  # left at once, in the first step
    list(loader)
    assert seen == [(1, 0)] * 5 + [(2, 0)] * 5 + [(3, 0)] + [(4, 1)] * 5


def test_iterations_made_side_by_side_are_passes_of_their_own():
    loader, _ = scripted()
    one, two = iter(loader), iter(loader)
    next(one)
    assert loader.passes == 1
    next(two)
    assert loader.passes == 2


def test_a_refused_piece_is_not_counted():
    def refuse(piece: Piece) -> None:
        raise RuntimeError("budget spent")

    loader = poisson()
    loader.on_piece = refuse
    with pytest.raises(RuntimeError, match="budget spent"):
        next(iter(loader))
    assert loader.position == 0


def test_leaving_an_epoch_starts_a_new_one():
    loader, _ = scripted()
    for _ in loader:
        if loader.position == 3:
            break
    assert (loader.epoch, loader.position) == (0, 3)
    assert [loader.position for _ in loader] == list(range(1, len(SCRIPT) + 1))
    assert (loader.epoch, loader.position) == (2, 0)


def test_a_newer_iteration_ends_the_older():
    loader, _ = scripted()
    older = iter(loader)
    next(older)
    newer = iter(loader)
    next(newer)
    with pytest.raises(RuntimeError, match="newer iteration"):
        next(older)
    assert [len(batch) for batch in newer] == HANDED[1:]


@pytest.mark.parametrize("stop", [1, 4, 6])
def test_resuming_yields_the_other_steps_drawn_afresh(stop):
    loader = poisson(records=200, rate=0.5)
    list(loader)
    before: list[list[int]] = []
    for (batch,) in loader:
        before.append(batch.tolist())
        if loader.position == stop:
            state = json.loads(json.dumps(loader.state_dict()))
    assert state["epoch"] == 1
    assert state["position"] == stop

    resumed = poisson(records=200, rate=0.5)
    resumed.load_state_dict(state)
    after = lists(resumed)
    assert len(after) == 6 - stop
    assert (resumed.epoch, resumed.position) == (2, 0)
    resumed.load_state_dict(state)
    again = lists(resumed)
    assert len({str(batch) for batch in (*before, *after, *again)}) == sum(
        map(len, (before, after, again))
    )
    assert len(lists(resumed)) == 6  # only the interrupted epoch was short


def test_a_resumed_epoch_that_is_left_is_over():
    loader = poisson()
    loader.load_state_dict({**loader.state_dict(), "position": 4})
    next(iter(loader))
    assert loader.position == 5
    assert len(lists(loader)) == 6
    assert (loader.epoch, loader.position) == (2, 0)


def test_the_middle_of_a_step_is_not_a_finished_step():
    loader = poisson(rate=1.0, max_physical_batch_size=7)
    batches = iter(loader)
    positions = [next(batches) and loader.position for _ in range(4)]
    assert positions == [0, 0, 1, 1]  # 7 + 7 + 6 samples, then the second step's first piece


def test_a_partition_restarts_its_epoch():
    def make() -> PrivateLoader:
        return PrivateLoader(
            DataLoader(TensorDataset(torch.arange(50))), PartitionDraw(records=50, batches=5)
        )

    loader = make()
    list(loader)
    batches = iter(loader)
    next(batches)
    next(batches)
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (1, 2)
    resumed = make()
    resumed.load_state_dict(state)
    assert (resumed.epoch, resumed.position) == (1, 0)
    assert sorted(i for batch in lists(resumed) for i in batch) == list(range(50))


def test_the_state_holds_nothing_but_the_place():
    state = poisson(seed=1).state_dict()
    draw = "PoissonDraw(sample_rate=0.2, steps_per_epoch=6)"
    assert state == {"draw": draw, "epoch": 0, "position": 0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": "1"}, r"Expected state\['epoch'\] in 0\.\.inf, got '1'"),
        ({"epoch": -1}, r"Expected state\['epoch'\]"),
        ({"epoch": True}, r"Expected state\['epoch'\]"),
        ({"position": 2.0}, r"Expected state\['position'\] in 0\.\.6, got 2\.0"),
        ({"position": 7}, r"Expected state\['position'\] in 0\.\.6, got 7"),
        ({"generator": b""}, "Expected keys draw, epoch, position"),
        (
            {"draw": repr(PartitionDraw(records=20, batches=6))},
            r"Expected state\['draw'\] = PoissonDraw\(.*\), got 'PartitionDraw\(batches=6\)'",
        ),
        ({"draw": None}, r"Expected state\['draw'\]"),
    ],
)
def test_foreign_states_are_refused_and_change_nothing(change, message):
    loader = poisson()
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict({**loader.state_dict(), "epoch": 3, **change})
    assert (loader.epoch, loader.position) == (0, 0)
    with pytest.raises(ValueError, match="Expected keys draw, epoch, position"):
        loader.load_state_dict({"epoch": 1})


# --- physical batch size ------------------------------------------------------------------------


def test_the_physical_size_changes_at_the_next_epoch():
    loader, _ = scripted()
    sizes = []
    for batch in loader:
        sizes.append(len(batch))
        loader.max_physical_batch_size = 2
    assert sizes == HANDED
    assert [len(batch) for batch in loader] == [1, 2, 1, 1, 1, 1, 2, 2, 1, 1]


def test_batch_memory_manager_limits_and_restores():
    loader, _ = scripted()
    loader.max_physical_batch_size = 4
    manager = BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=1, optimizer=torch.optim.SGD
    )
    with manager as limited:
        assert limited is loader
        assert len(list(limited)) == sum(HANDED)
    assert loader.max_physical_batch_size == 4
    with pytest.raises(KeyError), manager:
        raise KeyError
    assert loader.max_physical_batch_size == 4


@pytest.mark.parametrize("size", [0, -3, 2.5])
def test_an_impossible_physical_size_is_refused(size):
    message = "Expected max_physical_batch_size to be an integer of at least 1"
    loader = poisson()
    with pytest.raises(ValueError, match=message):
        poisson(max_physical_batch_size=size)
    with pytest.raises(ValueError, match=message):
        loader.max_physical_batch_size = size
    with pytest.raises(ValueError, match=message):
        BatchMemoryManager(data_loader=loader, max_physical_batch_size=size)
    assert loader.max_physical_batch_size is None


# --- loaders that are refused -------------------------------------------------------------------


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))

    def __len__(self) -> int:
        return 9


class Endless(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


NINE = TensorDataset(torch.arange(9))


class Reversed(SequentialSampler):
    pass


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            poisson,
            TypeError,
            r"private already: pass the DataLoader it was made from\.",
        ),
        (lambda: DataLoader(Stream(), batch_size=3), TypeError, "dataset has no length: Stream"),
        (lambda: DataLoader(Endless(), batch_size=3), TypeError, "dataset has no length: Endless"),
        (lambda: DataLoader(Numbers(0), batch_size=3), ValueError, "dataset is empty"),
        (lambda: DataLoader(NINE, batch_size=None), ValueError, "batch_size=None: build it with"),
        (
            lambda: DataLoader(NINE, sampler=WeightedRandomSampler([0.1] * 9, 9)),
            ValueError,
            "sampler is a WeightedRandomSampler: .* build the DataLoader without sampler",
        ),
        (
            lambda: DataLoader(NINE, sampler=DistributedSampler(NINE, num_replicas=2, rank=0)),
            ValueError,
            "sampler is a DistributedSampler",
        ),
        (lambda: DataLoader(NINE, sampler=Reversed(NINE)), ValueError, "sampler is a Reversed"),
        (
            lambda: DataLoader(NINE, batch_sampler=BatchSampler(RandomSampler(NINE), 3, False)),
            ValueError,
            "batch_sampler is a BatchSampler: .* build the DataLoader without batch_sampler",
        ),
        (
            lambda: DataLoader(NINE, batch_sampler=[[0, 1], [2]]),
            ValueError,
            "batch_sampler is a list: .* build the DataLoader without batch_sampler",
        ),
        *(
            (lambda s=sampler: DataLoader(NINE, sampler=s), ValueError, "give .*Subset")
            for sampler in (
                SequentialSampler(range(4)),
                RandomSampler(range(4)),
                RandomSampler(NINE, num_samples=4),
                RandomSampler(NINE, replacement=True),
                RandomSampler(range(4), num_samples=9),
            )
        ),
    ],
)
def test_loaders_that_would_lose_their_meaning_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        plan_sampling(make(), poisson_sampling=True, sample_rate=None)
    with pytest.raises(error, match=message):
        PrivateLoader(make(), Scripted(SCRIPT, records=9))


@pytest.mark.parametrize(
    "sampler", [SequentialSampler(range(9)), RandomSampler(NINE, num_samples=9)]
)
def test_a_sampler_of_all_records_loses_nothing(sampler):
    assert records_of(DataLoader(NINE, sampler=sampler)) == 9


def test_a_draw_for_another_dataset_is_refused():
    with pytest.raises(ValueError, match=r"Expected draw\.records 9, the dataset's, got 8\."):
        PrivateLoader(DataLoader(NINE), Scripted(SCRIPT, records=8))


@pytest.mark.parametrize(("batch_size", "rate"), [(3, 1 / 3), (9, 1.0), (100, 1.0)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_sample_rate_of_a_loader(batch_size, rate, shuffle):
    loader = DataLoader(NINE, batch_size=batch_size, shuffle=shuffle)
    draw = plan_sampling(loader, poisson_sampling=True, sample_rate=None)
    assert draw == PoissonDraw.one_pass(records=9, sample_rate=rate)
