"""The private steps of one model.

Making a `Training` touches nothing. `prepare` reads the data and trains on public ones; private
records are charged for step by step.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from dp_accounting.dp_event import DpEvent
from torch import Tensor, nn
from torch.utils.data import Dataset

from dpspan.accounting.calibration import calibrate_event
from dpspan.accounting.events import gaussian_event, step_event
from dpspan.accounting.ledger import Ledger
from dpspan.accounting.promises import Budget
from dpspan.app.run.full_batch import FullBatch
from dpspan.app.run.task import Contender, FixedNoise, Spent, Task, in_batches
from dpspan.engine.engine import PrivacyEngine
from dpspan.public.data import move
from dpspan.support.device_facts import Health
from dpspan.support.errors import BudgetExceeded
from dpspan.support.left_as_found import left_as_found

Status = Literal["finished", "stopped", "budget spent", "diverged"]

_TEST_BATCH = 1024
_HUGE = 1e6  # a weight of this size has left every sensible range


class Training:
    """The private steps of one model."""

    def __init__(self, task: Task, contender: Contender, seed: int) -> None:
        self.task, self.contender, self.seed = task, contender, seed
        self.step = self.steps = 0
        self.status: Status | None = None  # why training ended
        self.observe: Callable[[Tensor, Tensor, Tensor], None] | None = None

    def prepare(
        self,
        ledger: Ledger,
        *,
        noise_multiplier: float,
        sample_rate: float | None = None,
        goes_on: bool = False,
    ) -> None:
        """Make the model and train it on public data, unless it goes on; nothing is charged."""
        task, contender = self.task, self.contender
        if isinstance(contender.method, FullBatch):
            fits = "convex methods are for `dpspan train`, `compare` and `advise`"
            raise ValueError(f"This takes single steps of training: {fits}.")
        # A rate that comes from the data is for the engine to find, and to say so.
        if sample_rate is None and task.records is not None:
            sample_rate = task.sample_rate
        self.model = task.new_model(self.seed, contender.model)
        self.engine = PrivacyEngine(ledger=ledger, secure_mode=task.secure_mode)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        _, self.optimizer, self.loader = self.engine.make_private(
            module=self.model,
            optimizer=contender.build_optimizer(trained),
            data_loader=in_batches(task.private, task.batch_size),
            criterion=task.criterion,
            method=contender.method,
            warm_start=None if goes_on else contender.seeded_start(self.seed),
            noise_multiplier=noise_multiplier,
            sample_rate=sample_rate,
            expected_batch_size=float(task.batch_size),
            max_physical_batch_size=task.physical_batch_size,
            views=contender.views,
            low_pass=contender.low_pass,
            average_weights=contender.average_weights,
            unit=task.units,
            cuda_graphs=task.cuda_graphs,
        )
        self.steps = task.epochs * len(self.loader)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]

    def load(self, saved: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """Weights from a checkpoint; what was spent from the record, which may be longer."""
        self.engine.load_state_dict({**saved["engine"], "ledger": record})
        self.model.load_state_dict(saved["module"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step = self._handed_over

    @property
    def _handed_over(self) -> int:
        return self.loader.epoch * len(self.loader) + self.loader.position

    @property
    def epoch(self) -> int:
        return self.loader.epoch if hasattr(self, "loader") else self.steps

    def take_steps(self) -> Iterator[bool]:
        """Train; after each step, whether an epoch or all has ended. `status` says why it did.

        Released weights alone decide whether training has diverged: an error might tell something
        of private records.
        """
        health = Health()
        self.status = None if float(_largest(self.model)) < _HUGE else "diverged"
        while self.step < self.steps and self.status is None:
            for inputs, labels in self.loader:
                try:
                    self._piece(inputs, labels)
                except BudgetExceeded:  # steps were lost, and paid for: the last are not affordable
                    self.loader.position -= 1  # the batch was handed over, its step refused
                    self.status = "budget spent"
                    break
                if self._handed_over == self.step:  # a piece of a batch
                    continue
                self.step = self._handed_over
                known = health.known(_largest(self.model)[None])  # on a GPU a step late: no waiting
                # Of several processes one may know first.
                if self.engine.processes.any(known is not None and not known[0] < _HUGE):
                    self.status = "diverged"
                    break
                if self.loader.position < len(self.loader):
                    yield False
            if self.step == self.steps and self.status is None:
                self.status = "finished" if float(_largest(self.model)) < _HUGE else "diverged"
            yield True
        self.status = self.status or "finished"
        if self.contender.average_weights is not None and self.status != "diverged":
            self.engine.adopt_average()

    def averaged(self) -> AbstractContextManager[None]:
        """The model as it is measured: with averaged weights, if any are."""
        plain = self.contender.average_weights is None or not hasattr(self, "engine")
        return nullcontext() if plain else self.engine.averaged()

    def take_all_steps(self, *, forgiving: bool = False) -> bool:
        """Train; whether weights stayed in range. `forgiving`: errors after a step count as not."""
        try:
            for _ in self.take_steps():
                pass
        except ValueError:
            if float(_largest(self.model)) < _HUGE and not (forgiving and self.step):
                raise
            self.status = "diverged"
        return self.status != "diverged"

    def _piece(self, inputs: Any, labels: Any) -> None:
        task, schedule = self.task, self.contender.schedule
        if schedule is not None:
            factor = schedule(self.step, self.steps)
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor
        inputs, labels = move((inputs, labels), torch.device(task.device))
        if self.contender.augment is not None:  # by random numbers that the loader made anew
            inputs, labels = (
                x.repeat_interleave(self.contender.views, 0) for x in (inputs, labels)
            )
            inputs = self.contender.augment(inputs)
        self.optimizer.zero_grad()
        outputs = self.model(inputs)
        loss = task.criterion(outputs, labels)
        loss.backward()
        self.optimizer.step()
        if self.observe is not None:
            self.observe(loss, outputs, labels)


def rehearse(
    task: Task, contender: Contender, seed: int, noise: float, sample_rate: float | None = None
) -> float:
    """The accuracy of a run that nobody counts, with this noise multiplier; NaN if it diverged."""
    start, method = contender.seeded_start(seed), contender.method
    if method is None or isinstance(method, FullBatch):
        model = task.new_model(seed, contender.model)
        if method is not None:
            ledger, rate = Ledger(accountant="rdp"), contender.learning_rate
            method.fit(task, model, ledger, noise=noise, rate=rate)
        elif start is not None:
            start.run(model, task.criterion)
        return measured(task, model)["accuracy"]
    training = Training(task, contender, seed)
    training.prepare(Ledger(), noise_multiplier=noise, sample_rate=sample_rate)
    kept = training.take_all_steps(forgiving=True)
    training.engine.detach()
    return measured(task, training.model)["accuracy"] if kept else math.nan


def _largest(model: nn.Module) -> Tensor:
    """Of the released weights, which may be looked at; NaN is not below anything."""
    trained = [p.detach() for p in model.parameters() if p.requires_grad and p.numel()]
    return torch.stack([weight.abs().amax().float() for weight in trained]).amax()


@functools.lru_cache(maxsize=64)  # runs of other seeds need the same noise
def _calibrated(
    budget: Budget, spent: Spent, sample_rate: float | None, steps: int, accountant: str
) -> float:
    def event(z: float) -> DpEvent:
        return gaussian_event(z) if sample_rate is None else step_event(z, sample_rate)

    return calibrate_event(event, steps, budget, accountant=accountant, spent=spent)


def noise_for(task: Task, contender: Contender, spent: Spent | None = None) -> float:
    """z of a step: the task's, or what its budget pays for beside what the run has `spent`."""
    if isinstance(task.budget, FixedNoise):
        return task.budget.noise_multiplier
    method, before = contender.method, contender.spent if spent is None else spent
    if isinstance(method, FullBatch):
        return _calibrated(task.budget, before, None, method.method.steps, task.accountant)
    return _calibrated(task.budget, before, task.sample_rate, task.steps, task.accountant)


def outputs_on(task: Task, records: Dataset[Any], model: nn.Module) -> tuple[Tensor, Tensor]:
    """What a model makes of records, and their labels."""
    found = []
    with left_as_found(model, mode="evaluation"), torch.no_grad():
        for batch in in_batches(records, _TEST_BATCH):
            x, y = move(batch, torch.device(task.device))
            found.append((outputs := model(x), y))
            classifies = outputs.dim() == 2 and y.dim() == 1 and not y.is_floating_point()
            if not classifies and not (task.numeric and outputs.shape == y.shape):
                raise ValueError(
                    "Expected a classifier, whose accuracy can be measured: logits (n, classes) "
                    f"and labels (n,), got {tuple(outputs.shape)} and {tuple(y.shape)}."
                )
    outputs, labels = (torch.cat(part) for part in zip(*found, strict=True))
    return outputs, labels


def measured(task: Task, model: nn.Module) -> dict[str, float]:
    """The mean loss on test records, and of a classifier the share that it classifies right."""
    assert task.test is not None
    outputs, labels = outputs_on(task, task.test, model)
    with torch.no_grad():
        loss = {"loss": float(task.criterion(outputs, labels))}
    if task.numeric:
        return loss
    return {**loss, "accuracy": float((outputs.argmax(1) == labels).double().mean())}
