"""One training run of an experiment, through the engine: what it reached and what it cost."""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import torch
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import dpspan
from dpspan.accounting.calibration import calibrate
from dpspan.app.config.methods import MethodSection
from dpspan.audit import membership_inference
from dpspan.engine.sampling import PoissonDraw
from dpspan.model.trainable import train_only
from dpspan.public.data import PublicData
from experiments.data import Data
from experiments.images import Images, collate, shifted
from experiments.linear import ConvexSection
from experiments.patches import PatchesModel, drawn
from experiments.pretraining import load_common, pretrained
from experiments.runner import Place
from experiments.samples import Choice, samples_of
from experiments.schema import NON_PRIVATE, PUBLIC_ONLY, Row, TrainingExperiment
from experiments.trajectory import InTrajectory

CRITERION = nn.CrossEntropyLoss()
SECONDS_BETWEEN_CHECKPOINTS = 60.0


@dataclass(frozen=True)
class Run:
    """One cell of a table with one learning rate and seed.

    A run that is part of a search is judged by training samples that it does not train on, and may
    take a share of the epochs only. `target` is ε or the noise multiplier, None where there is no
    privacy to pay for.
    """

    experiment: str
    row: str
    target: float | None
    rate: float
    seed: int
    tuning: bool
    settings: str  # their digest
    share: float | None = None  # of the epochs; None: all


def train(run: Run, experiment: TrainingExperiment, place: Place) -> dict[str, Any]:
    """Everything about one run, as one line of a results file."""
    start = time.perf_counter()
    place.configure()
    row, targets = experiment.rows[run.row], experiment.targets
    hold_out = run.tuning or experiment.attack
    samples = samples_of(Choice.of(experiment.data, row, run.seed, hold_out, place))
    data, private = samples.data, samples.private
    model = _model(experiment, row, data, samples.before, run.seed, place)
    trained = _Trained(model)
    if isinstance(row.method, ConvexSection):
        assert run.target is not None
        trained.certificate = row.method.fit(
            model, private, epsilon=run.target, delta=targets.delta, rate=run.rate
        )
    elif row.method == PUBLIC_ONLY:
        phase = _phase(row, data, run.seed)
        assert phase is not None
        phase.run(model, CRITERION)
    else:
        trained = _trained(run, experiment, data, private, model, samples.declared, place)
    judged = (data.held_out if run.tuning else data.test).to(place.device)
    result = {
        **asdict(run),
        **metrics(trained.tested, judged),
        "epsilon": _epsilon(trained.certificate, row),
        "delta": targets.delta,
        "records": len(private),
        "seconds": time.perf_counter() - start,
    }
    diverged = not _finite(trained.tested)
    if diverged:
        result["diverged"] = True
    if trained.stopped:
        result["stopped"] = trained.stopped
    if trained.unaveraged is not None:
        result["unaveraged"] = metrics(trained.unaveraged, judged)
    if experiment.attack and not diverged:
        attacked = membership_inference(
            trained.tested,
            private.first(len(data.held_out)).tensors,
            data.held_out.to(place.device).tensors,
            criterion=CRITERION,
        )
        result["unprivate_membership"] = attacked.describe()
    if trained.certificate is not None and not run.tuning:
        result["certificate"] = trained.certificate
    return {**result, "made": place.provenance()}


@dataclass
class _Trained:
    """The model that is tested, and what it cost."""

    tested: nn.Module
    certificate: dict[str, Any] | None = None
    stopped: str | None = None  # why, before the last epoch
    unaveraged: nn.Module | None = None  # if it has averaged weights: with the last ones


def _trained(
    run: Run,
    experiment: TrainingExperiment,
    data: Data,
    private: Images,
    model: nn.Module,
    declared: Sequence[tuple[PublicData, str]],
    place: Place,
) -> _Trained:
    """Epochs over the private samples, with or without privacy."""
    row, targets = experiment.rows[run.row], experiment.targets
    training = row.training or experiment.training
    epochs = max(1, round((run.share or 1) * training.epochs_at(run.target)))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = training.optimizer.build(trained, lr=run.rate)
    size = training.batch_size
    loader: Any = DataLoader(private, batch_size=size, shuffle=True, collate_fn=collate)
    engine: dpspan.PrivacyEngine | None = None
    if isinstance(row.method, MethodSection):
        assert run.target is not None
        engine = dpspan.PrivacyEngine()
        for source, detail in declared:
            engine.ledger.declare_public(source.name, source.digest, source.count, detail=detail)
        rate = min(1.0, size / len(private))
        draw = PoissonDraw.one_pass(records=len(private), sample_rate=rate)
        steps = epochs * draw.steps_per_epoch
        noise = run.target
        if targets.epsilon:
            noise = _noise(run.target, targets.delta, rate, steps)
        name = getattr(row.method, "public", None)
        method = row.method.build(data.public[name] if name else None, steps=steps)
        phase = _phase(row, data, run.seed)
        if isinstance(method, InTrajectory):
            phase = method.recorded(phase)
        _, optimizer, loader = engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            criterion=CRITERION,
            noise_multiplier=noise,
            method=method,
            warm_start=phase,
            max_physical_batch_size=place.physical,
            cuda_graphs=place.graphs,
            views=training.views,
            average_weights=training.average_weights,
            low_pass=training.low_pass,
        )
    schedule = LambdaLR(optimizer, lambda epoch: training.schedule.factor(epoch, epochs))
    stopped: str | None = None
    kept = None if engine is None else _Kept(run, place, engine, model, optimizer)
    begin = 0 if kept is None else kept.load(schedule)
    try:
        for epoch in range(begin, epochs):
            for x, y in loader:
                optimizer.zero_grad()
                if training.views > 1:
                    x, y = shifted(x, training.views), y.repeat_interleave(training.views)
                with place.precision():
                    loss = CRITERION(model(x), y)
                loss.backward()
                optimizer.step()
            schedule.step()
            if kept is not None:
                kept.save(epoch + 1)
    except ValueError as error:
        # A model that has diverged is a result; a learning rate with which training stops is one
        # for a search. A mistake in the settings shows before the first step.
        begun = engine is not None and engine.ledger.steps > 0
        if not begun or (_finite(model) and not run.tuning):
            raise
        stopped = str(error)
    if engine is None:
        return _Trained(model, stopped=stopped)
    last = None
    if training.average_weights is not None:
        last = copy.deepcopy(model)
        engine.adopt_average()
    return _Trained(model, engine.certificate(targets.delta), stopped, last)


class _Kept:
    """The checkpoint of a long run, if `place` has a folder for it: a machine may be lent for less.

    Its noise is fresh after an interruption, as a resumed run's always is.
    """

    def __init__(
        self,
        run: Run,
        place: Place,
        engine: dpspan.PrivacyEngine,
        model: nn.Module,
        optimizer: Optimizer,
    ) -> None:
        name = hashlib.sha256(json.dumps(asdict(run)).encode()).hexdigest()[:16]
        folder = place.checkpoints
        self._path = None if folder is None else folder / f"{name}.safetensors"
        self._engine, self._model, self._optimizer = engine, model, optimizer
        self._saved = time.monotonic()

    def load(self, schedule: LambdaLR) -> int:
        """Go on where it ended; how many epochs are done."""
        if self._path is None or not self._path.exists():
            return 0
        model, optimizer = self._model, self._optimizer
        found = self._engine.load_checkpoint(self._path, module=model, optimizer=optimizer)
        schedule.last_epoch = epoch = int(found["epoch"])
        return epoch

    def save(self, epoch: int) -> None:
        """After an epoch, now and then."""
        if self._path is None or time.monotonic() - self._saved < SECONDS_BETWEEN_CHECKPOINTS:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        model, optimizer, done = self._model, self._optimizer, {"epoch": epoch}
        self._engine.save_checkpoint(
            self._path, module=model, optimizer=optimizer, checkpoint_dict=done
        )
        self._saved = time.monotonic()


def metrics(model: nn.Module, data: Images) -> dict[str, float]:
    """Accuracy in evaluation mode; of two classes also balanced, and the area under the curve."""
    training = model.training
    model.eval()
    with torch.no_grad():
        scores = torch.cat([model(x) for x in data.x.split(500)]).cpu()
    model.train(training)
    scores = scores.nan_to_num(posinf=0.0, neginf=0.0)  # of a model that diverged: chance
    labels, guessed = data.y.cpu(), scores.argmax(1)
    found = {"accuracy": float((guessed == labels).float().mean())}
    if scores.shape[1] == 2:
        found["balanced_accuracy"] = float(balanced_accuracy_score(labels, guessed))
        found["auc"] = float(roc_auc_score(labels, scores[:, 1] - scores[:, 0]))
    return found


def _model(
    experiment: TrainingExperiment,
    row: Row,
    data: Data,
    before: PublicData | None,
    seed: int,
    place: Place,
) -> nn.Module:
    section = row.model or experiment.model
    torch.manual_seed(seed)
    if isinstance(section, PatchesModel):
        return section.head(data.shape, data.classes).to(place.device).train()
    model = drawn(section, data, seed)
    if row.pretraining is not None and before is not None:
        other = drawn(section, replace(data, classes=row.pretraining.classes), seed)
        load_common(model, pretrained(row.pretraining, before, other, seed, place.device))
    if row.trainable is not None:
        model = train_only(model, row.trainable.built())
    return model.to(place.device).train()


def _phase(row: Row, data: Data, seed: int) -> dpspan.WarmStart | None:
    """The warm start, or second phase, of a row that has one."""
    if row.warm_start is None:
        return None
    return row.warm_start.build(data.public[row.warm_start.public], row.trainable, seed=seed)


def _finite(model: nn.Module) -> bool:
    return all(bool(p.detach().isfinite().all()) for p in model.parameters())


@cache
def _noise(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """The noise multiplier; a process that makes several runs finds it once."""
    return calibrate(epsilon, delta, rate, steps)


def _epsilon(certificate: dict[str, Any] | None, row: Row) -> float | None:
    if certificate is not None:
        return float(certificate["epsilon"])
    return None if row.method == NON_PRIVATE else 0.0
