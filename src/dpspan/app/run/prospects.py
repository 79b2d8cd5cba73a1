"""Will this run learn anything? Doubts before the first step, from public numbers alone."""

import math
import warnings
from collections.abc import Iterator

from dpspan.app.run.task import Task
from dpspan.app.run.training import Training
from dpspan.mechanisms import DPSGD

_UNSCALED = "columns of numbers enter as they are: the largest drown the others, and often nothing "
_UNSCALED += "is learnt. Describe them in data.preprocessing, or give mean and std"
_WHOLE = "batch_size is at least the number of records, so every step uses all of them (q = 1): "
_WHOLE += "sampling makes nothing more private. Take a smaller one"
_NOISE = "all noise together is longer than the sum of all gradients can be, so next to nothing is "
_NOISE += "learnt: take a larger ε, a smaller model, or larger batches"


def doubts(task: Task, training: Training | None = None) -> Iterator[str]:
    """For the console, where they are said now, and for the certificate; of a fit the first."""
    data = (task.about or {}).get("data")  # of a task from Python it may be anything
    private = data.get("private", {}) if isinstance(data, dict) else {}
    numbers = {*private.get("inputs", ())} - {*private.get("categories", ())}
    scaling = [private.get(key) for key in ("scale", "mean", "std")]
    is_table = private.get("format") in ("csv", "parquet")
    found = {_UNSCALED: is_table and bool(numbers) and scaling == [None, 0, 1]}
    if training is not None:
        trained = sum(p.numel() for p in training.model.parameters() if p.requires_grad)
        noise = training.engine.noise_multiplier * math.sqrt(trained * training.steps)
        most = task.sample_rate * task.count * training.steps  # both times the clip
        found[_WHOLE] = task.sample_rate == 1
        found[_NOISE] = noise > most and isinstance(training.contender.method, DPSGD)
    for doubt in (doubt for doubt, holds in found.items() if holds):
        warnings.warn(f"dpspan: {doubt}.", stacklevel=3)
        yield doubt
