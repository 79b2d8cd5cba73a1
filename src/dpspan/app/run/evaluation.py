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
from dpspan.app.run.training import Task, outputs_on
from dpspan.support.checks import expect
from dpspan.support.strict_json import plain

SHOWN = ("accuracy", "auc", "sensitivity", "specificity", "calibration_error")
_BINS, _MOST_GROUPS = 15, 20
Floats = NDArray[np.float64]


def classified(probabilities: Floats, threshold: float) -> NDArray[np.int64]:
    """Of two classes the second from the threshold on, of more the most probable."""
    two = probabilities.shape[1] == 2
    return (probabilities[:, 1] >= threshold).astype(int) if two else probabilities.argmax(1)


def evaluate(probabilities: Floats, labels: Any, *, threshold: float = 0.5) -> dict[str, Any]:
    """Accuracy, AUC (one against the rest), calibration error, recalls, confusion (truth in rows).

    The recall of the second of two classes is the sensitivity, of the first the specificity. None
    stands for what cannot be measured: classes are missing.
    """
    classes, n = np.arange(probabilities.shape[1]), len(labels)
    found, two = classified(probabilities, threshold), len(classes) == 2
    confusion = metrics.confusion_matrix(labels, found, labels=classes)
    with np.errstate(invalid="ignore"):
        recalls = (np.diag(confusion) / confusion.sum(1)).tolist()
    auc, sure = None, probabilities.max(1)
    if len(np.unique(labels)) == len(classes):
        score = probabilities[:, 1] if two else probabilities
        auc = float(metrics.roc_auc_score(labels, score, multi_class="ovr"))
    # In each bin, by how much confidence and accuracy differ, times the bin's records
    gaps = np.bincount((sure * _BINS).astype(int), sure - (probabilities.argmax(1) == labels))
    measured = {"records": n, "accuracy": float((found == labels).mean()), "auc": auc}
    measured |= {"sensitivity": recalls[1], "specificity": recalls[0]} if two else {}
    measured["calibration_error"] = float(np.abs(gaps).sum() / n)
    return dict(plain({**measured, "recalls": recalls, "confusion": confusion.tolist()}))


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is measured when training is over; see the section `evaluate`."""

    threshold: float = 0.5
    groups: Mapping[str, Any] = field(default_factory=dict)  # columns of the test data
    unseen: Dataset[Any] | None = None  # test data of which one accuracy is released
    noise_multiplier: float = 1.0  # of that

    def results(self, task: Task, model: nn.Module, kept: Mapping[str, Any]) -> dict[str, Any]:
        """For `evaluation.json`; an accuracy that was released there stays."""
        found: dict[str, Any] = {"threshold": self.threshold}
        if task.test is not None:
            found[task.metric("results")] = self._by_group(*_judged(task, task.test, model))
        if self.unseen is not None:
            probabilities, labels = _judged(task, self.unseen, model)
            right = classified(probabilities, self.threshold) == labels
            released = private_metric(right, noise_multiplier=self.noise_multiplier)
            found["test_accuracy"] = kept.get("test_accuracy") or asdict(released)
        return found

    def _by_group(self, probabilities: Floats, labels: Any) -> dict[str, dict[str, Any]]:
        parts = {"all": np.full(len(labels), True)}
        for name, values in self.groups.items():
            texts = np.array([str(value) for value in values])
            parts |= {f"{name} = {kind}": texts == kind for kind in np.unique(texts)}
        few = f"at most {_MOST_GROUPS} values of evaluate.by"
        expect(len(parts) <= _MOST_GROUPS + 1, few, len(parts) - 1)
        at = {"threshold": self.threshold}
        return {k: evaluate(probabilities[own], labels[own], **at) for k, own in parts.items()}


def sentences(document: Mapping[str, Any]) -> Iterator[str]:
    """What `evaluation.json` says, a line for all records and for each group."""
    for kind, groups in document.items():
        for name, found in groups.items() if kind.endswith("results") else ():
            known = {key.replace("_", " "): found.get(key) for key in SHOWN}
            values = [f"{key} {value:.3f}" for key, value in known.items() if value is not None]
            private = "NOT PRIVATE: " * kind.startswith("unprivate_")
            yield f"{private}{name} ({found['records']} records): {', '.join(values)}"
    if released := document.get("test_accuracy"):
        yield f"test accuracy {released['value']:.3f} ± {released['error']:.3f} (with noise)"


def _judged(task: Task, records: Dataset[Any], model: nn.Module) -> tuple[Floats, Any]:
    outputs, labels = outputs_on(task, records, model)
    probabilities = outputs.double().softmax(1).nan_to_num(0.0)  # of weights without bound
    return probabilities.cpu().numpy(), labels.cpu().numpy()
