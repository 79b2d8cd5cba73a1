"""Several processes train one model as one process would: the same sums, one noise, one ledger."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import threading
import time
import warnings
from collections import UserDict
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpspan
from dpspan import DPSGD, GEP, PDPSGD, RGP, BiasedGEP, MirrorDescent, PrivacyEngine, RandomSubspace
from dpspan.engine.sampling import Piece, PoissonDraw, PrivateLoader
from dpspan.mechanisms.base import Method, Sums
from dpspan.mechanisms.dpsgd import DPSGDMechanism
from dpspan.subspaces.solvers import Basis, Eigh, Lanczos
from dpspan.support.distributed import Processes
from helpers.distributed import Failed, Killed, in_processes
from helpers.training import N, data, network, setup, train, weights

ROOT = Path(__file__).parents[2]
PUBLIC = data(12).tensors[0].double().flip(0) + 0.5, torch.arange(12) % 2
METHODS: dict[str, Method] = {
    "DPSGD": DPSGD(clip=1.0),
    "PDPSGD": PDPSGD(public=PUBLIC, rank=4, clip=1.0),
    "PDPSGD later": PDPSGD(public=PUBLIC, rank=4, clip=1.0, start=3),
    "random": PDPSGD(subspace=RandomSubspace(rank=20), clip=1.0),
    "BiasedGEP": BiasedGEP(public=PUBLIC, rank=4, clip=1.0),
    "GEP": GEP(public=PUBLIC, rank=4, clip=1.0),
    "GEP in groups": GEP(public=PUBLIC, rank=4, clip=1.0, groups=2, refresh=3, solver=Lanczos()),
    "RGP": RGP(rank=1, clip=1.0),
    "an adaptive clip": DPSGD(clip=1.0, clipping=dpspan.AdaptiveClipping(rate=1.0)),
    "RGP left only": RGP(rank=2, clip=1.0, left_only=True, carriers="weights"),
    "MirrorDescent": MirrorDescent(
        public=PUBLIC, mixing=dpspan.ConstantMixing(share=0.5), clip=1.0
    ),
}


class Tied(nn.Module):
    """One weight, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def doubles() -> TensorDataset:
    x, y = data().tensors
    return TensorDataset(x.double(), y)


def without_noise(rank: int, method: Method, changes: dict[str, Any]) -> Any:
    """Weights after two epochs, and how many records each piece of this process had."""
    torch.manual_seed(rank)  # every process begins with weights of its own
    module = changes.pop("module", network)().double()
    loader = DataLoader(doubles(), batch_size=changes.pop("batch_size", 10))
    _, model, optimizer, loader = setup(
        module=module,
        data_loader=loader,
        method=method,
        noise_multiplier=0.0,
        non_private=True,
        criterion=nn.CrossEntropyLoss(),
        **changes,
    )
    told, sizes = loader.on_piece, []
    loader.on_piece = lambda piece: (sizes.append(piece.samples), told(piece))
    train(model, optimizer, loader, epochs=2)
    return weights(model), sizes


def results(world: int, function: Any, *args: Any) -> list[Any]:
    """Of processes that all must end well."""
    found = in_processes(world, function, *args)
    for each in found:
        assert not isinstance(each, Failed), each.trace
        assert not isinstance(each, Killed), each
    return found


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    ("world", "changes"), [(2, {"max_physical_batch_size": 2}), (4, {})], ids=["2, pieces", "4"]
)
def test_a_step_without_noise_is_that_of_one_process(
    name: str, world: int, changes: dict[str, Any]
) -> None:
    expected, sizes = without_noise(0, METHODS[name], dict(changes))
    found = results(world, without_noise, METHODS[name], dict(changes))
    assert sum(sum(own) for _, own in found) == sum(sizes)  # each record with one of them
    for own, _ in found:
        assert torch.allclose(own, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_tied_weights_and_processes_without_a_record(name: str) -> None:
    changes = {"module": Tied, "batch_size": 3}
    expected, sizes = without_noise(0, METHODS[name], dict(changes))
    found = results(4, without_noise, METHODS[name], dict(changes))
    assert sum(sum(own) for _, own in found) == sum(sizes)
    assert any(0 in own for _, own in found)
    for own, _ in found:
        assert torch.allclose(own, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["DPSGD", "GEP", "RGP"])
def test_units_with_all_their_records_in_one_process(name: str) -> None:
    ids = [place % 9 for place in range(N)]  # four or five records each
    changes = {"unit": ids, "batch_size": 4, "records_per_unit": 5, "max_physical_batch_size": 7}
    expected, sizes = without_noise(0, METHODS[name], dict(changes))
    found = results(2, without_noise, METHODS[name], dict(changes))
    assert sum(sum(own) for _, own in found) == sum(sizes)
    for own, _ in found:
        assert torch.allclose(own, expected, rtol=0, atol=1e-12)


def test_processes_that_know_other_units_are_refused() -> None:
    def run(rank: int) -> None:
        setup(unit=[place % 10 if rank else place // 4 for place in range(N)])

    for each in in_processes(2, run):
        assert isinstance(each, Failed)
        assert "units" in each.text


def test_a_batch_cut_into_views() -> None:
    def run(rank: int) -> Tensor:
        _, model, optimizer, loader = setup(
            module=network().double(),
            data_loader=DataLoader(doubles(), batch_size=10),
            noise_multiplier=0.0,
            non_private=True,
            views=2,
        )
        for x, y in loader:
            both = torch.stack([x, 2 * x], 1).flatten(0, 1)
            optimizer.zero_grad()
            nn.CrossEntropyLoss()(model(both), y.repeat_interleave(2)).backward()
            optimizer.step()
        return weights(model)

    expected = run(0)
    for own in results(2, run):
        assert torch.allclose(own, expected, rtol=0, atol=1e-12)


# -- sampling -------------------------------------------------------------------------------------


class Pretend(Processes):
    """One of several, as far as the loader can see."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.rank, self.world = rank, world

    def same(self, value: Any) -> Any:
        return value


@settings(max_examples=100, deadline=None)
@given(
    records=st.integers(1, 30),
    rate=st.floats(0.01, 1.0),
    limit=st.none() | st.integers(1, 8),
    world=st.integers(1, 5),
    seed=st.integers(0, 2**32),
    left=st.booleans(),
)
def test_the_parts_of_all_processes_are_one_draw(
    records: int, rate: float, limit: int | None, world: int, seed: int, left: bool
) -> None:
    draw = PoissonDraw(records=records, sample_rate=rate, steps_per_epoch=3)
    parts: list[list[tuple[Piece, list[int]]]] = []
    for rank in range(world):
        loader = PrivateLoader(
            DataLoader(TensorDataset(torch.arange(records))), draw, limit, seed=seed
        )
        loader.spread_over(Pretend(rank, world))
        if left:  # an epoch after its first piece
            next(iter(loader))
        pieces: list[Piece] = []
        loader.on_piece = pieces.append
        found = [batch.tolist() for (batch,) in loader]
        parts.append(list(zip(pieces, found, strict=True)))
    marks = [[(piece.first, piece.last) for piece, _ in own] for own in parts]
    assert all(own == marks[0] for own in marks)  # none skips a piece
    together: list[list[int]] = []
    for same_piece in zip(*parts, strict=True):
        sizes = [piece.samples for piece, _ in same_piece]
        assert max(sizes) - min(sizes) <= (limit or 1)
        for piece, _ in same_piece:
            assert piece.most == max(sizes) == sizes[0]
        if same_piece[0][0].first:
            together.append([])
        for piece, batch in same_piece:
            together[-1] += batch[: piece.samples]
    drawn = draw.epoch(np.random.default_rng([seed, 1 + left]))
    assert [sorted(each) for each in together] == [batch.tolist() for batch in drawn]


# -- noise and price ------------------------------------------------------------------------------


def with_noise(rank: int, method: Method) -> Any:
    """Noise of one step without a record: the released sums, and the books."""
    wide = nn.Linear(300, 40).double()
    with torch.no_grad():
        wide.weight.zero_()
    records = TensorDataset(torch.zeros(N, 300).double(), torch.zeros(N).long())
    engine = PrivacyEngine(accountant="rdp")
    _, model, optimizer, loader = setup(
        engine,
        module=wide,
        data_loader=DataLoader(records, batch_size=10),
        method=method,
        noise_multiplier=2.0,
    )
    for x, _ in loader:
        (model(x).sum() * 0.0).backward()
        optimizer.step()
        break
    return model.weight.grad * 10, engine.get_epsilon(1e-5), engine.ledger.steps


@pytest.mark.filterwarnings("ignore:dpspan")  # that this loss could not be checked
def test_noise_does_not_depend_on_how_many_they_are() -> None:
    """A chi-square test of the variance: z·C = 3, once, whatever the number of processes."""
    epsilons = set()
    for world in (1, 2, 4):
        found = results(world, with_noise, DPSGD(clip=1.5))
        noise = found[0][0]
        assert all(torch.equal(own, noise) for own, *_ in found)
        total = float((noise / 3.0).square().sum())
        assert 1e-6 < stats.chi2(noise.numel()).cdf(total) < 1 - 1e-6
        assert [steps for *_, steps in found] == [1] * world
        epsilons |= {epsilon for _, epsilon, _ in found}
    assert len(epsilons) == 1


# -- what goes wrong ------------------------------------------------------------------------------


def test_settings_weights_and_records_are_compared() -> None:
    def other_clip(rank: int) -> None:
        setup(method=DPSGD(clip=1.0 + rank))

    def other_model(rank: int) -> None:
        setup(module=nn.Linear(6, 2 + rank))

    def other_order(rank: int) -> None:
        x, y = data().tensors
        order = torch.arange(N).roll(rank)
        setup(data_loader=DataLoader(TensorDataset(x[order], y[order]), batch_size=10))

    def other_public(rank: int) -> None:
        public = PUBLIC[0].float() + rank
        setup(method=GEP(public=public, rank=2), criterion=nn.CrossEntropyLoss())

    for function, said in (
        (other_clip, "Process 1 has another plan than the first: .*'clip': 2.0"),
        (other_model, "Process 1 has another (plan|model) than the first"),
        (other_order, "Process 1 has other records than the first"),
        (other_public, "Process 1 has another public data than the first"),
    ):
        first, second = in_processes(2, function)
        assert second.kind == "ValueError"
        with pytest.raises(ValueError, match=said):
            raise ValueError(second.text)
        assert first.kind == "RuntimeError", first
        assert first.text.startswith("Process 1 of 2 stopped, so all do, and nothing was released")


class Broken(RuntimeError):
    """What a user's own code may raise."""


class AtAll(DPSGDMechanism):
    """Fails in a step, in one process."""

    steps = 0
    where = ""

    def _fail(self, where: str) -> None:
        if where == self.where and self.steps == 2 and torch.distributed.get_rank() == 1:
            raise Broken(f"no {where}")

    def clipped_sum(self, gradients: Any) -> Sums:
        self._fail("sum")
        return super().clipped_sum(gradients)

    def gradient(self, released: Sums) -> Sums:
        self.steps += 1
        return super().gradient(released)


class Fails(DPSGD):
    """A method whose third step fails in process 1."""

    def bind(self, setting: Any) -> Any:
        mechanism = AtAll(self.clip_norm, self.clipping)
        mechanism.where = type(self).__name__.removeprefix("Fails").lower()
        return mechanism


class FailsSum(Fails):
    """In clipped_sum."""


def failing(rank: int, method: Method, trouble: Any) -> Any:
    """Steps charged, steps taken, and what was said; a process must not be left waiting."""
    engine = PrivacyEngine(accountant="rdp")
    _, model, optimizer, loader = setup(engine, method=method)
    taken = 0
    optimizer.register_step_post_hook(lambda *_: None)
    try:
        for x, y in loader:
            if trouble is not None and taken == 2 and rank == 1:
                trouble(model, engine)
            optimizer.zero_grad()
            nn.CrossEntropyLoss()(model(x), y).backward()
            optimizer.step()
            taken += 1
    except Exception as error:
        return engine.ledger.steps, taken, f"{type(error).__name__}: {error}", weights(model)
    return engine.ledger.steps, taken, None, weights(model)


def budget_ends(model: nn.Module, engine: PrivacyEngine) -> None:
    engine.ledger.budget = dpspan.Budget(epsilon=0.01, delta=1e-5)


def weight_is_changed(model: nn.Module, engine: PrivacyEngine) -> None:
    with torch.no_grad():
        model[0].weight.add_(1.0)


@pytest.mark.parametrize(
    ("method", "trouble", "said"),
    [
        (FailsSum(clip=1.0), None, "Broken: no sum"),
        (DPSGD(clip=1.0), budget_ends, "BudgetExceeded"),
        (DPSGD(clip=1.0), weight_is_changed, "CaptureError"),
    ],
)
def test_what_fails_in_one_fails_in_all(method: Method, trouble: Any, said: str) -> None:
    first, second, third = results(3, failing, method, trouble)
    assert second[2].startswith(said)
    for steps, taken, text, _ in (first, third):
        assert taken == second[1] == 2  # the same in all
        assert f"Process 1 of 3 stopped, so all do, and nothing was released: {said}" in text
        assert steps <= 3
    assert torch.equal(first[3], third[3])


def test_a_process_at_another_batch() -> None:
    def run(rank: int) -> None:
        _, model, optimizer, loader = setup()
        next(iter(loader))  # an epoch that is left early, here twice
        if rank == 1:
            next(iter(loader))
        train(model, optimizer, loader)

    for each in in_processes(2, run):
        assert "The processes are at different batches" in each.text


def test_weights_that_drift_apart() -> None:
    def run(rank: int, by: float) -> Tensor:
        engine, model, optimizer, loader = setup()
        train(model, optimizer, loader)
        state = {name: x + rank * by for name, x in model.state_dict().items()}
        engine.load_state_dict(engine.state_dict())
        model.load_state_dict(state)
        train(model, optimizer, loader)
        return weights(model)

    near = results(2, run, 1e-6)  # as rounding would: taken back
    assert torch.equal(*near)
    first, second = in_processes(2, run, 1.0)
    assert "'0.weight' differs between the processes" in second.text
    assert "Process 1 of 2 stopped" in first.text


# -- public data ----------------------------------------------------------------------------------


class Watched:
    """A loss for public samples that counts them."""

    def __init__(self, fails: bool = False) -> None:
        self.seen, self.fails = 0, fails

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if self.fails and self.seen > 2 and torch.distributed.get_rank() == 1:
            raise Broken("no public loss")
        self.seen += len(x)
        return nn.functional.cross_entropy(model(x), y, reduction="none")


@pytest.mark.parametrize(
    ("world", "count", "shares"),
    [(2, 12, [6, 6]), (4, 7, [2, 2, 2, 1]), (4, 3, [3, 3, 3, 3])],
)
@pytest.mark.parametrize("method", [GEP, MirrorDescent])
def test_each_process_runs_its_share_of_the_public_samples(
    method: Any, world: int, count: int, shares: list[int]
) -> None:
    """Unless there are fewer of them than processes."""
    own: Any = {"mixing": dpspan.ConstantMixing(share=0.5)}
    if method is GEP:
        own = {"rank": 2, "public_labels": "real"}
    public = PUBLIC[0][:count], PUBLIC[1][:count]

    def run(rank: int) -> Any:
        loss = Watched()
        made = method(public=public, public_loss=loss, clip=1.0, **own)
        released, sizes = without_noise(rank, made, {})
        return released, loss.seen, len(sizes)

    expected, *_ = run(0)
    found = results(world, run)
    steps = found[0][2]
    # One more is run before training, to see whether the loss fits.
    assert [seen - 1 for _, seen, _ in found] == [steps * share for share in shares]
    for released, *_ in found:
        assert torch.allclose(released, expected, rtol=0, atol=1e-12)


def test_public_samples_of_several_lengths() -> None:
    """Whose terms have other shapes in other processes."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(30, 6), network()

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.words(tokens).mean(1))

    def run(rank: int) -> Tensor:
        torch.manual_seed(0)
        batches = [torch.randint(30, (4, length)) for length in (3, 9, 2)]
        tokens, labels = torch.randint(30, (N, 5)), torch.arange(N) % 2
        _, model, optimizer, loader = setup(
            module=Mean().double(),
            data_loader=DataLoader(TensorDataset(tokens, labels), batch_size=10),
            method=GEP(public=DataLoader(batches, batch_size=None), rank=4, clip=1.0),
            criterion=nn.CrossEntropyLoss(),
            noise_multiplier=0.0,
            non_private=True,
        )
        train(model, optimizer, loader)
        return weights(model)

    expected = run(0)
    for own in results(3, run):
        assert torch.allclose(own, expected, rtol=0, atol=1e-12)


def test_a_public_loss_that_fails_in_one_process_stops_all() -> None:
    public, loss = (PUBLIC[0].float(), PUBLIC[1]), Watched(fails=True)
    method = GEP(public=public, rank=2, clip=1.0, public_labels="real", public_loss=loss)
    first, second = results(2, failing, method, None)
    assert second[2] == "Broken: no public loss"
    assert "Process 1 of 2 stopped, so all do, and nothing was released: Broken" in first[2]
    assert first[:2] == second[:2] == (1, 1)  # the second step was not charged


def test_directions_are_those_of_the_first_process() -> None:
    class Flips:
        """Eigenvectors may come with either sign."""

        def __call__(self, *args: Any, **options: Any) -> Basis:
            basis = Eigh()(*args, **options)
            sign = -1.0 if torch.distributed.get_rank() == 1 else 1.0
            return basis._replace(coefficients=sign * basis.coefficients)

    method = GEP(public=PUBLIC, rank=4, clip=1.0)
    expected, _ = without_noise(0, method, {})
    flipped = GEP(public=PUBLIC, rank=4, clip=1.0, solver=Flips())
    for own, _ in results(2, without_noise, flipped, {}):
        assert torch.allclose(own, expected, rtol=0, atol=1e-12)


def test_a_warning_of_one_is_on_the_certificate_of_the_first() -> None:
    def run(rank: int) -> tuple[str, ...]:
        engine, model, optimizer, loader = setup()
        if rank == 1:
            engine._warn("something happened here")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(model, optimizer, loader)
        shown = [str(each.message) for each in caught]
        assert shown.count("dpspan: something happened here.") == (rank == 0)
        return engine.ledger.warnings

    for found in results(2, run):
        assert "something happened here" in found


def test_what_makes_one_not_private_makes_all_so() -> None:
    def run(rank: int) -> tuple[Any, ...]:
        engine = PrivacyEngine(accountant="rdp")
        _, model, optimizer, loader = setup(engine)
        if rank == 1:
            engine.ledger.invalidate("somebody looked")
            engine.note_unprivate("the loss")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(model, optimizer, loader)
        return engine.ledger.invalid, engine.ledger.warnings

    for invalid, told in results(2, run):
        assert invalid == ("somebody looked",)
        assert "unprivate: the loss" in told

    def seeded(rank: int) -> None:
        setup(PrivacyEngine(debug_seed=1 if rank else None))

    _, second = in_processes(2, seeded)
    assert "another debug_seed than the first: 1, not None" in second.text


@pytest.mark.filterwarnings("ignore:dpspan")
@pytest.mark.parametrize("form", [UserDict, lambda batch: SimpleNamespace(**batch), dict])
@pytest.mark.parametrize("arrays", [False, True])
def test_records_in_another_order_are_seen_in_any_form(form: Any, arrays: bool) -> None:
    def collate(records: list[Any]) -> Any:
        x, y = (torch.stack(column) for column in zip(*records, strict=True))
        return form({"x": x.numpy() if arrays else x, "y": y.numpy() if arrays else y})

    def run(rank: int) -> None:
        x, y = data().tensors
        order = torch.arange(N).roll(rank)
        records = TensorDataset(x[order], y[order])
        setup(data_loader=DataLoader(records, batch_size=10, collate_fn=collate))

    _, second = in_processes(2, run)
    assert "Process 1 has other records than the first" in second.text


def test_one_record_of_many_in_memory() -> None:
    def run(rank: int) -> None:
        x, y = data(5000).tensors
        x[4321] += rank
        setup(data_loader=DataLoader(TensorDataset(x, y), batch_size=10))

    _, second = in_processes(2, run)
    assert "Process 1 has other records than the first" in second.text


def test_batches_that_show_nothing_are_on_the_certificate() -> None:
    def run(rank: int) -> tuple[str, ...]:
        engine = PrivacyEngine(debug_seed=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loader = DataLoader(data(), batch_size=10, collate_fn=lambda records: str(records))
            setup(engine, data_loader=loader)
        return engine.ledger.warnings

    for told in results(2, run):
        assert any("same records in the same order" in each for each in told)


def test_runs_in_another_order_do_not_meet() -> None:
    def run(rank: int) -> None:
        runs = [setup(PrivacyEngine())[1:] for _ in range(2)]
        for each in reversed(runs) if rank else runs:
            train(*each)

    for each in in_processes(2, run):
        assert "The processes are at different batches" in each.text


@pytest.mark.parametrize("sizes", [(None, 2), (2, 3)])
def test_pieces_of_another_size(sizes: tuple[int | None, int]) -> None:
    def run(rank: int) -> None:
        train(*setup(max_physical_batch_size=sizes[rank])[1:])

    for each in in_processes(2, run):
        assert "The processes are at different batches" in each.text


def test_a_mechanism_that_releases_other_shapes_is_refused() -> None:
    class Halved(DPSGDMechanism):
        def release(self, total: Sums, noise: Any, noise_multiplier: float) -> Sums:
            released = super().release(total, noise, noise_multiplier)
            return {name: value[:1] for name, value in released.items()}

    class Half(DPSGD):
        def bind(self, setting: Any) -> Any:
            return Halved(self.clip_norm, self.clipping)

    first, second = in_processes(2, lambda rank: train(*setup(method=Half())[1:]))
    assert first.kind == "TypeError"
    assert "Halved.release changes names or shapes of the sums" in second.text


# -- what the documentation shows -----------------------------------------------------------------


def as_a_script(rank: int, source: str, folder: str) -> str:
    """What it prints; the group is there already."""
    os.chdir(folder)
    for name in ("init_process_group", "destroy_process_group"):
        setattr(torch.distributed, name, lambda *_: None)
    with redirect_stdout(io.StringIO()) as said:
        exec(compile(source, "script", "exec"), {"__name__": "__main__"})
    return said.getvalue()


def test_the_page(tmp_path: Path) -> None:
    source = (ROOT / "docs/scale.md").read_text().split("```python\n")[1].split("```")[0]
    results(2, as_a_script, source, str(tmp_path))
    assert json.loads((tmp_path / "certificate.json").read_text())["epsilon"] <= 3.0


def test_the_example(tmp_path: Path) -> None:
    source = (ROOT / "examples/torchrun.py").read_text()
    first, second = results(2, as_a_script, source, str(tmp_path))
    assert second == ""
    assert first.startswith("ε = 4.00 at δ = 1e-05, test accuracy ")
    assert float(first.rpartition(" ")[2].strip("%\n")) > 80


# -- saving, and being killed ---------------------------------------------------------------------


def trained(rank: int, folder: str, epochs: int, victim: int | None, seconds: float) -> Any:
    """Train from the last checkpoint, saving after every step; one of them may be killed."""
    engine = PrivacyEngine(accountant="rdp")
    _, model, optimizer, loader = setup(engine, noise_multiplier=2.0)
    path = Path(folder, "checkpoint")
    if path.exists():
        engine.load_checkpoint(path, module=model, optimizer=optimizer)
    resumed = engine.ledger.steps
    if rank == victim:
        threading.Thread(
            target=lambda: (time.sleep(seconds), os.kill(os.getpid(), signal.SIGKILL)), daemon=True
        ).start()
    while loader.epoch < epochs:
        for x, y in loader:
            optimizer.zero_grad()
            nn.CrossEntropyLoss()(model(x), y).backward()
            optimizer.step()
            engine.save_checkpoint(path, module=model, optimizer=optimizer)
    return resumed, engine.ledger.steps, weights(model), engine.get_epsilon(1e-5)


def test_saved_and_resumed(tmp_path: Path) -> None:
    first = results(2, trained, str(tmp_path), 1, None, 0.0)
    assert [(resumed, steps) for resumed, steps, *_ in first] == [(0, 4)] * 2
    second = results(3, trained, str(tmp_path), 3, None, 0.0)  # another number of processes
    assert [(resumed, steps) for resumed, steps, *_ in second] == [(4, 12)] * 3
    assert all(torch.equal(own[2], second[0][2]) for own in second)
    assert len({own[3] for own in second}) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_loaded_in_the_same_program(tmp_path: Path) -> None:
    def run(rank: int) -> int:
        engine, model, optimizer, loader = setup()
        train(model, optimizer, loader)
        engine.save_checkpoint(tmp_path / "one", module=model)
        torch.distributed.barrier()
        engine.load_checkpoint(tmp_path / "one", module=model)
        train(model, optimizer, loader)
        return engine.ledger.steps

    assert results(2, run) == [8, 8]


def test_followers_keep_no_sums() -> None:
    def run(rank: int) -> list[float]:
        processes = Processes.of_this_run()
        return processes.add_up({"sum": torch.full((4,), 10.0**rank)})["sum"].tolist()

    assert results(3, run) == [[111.0] * 4, [0.0] * 4, [0.0] * 4]


def test_books_that_only_one_has_loaded(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        engine, model, optimizer, loader = setup()
        train(model, optimizer, loader)
        engine.save_checkpoint(tmp_path / "one", module=model)
        torch.distributed.barrier()
        engine, model, optimizer, loader = setup()
        if rank == 0:
            engine.load_checkpoint(tmp_path / "one", module=model)
        train(model, optimizer, loader)

    first, second = in_processes(2, run)
    assert "Process 1 has another number of charged steps than the first: 0, not 4" in second.text
    assert "Process 1 of 2 stopped" in first.text


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path: Path) -> None:
    """Twenty times: the others stop, and what is on the disk names every step behind it."""
    chance, steps = random.Random(0), 0
    for attempt in range(20):
        world = 2 + attempt % 3
        victim = chance.randrange(world)
        found = in_processes(world, trained, str(tmp_path), 1000, victim, chance.uniform(0.05, 0.6))
        assert found[victim] == Killed(-signal.SIGKILL)
        for rank, each in enumerate(found):
            if rank != victim:
                assert isinstance(each, Failed), each
                assert "Another process of this run is gone" in each.text, each.trace
        if (tmp_path / "checkpoint").exists():
            engine = PrivacyEngine(accountant="rdp")
            _, model, _, loader = setup(engine, noise_multiplier=2.0)
            engine.load_checkpoint(tmp_path / "checkpoint", module=model)
            now = engine.ledger.steps
            # Every step that was saved is charged, and the loader stands where the books say.
            assert now == loader.epoch * len(loader) + loader.position >= steps
            steps = now
            engine.detach()
    assert steps > 0
