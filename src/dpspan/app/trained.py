"""A trained model in use: read from the folder of its run, with all that belongs to it."""

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpspan.accounting.certificate import weights_sha256
from dpspan.accounting.schema import parse_certificate
from dpspan.app.config import Subject, load_config
from dpspan.app.config.sections import CheckpointSection, FactorySection, OwnSection
from dpspan.app.data import Source, load
from dpspan.app.run.folder import RunFolder, read_json, read_lines
from dpspan.app.run.from_config import Like, load_weights, new_model
from dpspan.app.tables import Table
from dpspan.public.patches import PatchFeatures
from dpspan.support.randomness import seeded

_BATCH = 1024
_UNLABELLED = {"label": None, "labels": None, "labelled": False}


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainedRun:
    """A model with its data pipeline, its classes and its price; made by `load_run`."""

    folder: Path
    subject: Subject  # the sections of the configuration about data and model
    classes: tuple[str, ...]  # in the order of the model's outputs
    model: nn.Module = field(repr=False)  # in evaluation mode
    network: nn.Module = field(repr=False)  # the model behind the layer of `features`, if any
    sample_shape: tuple[int, ...] | None  # of what the model takes
    certificate: dict[str, Any]
    epsilon: float  # of everything that was released on the way to the model
    delta: float
    metrics: dict[str, Any]  # the last line of them; names may say unprivate_
    device: torch.device

    def __repr__(self) -> str:
        what = f"{type(self.model).__name__}, {len(self.classes)} classes"
        private = "" if self.certificate["private"] else ", NOT PRIVATE"
        price = f"ε = {self.epsilon:.4g} at δ = {self.delta:g}{private}"
        return f"<TrainedRun of {self.folder}: {what}, {price}>"

    def source(self, path: str | Path) -> Source:
        """New records at this path, in the format and with the columns of the private ones."""
        private, path = self.subject.data.private, Path(path)
        unlabelled = {k: v for k, v in _UNLABELLED.items() if k in type(private).model_fields}
        source: Source = private.model_copy(update={**unlabelled, "path": path})
        if isinstance(source, Table) and path.exists():
            missing = [name for name in source.inputs if name not in source.columns]
            if missing:
                of = f"{len(missing)} of the {len(source.inputs)} columns that the model takes"
                raise ValueError(f"{path} lacks {of}: {', '.join(missing)}.")
        return source

    def predict_proba(self, data: Any) -> NDArray[np.float64]:
        """The probability of each class, (records, classes).

        Args:
            data: the path of a file (or folder) like the one trained on, with or without labels;
                or an array of inputs as the network takes them, scaled already.
        """
        if isinstance(data, str | Path):
            inputs = load(self.source(data), classes=self.subject.data.classes).tensors[0]
        else:
            inputs = self._numbers(data)
        with torch.no_grad():
            found = [self._outputs(part.to(self.device)) for part in inputs.split(_BATCH)]
        return np.asarray(torch.cat(found).double().softmax(1).cpu().numpy())

    def predict(self, data: Any) -> NDArray[np.str_]:
        """The name of the most probable class of each record, (records,)."""
        return self.named(self.predict_proba(data))

    def named(self, probabilities: NDArray[np.float64]) -> NDArray[np.str_]:
        """The class that follows from the probabilities of each record."""
        return np.asarray(np.array(self.classes)[probabilities.argmax(1)])

    def _numbers(self, data: Any) -> Tensor:
        kind = np.int64 if getattr(self.subject.data.private, "tokens", False) else np.float32
        try:
            given = data.detach().cpu().numpy() if isinstance(data, Tensor) else data
            return torch.from_numpy(np.array(given, dtype=kind))
        except (TypeError, ValueError):
            raise ValueError("Expected data to be a path, or an array of numbers.") from None

    def _outputs(self, inputs: Tensor) -> Tensor:
        try:
            outputs: Tensor = self.network(inputs)
        except (RuntimeError, ValueError, IndexError, TypeError):  # whose words may quote data
            given, wanted = tuple(inputs.shape[1:]), self.sample_shape or "others"
            said = f"Samples of shape {given} do not fit the model, which takes {wanted}."
            raise ValueError(said) from None
        return outputs


def load_run(path: str | Path, *, device: str | torch.device = "cpu") -> TrainedRun:
    """The model of a finished run, ready to predict; no data of the run are opened.

    Args:
        path: the folder of a run of `dpspan train` or `tune`, or of one run of `compare`.
        device: where to predict.
    """
    folder = RunFolder(path)
    if not folder.model.exists():
        cure = "Name the folder of a run that has ended"
        raise FileNotFoundError(f"There is no {folder.model.name} in {folder.path}. {cure}.")
    facts, subject = folder.facts or {}, _subject(folder)
    shape, classes = facts.get("sample_shape"), subject.data.classes
    names = tuple(map(str, range(classes))) if isinstance(classes, int) else classes
    if shape is None and not isinstance(subject.model, OwnSection):
        early = "was made by an earlier dpspan, which did not note the shape of samples"
        raise ValueError(f"{folder.path} {early}: load its weights into a network of your own.")
    if facts.get("status") == "diverged":
        worth = "its predictions are worth nothing"
        warnings.warn(f"dpspan: {folder.path} has diverged in training: {worth}.", stacklevel=2)
    with seeded(0):  # of weights that are replaced at once
        model = new_model(subject, Like(shape=tuple(shape or ()), classes=len(names)))
    load_weights(model, folder.model)
    certificate = read_json(folder.certificate)
    stated = parse_certificate(certificate).training.get("weights_sha256")
    if stated not in (None, weights_sha256(model.state_dict())):  # ε is of those, and of no others
        other = f"is not the model that {folder.certificate.name} is about"
        raise ValueError(f"{folder.model} {other}: restore the one that was trained.")
    network, kept = model, folder.kept_features(wanted=subject.features is not None)
    if kept is not None:
        network = nn.Sequential(PatchFeatures.load(kept), model)
    return TrainedRun(
        folder=folder.path,
        subject=subject,
        classes=names,
        model=model,
        network=network.to(device).eval(),
        sample_shape=None if shape is None else tuple(shape),
        certificate=certificate,
        epsilon=float(certificate["epsilon"]),
        delta=float(certificate["delta"]),
        metrics=next(iter(read_lines(folder.metrics)[-1:]), {}),
        device=torch.device(device),
    )


def _subject(folder: RunFolder) -> Subject:
    """From the configuration; a run of `compare` has it in its settings."""
    if folder.config.exists():
        found: Subject = load_config(folder.config)
    else:
        about = ((folder.facts or {}).get("settings") or {}).get("about") or {}
        if not {"data", "model"} <= about.keys():
            unknown = "does not say how its model is built"
            raise ValueError(f"{folder.path} {unknown}: it was not made from a configuration.")
        found = Subject.model_validate({k: about[k] for k in Subject.model_fields if k in about})
    if isinstance(found.model, CheckpointSection):  # what it began with is not needed any more
        kept = found.model.model_dump(include={"factory", "arguments", "fix"})
        found = found.model_copy(update={"model": FactorySection(**kept)})
    return found
