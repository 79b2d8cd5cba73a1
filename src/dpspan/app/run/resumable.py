"""One run: a contender, trained on a task with a seed, by a process that may be killed any time."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from dpspan.accounting.certificate import certificate, write_certificate
from dpspan.accounting.epsilon import Budget, account
from dpspan.accounting.ledger import Ledger, steps_beyond
from dpspan.accounting.promises import weaknesses
from dpspan.app.run.folder import CHECKPOINT, RunFolder, read_json, read_lines
from dpspan.app.run.task import Contender, Task
from dpspan.app.run.training import Spent, Status, Training, accuracy_and_loss
from dpspan.engine.checkpoint import load_file
from dpspan.public.data import PublicData
from dpspan.public.encoded import encodings
from dpspan.public.overlap import refuse_overlap
from dpspan.support.strict_json import plain

_SHARE_OF_TIME = 0.02  # that may go into ε for the eyes of whoever watches
_DIVERGED = "the weights grew without bound: lower the learning rate"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run is; nothing of it is private. ε may be some steps old."""

    step: int
    steps: int
    epoch: int
    epochs: int
    epsilon: float
    metrics: dict[str, Any] | None  # of the last epoch that ended


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended."""

    folder: Path
    status: Status
    step: int
    steps: int
    epsilon: float
    delta: float
    metrics: dict[str, Any] | None

    def describe(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "folder": str(self.folder)}


class Run:
    """A training in a folder, which goes on where an earlier process ended.

    Args:
        task, contender, seed: what is trained. The seed is of weights and public training, never
            of noise.
        folder: where everything is kept.
        settings: what makes two runs the same, as plain values; public things only.
        lines: of metrics, about, and the first of them before the first step. The certificate then
            comes at the end. None for one an epoch, with a certificate each.
        every: steps from one checkpoint to the next, beside those at lines of metrics.
        features: the digest of the frozen layer that the data have been through.
        unprivate: write loss and accuracy on private batches too, under names that say so.
        tensorboard: write metrics there as well.
    """

    def __init__(
        self,
        task: Task,
        contender: Contender,
        seed: int,
        folder: RunFolder,
        *,
        settings: Mapping[str, Any],
        lines: int | None = None,
        every: int | None = None,
        features: str | None = None,
        unprivate: bool = False,
        tensorboard: bool = False,
    ) -> None:
        self.training = Training(task, contender, seed)
        self._task, self._contender, self._folder = task, contender, folder
        self._settings, self._features = settings, features
        self._lines, self._every = lines, every
        self._unprivate = _Unprivate() if unprivate else None
        self._scalars = _Scalars(folder.path) if tensorboard else None
        self._meter = _Meter(self._spent)
        self._line: dict[str, Any] | None = None
        self._notes = 0  # of the engine's diagnostics, written

    # -- starting -------------------------------------------------------------------------------

    def start(self) -> None:
        """Read the data, train on public ones, and load what an earlier process left."""
        folder, task, training = self._folder, self._task, self.training
        saved = self._saved()
        budget = task.budget if isinstance(task.budget, Budget) else None
        self._ledger = folder.open_ledger(task.accountant, budget, self._contender.paid)
        for sentence in weaknesses(None, task.budget.delta, task.count):
            self._ledger.warn(sentence)
        self._note_unprivate()
        z = None if saved is None else saved["checkpoint_dict"]["noise_multiplier"]
        training.prepare(self._ledger, noise_multiplier=z, goes_on=saved is not None)
        if self._unprivate is not None:
            training.observe = self._unprivate.add
        if saved is not None:
            self._load(saved)
            self._write_facts(None)
            return
        for path in (folder.metrics, folder.diagnostics):  # of a run whose checkpoint was lost
            path.unlink(missing_ok=True)
        first = None if self._lines is None else self._measured()
        self._write_facts(None)
        self._save(first)  # a run that dies early finds its public training, and its price, again

    def _saved(self) -> dict[str, Any] | None:
        """The checkpoint of the run, or None if there is none."""
        if not self._folder.checkpoint.exists():
            return None
        saved = load_file(self._folder.checkpoint, CHECKPOINT)
        facts = self._folder.facts
        there = saved["checkpoint_dict"]["config"] if facts is None else facts["settings"]
        self._folder.refuse_other_settings(self._settings, there)
        return saved

    def _load(self, saved: dict[str, Any]) -> None:
        """Weights from the checkpoint; the record of what was spent from the ledger's file."""
        folder, state = self._folder, saved["checkpoint_dict"]
        if state.get("features") != self._features:
            raise ValueError(
                f"{folder.features} is not the layer that the run in {folder.path} began with. "
                "Restore it, or train anew in another folder."
            )
        record = read_json(folder.ledger)
        lost = steps_beyond(saved["engine"]["ledger"], record)
        if lost is None:
            raise ValueError(
                f"{folder.ledger} leaves out releases that are behind the checkpoint beside it. "
                "Restore it from a copy, or train anew in another folder."
            )
        try:
            self.training.load(saved, record)
        except (ValueError, RuntimeError) as error:
            raise ValueError(
                f"The checkpoint in {folder.path} is of another run: {error} {folder.way_out}"
            ) from error
        if lost:
            self._ledger.warn(
                f"{lost} steps were charged that the model was not trained by: the process ended "
                "while they were being written"
            )
        self._line = state["line"]
        for path in (folder.metrics, folder.diagnostics):
            if path.exists():
                folder.keep_until(path, self.training.step)
        if self._line is not None and self._line not in read_lines(folder.metrics)[-1:]:
            folder.append(folder.metrics, [self._line])  # it had not come to that

    def _note_unprivate(self) -> None:
        if self._unprivate is not None:
            self._ledger.warn("unprivate: loss and accuracy on private batches were written down")
        if self._task.test is not None and not self._task.test_is_public:
            self._ledger.warn("unprivate: results on test data not declared public were written")

    # -- training -------------------------------------------------------------------------------

    def go(
        self,
        watch: Callable[[Progress], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Result:
        """Train until the end, or until told to stop."""
        training, told = self.training, False
        self._watched(watch)
        for end_of_epoch in training.take_steps():
            ended = training.status is not None
            if end_of_epoch and (ended or self._is_due()):
                known = self._line is not None and self._line["step"] == training.step
                self._save(None if known else self._measured())
            self._watched(watch)
            told = not ended and stop is not None and stop()
            every = self._every is not None and training.step % self._every == 0
            if not end_of_epoch and (told or every):
                self._save()
            if told:
                break
        status = training.status or "stopped"
        if not told:
            self._finish(status)
        if self._scalars is not None:
            self._scalars.close()
        return self._result(status)

    def _is_due(self) -> bool:
        if self._lines is None:
            return True
        epoch = self.training.loader.epoch
        return epoch % max(1, self._task.epochs // self._lines) == 0

    def _finish(self, status: Status) -> None:
        """The price first, as ever; `run.json` says last that all is there."""
        document = self.training.engine.certificate(self._task.budget.delta)
        self._folder.write_ledger(self._ledger)
        write_certificate(self._folder.certificate, document)
        self._folder.write_model(self.training.model)
        self.training.engine.detach()
        self._write_facts(status)

    def train_on_public(self) -> Result:
        """The free baseline: no private record is trained on, so ε = 0."""
        task, folder, start = self._task, self._folder, self._contender.warm_start
        assert start is not None
        budget = task.budget if isinstance(task.budget, Budget) else None
        self._ledger = ledger = Ledger(accountant=task.accountant, budget=budget)
        data = PublicData.of(start.data)
        refuse_overlap(data, task.private)  # or it is not free
        model = self.training.model = task.new_model(self.training.seed)
        self._note_unprivate()
        lines = [self._measured()]
        start = dataclasses.replace(start, data=data, seed=self.training.seed)
        detail = start.summary(start.run(model, task.criterion))
        ledger.declare_public(data.name, data.digest, data.count, detail=detail)
        for each in encodings(task.private):  # their layer is a part of the model; nothing is read
            public = each.public
            ledger.declare_public(public.name, public.digest, public.count, detail=each.layer)
        lines.append(self._measured())
        about = {"method": None, "model": type(model).__name__}
        document = certificate(ledger, delta=task.budget.delta, training=about)
        self._write_facts(None)
        folder.metrics.unlink(missing_ok=True)
        folder.ledger.unlink(missing_ok=True)  # an interrupted one, of no release
        folder.write_ledger(ledger)
        folder.append(folder.metrics, lines)
        write_certificate(folder.certificate, document)
        folder.write_model(model)
        self._line = lines[-1]
        self._write_facts("finished")
        return self._result("finished")

    # -- what leaves the process ----------------------------------------------------------------

    def _save(self, line: dict[str, Any] | None = None) -> None:
        """The ledger first: see `folder`."""
        folder, engine, delta = self._folder, self.training.engine, self._task.budget.delta
        # It may put a warning on record, so it is made before the ledger is written.
        document = engine.certificate(delta) if self._lines is None else None
        folder.write_ledger(self._ledger)
        self._line = line or self._line
        engine.save_checkpoint(
            folder.checkpoint,
            module=self.training.model,
            optimizer=self.training.optimizer,
            checkpoint_dict={
                "config": dict(self._settings),
                "noise_multiplier": engine.noise_multiplier,
                "line": self._line,
                "features": self._features,
            },
        )
        if line is not None:
            folder.append(folder.metrics, [line])
            if self._scalars is not None:
                self._scalars.write(line)
        notes = engine.diagnostics()
        folder.append(folder.diagnostics, notes[self._notes :])
        self._notes = len(notes)
        if document is not None:
            write_certificate(folder.certificate, document)

    def _write_facts(self, status: Status | None) -> None:
        self._folder.write_facts(
            settings=dict(self._settings),
            seed=self.training.seed,
            warm=self._contender.warm_start is not None,
            base=self._contender.base or self._contender.name,
            status=status,
            diverged=_DIVERGED if status == "diverged" else None,
        )

    def _measured(self) -> dict[str, Any]:
        """A line of metrics; no time, as how long steps took depends on who was drawn."""
        task, training = self._task, self.training
        line: dict[str, Any] = {
            "step": training.step,
            "epoch": training.loader.epoch if training.steps else 0,
            "epsilon": self._meter.now(),
            "delta": task.budget.delta,
        }
        if task.test is not None:
            accuracy, loss = accuracy_and_loss(task, training.model)
            line |= {task.metric("loss"): loss, task.metric("accuracy"): accuracy}
        if self._unprivate is not None:
            line |= self._unprivate.means()
        strict: dict[str, Any] = plain(line)
        return strict

    def _spent(self) -> float:
        delta = self._task.budget.delta
        if self._lines is None:  # a certificate is about to ask the same
            return self._ledger.epsilon(delta)
        return _epsilon(self._ledger.events, delta, self._task.accountant)

    def _watched(self, watch: Callable[[Progress], None] | None) -> None:
        if watch is None:
            return
        training = self.training
        progress = Progress(
            step=training.step,
            steps=training.steps,
            epoch=training.loader.epoch,
            epochs=self._task.epochs,
            epsilon=self._meter.recent(),
            metrics=self._line,
        )
        watch(progress)

    def _result(self, status: Status) -> Result:
        return Result(
            folder=self._folder.path,
            status=status,
            step=self.training.step,
            steps=self.training.steps,
            epsilon=self._meter.now(),
            delta=self._task.budget.delta,
            metrics=self._line,
        )


class _Meter:
    """ε now, or one that is recent enough to look at and cost little time."""

    def __init__(self, spent: Callable[[], float]) -> None:
        self._spent, self._epsilon, self._next = spent, 0.0, 0.0

    def now(self) -> float:
        start = time.monotonic()
        self._epsilon = self._spent()
        end = time.monotonic()
        self._next = end + (end - start) / _SHARE_OF_TIME
        return self._epsilon

    def recent(self) -> float:
        return self.now() if time.monotonic() > self._next else self._epsilon


class _Unprivate:
    """Means over the private batches of an epoch: not private, and named so."""

    def __init__(self) -> None:
        self._loss = self._right = 0.0
        self._samples = 0

    def add(self, loss: Tensor, outputs: Tensor, labels: Tensor) -> None:
        self._loss += float(loss.detach()) * len(labels)
        self._right += float((outputs.detach().argmax(1) == labels).sum())
        self._samples += len(labels)

    def means(self) -> dict[str, float]:
        loss, right, samples = self._loss, self._right, max(self._samples, 1)
        self._loss, self._right, self._samples = 0.0, 0.0, 0
        return {
            "unprivate_train_loss": loss / samples,
            "unprivate_train_accuracy": right / samples,
        }


class _Scalars:
    """Metrics for TensorBoard: the same numbers as in metrics.jsonl, after the ledger."""

    def __init__(self, folder: Path) -> None:
        if find_spec("tensorboard") is None:
            raise ModuleNotFoundError(
                "output.tensorboard needs the package tensorboard: pip install "
                "'dpspan[tensorboard]', or set it to false."
            )
        self._folder = folder
        self._writer: Any = None

    def write(self, line: Mapping[str, Any]) -> None:
        """Everything but the step itself, and not when: steps take longer with more records."""
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is None:
            self._writer = SummaryWriter(str(self._folder / "tensorboard"))
        for name, value in line.items():
            if name != "step":
                self._writer.add_scalar(name, value, line["step"], walltime=0.0)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


# Runs of other seeds pass through the same values of ε, and PLD takes a while for each.
@functools.lru_cache(maxsize=1024)
def _epsilon(events: Spent, delta: float, accountant: str) -> float:
    return account(events, delta, accountant).epsilon
