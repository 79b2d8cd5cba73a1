"""The training loop of all commands: the private steps of one model.

Making a `Training` touches nothing. `prepare` reads the data and trains on public ones; private
records are charged for step by step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from dp_accounting.dp_event import DpEvent
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from dpspan.accounting.calibration import calibrate_event
from dpspan.accounting.epsilon import Budget
from dpspan.accounting.events import step_event
from dpspan.accounting.ledger import Ledger
from dpspan.app.run.task import Contender, FixedNoise, Task
from dpspan.engine.engine import PrivacyEngine
from dpspan.engine.sampling import PoissonDraw
from dpspan.public.data import move
from dpspan.public.overlap import Encoded
from dpspan.support.device_facts import Health
from dpspan.support.errors import BudgetExceeded
from dpspan.support.left_as_found import left_as_found

Status = Literal["finished", "stopped", "budget spent", "diverged"]
Spent = tuple[tuple[DpEvent, int], ...]

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
        noise_multiplier: float | None = None,
        sample_rate: float | None = None,
        goes_on: bool = False,
    ) -> None:
        """Make the model and train it on public data, unless it goes on; nothing is charged."""
        task, contender = self.task, self.contender
        # A rate that comes from the data is for the engine to find, and to say so.
        if sample_rate is None and task.records is not None:
            sample_rate = task.sample_rate
        rate = sample_rate or task.sample_rate
        draw = PoissonDraw.one_pass(records=len(task.private), sample_rate=rate)  # type: ignore[arg-type]
        self.steps = task.epochs * draw.steps_per_epoch
        z, budget = noise_multiplier, task.budget
        if isinstance(budget, FixedNoise):
            z = budget.noise_multiplier
        elif z is None:
            z = calibrated(budget, ledger.events, rate, self.steps, task.accountant)
            ledger.budget = budget
            ledger.reserve(step_event(z, rate), self.steps)
        self.model = task.new_model(self.seed)
        self.engine = PrivacyEngine(ledger=ledger)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        _, self.optimizer, self.loader = self.engine.make_private(
            module=self.model,
            optimizer=contender.build_optimizer(trained),
            data_loader=in_batches(task.private, task.batch_size),
            criterion=task.criterion,
            method=contender.method,
            warm_start=None if goes_on else contender.seeded_start(self.seed),
            noise_multiplier=z,
            sample_rate=sample_rate,
            expected_batch_size=float(task.batch_size),
            max_physical_batch_size=task.physical_batch_size,
        )
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
        """How many epochs are over."""
        return self.loader.epoch if self.steps else 0

    def take_steps(self) -> Iterator[bool]:
        """Train until the end, or for as long as it is asked for; `status` says why it ended.

        After each step: whether a line of metrics may be due, at the end of an epoch or of all.
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
                if known is not None and not known[0] < _HUGE:
                    self.status = "diverged"
                    break
                if self.loader.position < len(self.loader):
                    yield False
            if self.step == self.steps and self.status is None:
                self.status = "finished" if float(_largest(self.model)) < _HUGE else "diverged"
            yield True
        self.status = self.status or "finished"

    def _piece(self, inputs: Any, labels: Any) -> None:
        task, schedule = self.task, self.contender.schedule
        if schedule is not None:
            factor = schedule(self.step, self.steps)
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor
        device = torch.device(task.device)
        inputs, labels = move(inputs, device), move(labels, device)
        self.optimizer.zero_grad()
        outputs = self.model(inputs)
        loss = task.criterion(outputs, labels)
        loss.backward()
        self.optimizer.step()
        if self.observe is not None:
            self.observe(loss, outputs, labels)


def rehearse(
    task: Task, contender: Contender, seed: int, noise_multiplier: float, sample_rate: float
) -> float:
    """The accuracy of a run whose records are public: noise as given, and no books to keep."""
    if contender.method is None:
        model, start = task.new_model(seed), contender.seeded_start(seed)
        assert start is not None
        start.run(model, task.criterion)
        return accuracy_and_loss(task, model)[0]
    training = Training(task, contender, seed)
    training.prepare(Ledger(), noise_multiplier=noise_multiplier, sample_rate=sample_rate)
    for _ in training.take_steps():
        pass
    training.engine.detach()
    return accuracy_and_loss(task, training.model)[0]


class _Records(Dataset[tuple[Tensor, ...]]):
    """Samples in memory, a batch read at once: one at a time would take most of a step."""

    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset
        self._tensors = dataset.tensors

    def __len__(self) -> int:
        return len(self._tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self._tensors)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        chosen = torch.as_tensor(indices)
        return tuple(tensor[chosen] for tensor in self._tensors)


def _collate(batch: Any) -> Any:
    """A batch that was read at once is one already."""
    return batch if isinstance(batch, tuple) else tuple(default_collate(batch))


def in_batches(dataset: Dataset[Any], batch_size: int) -> DataLoader[Any]:
    """A loader over the samples."""
    # A subclass of somebody else's may have another length, and give samples in another form.
    if isinstance(dataset, TensorDataset) and type(dataset) in (TensorDataset, Encoded):
        return DataLoader(_Records(dataset), batch_size=batch_size, collate_fn=_collate)
    return DataLoader(dataset, batch_size=batch_size)


def _largest(model: nn.Module) -> Tensor:
    """Of the released weights, which may be looked at; NaN is not below anything."""
    trained = [p.detach() for p in model.parameters() if p.requires_grad and p.numel()]
    return torch.stack([weight.abs().amax().float() for weight in trained]).amax()


# Runs of other seeds need the same noise.
@functools.lru_cache(maxsize=64)
def calibrated(
    budget: Budget, spent: Spent, sample_rate: float, steps: int, accountant: str
) -> float:
    """The noise multiplier for so many steps on top of what is spent."""
    return calibrate_event(
        lambda z: step_event(z, sample_rate), steps, budget, accountant=accountant, spent=spent
    )


def accuracy_and_loss(task: Task, model: nn.Module) -> tuple[float, float]:
    """The share of test records classified right, and the mean loss."""
    assert task.test is not None
    losses, right, count = 0.0, 0.0, 0
    device = torch.device(task.device)
    with left_as_found(model, mode="evaluation"), torch.no_grad():
        for x, y in in_batches(task.test, _TEST_BATCH):
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
    return right / count, losses / count
