"""Training from a configuration, in a folder, by a process that may be killed at any moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import Tensor, nn
from torch.optim import Optimizer

from dpspan.accounting.epsilon import Budget
from dpspan.accounting.ledger import Ledger, steps_beyond
from dpspan.accounting.promises import weaknesses
from dpspan.app.config import Config, parse_config
from dpspan.app.config.yaml_file import read_text
from dpspan.app.data import Loaded
from dpspan.app.run.choice import chosen_public
from dpspan.app.run.folder import RunFolder, read_json, read_lines
from dpspan.app.run.run_inputs import make_parts, public_count, sampling
from dpspan.app.run.tensorboard import Scalars
from dpspan.engine.checkpoint import load_file
from dpspan.engine.engine import PrivacyEngine
from dpspan.engine.sampling import PrivateLoader
from dpspan.support.errors import BudgetExceeded
from dpspan.support.processes import refuse_several_processes
from dpspan.support.strict_json import plain

Status = Literal["finished", "stopped", "budget spent"]
_CHECKPOINT = {"engine", "module", "optimizer", "checkpoint_dict"}
_SHARE_OF_TIME = 0.02  # that may go into ε for the eyes of whoever watches
_EVALUATED = 1024  # test samples at a time


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


def _ignore(_: Progress) -> None:
    return None


def _never() -> bool:
    return False


def train(
    config: Config | str | Path,
    *,
    resume: bool = False,
    watch: Callable[[Progress], None] = _ignore,
    stop: Callable[[], bool] = _never,
) -> Result:
    """Train as a configuration (or its file) says, and leave everything in its output folder.

    Args:
        config: what to do.
        resume: go on from the folder's checkpoint; from the beginning if there is none. Without it
            a folder that holds private steps is refused.
        watch: called before the first step and after every step.
        stop: asked after every step; True saves a checkpoint and ends the run, to be resumed.
    """
    refuse_several_processes()
    text = _text(config)
    checked = config if isinstance(config, Config) else parse_config(text, name=str(config))
    folder = RunFolder(checked.output.folder)
    with folder.locked():
        if folder.checkpoint.exists() and not resume:
            _begin_anew(folder)
        run = _Run(checked, folder)
        folder.write_text(folder.config, text)
        status = run.go(watch, stop)
        return run.result(status)


def _text(config: Config | str | Path) -> str:
    if isinstance(config, Config):
        plain = config.model_dump(mode="json", exclude_defaults=False)
        return str(yaml.safe_dump(plain, sort_keys=False))
    return read_text(config)


class _Run:
    """One process's part of a run."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self._config, self._folder = config, folder
        self._ledger = run_ledger(config, folder)
        self._saved = _saved(folder, config)
        goes_on = self._saved is not None
        kept = folder.kept_features(wanted=goes_on and config.features is not None)
        self._parts = make_parts(config, features=kept)
        self._features = None if self._parts.layer is None else self._parts.layer.digest
        self._criterion = nn.CrossEntropyLoss()
        self._unprivate = _Unprivate() if config.output.unprivate_metrics else None
        self._scalars = Scalars(folder.path) if config.output.tensorboard else None
        for sentence in weaknesses(
            None, config.budget.delta, public_count(config, self._parts.private)
        ):
            self._ledger.warn(sentence)
        self._engine = PrivacyEngine(ledger=self._ledger)
        self._model, self._optimizer, self._loader = self._make_private()
        self._line: dict[str, Any] | None = None
        self._notes = 0  # of the engine's diagnostics, written
        if self._saved is not None:
            self._go_on(self._saved)
        else:  # what is there is of a run whose checkpoint was lost
            for path in (folder.metrics, folder.diagnostics):
                path.unlink(missing_ok=True)
        self._meter = _Meter(self._spent)
        if self._unprivate is not None:
            self._engine.note_unprivate("loss and accuracy on private batches were written down")
        if self._parts.test is not None and self._unprivate and not config.data.test_is_public:
            self._engine.note_unprivate("results on test data not declared public were written")

    # -- setting up -----------------------------------------------------------------------------

    def _make_private(self) -> tuple[nn.Module, Optimizer, PrivateLoader]:
        config, parts = self._config, self._parts
        draw = sampling(config, parts)
        self._steps = config.training.epochs * draw.steps_per_epoch
        name = getattr(config.method, "public", None)
        if config.choose is not None:
            name = chosen_public(config, parts, self._folder, self._ledger)["chosen"]
        method = config.method.build(
            None if name is None else parts.public[name], steps=self._steps
        )
        warm_start = None
        if config.warm_start is not None and self._saved is None:
            data = parts.public[config.warm_start.public]
            seed = config.training.seed
            warm_start = config.warm_start.build(data, parts.trainable, seed=seed)
        arguments: dict[str, Any] = {
            "module": parts.model,
            "optimizer": config.training.optimizer.build(
                p for p in parts.model.parameters() if p.requires_grad
            ),
            "data_loader": parts.loader(config.training.batch_size),
            "criterion": self._criterion,
            "method": method,
            # A rate that comes from the data is for the engine to find, and to say so.
            "sample_rate": None if config.data.records is None else draw.sample_rate,
            "expected_batch_size": float(config.training.batch_size),
            "max_physical_batch_size": config.training.physical_batch_size,
            "warm_start": warm_start,
        }
        z = config.budget.noise_multiplier
        if self._saved is not None:  # as it was calibrated then
            z = self._saved["checkpoint_dict"]["noise_multiplier"]
        if z is not None:
            return self._engine.make_private(**arguments, noise_multiplier=z)
        assert config.budget.epsilon is not None
        return self._engine.make_private_with_epsilon(
            **arguments,
            target_epsilon=config.budget.epsilon,
            target_delta=config.budget.delta,
            epochs=config.training.epochs,
        )

    def _go_on(self, saved: dict[str, Any]) -> None:
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
            self._engine.load_state_dict({**saved["engine"], "ledger": record})
            self._model.load_state_dict(saved["module"])
            self._optimizer.load_state_dict(saved["optimizer"])
        except (ValueError, RuntimeError) as error:
            raise ValueError(
                f"The checkpoint in {folder.path} is of another run: {error} {_way_out(folder)}"
            ) from error
        if lost:
            self._ledger.warn(
                f"{lost} steps were charged that the model was not trained by: the process ended "
                "while they were being written"
            )
        self._line = state["line"]
        for path in (folder.metrics, folder.diagnostics):
            if path.exists():
                folder.keep_until(path, self._step)
        if self._line is not None and self._line not in read_lines(folder.metrics)[-1:]:
            folder.append(folder.metrics, [self._line])  # it had not come to that

    # -- training -------------------------------------------------------------------------------

    @property
    def _step(self) -> int:
        return self._loader.epoch * len(self._loader) + self._loader.position

    def go(self, watch: Callable[[Progress], None], stop: Callable[[], bool]) -> Status:
        """Train until the end, or until told to stop."""
        watch(self._progress())
        try:
            stopped = self._epochs(watch, stop)
        except BudgetExceeded:  # steps were lost, and paid for: the last ones cannot be afforded
            stopped = False
            self._loader.position -= 1  # the batch was handed over, but its step was refused
            known = self._line is not None and self._line["step"] == self._step
            self._save(None if known else self._epoch_line())
        status: Status = "stopped" if stopped else "finished"
        if not stopped and self._step < self._steps:
            status = "budget spent"
        if not stopped:
            self._folder.write_model(self._model)  # what the last `_save` has charged
        if self._scalars is not None:
            self._scalars.close()
        return status

    def _epochs(self, watch: Callable[[Progress], None], stop: Callable[[], bool]) -> bool:
        """Whether it was stopped."""
        loader, every = self._loader, self._config.output.checkpoint_every
        if self._saved is None:
            self._folder.features.unlink(missing_ok=True)  # of a run that never came to a step
            if self._parts.layer is not None:
                self._parts.layer.save(self._folder.features)
            self._save()  # a run that dies early finds its public training, and its price, again
        while loader.epoch < self._config.training.epochs:
            before = self._step
            for inputs, labels in loader:
                self._piece(inputs, labels, before)
                if self._step == before:  # a piece of a batch
                    continue
                before = self._step
                watch(self._progress())
                if loader.position == len(loader):
                    continue
                if stop():
                    self._save()
                    return True
                if every is not None and before % every == 0:
                    self._save()
            self._save(self._epoch_line())
            watch(self._progress())
            if stop() and loader.epoch < self._config.training.epochs:
                return True
        return False

    def _piece(self, inputs: Tensor, labels: Tensor, step: int) -> None:
        training = self._config.training
        for group in self._optimizer.param_groups:
            group["lr"] = training.optimizer.learning_rate * training.schedule.factor(
                step, self._steps
            )
        inputs, labels = inputs.to(self._parts.device), labels.to(self._parts.device)
        self._optimizer.zero_grad()
        outputs = self._model(inputs)
        loss = self._criterion(outputs, labels)
        loss.backward()
        self._optimizer.step()
        if self._unprivate is not None:
            self._unprivate.add(loss, outputs, labels)

    # -- what leaves the process ----------------------------------------------------------------

    def _save(self, line: dict[str, Any] | None = None) -> None:
        """The ledger first: see `folder`."""
        folder, engine = self._folder, self._engine
        folder.write_ledger(self._ledger)
        self._line = line or self._line
        engine.save_checkpoint(
            folder.checkpoint,
            module=self._model,
            optimizer=self._optimizer,
            checkpoint_dict={
                "config": self._config.fixed(),
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
        engine.write_certificate(folder.certificate, self._config.budget.delta)

    def _epoch_line(self) -> dict[str, Any]:
        """No time: how long steps took depends on how many records were drawn."""
        line: dict[str, Any] = {
            "step": self._step,
            "epoch": self._loader.epoch,
            "epsilon": self._meter.now(),
            "delta": self._config.budget.delta,
        }
        public = self._config.data.test_is_public
        if self._parts.test is not None and (public or self._unprivate is not None):
            prefix = "test" if public else "unprivate_test"
            loss, accuracy = evaluate(self._model, self._parts.test, self._parts.device)
            line |= {f"{prefix}_loss": loss, f"{prefix}_accuracy": accuracy}
        if self._unprivate is not None:
            line |= self._unprivate.means()
        strict: dict[str, Any] = plain(line)
        return strict

    def _spent(self) -> float:
        return self._engine.get_epsilon(self._config.budget.delta)

    def _progress(self) -> Progress:
        return Progress(
            step=self._step,
            steps=self._steps,
            epoch=self._loader.epoch,
            epochs=self._config.training.epochs,
            epsilon=self._meter.recent(),
            metrics=self._line,
        )

    def result(self, status: Status) -> Result:
        """For whoever called."""
        return Result(
            folder=self._folder.path,
            status=status,
            step=self._step,
            steps=self._steps,
            epsilon=self._meter.now(),
            delta=self._config.budget.delta,
            metrics=self._line,
        )


def evaluate(model: nn.Module, data: Loaded, device: torch.device) -> tuple[float, float]:
    """Mean loss and accuracy on samples that are not trained on."""
    inputs, labels = data.tensors
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    loss = right = 0.0
    with torch.no_grad():
        for x, y in zip(inputs.split(_EVALUATED), labels.split(_EVALUATED), strict=True):
            outputs, y = model(x.to(device)), y.to(device)
            loss += float(nn.functional.cross_entropy(outputs, y, reduction="sum"))
            right += float((outputs.argmax(1) == y).sum())
    for module, training in modes:
        module.training = training
    return loss / len(labels), right / len(labels)


def _saved(folder: RunFolder, config: Config) -> dict[str, Any] | None:
    """The checkpoint of the run, or None if there is none."""
    if not folder.checkpoint.exists():
        return None
    saved = load_file(folder.checkpoint, _CHECKPOINT)
    mine, theirs = config.fixed(), saved["checkpoint_dict"]["config"]
    for section in mine:
        if mine[section] != theirs.get(section):
            raise ValueError(
                f"The section `{section}` is not as it was when the run in {folder.path} began. "
                f"{_way_out(folder)}"
            )
    return saved


def _untrained(folder: RunFolder) -> bool:
    """Whether no private step is behind the checkpoint, nor after it: a choice at the most."""
    if folder.metrics.exists() or folder.model.exists():
        return False
    try:
        engine = load_file(folder.checkpoint, _CHECKPOINT)["engine"]
        lost = steps_beyond(engine["ledger"], read_json(folder.ledger))
    except (ValueError, OSError):  # damaged, or lost: nobody knows
        return False
    return lost == 0 and engine["loader"]["epoch"] == engine["loader"]["position"] == 0


def _begin_anew(folder: RunFolder) -> None:
    """Take off a checkpoint of public things only; ValueError if there is more behind it."""
    if not _untrained(folder):
        raise ValueError(
            f"{folder.path} holds a run already. Go on with it by --resume (resume=True), or "
            "choose another output folder."
        )
    for path in (folder.certificate, folder.checkpoint):  # the ledger stays
        path.unlink(missing_ok=True)


def _way_out(folder: RunFolder) -> str:
    if _untrained(folder):
        return "No private step was taken yet: train without --resume to begin anew."
    return f"Put it back (see {folder.config}), or train anew in another folder."


def run_ledger(config: Config, folder: RunFolder) -> Ledger:
    """A ledger with the budget, and what the folder of a run that has yet to begin has spent."""
    folder.refuse_lost_ledger()
    epsilon, delta = config.budget.epsilon, config.budget.delta
    budget = None if epsilon is None else Budget(epsilon=epsilon, delta=delta)
    ledger = Ledger(accountant=config.budget.accountant, budget=budget)
    if folder.ledger.exists() and not folder.checkpoint.exists():
        ledger.load_state_dict(read_json(folder.ledger))
    return ledger


class _Meter:
    """ε now, or one that is recent enough to look at and cost little time."""

    def __init__(self, spent: Callable[[], float]) -> None:
        self._spent, self._epsilon, self._next = spent, 0.0, 0.0
        self.now()

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
        samples = max(self._samples, 1)
        means = {
            "unprivate_train_loss": self._loss / samples,
            "unprivate_train_accuracy": self._right / samples,
        }
        self._loss, self._right, self._samples = 0.0, 0.0, 0
        return means
