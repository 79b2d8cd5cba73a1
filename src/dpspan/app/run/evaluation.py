"""How good a model is on test records, group by group: of a classifier, or of numbers."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn import metrics
from torch import Tensor, nn
from torch.utils.data import Dataset

from dpspan.accounting.questions import private_metric
from dpspan.app.config import EvaluateSection
from dpspan.app.data import Target
from dpspan.app.run.task import Task
from dpspan.app.run.training import outputs_on
from dpspan.support.checks import expect
from dpspan.support.strict_json import plain

_OF_CLASSES = ("accuracy", "auc", "sensitivity", "specificity", "calibration_error")
SHOWN = (*_OF_CLASSES, "mean_absolute_error", "root_mean_squared_error", "r2")
_BINS = 15
_MOST = 20  # groups
Floats = NDArray[np.float64]


def classified(probabilities: Floats, threshold: float) -> NDArray[np.int64]:
    """Of two classes the second from the threshold on, of more the most probable."""
    two = probabilities.shape[1] == 2
    return (probabilities[:, 1] >= threshold).astype(int) if two else probabilities.argmax(1)


def evaluate(probabilities: Floats, labels: Any, *, threshold: float = 0.5) -> dict[str, Any]:
    """Accuracy, AUC (one against the rest) and so on; None for what cannot be measured."""
    classes, found = np.arange(probabilities.shape[1]), classified(probabilities, threshold)
    two, sure, auc = len(classes) == 2, probabilities.max(1), None
    known = bool(probabilities.sum(1).min() > 0)  # not of a model that says nothing any more
    if known and len(np.unique(labels)) == len(classes):
        score = probabilities[:, 1] if two else probabilities
        auc = float(metrics.roc_auc_score(labels, score, multi_class="ovr"))
    confusion = metrics.confusion_matrix(labels, found, labels=classes)
    with np.errstate(invalid="ignore"):
        recalls = (np.diag(confusion) / confusion.sum(1)).tolist()
    # In each bin, by how much confidence and accuracy differ, times the bin's records
    bins = np.minimum((sure * _BINS).astype(int), _BINS - 1)
    gaps = np.bincount(bins, sure - (probabilities.argmax(1) == labels))
    measured = {
        "records": len(labels),
        "accuracy": float((found == labels).mean()),
        "auc": auc,
        **({"sensitivity": recalls[1], "specificity": recalls[0]} if two else {}),
        "calibration_error": float(np.abs(gaps).sum() / len(labels)),
    }
    return dict(plain({**measured, "recalls": recalls, "confusion": confusion.tolist()}))


def errors(predicted: Floats, true: Floats) -> dict[str, Any]:
    """How far predictions are from numbers, in their units; R² is 0 for always telling the mean."""
    spread = float(((true - true.mean()) ** 2).mean())
    squared = float(((predicted - true) ** 2).mean())
    measured = {
        "records": len(true),
        "mean_absolute_error": float(np.abs(predicted - true).mean()),
        "root_mean_squared_error": math.sqrt(squared),
        "r2": 1 - squared / spread if spread else None,
    }
    return dict(plain(measured))


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is measured when training is over."""

    section: EvaluateSection = field(default_factory=EvaluateSection)
    target: Target | None = None  # where labels are numbers
    groups: NDArray[np.str_] | None = None  # of test records, `by` which results are told
    unseen: Dataset[Any] | None = None  # test data of which one accuracy is released

    def results(self, task: Task, model: nn.Module, kept: Mapping[str, Any]) -> dict[str, Any]:
        """For `evaluation.json`; an accuracy that was released there stays."""
        found: dict[str, Any] = {} if self.target else {"threshold": self.section.threshold}
        if task.test is not None:
            outputs, labels = outputs_on(task, task.test, model)
            found[task.metric("results")] = self._by_group(outputs, labels)
        if self.unseen is not None:
            outputs, labels = outputs_on(task, self.unseen, model)
            right = classified(_probabilities(outputs), self.section.threshold) == _array(labels)
            released = private_metric(right, noise_multiplier=self.section.noise_multiplier or 1.0)
            found["test_accuracy"] = kept.get("test_accuracy") or asdict(released)
        return found

    def _by_group(self, outputs: Tensor, labels: Tensor) -> dict[str, dict[str, Any]]:
        judge: Callable[..., dict[str, Any]]
        if self.target is None:
            found, true = _probabilities(outputs), _array(labels)
            judge = partial(evaluate, threshold=self.section.threshold)
        else:
            judge = errors
            found, true = (self.target.unscaled(_array(x[:, 0])) for x in (outputs, labels))
        parts = {"all": np.full(len(true), True)}
        if self.groups is not None:
            names = np.unique(self.groups)
            parts |= {f"{self.section.by} = {each}": self.groups == each for each in names}
        return {name: judge(found[own], true[own]) for name, own in parts.items()}


def groups_of(by: str, values: Any, records: int) -> NDArray[np.str_]:
    """Of each test record the group as text; ValueError before anything is spent."""
    expect(values is not None, "evaluate.by to be a column there", by)
    groups = np.array([str(each) for each in values])
    expect(len(groups) == records, "evaluate.by to have one value for each test record", by)
    few = len(np.unique(groups)) <= _MOST
    expect(few, f"evaluate.by to be a column of at most {_MOST} different values", by)
    return groups


def sentences(document: Mapping[str, Any]) -> Iterator[str]:
    """What `evaluation.json` says, a line for all records and for each group."""
    for kind, groups in document.items():
        for name, found in groups.items() if kind.endswith("results") else ():
            known = [(key.replace("_", " "), found.get(key)) for key in SHOWN]
            values = [f"{key} {value:.3f}" for key, value in known if value is not None]
            private = "NOT PRIVATE: " * kind.startswith("unprivate_")
            yield f"{private}{name} ({found['records']} records): {', '.join(values)}"
    if released := document.get("test_accuracy"):
        yield f"test accuracy {released['value']:.3f} ± {released['error']:.3f} (with noise)"


def _probabilities(outputs: Tensor) -> Any:
    return _array(outputs.double().softmax(1).nan_to_num(0.0))


def _array(values: Tensor) -> Any:
    return values.cpu().numpy()
