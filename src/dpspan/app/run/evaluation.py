"""How good a classifier is on test records: at a threshold, calibrated, and group by group."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn import metrics
from torch import nn
from torch.utils.data import Dataset

from dpspan.accounting.questions import private_metric
from dpspan.app.config import EvaluateSection
from dpspan.app.run.task import Task
from dpspan.app.run.training import outputs_on
from dpspan.support.checks import expect
from dpspan.support.strict_json import plain

SHOWN = ("accuracy", "auc", "sensitivity", "specificity", "calibration_error")
_BINS = 15
Floats = NDArray[np.float64]


def classified(probabilities: Floats, threshold: float) -> NDArray[np.int64]:
    """Of two classes the second from the threshold on, of more the most probable."""
    two = probabilities.shape[1] == 2
    return (probabilities[:, 1] >= threshold).astype(int) if two else probabilities.argmax(1)


def evaluate(probabilities: Floats, labels: Any, *, threshold: float = 0.5) -> dict[str, Any]:
    """Accuracy, AUC (one against the rest) and so on; None for what cannot be measured."""
    classes, found = np.arange(probabilities.shape[1]), classified(probabilities, threshold)
    two, sure, auc = len(classes) == 2, probabilities.max(1), None
    if len(np.unique(labels)) == len(classes):
        score = probabilities[:, 1] if two else probabilities
        auc = float(metrics.roc_auc_score(labels, score, multi_class="ovr"))
    confusion = metrics.confusion_matrix(labels, found, labels=classes)
    with np.errstate(invalid="ignore"):
        recalls = (np.diag(confusion) / confusion.sum(1)).tolist()
    # In each bin, by how much confidence and accuracy differ, times the bin's records
    gaps = np.bincount((sure * _BINS).astype(int), sure - (probabilities.argmax(1) == labels))
    measured = {
        "records": len(labels),
        "accuracy": float((found == labels).mean()),
        "auc": auc,
        **({"sensitivity": recalls[1], "specificity": recalls[0]} if two else {}),
        "calibration_error": float(np.abs(gaps).sum() / len(labels)),
    }
    return dict(plain({**measured, "recalls": recalls, "confusion": confusion.tolist()}))


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is measured when training is over."""

    section: EvaluateSection = field(default_factory=EvaluateSection)
    groups: Any = None  # the column `by` of the test data
    unseen: Dataset[Any] | None = None  # test data of which one accuracy is released

    def results(self, task: Task, model: nn.Module, kept: Mapping[str, Any]) -> dict[str, Any]:
        """For `evaluation.json`; an accuracy that was released there stays."""
        found: dict[str, Any] = {"threshold": self.section.threshold}
        if task.test is not None:
            found[task.metric("results")] = self._by_group(*_judged(task, task.test, model))
        if self.unseen is not None:
            probabilities, labels = _judged(task, self.unseen, model)
            right = classified(probabilities, self.section.threshold) == labels
            released = private_metric(right, noise_multiplier=self.section.noise_multiplier or 1.0)
            found["test_accuracy"] = kept.get("test_accuracy") or asdict(released)
        return found

    def _by_group(self, probabilities: Floats, labels: Any) -> dict[str, dict[str, Any]]:
        parts = {"all": np.full(len(labels), True)}
        if self.groups is not None:
            texts = np.array([str(value) for value in self.groups])
            parts |= {f"{self.section.by} = {each}": texts == each for each in np.unique(texts)}
        expect(len(parts) <= 21, "at most 20 values of evaluate.by", len(parts) - 1)
        at = {"threshold": self.section.threshold}
        return {k: evaluate(probabilities[own], labels[own], **at) for k, own in parts.items()}


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


def _judged(task: Task, records: Dataset[Any], model: nn.Module) -> tuple[Floats, Any]:
    outputs, labels = outputs_on(task, records, model)
    return outputs.double().softmax(1).nan_to_num(0.0).cpu().numpy(), labels.cpu().numpy()
