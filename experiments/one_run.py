"""One training run of an experiment, through the engine: what it reached and what it cost."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import torch
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import dpspan
from dpspan.accounting import calibrate
from dpspan.audit import membership_inference
from dpspan.config.methods import MethodSection
from dpspan.sampling import PoissonDraw
from dpspan.trainable import train_only
from experiments.data import Data
from experiments.images import Images, collate, shifted
from experiments.linear import ConvexSection
from experiments.pretraining import load_common, pretrained
from experiments.runner import Place
from experiments.schema import NON_PRIVATE, Row, Training, TrainingExperiment


@dataclass(frozen=True)
class Run:
    """One cell of a table with one learning rate and seed.

    A run that is part of a search is judged by training samples that it does not train on.
    `target` is ε or the noise multiplier, None where there is no privacy to pay for.
    """

    experiment: str
    row: str
    target: float | None
    rate: float
    seed: int
    tuning: bool
    settings: str  # their digest


def train(run: Run, experiment: TrainingExperiment, place: Place) -> dict[str, Any]:
    """Everything about one run, as one line of a results file."""
    start = time.perf_counter()
    place.configure()
    row = experiment.rows[run.row]
    training, targets = row.training or experiment.training, experiment.targets
    epochs = training.epochs_at(run.target)
    hold_out = run.tuning or experiment.attack
    data = experiment.data.load(place.data, seed=run.seed, hold_out=hold_out)
    private = data.without(row.public).to(place.device)
    model = _model(experiment, row, data, run.seed, place)
    phase = None
    if row.warm_start is not None:
        trainable = row.trainable.build() if row.trainable else None
        public = data.public[row.warm_start.public]
        phase = row.warm_start.build(public, trainable, seed=run.seed)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(training.averaging))
    certificate: dict[str, Any] | None = None
    criterion = nn.CrossEntropyLoss()
    if isinstance(row.method, ConvexSection):
        certificate = row.method.fit(
            model, private, epsilon=run.target, delta=targets.delta, rate=run.rate
        )
        average.update_parameters(model)
    elif isinstance(row.method, MethodSection) or row.method == NON_PRIVATE:
        engine: dpspan.PrivacyEngine | None = None
        section = training.optimizer.model_copy(update={"learning_rate": run.rate})
        optimizer = section.build([p for p in model.parameters() if p.requires_grad])
        loader: Any = DataLoader(
            private, batch_size=training.batch_size, shuffle=True, collate_fn=collate
        )
        if isinstance(row.method, MethodSection):
            engine = dpspan.PrivacyEngine()
            rate = min(1.0, training.batch_size / len(private))
            draw = PoissonDraw.one_pass(records=len(private), sample_rate=rate)
            steps = epochs * draw.steps_per_epoch
            name = getattr(row.method, "public", None)
            _, optimizer, loader = engine.make_private(
                module=model,
                optimizer=optimizer,
                data_loader=loader,
                criterion=criterion,
                noise_multiplier=run.target
                if targets.noise_multiplier
                else _noise(run.target, targets.delta, rate, steps),
                method=row.method.build(data.public[name] if name else None, steps=steps),
                warm_start=phase,
                max_physical_batch_size=place.physical,
                views=training.views,
            )
        _epochs(epochs, model, average, optimizer, loader, criterion, training)
        certificate = None if engine is None else engine.certificate(targets.delta)
    else:
        assert phase is not None
        phase.run(model, criterion)
        average.update_parameters(model)
    judged = (data.held_out if run.tuning else data.test).to(place.device)
    result = {
        **asdict(run),
        **metrics(average.module, judged),
        "epsilon": _epsilon(certificate, row),
        "delta": targets.delta,
        "records": len(private),
        "seconds": time.perf_counter() - start,
    }
    if training.averaging:
        result["unaveraged"] = metrics(model, judged)
    if experiment.attack:
        attacked = membership_inference(
            average.module,
            private.first(len(data.held_out)).tensors,
            data.held_out.to(place.device).tensors,
            criterion=criterion,
        )
        result["unprivate_membership"] = attacked.describe()
    if certificate is not None and not run.tuning:
        result["certificate"] = certificate
    return {**result, "made": place.provenance()}


def metrics(model: nn.Module, data: Images) -> dict[str, float]:
    """Accuracy in evaluation mode; of two classes also balanced, and the area under the curve."""
    training = model.training
    model.eval()
    with torch.no_grad():
        scores = torch.cat([model(x) for x in data.x.split(500)]).cpu()
    model.train(training)
    labels, guessed = data.y.cpu(), scores.argmax(1)
    found = {"accuracy": float((guessed == labels).float().mean())}
    if scores.shape[1] == 2:
        found["balanced_accuracy"] = float(balanced_accuracy_score(labels, guessed))
        found["auc"] = float(roc_auc_score(labels, scores[:, 1] - scores[:, 0]))
    return found


def _model(
    experiment: TrainingExperiment, row: Row, data: Data, seed: int, place: Place
) -> nn.Module:
    section = row.model or experiment.model
    torch.manual_seed(seed)
    model = section.build(data, seed=seed)
    if row.pretraining is not None:
        start = partial(section.build, seed=seed)
        load_common(model, pretrained(row.pretraining, start, data, seed, place))
    if row.trainable is not None:
        model = train_only(model, row.trainable.build())
    return model.to(place.device).train()


def _epochs(
    epochs: int,
    model: nn.Module,
    average: AveragedModel,
    optimizer: Any,
    loader: Any,
    criterion: nn.Module,
    training: Training,
) -> None:
    schedule = LambdaLR(optimizer, lambda epoch: training.schedule.factor(epoch, epochs))
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            if training.views > 1:
                x, y = shifted(x, training.views), y.repeat_interleave(training.views)
            criterion(model(x), y).backward()
            optimizer.step()
            if training.averaging:
                average.update_parameters(model)
        schedule.step()
    if not training.averaging:
        average.update_parameters(model)


@cache
def _noise(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """The noise multiplier; a process that makes several runs finds it once."""
    return calibrate(epsilon, delta, rate, steps)


def _epsilon(certificate: dict[str, Any] | None, row: Row) -> float | None:
    if certificate is not None:
        return float(certificate["epsilon"])
    return None if row.method == NON_PRIVATE else 0.0
