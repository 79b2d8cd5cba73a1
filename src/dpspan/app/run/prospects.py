"""Will this run learn anything? Doubts before the first step, at no cost in privacy."""

import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from dpspan.app.run.scene import public_of, scene_of
from dpspan.app.run.task import Contender, Task
from dpspan.app.run.training import Training, noise_for, rehearse
from dpspan.mechanisms import DPSGD
from dpspan.public.data import PublicData

_UNSCALED = "columns of numbers enter as they are: the largest drown the others, and often nothing "
_UNSCALED += "is learnt. Describe them in data.preprocessing, or give mean and std"
_WHOLE = "batch_size is at least the number of records, so every step uses all of them (q = 1): "
_WHOLE += "sampling makes nothing more private. Take a smaller one"
_NOISE = "all noise together is longer than the sum of all gradients can be, so next to nothing is "
_NOISE += "learnt: take a larger ε, a smaller model, or larger batches"
_CONSTANT = "rehearsed on {0} records of “{1}”, with this run's noise, the model was right no more "
_CONSTANT += "often than if it always said the commonest class. Scale the inputs, take a simpler "
_CONSTANT += "model, a larger ε or another learning rate (`dpspan advise`)"
_A_CLASS = 20  # records of it to learn from, and to measure on: fewer say nothing
_SHARE = 0.25  # of the training's time, at the most


def doubts(task: Task, training: Training | None = None) -> Iterator[str]:
    """For the console, where they are said now, and for the certificate; of a fit the first."""
    about = task.about or {}
    data = about.get("data")  # of a task from Python it may be anything
    private = data.get("private", {}) if isinstance(data, dict) else {}
    numbers = {*private.get("inputs", ())} - {*private.get("categories", ())}
    scaling = [private.get(key) for key in ("scale", "mean", "std")]
    is_table = private.get("format") in ("csv", "parquet") and not about.get("features")
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


def rehearsed(task: Task, contender: Contender, public: Iterable[PublicData]) -> Iterator[str]:
    """Whether the largest labelled public data would teach it more than one answer."""
    known = [data for data in public if data.labelled]
    if task.numeric or contender.method is None or not known:
        return
    stand_in, used = max(known, key=lambda data: data.count), public_of(contender)
    others = None if stand_in.digest in {data.digest for data in used} else used
    task = replace(task, unit=None, records=task.count)
    try:
        scene = scene_of(task, stand_in, fold=0, others=others, share=_SHARE)
    except ValueError:  # of batches too small to say anything
        return
    labels = np.array([int(scene.task.test[i][1]) for i in range(len(scene.task.test))])  # type: ignore
    shares = np.bincount(labels) / len(labels)
    count = len(scene.task.private)  # type: ignore[arg-type]
    if min(count, len(labels)) < _A_CLASS * len(shares):
        return
    z = noise_for(task, contender)
    if not rehearse(*scene.job(contender, z, 0)) > shares.max():
        doubt = _CONSTANT.format(count, stand_in.name)
        warnings.warn(f"dpspan: {doubt}.", stacklevel=3)
        yield doubt
