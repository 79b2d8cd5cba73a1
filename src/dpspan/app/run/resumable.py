"""One run: a contender, trained on a task with a seed, by a process that may be killed any time."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dp_accounting.dp_event import GaussianDpEvent
from torch import Tensor
from torch.utils.data import DataLoader

from dpspan.accounting.certificate import certificate, sha256_of
from dpspan.accounting.epsilon import account, rough_epsilon
from dpspan.accounting.events import gaussian_event
from dpspan.accounting.ledger import steps_beyond
from dpspan.accounting.promises import Budget, weaknesses
from dpspan.app.config import OutputSection
from dpspan.app.data import optional
from dpspan.app.run.evaluation import Evaluation
from dpspan.app.run.folder import ANEW, RunFolder, read_json, read_lines
from dpspan.app.run.full_batch import FullBatch
from dpspan.app.run.prospects import doubts
from dpspan.app.run.task import Contender, Spent, Task
from dpspan.app.run.training import Status, Training, measured, noise_for
from dpspan.public.data import PublicData
from dpspan.public.overlap import encodings, refuse_overlap
from dpspan.support.distributed import Processes
from dpspan.support.strict_json import plain

DIVERGED = "the weights grew without bound: lower the learning rate"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run is; nothing of it is private. ε is a bound, and exact at the end."""

    plan: str  # the run in one line
    step: int
    steps: int
    epoch: int
    epochs: int
    epsilon: float
    metrics: dict[str, Any] | None  # of the last epoch that ended


@dataclass(frozen=True, kw_only=True)
class Result(Progress):
    """How a run ended."""

    folder: Path
    status: Status
    delta: float
    evaluation: dict[str, Any]

    def describe(self) -> dict[str, Any]:
        return {**asdict(self), "folder": str(self.folder)}


@dataclass(kw_only=True)
class Run:
    """A training in a folder, which goes on where an earlier process ended.

    Making one touches nothing: `start` reads the data, and `go` takes the private steps.
    """

    task: Task
    contender: Contender
    seed: int  # of weights and public training, never of noise
    folder: RunFolder
    settings: Mapping[str, Any]  # what makes two runs the same, as plain values; all of it public
    # Lines of metrics, about, the first of them before the first step, and a certificate at the
    # end. None for a line and a certificate each epoch.
    lines: int | None = None
    scale: float | None = None  # what inputs were divided by
    features: str | None = None  # the digest of the frozen layer that the data have been through
    output: OutputSection | None = None  # how often to save, and what else to write
    processes: Processes = field(default_factory=Processes)  # those that train the model together
    notes: Sequence[str] = ()  # for the certificate, of what was done before
    evaluation: Evaluation = field(default_factory=Evaluation)  # of the model that comes out

    def __post_init__(self) -> None:
        self.training = Training(self.task, self.contender, self.seed)
        self._output = self.output or OutputSection(folder=self.folder.path)
        self._sums = [0.0, 0.0, 0.0]  # loss, hits and samples of an epoch's private batches
        self._scalars: Any = None  # a writer for TensorBoard
        self._line: dict[str, Any] | None = None
        self._notes = 0  # of the engine's diagnostics, written
        self._plan, self._planned = "", math.inf  # the run in one line, and its ε

    # -- starting -------------------------------------------------------------------------------

    def start(self) -> None:
        """Read the data, train on public ones, and load what an earlier process left."""
        folder, task, training = self.folder, self.task, self.training
        if self._output.tensorboard and folder.writes:
            optional("tensorboard", "Files of output.tensorboard", "tensorboard")
        saved = folder.read_checkpoint(self.settings)
        self._ledger = folder.open_ledger(task.accountant, task.budget, self.contender.paid)
        self._ledger.warn(*weaknesses(None, task.budget.delta, task.count, unit=task.protects))
        self._note_unprivate()
        if self.evaluation.unseen is not None and saved is None:  # noise is for what is left of ε
            folder.remove(folder.evaluation)  # of another model, whose run did not end
            self._ledger.charge(gaussian_event(self.evaluation.section.noise_multiplier or 1.0))
        ended = self.evaluation.unseen is not None and (folder.facts or {}).get("status")
        if saved is not None and ended and "test_accuracy" not in read_json(folder.evaluation, {}):
            lost = f"{folder.evaluation} is missing, with an accuracy that is released once"
            raise ValueError(f"{lost}. Restore it, or choose another output folder.")
        if isinstance(self.contender.method, FullBatch):
            self._refuse_lost_fit(self.contender.method)
            self._ledger.warn(*doubts(task))
            self._declare_public()
            return
        if saved is None:
            z = noise_for(task, self.contender, self._ledger.events)
        else:
            z = saved["checkpoint_dict"]["noise_multiplier"]
        training.prepare(self._ledger, noise_multiplier=z, goes_on=saved is not None)
        self._ledger.warn(*doubts(task, training))
        self._declare_public()
        if saved is not None:
            self._load(saved)
        else:  # what is there is of a run whose checkpoint was lost
            self._ledger.reserve(training.engine.plan.event, training.steps)
            folder.remove(folder.metrics, folder.diagnostics)
        if self._output.tensorboard and folder.writes:  # not before: a run may be refused
            from torch.utils.tensorboard import SummaryWriter

            self._scalars = SummaryWriter(str(folder.path / "tensorboard"))

    def _refuse_lost_fit(self, method: FullBatch) -> None:
        """ValueError if an earlier process paid for a fit and lost it: too little is left."""
        fits = [n for event, n in self._ledger.events if isinstance(event, GaussianDpEvent)]
        if isinstance(self.task.budget, Budget) and method.method.steps in fits:
            gone = "has the price of a fit whose model was lost: what is left of ε makes no other"
            raise ValueError(f"{self.folder.ledger} {gone}. Fit anew in another folder.")

    def _load(self, saved: dict[str, Any]) -> None:
        """Weights from the checkpoint; the record of what was spent from the ledger's file."""
        folder, state = self.folder, saved["checkpoint_dict"]
        if state.get("features") != self.features:
            began = f"the layer that the run in {folder.path} began with"
            raise ValueError(f"{folder.features} is not {began}. {ANEW}")
        record = read_json(folder.ledger)
        lost = steps_beyond(saved["engine"]["ledger"], record)
        if lost is None:
            gap = "leaves out releases that are behind the checkpoint beside it"
            raise ValueError(f"{folder.ledger} {gap}. {ANEW}")
        try:
            self.training.load(saved, record)
        except (ValueError, RuntimeError) as error:
            other = f"The checkpoint in {folder.path} is of another run"
            raise ValueError(f"{other}: {error} {folder.way_out}") from error
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
        self._ledger.warn(*self.notes)
        batches = not isinstance(self.contender.method, FullBatch | None)
        if self._output.unprivate_metrics and batches:  # or nothing is measured on them
            self.training.observe = self._observe
            self._ledger.warn("unprivate: loss and accuracy on private batches were written down")
        if self.task.test is not None and not self.task.test_is_public:
            self._ledger.warn("unprivate: results on test data not declared public were written")

    def _declare_public(self) -> None:
        """What the method does not declare itself; a frozen layer is a part of the model."""
        for each in encodings(self.task.private):
            self._declare(each.public, each.layer)
        self.task.preparation.put_on(self._ledger)
        if self.task.test is not None and self.task.test_is_public:
            self._declare(PublicData.of(self.task.test, name="test"), "measured on")

    def _declare(self, data: PublicData, purpose: str) -> None:
        self._ledger.declare_public(data.name, data.digest, data.count, detail=purpose)

    # -- training -------------------------------------------------------------------------------

    def go(
        self,
        watch: Callable[[Progress], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Result:
        """Train until the end, or until told to stop."""
        if isinstance(self.contender.method, FullBatch):
            return self._fit(self.contender.method)
        training, told = self.training, False
        apart = 1 if self.lines is None else max(1, self.task.epochs // self.lines)
        self._foresee()
        watch = watch or (lambda _: None)
        watch(self._progress(self._spent(exact=False)))
        self._write_facts(None)
        if not self.folder.checkpoint.exists():
            # A run that dies early finds its public training, and its price, again.
            self._save(measured=self.lines is not None)
        for end_of_epoch in training.take_steps():
            ended = training.status is not None
            if end_of_epoch and (ended or training.epoch % apart == 0):
                known = self._line is not None and self._line["step"] == training.step
                self._save(measured=not known)
            watch(self._progress(self._spent(exact=False)))
            told = not ended and stop is not None and self.processes.any(stop())
            every = self._output.checkpoint_every
            if not end_of_epoch and (told or (every and training.step % every == 0)):
                self._save()
            if told:
                break
        if self._scalars is not None:
            self._scalars.close()
        document = training.engine.certificate(self.task.budget.delta)
        if told:
            self.folder.write_ledger(self._ledger)
            self._certify(document)
            result = self._result("stopped")
        else:
            training.engine.detach()
            result = self._finish(training.status or "finished", document)
        self.processes.any(False)  # nobody leaves, and ends the others, before all is written
        return result

    def _finish(self, status: Status, document: Mapping[str, Any]) -> Result:
        """The price first, as ever; `run.json` says last that all is there."""
        self.folder.write_ledger(self._ledger)
        self._certify(document)
        kept = read_json(self.folder.evaluation, {})
        found = self.evaluation.results(self.task, self.training.model, kept)
        self.folder.write_json(self.folder.evaluation, found)
        self.folder.write_model(self.training.model)
        self._write_facts(status)
        return self._result(status)

    def train_on_public(self) -> Result:
        """The free baseline: no private record is trained on, so ε = 0."""
        task, folder, start = self.task, self.folder, self.contender.warm_start
        assert start is not None
        self._ledger = ledger = folder.open_ledger(task.accountant, task.budget)
        data = PublicData.of(start.data)
        refuse_overlap(DataLoader(task.private), [data], task.units)  # or it is not free
        ledger.protect(task.protects)
        model = self.training.model = task.new_model(self.seed, self.contender.model)
        self._note_unprivate()
        lines = [self._measured()]
        start = dataclasses.replace(start, data=data, seed=self.seed)
        detail = start.summary(start.run(model, task.criterion))
        self._declare(data, detail)
        self._declare_public()
        lines.append(self._measured())
        return self._end({"method": None, "model": type(model).__name__}, lines)

    def _fit(self, method: FullBatch) -> Result:
        """All steps of a convex method: what is seen of them is the end."""
        task, training, ledger = self.task, self.training, self._ledger
        ledger.protect(task.protects)
        z = noise_for(task, self.contender, ledger.events)
        model = training.model = task.new_model(self.seed, self.contender.model)
        about = method.fit(task, model, ledger, noise=z, rate=self.contender.learning_rate)
        training.step = training.steps = method.method.steps
        training.status = "finished"
        self._line = self._measured()
        return self._end(about, [self._line])

    def _end(self, about: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> Result:
        """Keep the model of a training of which nothing was kept on the way."""
        folder = self.folder
        self._write_facts(None)
        folder.write_ledger(self._ledger)
        folder.remove(folder.metrics)
        folder.append(folder.metrics, lines)
        document = certificate(self._ledger, delta=self.task.budget.delta, training=about)
        return self._finish("finished", document)

    # -- what leaves the process ----------------------------------------------------------------

    def _save(self, *, measured: bool = False) -> None:
        """The ledger first: see `folder`."""
        if not self.folder.writes:
            return
        line = self._measured() if measured else None
        folder, engine = self.folder, self.training.engine
        folder.write_ledger(self._ledger)
        folder.remove(folder.certificate)  # of fewer steps
        self._line = line or self._line
        engine.save_checkpoint(
            folder.checkpoint,
            module=self.training.model,
            optimizer=self.training.optimizer,
            checkpoint_dict={
                "config": dict(self.settings),
                "noise_multiplier": engine.noise_multiplier,
                "line": self._line,
                "features": self.features,
            },
        )
        if line is not None:
            folder.append(folder.metrics, [line])
            for name in () if self._scalars is None else set(line) - {"step"}:
                if line[name] is not None:  # it was not finite
                    # Not when: steps take longer with more records.
                    self._scalars.add_scalar(name, line[name], line["step"], walltime=0.0)
        notes = engine.diagnostics()
        folder.append(folder.diagnostics, notes[self._notes :])
        self._notes = len(notes)

    def _certify(self, document: Mapping[str, Any]) -> None:
        """With the digest of the settings beside that of the ledger, and what columns became."""
        digests = {**document["digests"], "configuration": sha256_of(dict(self.settings))}
        training = {**document["training"], **self.task.preparation.summary()}
        self.folder.write_certificate({**document, "training": training, "digests": digests})

    def _write_facts(self, status: Status | None) -> None:
        self.folder.write_facts(
            settings=dict(self.settings),
            seed=self.seed,
            status=status,
            diverged=DIVERGED if status == "diverged" else None,
            sample_shape=self.task.sample_shape,
            scale=self.scale,
        )

    def _measured(self) -> dict[str, Any]:
        """A line of metrics; no time, as how long steps took depends on who was drawn."""
        task, training = self.task, self.training
        line: dict[str, Any] = {
            "step": training.step,
            "epoch": training.epoch,
            "epsilon": self._spent(exact=bool(self.lines or training.status)),
            "delta": task.budget.delta,
        }
        if task.test is not None:
            with training.averaged():
                found = measured(task, training.model)
            line |= {task.metric(name): value for name, value in found.items()}
        loss, hits, samples = self._sums
        if samples:  # none are seen before the first step, nor of a fit that is seen at its end
            self._sums = [0.0, 0.0, 0.0]
            line["unprivate_train_loss"] = loss / samples
            if not task.numeric:
                line["unprivate_train_accuracy"] = hits / samples
        return dict(plain(line))

    def _observe(self, loss: Tensor, outputs: Tensor, labels: Tensor) -> None:
        """Not private, and named so."""
        hits = 0.0 if self.task.numeric else (outputs.detach().argmax(1) == labels).sum()
        new = (float(loss.detach()) * len(labels), float(hits), len(labels))
        self._sums = [old + more for old, more in zip(self._sums, new, strict=True)]

    def _foresee(self) -> None:
        task, training, delta = self.task, self.training, self.task.budget.delta
        plan, left = training.engine.plan, training.steps - training.step
        events = (*self._ledger.events, *([(plan.event, left)] if left else []))
        self._planned = _epsilon(events, delta, task.accountant)
        who = f"{type(plan.method).__name__} on {task.count:,} {task.protects}s"
        what = f"{plan.trainable_parameters:,} parameters, {training.steps:,} steps"
        price = f"z = {plan.noise_multiplier:.3g}, ε = {self._planned:.4g} at δ = {delta:g}"
        self._plan = f"{who}: {what} with batches of {task.batch_size:,}, {price} in the end."

    def _spent(self, *, exact: bool) -> float:
        """PLD takes longer than many an epoch, so until the end a bound will do."""
        spent = self._ledger.events, self.task.budget.delta
        bound = math.inf if exact else min(rough_epsilon(*spent), self._planned)
        return _epsilon(*spent, self.task.accountant) if exact else bound

    def _progress(self, epsilon: float) -> Progress:
        return Progress(
            plan=self._plan,
            step=self.training.step,
            steps=self.training.steps,
            epoch=self.training.epoch,
            epochs=self.task.epochs,
            epsilon=epsilon,
            metrics=self._line,
        )

    def _result(self, status: Status) -> Result:
        about: dict[str, Any] = {"folder": self.folder.path, "delta": self.task.budget.delta}
        about["evaluation"] = read_json(self.folder.evaluation, {})
        return Result(status=status, **about, **vars(self._progress(self._spent(exact=True))))


# Runs of other seeds pass through the same values of ε, and PLD takes a while for each.
@functools.lru_cache(maxsize=1024)
def _epsilon(events: Spent, delta: float, accountant: str) -> float:
    return account(events, delta, accountant).epsilon
