"""Will this run learn anything? Doubts before the first step, from public numbers alone."""

import math
import warnings
from collections.abc import Iterator

from dpspan.app.run.training import Task, Training
from dpspan.mechanisms import DPSGD


def doubts(task: Task, training: Training | None = None) -> Iterator[str]:
    """Each for the console, said here, and for the certificate."""
    for doubt in _found(task, training):
        warnings.warn(f"dpspan: {doubt}.", stacklevel=3)
        yield doubt


def _found(task: Task, training: Training | None) -> Iterator[str]:
    data = (task.about or {}).get("data", {})
    private = data.get("private", {})
    numbers = {*private.get("inputs", ())} - {*private.get("categories", ())}
    as_they_are = (private.get("scale"), private.get("mean"), private.get("std")) == (None, 0, 1)
    if private.get("format") in ("csv", "parquet") and numbers and as_they_are:
        yield (
            "columns of numbers enter as they are, without bounds, mean or std: the largest drown "
            "the others, and often nothing is learnt. Describe them in data.preprocessing"
        )
    if training is None:  # of a fit that is meant to use all records in every step
        return
    if task.sample_rate == 1:
        yield (
            "batch_size is at least the number of records, so every step uses all of them (q = 1) "
            "and sampling makes nothing more private: take a smaller batch_size"
        )
    most = task.sample_rate * task.count * training.steps  # the clip times this
    trained = sum(p.numel() for p in training.model.parameters() if p.requires_grad)
    noise = training.engine.noise_multiplier * math.sqrt(trained * training.steps)
    if isinstance(training.contender.method, DPSGD) and noise > most:
        yield (
            "all noise together is longer than the sum of all gradients can be, so next to nothing "
            "is learnt: take a larger ε, a smaller model, or larger batches"
        )
