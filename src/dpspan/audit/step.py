"""`audit_step`: is one private step what its certificate will say? Measured, not proved.

The noise of a release against the std it asks for; how far a record moves what gets that noise; how
batches are drawn. Cheap, and sharp: a tenth of noise missing, or of clip too much, is found.
"""

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from torch.optim import Optimizer

from dpspan.audit.findings import StepAudit
from dpspan.audit.noise import LONGEST, MeasuredNoise, NoiseWatch, drawn_by_a_fork, noted
from dpspan.audit.sampler import sampler_checks
from dpspan.audit.sensitivity import Batches, Loss, sensitivity_checks
from dpspan.engine.engine import PrivacyEngine
from dpspan.engine.private_step import PrivateRun
from dpspan.engine.sampling import PrivateLoader
from dpspan.mechanisms.base import Sums
from dpspan.public.fingerprints import Array
from dpspan.support.checks import check_seed, expect

Prepared = tuple[PrivacyEngine, nn.Module, Optimizer, PrivateLoader]

_STEPS = 6  # real ones, of each of two runs


def audit_step(prepare: Callable[[], Prepared], loss: Loss, *, seed: int = 0) -> StepAudit:
    """Audit a private step with your own model, data pipeline, method and loss.

    Two runs are made and trained for a few steps; nothing of them is kept. They cost no privacy as
    long as they are thrown away, but what the audit says may depend on private records.

    Args:
        prepare: makes a private run anew, from a new model: the engine, and what its `make_private`
            returned.
        loss: `loss(model, batch)` as your training loop computes it.
        seed: of the canaries, and of dropout while they are exchanged.
    """
    seed = check_seed(seed)
    releases, notes = dict[str, Array](), list[str]()
    for number in (1, 2):
        prepared = engine, _, optimizer, loader = prepare()
        run = engine._running()
        z = run.plan.noise_multiplier
        expect(z > 0, "a run with noise to audit", z)
        expect(run.plan.unit == "record", "each record to be its own unit", run.plan.unit)
        expect(run.processes.world == 1, "one process: audit before torchrun", run.processes.world)
        expect(run._graphs is None, "a run without cuda_graphs, to look into its steps", True)
        sums, noise = _real_steps(run, prepared, loss)
        watch = NoiseWatch(run, sums)
        for i, each in enumerate(noise):
            releases[f"step {i + 1} of run {number}"] = watch.scaled(*each)[:LONGEST].copy()
        if number == 1:
            engine.detach()
    if hasattr(os, "fork") and all(x.device.type == "cpu" for x in sums.values()):
        releases |= drawn_by_a_fork(watch)
    else:
        notes.append("noise of forked processes was not compared: there are none here")
    notes += [f"{name}: no std was declared for its noise" for name in sorted(watch.unknown)]
    measured = MeasuredNoise(watch, releases)
    sensitivity = sensitivity_checks(Batches(run, optimizer, loss, seed), measured, z)
    checks = (*sensitivity, *measured.checks(), *sampler_checks(loader))
    engine.detach()
    return StepAudit(checks=checks, notes=tuple(notes))


def _real_steps(
    run: PrivateRun, prepared: Prepared, loss: Loss
) -> tuple[Sums, list[tuple[Sums, dict[str, float]]]]:
    """Train for some steps; what was summed last, what each release added and asked for."""
    release, summed = run.mechanism.release, dict[str, Tensor]()
    noise = list[tuple[Sums, dict[str, float]]]()

    def watched(total: Sums, *rest: Any) -> Sums:
        summed.update({name: value.clone() for name, value in total.items()})
        asked = dict[str, float]()
        with noted(run._noise, asked):
            released = release(total, *rest)
        noise.append(({name: released[name] - value for name, value in summed.items()}, asked))
        return released

    with patch.object(run.mechanism, "release", watched):
        take_steps(prepared, loss, lambda: len(noise) >= _STEPS)
    return summed, noise


def take_steps(prepared: Prepared, loss: Loss, enough: Callable[[], bool]) -> None:
    """Train as a user's loop does, until it is enough."""
    _, module, optimizer, loader = prepared
    while not enough():
        for batch in loader:
            optimizer.zero_grad()
            loss(module, batch).backward()
            optimizer.step()
            if enough():
                break
