"""One run of a comparison: one contender, one seed. Nothing of it is shown before it is over."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from dp_accounting.dp_event import DpEvent
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dpspan.accounting import Budget, account, calibrate_event
from dpspan.certificate import certificate
from dpspan.comparison.task import Contender, Task
from dpspan.engine import PrivacyEngine
from dpspan.events import step_event
from dpspan.ledger import Ledger
from dpspan.public import PublicData
from dpspan.sampling import PoissonDraw, records_of, sample_rate_of
from dpspan.transfer import WarmStart

Spent = tuple[tuple[DpEvent, int], ...]

_LINES = 10  # of metrics, about, in a run
_TEST_BATCH = 1024
_HUGE = 1e6  # a weight of this size has left every sensible range
_DIVERGED = "the weights grew without bound: lower the learning rate"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a finished run leaves."""

    metrics: list[dict[str, Any]]
    certificate: dict[str, Any]
    diagnostics: list[dict[str, Any]]  # public or released things only
    weights: dict[str, Tensor]
    diverged: str | None  # why training stopped early


def train(task: Task, contender: Contender, seed: int) -> Outcome:
    """Train and measure. The seed is of weights and public training, never of noise."""
    began = time.perf_counter()
    model = _new_model(task, seed)
    if contender.method is None:
        return _public_only(task, contender, model, seed, began)
    ledger = _ledger(contender)
    engine = PrivacyEngine(ledger=ledger)
    loader = DataLoader(task.private, batch_size=task.batch_size)
    rate = sample_rate_of(loader)
    draw = PoissonDraw.one_pass(records=records_of(loader), sample_rate=rate)
    steps = task.epochs * draw.steps_per_epoch
    noise = _calibrated(task.budget, ledger.events, rate, steps)
    _, optimizer, batches = engine.make_private(
        module=model,
        optimizer=_optimizer(contender, model),
        data_loader=loader,
        criterion=task.criterion,
        method=contender.method,
        warm_start=_seeded_start(contender, seed),
        noise_multiplier=noise,
    )
    ledger.budget = task.budget
    ledger.reserve(step_event(noise, rate), steps)
    # Before the first private step, and at each point of the curve.
    metrics = [{"step": 0, "epoch": 0, **_measured(task, engine.ledger, model, began)}]
    diverged, done = None, 0
    for epoch in range(1, task.epochs + 1):
        taken, diverged = _epoch(task, model, optimizer, batches)
        done += taken
        last = epoch == task.epochs or diverged is not None
        if last or epoch % max(1, task.epochs // _LINES) == 0:
            line = {"step": done, "epoch": epoch}
            metrics.append({**line, **_measured(task, engine.ledger, model, began)})
        if last:
            break
    engine.detach()
    if not task.test_is_public:
        engine.note_unprivate("the model was measured on test records that are not public")
    return Outcome(
        metrics=metrics,
        certificate=engine.certificate(task.budget.delta),
        diagnostics=engine.diagnostics(),
        weights={name: w.detach().clone() for name, w in model.state_dict().items()},
        diverged=diverged,
    )


def rehearse(
    task: Task, contender: Contender, seed: int, noise_multiplier: float, sample_rate: float
) -> float:
    """The accuracy of a run whose records are public: noise as given, and no books to keep."""
    model = _new_model(task, seed)
    start = _seeded_start(contender, seed)
    if contender.method is None:
        assert start is not None
        start.run(model, task.criterion)
        return accuracy_and_loss(task, model)[0]
    engine = PrivacyEngine()
    _, optimizer, batches = engine.make_private(
        module=model,
        optimizer=_optimizer(contender, model),
        data_loader=DataLoader(task.private, batch_size=task.batch_size),
        criterion=task.criterion,
        method=contender.method,
        warm_start=start,
        noise_multiplier=noise_multiplier,
        sample_rate=sample_rate,
        expected_batch_size=float(task.batch_size),
    )
    for _ in range(task.epochs):
        if _epoch(task, model, optimizer, batches)[1] is not None:
            break
    engine.detach()
    return accuracy_and_loss(task, model)[0]


def _epoch(
    task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]
) -> tuple[int, str | None]:
    """One pass: how many steps, and why it ended early if it did."""
    steps = 0
    try:
        for x, y in batches:
            optimizer.zero_grad()
            task.criterion(model(x), y).backward()
            optimizer.step()
            steps += 1
    except ValueError:
        if not _exploded(model):
            raise
        return steps, _DIVERGED
    return steps, None


def _new_model(task: Task, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return task.model()


def _optimizer(contender: Contender, model: nn.Module) -> torch.optim.Optimizer:
    assert contender.learning_rate is not None
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=contender.learning_rate, momentum=contender.momentum)


def _seeded_start(contender: Contender, seed: int) -> WarmStart | None:
    start = contender.warm_start
    return None if start is None else dataclasses.replace(start, seed=seed)


def metric_name(task: Task, name: str) -> str:
    """What a number measured on the test records is called."""
    return f"test_{name}" if task.test_is_public else f"unprivate_test_{name}"


def _public_only(
    task: Task, contender: Contender, model: nn.Module, seed: int, began: float
) -> Outcome:
    """The free baseline: no private record is looked at, so ε = 0."""
    assert contender.warm_start is not None
    ledger = Ledger(budget=task.budget)
    data = PublicData.of(contender.warm_start.data)
    start = dataclasses.replace(contender.warm_start, data=data, seed=seed)
    before = {"step": 0, "epoch": 0, **_measured(task, ledger, model, began)}
    detail = start.summary(start.run(model, task.criterion))
    ledger.declare_public(data.name, data.digest, data.count, detail=detail)
    after = {"step": 0, "epoch": 0, **_measured(task, ledger, model, began)}
    return Outcome(
        metrics=[before, after],
        certificate=certificate(ledger, training={"method": None, "model": type(model).__name__}),
        diagnostics=[],
        weights={name: w.detach().clone() for name, w in model.state_dict().items()},
        diverged=None,
    )


def _ledger(contender: Contender) -> Ledger:
    ledger = Ledger()
    if contender.paid is not None:
        ledger.load_state_dict(contender.paid)
        ledger.budget = None  # the engine sets the task's
    return ledger


def _exploded(model: nn.Module) -> bool:
    """Whether the released weights are beyond use; they may be looked at."""
    return not all(bool((p.detach().abs() < _HUGE).all()) for p in model.parameters())


# Runs of other seeds need the same noise and pass through the same values of ε.
@functools.lru_cache(maxsize=64)
def _calibrated(budget: Budget, spent: Spent, sample_rate: float, steps: int) -> float:
    ledger = Ledger()
    for event, count in spent:
        ledger.charge(event, count)
    return calibrate_event(lambda z: step_event(z, sample_rate), steps, budget, spent=ledger)


@functools.lru_cache(maxsize=1024)
def _epsilon(events: Spent, delta: float) -> float:
    return account(events, delta, Ledger().accountant).epsilon


def _measured(task: Task, ledger: Ledger, model: nn.Module, began: float) -> dict[str, Any]:
    """ε so far, time so far, and the model on the test records."""
    accuracy, loss = accuracy_and_loss(task, model)
    return {
        "epsilon": _epsilon(ledger.events, task.budget.delta),
        "seconds": round(time.perf_counter() - began, 2),
        metric_name(task, "loss"): loss if math.isfinite(loss) else None,
        metric_name(task, "accuracy"): accuracy,
    }


def accuracy_and_loss(task: Task, model: nn.Module) -> tuple[float, float]:
    """The share of test records classified right, and the mean loss."""
    model.eval()
    losses, right, count = 0.0, 0.0, 0
    with torch.no_grad():
        for x, y in DataLoader(task.test, batch_size=_TEST_BATCH):
            outputs = model(x)
            if outputs.dim() != 2 or y.dim() != 1 or y.is_floating_point():
                raise ValueError(
                    "Expected a classifier, logits (n, classes) and labels (n,), got outputs "
                    f"{tuple(outputs.shape)} and labels {tuple(y.shape)}: accuracy is what a "
                    "comparison measures."
                )
            losses += float(task.criterion(outputs, y)) * len(y)
            right += float((outputs.argmax(1) == y).sum())
            count += len(y)
    model.train()
    return right / count, losses / count
