"""What is random in training is nobody's to know: noise, batches, dropout, augmentation."""

from __future__ import annotations

import math
import multiprocessing
import random
import sys

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dpspan import PrivacyEngine
from dpspan.accounting.events import step_event
from dpspan.accounting.ledger import Ledger
from dpspan.engine.admission import check_device
from dpspan.mechanisms.noise import _LONG, _STREAMS, Noise
from dpspan.support.errors import CaptureError
from dpspan.support.randomness import FreshWorker, _fill, fresh_randomness, torch_seed
from helpers.tails import TAILS, check_tails, tails
from helpers.training import network, setup, train

# -- dropout and augmentation ---------------------------------------------------------------------

N, D = 60, 20
EVENT = step_event(noise_multiplier=1.0, sample_rate=0.1)


class Augmented(Dataset[tuple[Tensor, int]]):
    """Each record with as much noise on top as signal, drawn by `source`."""

    def __init__(self, x: Tensor, source: str) -> None:
        self.x, self.source = x, source

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        numbers = {
            "torch": lambda: torch.randn(D),
            "numpy": lambda: torch.from_numpy(np.random.standard_normal(D)).float(),
            "python": lambda: torch.tensor([random.gauss(0.0, 1.0) for _ in range(D)]),
        }
        return self.x[index] + numbers[self.source](), index % 2


def seed_worker(worker: int) -> None:
    """The recipe that torch's documentation gives for reproducible workers."""
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def seed_everything() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def one_step(data: Dataset, dropout: float = 0.0, seed_in_loop=None, **loader) -> Tensor:
    """The noiseless clipped sum (clip 1) of all records, under known global seeds."""
    seed_everything()
    model = nn.Sequential(nn.Dropout(dropout), nn.Linear(D, 2))
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, private = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(data, batch_size=N, **loader),
        noise_multiplier=1e-6,
        sample_rate=1.0,
        expected_batch_size=1.0,
        max_grad_norm=1.0,
    )
    seed_everything()
    for x, y in private:
        optimizer.zero_grad()
        if seed_in_loop is not None:
            seed_in_loop()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def records() -> Tensor:
    return torch.randn(N, D, generator=torch.Generator().manual_seed(1))


def test_dropout_masks_are_fresh_whatever_was_seeded() -> None:
    data = TensorDataset(records(), torch.arange(N) % 2)
    assert float((one_step(data, dropout=0.5) - one_step(data, dropout=0.5)).norm()) > 0.1
    assert float((one_step(data) - one_step(data)).norm()) < 1e-3  # nothing else is random


@pytest.mark.parametrize("source", ["torch", "numpy", "python"])
@pytest.mark.parametrize("workers", [0, 1])
def test_augmentation_is_fresh_whatever_was_seeded(source: str, workers: int) -> None:
    loader = {"num_workers": workers}
    if workers:
        loader |= {"worker_init_fn": seed_worker, "generator": torch.Generator().manual_seed(0)}
    data = Augmented(records(), source)
    assert float((one_step(data, **loader) - one_step(data, **loader)).norm()) > 0.1


def test_a_seed_set_inside_the_loop_is_refused() -> None:
    data = TensorDataset(records(), torch.arange(N) % 2)
    with pytest.raises(CaptureError, match="torch was seeded between a private batch and its step"):
        one_step(data, dropout=0.5, seed_in_loop=lambda: torch.manual_seed(7))


def test_a_seed_set_after_a_step_has_no_effect_on_the_next() -> None:
    def second_batch() -> Tensor:
        loader = setup(
            PrivacyEngine(accountant="rdp"),
            module=nn.Linear(D, 2),
            data_loader=DataLoader(Augmented(records(), "numpy"), batch_size=N // 2),
            sample_rate=0.5,
        )[-1]
        batches = iter(loader)
        next(batches)
        seed_everything()
        return next(batches)[0]

    assert not torch.equal(second_batch()[:1], second_batch()[:1])


def test_the_users_own_random_numbers_are_left_as_they_were() -> None:
    seed_everything()
    np.random.standard_normal()  # leaves half of a pair for the next call
    expected = torch.rand(1), np.random.standard_normal(), random.random()
    seed_everything()
    np.random.standard_normal()
    loader = setup(PrivacyEngine(accountant="rdp"), module=nn.Linear(6, 2))[-1]
    torch.manual_seed(0)  # the model drew its weights
    for _ in loader:
        torch.rand(3), np.random.random(), random.random()
        break  # an epoch that is left early, too
    assert (torch.rand(1), np.random.standard_normal(), random.random()) == expected


def test_a_debug_seed_makes_dropout_reproducible() -> None:
    def weights() -> Tensor:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        _, model, optimizer, loader = setup(PrivacyEngine(debug_seed=0), module=model)
        train(model, optimizer, loader)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(), weights())


def test_the_whole_state_of_torchs_generator_comes_from_the_system() -> None:
    """Two generators whose seeds torch cannot tell apart must give different numbers."""
    states = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(7)
        _fill(generator)
        states.append(torch.randn(1000, generator=generator))
    assert not torch.equal(*states)
    assert abs(float(torch.cat(states).mean())) < 5.5 / math.sqrt(2000)
    assert abs(float(torch.cat(states).var()) - 1) < 5.5 * math.sqrt(2 / 2000)


def test_fresh_numbers_are_uniform_and_a_worker_begins_with_the_users_function() -> None:
    began = []
    with fresh_randomness():
        FreshWorker(began.append)(3)
        seed = torch_seed()
        FreshWorker(None)(0)
        assert torch_seed() != seed
        draws = np.random.random(10_000)
    assert began == [3]
    assert stats.kstest(draws, "uniform").pvalue > 1e-6


# -- noise ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [20_000, 40 * _LONG])
def test_noise_is_normal_and_white_in_every_length(count: int) -> None:
    """Short and long draws take different ways through the streams."""
    draws = Noise(seed=0).normal(torch.empty(count), 2.0) / 2.0
    assert draws.dtype == torch.float64
    assert stats.kstest(draws.numpy(), "norm").pvalue > 1e-6
    parts = torch.stack(draws.chunk(_STREAMS))
    correlation = parts @ parts.T / parts.shape[1]
    assert float((correlation - torch.eye(_STREAMS)).abs().max()) < 5.5 * math.sqrt(
        2 / parts.shape[1]
    )


def test_the_number_of_threads_does_not_change_the_numbers() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = Noise(seed=4).normal(torch.empty(2 * _LONG), 1.0)
        torch.set_num_threads(3)
        three = Noise(seed=4).normal(torch.empty(2 * _LONG), 1.0)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one, three)


def test_noise_is_added_in_float64() -> None:
    """Noise that was rounded to float32 first would cancel against its own negative."""
    noise = Noise(seed=1).normal(torch.empty(100_000), 0.3)
    total = -noise.float()
    noisy = Noise(seed=1).add({"w": total}, 0.3)["w"]
    assert noisy.dtype == torch.float32
    assert torch.equal(noisy, (noise + total.double()).float())
    assert float((noisy != 0).double().mean()) > 0.99


def test_noise_needs_more_than_32_bits_to_guess() -> None:
    """All state comes from the system: nobody's seed plays a part."""
    draws = []
    for _ in range(2):
        seed_everything()
        draws.append(Noise().normal(torch.empty(1000), 1.0))
    assert not torch.equal(*draws)
    noise = Noise()
    noise.normal(torch.empty(1), 1.0)
    for stream in noise._streams:
        sequence = stream.bit_generator.seed_seq
        assert sequence.entropy.bit_length() > 96  # of 128; fails once in 2³² runs
    keys = {stream.bit_generator.seed_seq.spawn_key for stream in noise._streams}
    assert len(keys) == _STREAMS


@pytest.mark.slow
def test_noise_has_the_tails_of_a_normal_law() -> None:
    """2·10⁹ draws: beyond 5.8 σ a float32 generator has none, a normal law 13."""
    noise, like, total = Noise(seed=0), torch.empty(4_000_000), 2_000_000_000
    check_tails(tails(lambda count: noise.normal(like, 1.0), total, len(like)), total)


def test_the_check_of_tails_finds_a_float32_generator() -> None:
    total = 2_000_000_000
    right = {at: round(total * 2 * stats.norm.sf(at)) for at in TAILS}
    check_tails(right, total)
    with pytest.raises(AssertionError):
        check_tails(right | {5.8: 0, 6.0: 0}, total)


# -- other processes and devices ------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_forked_processes_share_neither_noise_nor_ledger() -> None:
    noise, ledger = Noise(), Ledger(accountant="rdp")
    noise.normal(torch.empty(4), 1.0)  # generators exist
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def child() -> None:
        drawn = noise.normal(torch.empty(4), 1.0).tolist()
        try:
            setup(PrivacyEngine(ledger=ledger))[0].ledger.charge(EVENT)
        except RuntimeError as error:
            queue.put((drawn, str(error)))

    children = [context.Process(target=child) for _ in range(2)]
    for process in children:
        process.start()
    (first, message), (second, _) = queue.get(), queue.get()
    for process in children:
        process.join()
    own = noise.normal(torch.empty(4), 1.0).tolist()
    assert len({*first, *second, *own}) == 12
    assert "A ledger cannot be copied or sent to another process" in message
    assert ledger.steps == 0


def test_a_device_without_float64_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_float64(self: Tensor, *size: int, dtype: torch.dtype) -> Tensor:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")

    model = network()
    check_device(model)
    monkeypatch.setattr(torch.nn.Parameter, "new_zeros", no_float64, raising=False)
    with pytest.raises(ValueError, match=r"Parameter '0\.weight' is on cpu, which has no float64"):
        check_device(model)
