"""A trained model in use: read from the folder of its run, with all that belongs to it."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dpspan.accounting.certificate import weights_sha256
from dpspan.accounting.schema import parse_certificate
from dpspan.app.config import Config, load_config
from dpspan.app.config.sections import CheckpointSection, FactorySection
from dpspan.app.data import Source, load
from dpspan.app.preprocessing import Preprocessing
from dpspan.app.run.evaluation import classified
from dpspan.app.run.folder import RunFolder, read_json, read_lines
from dpspan.app.run.from_config import FEATURES
from dpspan.app.run.models import load_weights, new_model
from dpspan.support.checks import expect
from dpspan.support.randomness import seeded

_UNLABELLED = {"label": None, "labels": None, "labelled": False}


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainedRun:
    """A model with its data pipeline, its classes and its price; made by `load_run`."""

    folder: Path
    config: Config
    classes: tuple[str, ...]  # in the order of the model's outputs; none where it tells a number
    model: nn.Module  # in evaluation mode, behind the frozen layer of `features` if there is one
    sample_shape: tuple[int, ...] | None  # of what is trained
    scale: float | None  # what its inputs were divided by; None if nobody knows
    certificate: dict[str, Any]
    epsilon: float  # of everything that was released on the way to the model
    delta: float
    preprocessing: Preprocessing | None  # what becomes of a table's columns
    metrics: dict[str, Any]  # the last line of them, and what is in evaluation.json

    def __repr__(self) -> str:
        private = "" if self.certificate["private"] else ", NOT PRIVATE"
        price = f"ε = {self.epsilon:.4g} at δ = {self.delta:g}{private}"
        what = f"{len(self.classes)} classes" if self.classes else "a number"
        return f"<TrainedRun of {self.folder}: {what}, {price}>"

    def source(self, path: str | Path) -> Source:
        """New records at this path, in the format and with the columns of the private ones."""
        private = self.config.data.private
        unlabelled = {k: v for k, v in _UNLABELLED.items() if k in type(private).model_fields}
        return private.model_copy(update={**unlabelled, "path": Path(path)})

    def predict_proba(self, data: Any) -> NDArray[np.float64]:
        """The probability of each class, (records, classes), of a file like the one trained on.

        Or of an array of inputs as the model takes them, scaled already; or, where the run has
        data.preprocessing, of a table in memory: a mapping by column, or a pandas frame.
        """
        expect(bool(self.classes), "a classifier: this run has data.target, so predict", None)
        return np.asarray(self._outputs(data).softmax(1).numpy())

    def _outputs(self, data: Any) -> torch.Tensor:
        labels, columns = self.config.data.labels, self.preprocessing
        if isinstance(data, str | Path):
            loaded = load(self.source(data), classes=labels, preprocessing=columns)
            if self.scale not in (None, loaded.scale):
                by = f"divided by {self.scale:g}, those of {data} would be by {loaded.scale:g}"
                cure = "Give a file of the same type of numbers, or an array as the model takes it"
                raise ValueError(f"The model was trained on inputs {by}. {cure}.")
            inputs = loaded.tensors[0]
        elif columns is not None and hasattr(data, "keys"):
            inputs = torch.from_numpy(columns.transform(data))
        elif hasattr(data, "keys"):  # its columns may be in any order, and are not scaled
            cure = (
                "write it to a file like the one trained on, or give an array as the model takes it"
            )
            raise ValueError(f"A table in memory needs a run with data.preprocessing: {cure}.")
        else:
            kind = np.int64 if getattr(self.config.data.private, "tokens", False) else np.float32
            try:
                inputs = torch.from_numpy(np.asarray(data).astype(kind))
            except (TypeError, ValueError):
                raise ValueError("Expected data to be a path, or an array of numbers.") from None
        given, wanted = tuple(inputs.shape[1:]), self.sample_shape
        if wanted not in (None, given) and self.config.features is None:
            raise ValueError(f"Expected samples of shape {wanted} for the model, got {given}.")
        with torch.no_grad():
            return torch.cat([self.model(part) for part in inputs.split(1024)]).double()

    def predict(self, data: Any) -> NDArray[Any]:
        """The name of each record's class, or its number, (records,); see `evaluate`."""
        if (target := self.config.data.target) is not None:
            return np.asarray(target.unscaled(self._outputs(data)[:, 0].numpy()))
        return self.named(self.predict_proba(data))

    def named(self, probabilities: NDArray[np.float64]) -> NDArray[np.str_]:
        """The classes that follow from probabilities."""
        found = classified(probabilities, self.config.evaluate.threshold)
        return np.asarray(np.array(self.classes)[found])


def load_run(path: str | Path) -> TrainedRun:
    """The model of a finished run of `dpspan train` or `tune`, ready to predict.

    No data of the run are opened, nor is what its model began with.
    """
    folder = RunFolder(path)
    _check_there(folder, folder.model, folder.config)
    config, facts = load_config(folder.config), folder.facts or {}
    shape = facts.get("sample_shape")
    _check_there(folder, *[folder.preprocessing] * bool(config.data.preprocessing))
    if isinstance(config.model, CheckpointSection):
        kept = config.model.model_dump(include={"factory", "arguments", "fix"})
        config = config.model_copy(update={"model": FactorySection(**kept)})
    classes = config.data.classes or ()
    names = tuple(map(str, range(classes))) if isinstance(classes, int) else classes
    like: Any = SimpleNamespace(shape=tuple(shape or ()), outputs=len(names) or 1)
    with seeded(0):  # of weights that are replaced at once
        model = new_model(config, like)
    load_weights(model, folder.model)
    certificate = read_json(folder.certificate)
    stated, columns = parse_certificate(certificate).training, None
    known = stated.get("weights_sha256")
    _check_known(folder, folder.model, "model", known, weights_sha256(model.state_dict()))
    if config.data.preprocessing:
        columns = Preprocessing.of_document(read_json(folder.preprocessing))
        known = stated.get("preprocessing", {}).get("sha256")
        what = "description of columns"
        _check_known(folder, folder.preprocessing, what, known, columns.digest)
    if config.features is not None:
        layer = FEATURES[config.features.name].load(folder.kept_features)
        model = nn.Sequential(layer, model)
    last = next(iter(read_lines(folder.metrics)[-1:]), {})
    return TrainedRun(
        folder=folder.path,
        config=config,
        classes=names,
        model=model.eval(),
        sample_shape=shape and tuple(shape),
        scale=facts.get("scale"),
        certificate=certificate,
        epsilon=float(certificate["epsilon"]),
        delta=float(certificate["delta"]),
        preprocessing=columns,
        metrics={**last, **read_json(folder.evaluation, {})},
    )


def _check_there(folder: RunFolder, *paths: Path) -> None:
    for path in paths:
        if not path.exists():
            cure = "Name the folder of a run of `dpspan train` that has ended"
            raise FileNotFoundError(f"There is no {path.name} in {folder.path}. {cure}.")


def _check_known(folder: RunFolder, path: Path, what: str, known: Any, found: str) -> None:
    """ε is of what the certificate knows, and of no others."""
    if known not in (None, found):
        other = f"is not the {what} that {folder.certificate.name} is about"
        raise ValueError(f"{path} {other}: restore the one that was trained.")
