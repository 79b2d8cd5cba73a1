"""The engine as users meet it: loops, pieces, schedulers, checkpoints, errors."""

from __future__ import annotations

import copy
import gc
import io
import json
import math
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dp_accounting import GaussianDpEvent, NonPrivateDpEvent
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dpspan
from dpspan import DPSGD, BudgetExceeded, CaptureError, PrivacyEngine
from dpspan.accounting.events import step_event
from dpspan.accounting.ledger import Ledger
from dpspan.accounting.promises import Budget
from helpers.traces import traces
from helpers.training import N, data, network, private_with_epsilon, setup, train, weights

# -- one step is what the contract says -----------------------------------------------------------


def test_a_step_is_the_clipped_sum_plus_noise_over_the_lot_size() -> None:
    """Against a hand-made DP-SGD with the same batches and the same noise."""
    engine, model, optimizer, loader = setup()
    twin = copy.deepcopy(model)
    noise = dpspan.mechanisms.noise.Noise(seed=1)
    for x, y in loader:
        optimizer.zero_grad()
        nn.CrossEntropyLoss()(model(x), y).backward()
        assert all(p.grad is None for p in model.parameters())  # nothing unprivate to look at
        optimizer.step()
        parameters = list(twin.parameters())
        total = [torch.zeros_like(p) for p in parameters]
        for i in range(len(x)):
            loss = nn.CrossEntropyLoss()(twin(x[i : i + 1]), y[i : i + 1])
            grads = torch.autograd.grad(loss, parameters)
            norm = torch.cat([g.flatten() for g in grads]).norm()
            for t, g in zip(total, grads, strict=True):
                t += g * min(1.0, 1.0 / float(norm))
        noisy = noise.add({str(i): t for i, t in enumerate(total)}, 1.0).values()
        with torch.no_grad():
            for p, t in zip(parameters, noisy, strict=True):
                p -= 0.5 * t / 10
        assert torch.allclose(weights(model), weights(twin), atol=1e-5)
    assert engine.ledger.events == ((step_event(1.0, 0.25), 4),)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_reduction_is_undone(reduction: str) -> None:
    results = []
    for loss_reduction in ("mean", "sum"):
        _, model, optimizer, loader = setup(loss_reduction=loss_reduction)
        for x, y in loader:
            nn.CrossEntropyLoss(reduction=loss_reduction)(model(x), y).backward()
            optimizer.step()
        results.append(weights(model))
    assert torch.allclose(*results, atol=1e-5)


@pytest.mark.parametrize("pieces", [1, 3, 100])
def test_physical_pieces_give_the_same_step(pieces: int) -> None:
    _, whole, optimizer, loader = setup()
    train(whole, optimizer, loader, epochs=2)
    engine, model, optimizer, loader = setup(max_physical_batch_size=pieces)
    sizes = train(model, optimizer, loader, epochs=2)
    assert max(sizes) <= pieces
    assert engine.ledger.steps == 8
    assert torch.allclose(weights(model), weights(whole), atol=1e-5)


def test_batch_memory_manager_as_in_opacus() -> None:
    _, whole, optimizer, loader = setup()
    train(whole, optimizer, loader)
    engine, model, optimizer, loader = setup()
    with dpspan.BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
    ) as small:
        assert max(train(model, optimizer, small)) <= 2
    assert engine.ledger.steps == 4
    assert torch.allclose(weights(model), weights(whole), atol=1e-5)


def test_momentum_and_decay_leave_parameters_alone_between_pieces() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
    engine, model, optimizer, loader = setup(
        module=model, optimizer=optimizer, max_physical_batch_size=1
    )
    moved = 0
    before = weights(model)
    for x, y in loader:
        optimizer.zero_grad()
        nn.CrossEntropyLoss()(model(x), y).backward()
        optimizer.step()
        moved += not torch.equal(weights(model), before)
        before = weights(model)
    assert moved == engine.ledger.steps == 4


OPTIMIZERS = [
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad,
    torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adadelta,
]  # fmt: skip


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_any_optimizer_with_a_scheduler(kind: Any) -> None:
    model = network()
    optimizer = kind(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    before = weights(model)
    _, model, same, loader = setup(module=model, optimizer=optimizer)
    assert same is optimizer
    train(model, optimizer, loader)
    scheduler.step()
    assert math.isclose(optimizer.param_groups[0]["lr"], 0.01)
    assert not torch.equal(weights(model), before)


@pytest.mark.parametrize("keyword", [True, False])
def test_step_with_a_closure(keyword: bool) -> None:
    _, plain, optimizer, loader = setup()
    train(plain, optimizer, loader)
    engine, model, optimizer, loader = setup()
    for x, y in loader:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = nn.CrossEntropyLoss()(model(x), y)
            loss.backward()
            return loss

        loss = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
        assert loss.shape == ()
    assert engine.ledger.steps == 4
    assert torch.allclose(weights(model), weights(plain), atol=1e-6)


# -- batches of every kind ------------------------------------------------------------------------


class Records(Dataset[Any]):
    def __init__(self, kind: str) -> None:
        self.kind, self.inner = kind, data()

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        x, y = self.inner[index]
        return {"tuple": (x, y), "list": [x, y], "dict": {"x": x, "y": y}}[self.kind]


class Box:
    def __init__(self, items: list[Any]) -> None:
        self.x = torch.stack([x for x, _ in items])
        self.y = torch.stack([y for _, y in items])


def unpack(batch: Any) -> tuple[Tensor, Tensor]:
    if isinstance(batch, Box):
        return batch.x, batch.y
    return (batch["x"], batch["y"]) if isinstance(batch, dict) else tuple(batch)  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "custom"])
def test_empty_batches_are_ordinary_steps(kind: str) -> None:
    """At q = 0.01 most batches of 40 records are empty; each draws noise, steps and is counted.

    A stand-in is handed over for them, so that no model or loop trips over tensors of length 0.
    """
    collate = Box if kind == "custom" else None
    dataset = Records("tuple" if kind == "custom" else kind)
    loader = DataLoader(dataset, batch_size=10, collate_fn=collate)
    engine, model, optimizer, loader = setup(data_loader=loader, sample_rate=0.01)
    steps, before = 0, weights(model)
    for batch in loader:
        x, y = unpack(batch)
        optimizer.zero_grad()
        nn.CrossEntropyLoss()(model(x), y).backward()
        optimizer.step()
        steps += 1
        assert torch.isfinite(weights(model)).all()
        assert not torch.equal(weights(model), before)
        before = weights(model)
    assert engine.ledger.steps == steps == len(loader) == 100


def test_an_empty_step_moves_by_noise_alone() -> None:
    loader = DataLoader(data(), batch_size=10)
    engine = PrivacyEngine(debug_seed=1)
    _, model, optimizer, loader = setup(engine, data_loader=loader, sample_rate=1e-3)
    model = model.double()
    engine_pieces = []
    told, loader.on_piece = loader.on_piece, lambda p: (engine_pieces.append(p), told(p))
    x, y = next(iter(loader))  # empty under this debug_seed
    assert engine_pieces[0].samples == 0
    assert len(x) == 1  # a stand-in, whose gradient is dropped
    nn.CrossEntropyLoss()(model(x.double()), y).backward()
    optimizer.step()
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    expected = dpspan.mechanisms.noise.Noise(seed=2).add(zeros, 1.0)
    for name, p in model.named_parameters():
        assert torch.allclose(p.grad, expected[name] / 10)


# -- sampling without amplification ---------------------------------------------------------------


def test_partition_costs_one_gaussian_per_epoch() -> None:
    engine, model, optimizer, loader = setup(poisson_sampling=False)
    sizes = train(model, optimizer, loader, epochs=3)
    assert sum(sizes) == 3 * N
    assert engine.ledger.events == ((GaussianDpEvent(1.0), 3),)
    assert any("partition" in warning for warning in engine.certificate(1e-5)["warnings"])


def test_partition_charges_an_epoch_that_was_left_early() -> None:
    engine, model, optimizer, loader = setup(poisson_sampling=False)
    for _ in range(2):
        for x, y in loader:
            nn.CrossEntropyLoss()(model(x), y).backward()
            optimizer.step()
            break
    assert engine.ledger.events == ((GaussianDpEvent(1.0), 2),)


def test_partition_stays_refused_once_the_budget_is_spent() -> None:
    """Catching the error and going on within the epoch must not make its other steps free."""
    ledger = Ledger(budget=Budget(epsilon=3.0, delta=1e-5))
    engine, model, optimizer, loader = setup(
        engine=PrivacyEngine(ledger=ledger), poisson_sampling=False, noise_multiplier=1.5
    )
    refused = 0
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.CrossEntropyLoss()(model(x), y).backward()
            before = weights(model)
            try:
                optimizer.step()
            except BudgetExceeded:
                refused += 1
                assert torch.equal(weights(model), before)
    assert engine.ledger.events == ((GaussianDpEvent(1.5), 1),)
    assert refused == len(loader)


def test_partition_with_a_target() -> None:
    engine = PrivacyEngine()
    model = network()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data(), batch_size=10),
        poisson_sampling=False,
        target_epsilon=2.0,
        target_delta=1e-5,
        epochs=2,
    )
    train(model, optimizer, loader, epochs=2)
    assert 2.0 - 1e-3 <= engine.get_epsilon() <= 2.0
    with pytest.raises(BudgetExceeded):
        train(model, optimizer, loader)


# -- the budget -----------------------------------------------------------------------------------


def test_target_is_met_and_not_exceeded() -> None:
    engine = PrivacyEngine()
    model, optimizer, loader = private_with_epsilon(engine)
    train(model, optimizer, loader, epochs=2)
    assert 3.0 - 1e-3 <= engine.get_epsilon(1e-5) <= 3.0
    before = weights(model)
    with pytest.raises(BudgetExceeded, match=r"budget of ε = 3 at δ = 1e-05"):
        train(model, optimizer, loader)
    assert torch.equal(weights(model), before)
    assert engine.get_epsilon(1e-5) <= 3.0


def test_a_budget_already_spent() -> None:
    ledger = Ledger(budget=Budget(epsilon=1.0, delta=1e-5))
    ledger.charge(GaussianDpEvent(4.5))
    with pytest.raises(BudgetExceeded):
        private_with_epsilon(PrivacyEngine(ledger=ledger), target_epsilon=0.5)


def test_two_runs_share_a_ledger() -> None:
    first = PrivacyEngine()
    model, optimizer, loader = private_with_epsilon(first, target_epsilon=1.0)
    train(model, optimizer, loader, epochs=2)
    ledger = first.ledger
    ledger.budget = Budget(epsilon=3.0, delta=1e-5)
    second = PrivacyEngine(ledger=ledger)
    model, optimizer, loader = private_with_epsilon(second, target_epsilon=3.0)
    assert second.noise_multiplier < first.noise_multiplier
    train(model, optimizer, loader, epochs=2)
    assert 3.0 - 1e-3 <= ledger.epsilon(1e-5) <= 3.0


def test_rdp_accountant() -> None:
    pld, rdp = PrivacyEngine(accountant="pld"), PrivacyEngine(accountant="rdp")
    private_with_epsilon(pld)
    private_with_epsilon(rdp)
    assert rdp.noise_multiplier > pld.noise_multiplier
    with pytest.raises(ValueError, match="accountant"):
        PrivacyEngine(accountant="guess")


# -- saving and resuming --------------------------------------------------------------------------


def test_resume_goes_on_where_it_was(tmp_path: Path) -> None:
    engine = PrivacyEngine()
    model, optimizer, loader = private_with_epsilon(engine, epochs=3)
    for step, (x, y) in enumerate(loader):
        nn.CrossEntropyLoss()(model(x), y).backward()
        optimizer.step()
        if step == 1:
            break
    path = engine.save_checkpoint(
        tmp_path / "run.pt", module=model, optimizer=optimizer, checkpoint_dict={"note": 7}
    )
    resumed = PrivacyEngine()
    twin, twin_optimizer, twin_loader = private_with_epsilon(resumed, epochs=3)
    extra = resumed.load_checkpoint(path, module=twin, optimizer=twin_optimizer)
    assert extra == {"note": 7}
    assert torch.equal(weights(twin), weights(model))
    assert resumed.ledger.events == engine.ledger.events
    assert sum(1 for _ in twin_loader) == 2  # the rest of the epoch
    # Nothing is replayed: the two runs draw other batches and other noise from here on.
    state = resumed.state_dict()
    assert "generator" not in json.dumps(state)


def test_a_checkpoint_in_a_file_that_is_open_for_bytes() -> None:
    engine, resumed, file = PrivacyEngine(), PrivacyEngine(), io.BytesIO(b"before")
    model, optimizer, loader = private_with_epsilon(engine, epochs=3)
    train(model, optimizer, loader)
    file.seek(0, io.SEEK_END)
    engine.save_checkpoint(file, module=model, optimizer=optimizer)
    twin, twin_optimizer, _ = private_with_epsilon(resumed, epochs=3)
    file.seek(len(b"before"))
    resumed.load_checkpoint(file, module=twin, optimizer=twin_optimizer)
    assert torch.equal(weights(twin), weights(model))
    assert resumed.ledger.events == engine.ledger.events
    with pytest.raises(ValueError, match="not a complete dpspan checkpoint"):
        resumed.load_checkpoint(io.BytesIO(b"other"), module=twin)


def test_a_resumed_run_draws_fresh_noise() -> None:
    """Every record in every batch, so only noise can tell two continuations apart."""
    engine = PrivacyEngine()
    model, optimizer, loader = private_with_epsilon(engine, sample_rate=1.0, epochs=3)
    train(model, optimizer, loader)
    engine_state, model_state = engine.state_dict(), copy.deepcopy(model.state_dict())
    continued = []
    for _ in range(2):
        again = PrivacyEngine()
        twin, optimizer, loader = private_with_epsilon(again, sample_rate=1.0, epochs=3)
        again.load_state_dict(engine_state)
        twin.load_state_dict(model_state)
        train(twin, optimizer, loader)
        assert again.ledger.steps == 2
        continued.append(weights(twin))
    assert not torch.equal(*continued)


def test_a_state_that_does_not_fit(tmp_path: Path) -> None:
    engine, model, optimizer, loader = setup()
    train(model, optimizer, loader)
    state = engine.state_dict()
    other, twin, *_ = setup(noise_multiplier=2.0)
    with pytest.raises(ValueError, match=r"noise_multiplier is 1.0 there, 2.0 here"):
        other.load_state_dict(state)
    assert other.ledger.steps == 0
    same, *_ = setup()
    with pytest.raises(ValueError, match="keys"):
        same.load_state_dict({"format": "dpspan.engine.1"})
    with pytest.raises(ValueError, match="format"):
        same.load_state_dict({**state, "format": "other"})
    broken = copy.deepcopy(state)
    del broken["ledger"]["events"]
    with pytest.raises(ValueError, match="events"):
        same.load_state_dict(broken)
    assert same.ledger.steps == 0
    assert same.state_dict()["loader"]["epoch"] == 0

    path = engine.save_checkpoint(tmp_path / "run.pt", module=model)
    with pytest.raises(ValueError, match="holds no optimizer state"):
        same.load_checkpoint(path, module=twin, optimizer=optimizer)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"run\.pt is not a complete dpspan checkpoint"):
        same.load_checkpoint(path, module=twin)
    with pytest.raises(FileNotFoundError):
        same.load_checkpoint(tmp_path / "nothing.pt", module=twin)


def test_unwritable_folder_is_named(tmp_path: Path) -> None:
    engine, model, *_ = setup()
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(OSError, match=r"Cannot write a checkpoint to .*run\.pt"):
        engine.save_checkpoint(tmp_path / "file" / "run.pt", module=model)


def test_loading_never_forgets_what_was_spent() -> None:
    engine, model, optimizer, loader = setup()
    early = engine.state_dict()
    train(model, optimizer, loader)
    with pytest.raises(ValueError, match="forget"):
        engine.load_state_dict(early)
    assert engine.ledger.steps == 4


# -- the model is the user's ----------------------------------------------------------------------


def test_model_is_not_wrapped_and_detach_leaves_no_trace() -> None:
    model = network()
    before = {k: dict(vars(m)) for k, m in model.named_modules()}
    criterion = nn.CrossEntropyLoss()
    engine, private, optimizer, loader = setup(module=model, criterion=criterion)
    assert private is model
    assert list(private.state_dict()) == list(network().state_dict())
    train(private, optimizer, loader)
    engine.detach()
    for p in model.parameters():
        p.grad = None
    assert before == {k: dict(vars(m)) for k, m in model.named_modules()}
    assert not criterion._forward_hooks
    assert not optimizer._optimizer_step_pre_hooks
    nn.CrossEntropyLoss()(model(torch.randn(3, 6)), torch.zeros(3).long()).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    "method",
    [
        DPSGD(clip=1.0),
        dpspan.PDPSGD(public=torch.randn(8, 6), rank=2, clip=1.0),
        dpspan.GEP(public=torch.randn(8, 6), rank=2, clip=1.0),
        dpspan.RGP(rank=1, clip=1.0),
        dpspan.MirrorDescent(
            public=(torch.randn(8, 6), torch.arange(8) % 2),
            clip=1.0,
            mixing=dpspan.ConstantMixing(share=0.5),
        ),
    ],
    ids=lambda method: type(method).__name__,
)
def test_a_loss_that_is_used_again_keeps_no_run_alive(method: Any) -> None:
    """A sweep or a notebook has one loss for all its runs: each kept its model, data and guard."""
    criterion, kept = nn.CrossEntropyLoss(), []
    for run in range(3):
        engine, model, optimizer, loader = setup(criterion=criterion, method=method)
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            assert len(criterion._forward_hooks) == 1, f"run {run} sees another's"
            optimizer.step()
        kept += [weakref.ref(each) for each in (engine, model, optimizer, loader, loader.dataset)]
        del engine, model, optimizer, loader, x, y
        gc.collect()
        assert [each() for each in kept] == [None] * len(kept)
        assert not criterion._forward_hooks


def test_evaluation_between_steps() -> None:
    _, model, optimizer, loader = setup()
    for x, y in loader:
        nn.CrossEntropyLoss()(model(x), y).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            assert model(torch.randn(17, 6)).shape == (17, 2)
        assert model(torch.randn(1, 6)).shape == (1, 2)  # gradients on, but no private batch
        model.train()


# -- misuse ---------------------------------------------------------------------------------------


def test_step_without_a_batch_or_backward() -> None:
    _, model, optimizer, loader = setup()
    with pytest.raises(CaptureError, match="without a fresh batch"):
        optimizer.step()
    batches: Iterator[Any] = iter(loader)
    x, y = next(batches)
    with pytest.raises(CaptureError, match="No gradient was recorded"):
        optimizer.step()
    x, y = next(batches)
    nn.CrossEntropyLoss()(model(x), y).backward()
    optimizer.step()
    with pytest.raises(CaptureError, match="without a fresh batch"):
        optimizer.step()


def test_gradients_must_not_pile_up_without_steps() -> None:
    for pieces in (None, 2):
        _, model, _, loader = setup(max_physical_batch_size=pieces)
        with pytest.raises(CaptureError, match="pass max_physical_batch_size"):
            for x, y in loader:
                nn.CrossEntropyLoss()(model(x), y).backward()


class Decaying(torch.optim.Optimizer):
    """Decays weights whatever their gradients are."""

    def __init__(self, parameters: Any, hidden: bool) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.hidden = hidden  # from autograd's versions

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            (p.data if self.hidden else p).mul_(0.9)


@pytest.mark.parametrize("hidden", [False, True])
def test_an_optimizer_that_counts_pieces_is_refused(hidden: bool) -> None:
    model = network()
    optimizer = Decaying(model.parameters(), hidden)
    engine, *run = setup(module=model, optimizer=optimizer, max_physical_batch_size=2)
    with pytest.raises(CaptureError, match=r"changed '0\.weight' after a piece of a batch"):
        train(*run)
    assert engine.ledger.invalid
    model = network()
    engine, *run = setup(module=model, optimizer=Decaying(model.parameters(), hidden))
    train(*run)  # once a step is no secret
    assert not [reason for reason in engine.ledger.invalid if "piece" in reason]


@pytest.mark.parametrize(
    "kind", ["SGD", "AdamW", "Adam", "Adagrad", "RMSprop", "NAdam", "Adadelta", "ASGD"]
)
def test_optimizers_of_torch_take_pieces(kind: str) -> None:
    model = network()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, weight_decay=0.1)
    engine, *run = setup(module=model, optimizer=optimizer, max_physical_batch_size=2)
    train(*run)
    assert not [reason for reason in engine.ledger.invalid if "piece" in reason]


def test_a_batch_may_be_skipped() -> None:
    engine, model, optimizer, loader = setup()
    for number, (x, y) in enumerate(loader):
        if number == 1:
            continue
        nn.CrossEntropyLoss()(model(x), y).backward()
        optimizer.step()
    assert engine.ledger.steps == 3


def test_parameters_added_to_the_optimizer_later_are_refused() -> None:
    engine, model, optimizer, loader = setup()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ValueError, match="Parameter group 1 of the optimizer"):
        train(model, optimizer, loader)
    assert engine.ledger.steps == 0


def test_another_batch_than_the_sampled_one() -> None:
    _, model, _, loader = setup()
    next(iter(loader))
    with pytest.raises(CaptureError, match=r"saw 40 samples, the batch has"):
        nn.CrossEntropyLoss()(model(data().tensors[0]), data().tensors[1]).backward()


def test_batch_norm_is_refused_at_the_door() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    with pytest.raises(dpspan.UnsupportedModule, match=r"1 \(BatchNorm1d\)"):
        setup(module=model)
    assert not traces(model)
    fixed = dpspan.fix(model)
    _, fixed, optimizer, loader = setup(module=fixed)
    train(fixed, optimizer, loader)


def test_mixing_layer_is_found_on_the_first_batch() -> None:
    class Centre(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    engine, model, optimizer, loader = setup(
        module=nn.Sequential(nn.Linear(6, 8), Centre(), nn.Linear(8, 2))
    )
    with pytest.raises(dpspan.UnsupportedModule, match=r"'1' \(Centre\)"):
        train(model, optimizer, loader)
    assert engine.ledger.steps == 0


def test_running_statistics_of_a_custom_layer_are_refused() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
            return x

    engine, model, optimizer, loader = setup(module=nn.Sequential(Running(), nn.Linear(6, 2)))
    with pytest.raises(CaptureError, match=r"'0\.mean' was changed by the private batch"):
        train(model, optimizer, loader)
    assert engine.ledger.steps == 0


def test_loss_that_mixes_samples() -> None:
    class Contrast(nn.Module):
        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return (output - output.mean(0)).square().sum()

    criterion = Contrast()
    _, model, optimizer, loader = setup(criterion=criterion, loss_reduction="sum")
    with pytest.raises(ValueError, match=r"The loss \(Contrast\) mixes samples"):
        for x, y in loader:
            criterion(model(x), y).backward()
            optimizer.step()


def test_ignored_tokens_in_a_mean_mix_samples() -> None:
    criterion = nn.CrossEntropyLoss()
    setup(criterion=criterion)
    logits = torch.randn(4, 2, 3, requires_grad=True)
    target = torch.zeros(4, 3, dtype=torch.long)
    criterion(logits, target)
    target[0, 0] = -100
    with pytest.raises(ValueError, match="mixes samples"):
        criterion(logits, target)


def test_wrong_reduction_is_refused_and_good_losses_are_not() -> None:
    with pytest.raises(ValueError, match=r"reduction='sum' but loss_reduction is 'mean'"):
        setup(criterion=nn.CrossEntropyLoss(reduction="sum"))
    with pytest.raises(ValueError, match="class weights"):
        setup(criterion=nn.CrossEntropyLoss(weight=torch.ones(2)))
    with pytest.raises(
        ValueError, match="Expected loss_reduction to be 'mean' or 'sum', got 'max'"
    ):
        setup(loss_reduction="max")
    for criterion in (nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss()):
        _, model, optimizer, loader = setup(criterion=criterion)
        for x, y in loader:
            criterion(model(x), y).backward()
            optimizer.step()


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_two_precisions_of_what_is_trained_are_refused(place: int, kind: torch.dtype) -> None:
    model = network().to(kind)
    wide, narrow = f"{place}.weight", f"{2 - place}.weight"
    model[place].double()
    with pytest.raises(ValueError, match=f"'{wide}' is in torch.float64 and '{narrow}' in {kind}"):
        setup(module=model)
    setup(module=network().double())
    model[place].requires_grad_(False)
    setup(module=model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_multiplier": 0.0}, "non_private=True"),
        ({"noise_multiplier": -1.0}, "Expected noise_multiplier >= 0 and finite, got -1.0"),
        ({"noise_multiplier": math.nan}, "Expected noise_multiplier to be a number, got nan"),
        ({"sample_rate": 0.0}, r"Expected 0 < sample_rate <= 1, got 0.0"),
        ({"sample_rate": 1.5}, r"Expected 0 < sample_rate <= 1, got 1.5"),
        ({"max_grad_norm": 2.0}, "max_grad_norm=2.0"),
        ({"expected_batch_size": -5.0}, "Expected expected_batch_size > 0"),
        ({"max_physical_batch_size": 0}, "max_physical_batch_size"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        setup(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_epsilon": 0.0}, "Expected target_epsilon > 0"),
        ({"target_epsilon": -1.0}, "Expected target_epsilon > 0"),
        ({"target_delta": 1.0}, "target_delta"),
        ({"target_delta": 0.0}, "target_delta"),
        ({"epochs": 0}, "Expected epochs"),
        ({"method": DPSGD(clip=1.0), "max_grad_norm": 2.0}, "Give one of the two"),
    ],
)
def test_bad_targets(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        private_with_epsilon(PrivacyEngine(), **changes)


def test_dataset_without_length() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(data())

    for rate in (None, 0.5):
        with pytest.raises(TypeError, match="has no length"):
            setup(data_loader=DataLoader(Stream(), batch_size=10), sample_rate=rate)


def test_no_noise_must_be_asked_for_and_is_on_the_certificate() -> None:
    engine, model, optimizer, loader = setup(
        engine=PrivacyEngine(), noise_multiplier=0.0, non_private=True
    )
    train(model, optimizer, loader)
    assert engine.ledger.events == ((NonPrivateDpEvent(), 4),)
    assert engine.get_epsilon(1e-5) == math.inf
    document = engine.certificate(1e-5)
    assert document["private"] is False


def test_optimizer_of_another_model() -> None:
    with pytest.raises(ValueError, match="not part of the model"):
        setup(optimizer=torch.optim.SGD(network().parameters(), lr=0.1))


def test_one_engine_one_run() -> None:
    engine, *_ = setup()
    with pytest.raises(RuntimeError, match=r"ledger=engine\.ledger"):
        setup(engine=engine)
    with pytest.raises(RuntimeError, match="call make_private first"):
        PrivacyEngine().certificate(1e-5)


# -- the certificate ------------------------------------------------------------------------------


def test_certificate_says_what_was_done(tmp_path: Path) -> None:
    engine = PrivacyEngine()
    model, optimizer, loader = private_with_epsilon(engine, method=DPSGD(clip=0.7))
    train(model, optimizer, loader, epochs=2)
    engine.note_unprivate("training loss")
    document = json.loads(engine.write_certificate(tmp_path / "c.json").read_text())
    assert document["private"] is True
    assert document["epsilon"] == engine.get_epsilon()
    assert document["delta"] == 1e-5
    assert document["training"]["clip"] == 0.7
    assert document["training"]["noise_multiplier"] == engine.noise_multiplier
    assert any("unprivate: training loss" in w for w in document["warnings"])


def test_fixed_seed_is_not_private() -> None:
    engine, model, optimizer, loader = setup(engine=PrivacyEngine(debug_seed=3))
    train(model, optimizer, loader)
    document = engine.certificate(1e-5)
    assert document["private"] is False
    assert "debug_seed" in json.dumps(document)
    _, twin, optimizer, loader = setup(engine=PrivacyEngine(debug_seed=3))
    train(twin, optimizer, loader)
    assert torch.equal(weights(twin), weights(model))


def test_two_runs_differ() -> None:
    results = []
    for _ in range(2):
        _, model, optimizer, loader = setup(engine=PrivacyEngine())
        train(model, optimizer, loader)
        results.append(weights(model))
    assert not torch.equal(*results)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_what_was_frozen_after_a_backward_pass_does_not_move(set_to_none: bool) -> None:
    """Its gradient is still there, without noise, and the optimizer would use it."""
    model = network()
    x, y = data()[:]
    nn.functional.cross_entropy(model(x), y).backward()
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)
    _, model, optimizer, loader = setup(module=model, optimizer=optimizer)
    for x, y in loader:
        if not set_to_none:
            optimizer.zero_grad(set_to_none=False)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert torch.equal(model[0].weight, before)


def test_a_scheduler_steps_once_a_batch_however_many_pieces_it_has() -> None:
    model = nn.Linear(4, 2)
    samples = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    criterion = nn.CrossEntropyLoss()
    engine = dpspan.PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(samples, batch_size=16),
        criterion=criterion,
        method=dpspan.DPSGD(clip=1.0),
        noise_multiplier=1.0,
        max_physical_batch_size=3,
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=len(loader))
    iterations = 0
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        iterations += 1
        if loader.last_piece and engine.ledger.steps < len(loader):
            scheduler.step()
    assert iterations > len(loader) == engine.ledger.steps
    assert scheduler.last_epoch == len(loader) - 1


def test_a_loss_that_is_a_function_is_refused_by_name() -> None:
    model = nn.Linear(4, 2)
    samples = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    with pytest.raises(ValueError, match=r"criterion to be a module, such as nn\.CrossEntropyLoss"):
        dpspan.PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(samples, batch_size=16),
            criterion=nn.functional.cross_entropy,
            method=dpspan.DPSGD(clip=1.0),
            noise_multiplier=1.0,
        )
