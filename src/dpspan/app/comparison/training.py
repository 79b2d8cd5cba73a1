"""One run of a comparison: one contender, one seed. Nothing of it is shown before it is over."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from dp_accounting.dp_event import DpEvent
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dpspan.accounting.calibration import calibrate_event
from dpspan.accounting.certificate import certificate
from dpspan.accounting.epsilon import Budget, account
from dpspan.accounting.events import step_event
from dpspan.accounting.ledger import Ledger
from dpspan.app.comparison.task import Contender, Task
from dpspan.engine.engine import PrivacyEngine
from dpspan.engine.sampling import PoissonDraw
from dpspan.public.data import PublicData, move
from dpspan.public.overlap import encodings, refuse_overlap
from dpspan.public.warm_start import WarmStart
from dpspan.support.randomness import seeded

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
    model = _new_model(task, seed)
    if contender.method is None:
        return _public_only(task, contender, model, seed)
    ledger = _ledger(contender, task.accountant)
    rate = task.sample_rate
    draw = PoissonDraw.one_pass(records=len(task.private), sample_rate=rate)  # type: ignore[arg-type]
    steps = task.epochs * draw.steps_per_epoch
    noise = calibrated(task.budget, ledger.events, rate, steps, task.accountant)
    # A rate that comes from the data is for the engine to find, and to say so.
    given = None if task.records is None else rate
    run = _Run(task, contender, model, seed, ledger, noise, given)
    ledger.budget = task.budget
    ledger.reserve(step_event(noise, rate), steps)
    # Before the first private step, and at each point of the curve.
    metrics = [{"step": 0, "epoch": 0, **_measured(task, ledger, model)}]
    for epoch in range(1, task.epochs + 1):
        goes_on = run.epoch()
        if not goes_on or epoch == task.epochs or epoch % max(1, task.epochs // _LINES) == 0:
            line = {"step": run.taken, "epoch": epoch}
            metrics.append({**line, **_measured(task, ledger, model)})
        if not goes_on:
            break
    run.engine.detach()
    _note_test(task, ledger)
    return Outcome(
        metrics=metrics,
        certificate=run.engine.certificate(task.budget.delta),
        diagnostics=run.engine.diagnostics(),
        weights=_weights(model),
        diverged=_DIVERGED if _exploded(model) else None,
    )


def rehearse(
    task: Task, contender: Contender, seed: int, noise_multiplier: float, sample_rate: float
) -> float:
    """The accuracy of a run whose records are public: noise as given, and no books to keep."""
    model = _new_model(task, seed)
    if contender.method is None:
        start = _seeded_start(contender, seed)
        assert start is not None
        start.run(model, task.criterion)
        return accuracy_and_loss(task, model)[0]
    run = _Run(task, contender, model, seed, Ledger(), noise_multiplier, sample_rate)
    for _ in range(task.epochs):
        if not run.epoch():
            break
    run.engine.detach()
    return accuracy_and_loss(task, model)[0]


class _Run:
    """The private steps of one model."""

    def __init__(
        self,
        task: Task,
        contender: Contender,
        model: nn.Module,
        seed: int,
        ledger: Ledger,
        noise_multiplier: float,
        sample_rate: float | None,
    ) -> None:
        self.engine = PrivacyEngine(ledger=ledger)
        self._task, self._model, self._schedule = task, model, contender.schedule
        self._paid = ledger.steps
        trained = [p for p in model.parameters() if p.requires_grad]
        _, self._optimizer, self._loader = self.engine.make_private(
            module=model,
            optimizer=contender.build_optimizer(trained),
            data_loader=DataLoader(task.private, batch_size=task.batch_size),
            criterion=task.criterion,
            method=contender.method,
            warm_start=_seeded_start(contender, seed),
            noise_multiplier=noise_multiplier,
            sample_rate=sample_rate,
            expected_batch_size=float(task.batch_size),
            max_physical_batch_size=task.physical_batch_size,
        )
        self._rates = [group["lr"] for group in self._optimizer.param_groups]

    @property
    def taken(self) -> int:
        """Steps so far, by the books: a batch may come in pieces."""
        return self.engine.ledger.steps - self._paid

    def epoch(self) -> bool:
        """One pass; False if it ended early.

        Released weights alone decide that: an error might tell something of private records.
        """
        for x, y in self._loader:
            if _exploded(self._model):
                return False
            self._set_rate()
            self._optimizer.zero_grad()
            outputs = self._model(move(x, self._device))
            self._task.criterion(outputs, move(y, self._device)).backward()
            self._optimizer.step()
        return not _exploded(self._model)

    def _set_rate(self) -> None:
        if self._schedule is None:
            return
        factor = self._schedule(self.taken, self._task.epochs * len(self._loader))
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor

    @property
    def _device(self) -> torch.device:
        return torch.device(self._task.device)


def _new_model(task: Task, seed: int) -> nn.Module:
    place = nn.ParameterList([torch.empty(0, device=task.device)])
    with seeded(place, seed):  # only the generators that are put back afterwards
        return task.model().to(task.device)


def _seeded_start(contender: Contender, seed: int) -> WarmStart | None:
    start = contender.warm_start
    return None if start is None else dataclasses.replace(start, seed=seed)


def metric_name(task: Task, name: str) -> str:
    """What a number measured on the test records is called."""
    return f"test_{name}" if task.test_is_public else f"unprivate_test_{name}"


def _public_only(task: Task, contender: Contender, model: nn.Module, seed: int) -> Outcome:
    """The free baseline: no private record is trained on, so ε = 0."""
    assert contender.warm_start is not None
    ledger = Ledger(accountant=task.accountant, budget=task.budget)
    data = PublicData.of(contender.warm_start.data)
    refuse_overlap(data, task.private)  # or it is not free
    start = dataclasses.replace(contender.warm_start, data=data, seed=seed)
    before = {"step": 0, "epoch": 0, **_measured(task, ledger, model)}
    detail = start.summary(start.run(model, task.criterion))
    ledger.declare_public(data.name, data.digest, data.count, detail=detail)
    for each in encodings(task.private):  # their layer is a part of the model; no record is read
        ledger.declare_public(
            each.public.name, each.public.digest, each.public.count, detail=each.layer
        )
    after = {"step": 0, "epoch": 0, **_measured(task, ledger, model)}
    _note_test(task, ledger)
    return Outcome(
        metrics=[before, after],
        certificate=certificate(ledger, training={"method": None, "model": type(model).__name__}),
        diagnostics=[],
        weights=_weights(model),
        diverged=None,
    )


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: w.detach().cpu().clone() for name, w in model.state_dict().items()}


def _note_test(task: Task, ledger: Ledger) -> None:
    if not task.test_is_public:
        ledger.warn("unprivate: the model was measured on test records that are not public")


def spent_by(contender: Contender) -> Spent:
    """What was released before the first step of its runs."""
    return _ledger(contender).events


def _ledger(contender: Contender, accountant: str = "pld") -> Ledger:
    ledger = Ledger(accountant=accountant)
    if contender.paid is not None:
        ledger.load_state_dict(contender.paid)
        ledger.budget = None  # the task's, once noise has been calibrated
    return ledger


def _exploded(model: nn.Module) -> bool:
    """Whether the released weights are beyond use; they may be looked at."""
    trained = [p.detach() for p in model.parameters() if p.requires_grad]
    # One answer for all of them: each would wait for a GPU on its own. NaN is not below anything.
    largest = torch.stack([weight.abs().amax().float() for weight in trained]).amax()
    return not bool(largest < _HUGE)


# Runs of other seeds need the same noise and pass through the same values of ε.
@functools.lru_cache(maxsize=64)
def calibrated(
    budget: Budget, spent: Spent, sample_rate: float, steps: int, accountant: str
) -> float:
    """The noise multiplier for so many steps on top of what is spent."""
    return calibrate_event(
        lambda z: step_event(z, sample_rate), steps, budget, accountant=accountant, spent=spent
    )


@functools.lru_cache(maxsize=1024)
def _epsilon(events: Spent, delta: float, accountant: str) -> float:
    return account(events, delta, accountant).epsilon


def _measured(task: Task, ledger: Ledger, model: nn.Module) -> dict[str, Any]:
    """ε so far, and the model on the test records; no time, which depends on what was drawn."""
    accuracy, loss = accuracy_and_loss(task, model)
    return {
        "epsilon": _epsilon(ledger.events, task.budget.delta, task.accountant),
        metric_name(task, "loss"): loss if math.isfinite(loss) else None,
        metric_name(task, "accuracy"): accuracy,
    }


def accuracy_and_loss(task: Task, model: nn.Module) -> tuple[float, float]:
    """The share of test records classified right, and the mean loss."""
    model.eval()
    losses, right, count = 0.0, 0.0, 0
    device = torch.device(task.device)
    with torch.no_grad():
        for x, y in DataLoader(task.test, batch_size=_TEST_BATCH):
            x, y = move(x, device), move(y, device)
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
