"""DOPE-SGD, AdaDPS and the trajectory's subspace: sums by autograd, sensitivity, noise, cost."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments.one_run import Run, train
from experiments.public_gradients import DOPESGD, AdaDPS
from experiments.runner import Place
from experiments.schema import TrainingExperiment
from experiments.trajectory import (
    RecordedWarmStart,
    Trajectory,
    TrajectoryGEP,
    TrajectoryPDPSGD,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import dpspan
from dpspan.accounting.events import step_event
from dpspan.app.section import parse
from dpspan.gradients.layers.terms import Rows
from dpspan.gradients.operator import PerSampleGradients
from dpspan.mechanisms import Setting
from dpspan.mechanisms.noise import Noise
from helpers import training
from helpers.oracle import clip_rows, per_sample_matrix
from helpers.subspaces import flat, rows, stepped, summed

F64 = torch.float64
CLIP, LOT = 0.7, 10
METHODS = {"DOPE-SGD": DOPESGD, "AdaDPS": AdaDPS}
both = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def labelled(n: int, seed: int, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=g, dtype=dtype)
    return x, (x.sum(1) > 0).long() + (x[:, 0] > 0.5).long()


def network(dtype: torch.dtype = F64) -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 3).to(dtype)


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def bound(method: Any, model: nn.Module | None = None, **fields: Any) -> Any:
    model = network() if model is None else model
    dtype = next(model.parameters()).dtype
    setting = Setting(model=model, criterion=nn.CrossEntropyLoss(), expected_batch_size=LOT)
    return method(**{"public": labelled(12, 9, dtype), "clip": CLIP, **fields}).bind(setting)


def changed(method: Any, private: Tensor, public: Tensor) -> Tensor:
    """What is clipped, as the two papers say it."""
    if method is DOPESGD:
        return private - public.mean(0)
    squares = public.square().mean(0)
    return private / ((squares / squares.mean()).sqrt() + 0.1)


# -- what is summed -------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("samples", [1, 7, 23])
def test_sums_are_those_of_autograd(method: Any, samples: int) -> None:
    model = network()
    private = per_sample_matrix(model, losses, *labelled(samples, 3))
    public = per_sample_matrix(model, losses, *labelled(12, 9))
    expected = clip_rows(changed(method, private, public), CLIP)
    mechanism = bound(method, model)
    gradients = dpspan.per_sample_gradients(model, losses, *labelled(samples, 3))
    total = summed(mechanism, gradients)
    assert {name: x.shape for name, x in total.items()} == gradients.shapes
    assert torch.allclose(flat(total), expected.sum(0), atol=1e-10)
    # The expected number of records comes back, never that which was drawn.
    back = LOT * public.mean(0) if method is DOPESGD else 0.0
    step = flat(stepped(mechanism, total, Noise(seed=0), 0.0))
    assert torch.allclose(step, expected.sum(0) + back, atol=1e-10)
    assert mechanism.step == 1


@both
def test_pieces_of_a_batch_add_up(method: Any) -> None:
    matrix = torch.randn(9, 15, dtype=F64)
    mechanism = bound(method)
    whole = flat(summed(mechanism, rows(matrix)))
    parts = sum(flat(summed(mechanism, rows(part))) for part in matrix.split(4))
    assert torch.allclose(whole, parts, atol=1e-12)


def test_a_public_gradient_that_explains_all_leaves_nothing_to_clip() -> None:
    """Private records that are the public ones: all of the long gradient comes back."""
    model = network()
    x, y = labelled(1, 9)
    y = (model(100 * x).argmax(1) + 1) % 3  # a label that the model does not expect
    mechanism = bound(DOPESGD, model, public=(100 * x, y))
    gradients = dpspan.per_sample_gradients(model, losses, 100 * x, y)
    assert float(gradients.norms()) > 10 * CLIP
    step = flat(stepped(mechanism, summed(mechanism, gradients), Noise(seed=0), 0.0))
    assert torch.allclose(step, LOT * gradients.matrix()[0], atol=1e-10)


def test_public_gradients_are_of_the_present_weights() -> None:
    model = network()
    mechanism = bound(DOPESGD, model)
    nothing = rows(torch.zeros(0, 15, dtype=F64))
    for _ in range(2):
        expected = LOT * per_sample_matrix(model, losses, *labelled(12, 9)).mean(0)
        found = flat(stepped(mechanism, summed(mechanism, nothing), Noise(seed=0), 0.0))
        assert torch.allclose(found, expected, atol=1e-10)
        with torch.no_grad():
            model.weight.mul_(-2.0)


def test_second_moments_are_renewed_every_so_many_steps() -> None:
    model = network()
    mechanism, scales = bound(AdaDPS, model, refresh=2), []
    for _ in range(5):
        stepped(mechanism, summed(mechanism, rows(torch.zeros(1, 15, dtype=F64))), Noise(0), 0.0)
        scales.append(mechanism._scale)
        with torch.no_grad():
            model.weight.add_(0.1)
    same = [torch.equal(a, b) for a, b in pairwise(scales)]
    assert same == [True, False, True, False]


def test_a_step_has_one_augmentation_and_the_next_another() -> None:
    """By a public seed: what is random for all does not depend on who is in the batch."""

    def wobble(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    found = []
    for begin in (0, 0, 5):
        torch.manual_seed(begin)  # the run's own random numbers have no part in it
        mechanism = bound(DOPESGD, augment=wobble)
        steps = []
        for _ in range(2):
            total = summed(mechanism, rows(torch.zeros(0, 15, dtype=F64)))
            steps.append(flat(stepped(mechanism, total, Noise(seed=0), 0.0)))
        found.append(torch.stack(steps))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not torch.allclose(found[0][0], found[0][1], atol=1e-3)


# -- sensitivity, by brute force ------------------------------------------------------------------

special = st.sampled_from([0.0, 1e-38, 1e-20, 1e-3, 1.0, 1e4, 1e18, 1e25, 3e38, math.inf, math.nan])


@both
@settings(max_examples=100, deadline=None)
@given(
    scales=st.lists(special, min_size=0, max_size=4),
    newcomer=special,
    direction=st.integers(0, 2**16),
    along=st.booleans(),
    longer=st.sampled_from([1.0, 1e4]),
    dtype=st.sampled_from([torch.float32, F64]),
)
def test_one_record_moves_the_sum_by_at_most_the_clip(
    method: Any,
    scales: list[float],
    newcomer: float,
    direction: int,
    along: bool,
    longer: float,
    dtype: torch.dtype,
) -> None:
    """Records of any length; also next to the public gradient, where differences cancel."""
    model = network(dtype)
    x, y = labelled(12, 9, dtype)
    mechanism = bound(method, model, public=(longer * x, y))
    mechanism.prepare()
    g = torch.Generator().manual_seed(direction)
    factors = torch.tensor([*scales, newcomer], dtype=dtype)
    values = torch.randn(len(factors), 15, generator=g, dtype=dtype) * factors[:, None]
    if along and method is DOPESGD:
        values += mechanism._mean
    one = flat(mechanism.clipped_sum(rows(values))).double()
    other = flat(mechanism.clipped_sum(rows(values[:-1]))).double()
    assert one.isfinite().all()
    # What is left is the rounding of adding up vectors of length ≤ CLIP.
    rounding = 4 * len(factors) * CLIP * torch.finfo(dtype).eps
    assert float((one - other).norm()) <= CLIP + rounding
    if not math.isfinite(newcomer):
        assert torch.equal(one, other)


@both
def test_it_clips_as_little_as_it_may(method: Any) -> None:
    mechanism = bound(method, network(torch.float32))
    mechanism.prepare()
    total = flat(mechanism.clipped_sum(rows(1e3 * torch.randn(1, 15))))
    assert CLIP * (1 - 1e-4) <= float(total.norm()) <= CLIP * (1 + 1e-6)


@both
def test_rows_that_fill_up_a_batch_add_nothing(method: Any) -> None:
    """To DOPE-SGD they would be −h each."""
    matrix = torch.cat([torch.randn(2, 15, dtype=F64), torch.zeros(3, 15, dtype=F64)])
    plain = rows(matrix)
    filled = PerSampleGradients(
        plain.shapes,
        {name: [term] for name, term in plain.terms.items()},
        5,
        like=matrix,
        counted=torch.arange(5) < 2,
    )
    mechanism = bound(method)
    expected = flat(summed(mechanism, rows(matrix[:2])))
    assert torch.allclose(flat(summed(mechanism, filled)), expected, atol=1e-12)


# -- noise and cost -------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("samples", [0, 1, 400])
def test_noise_law(method: Any, samples: int) -> None:
    """z·C of white noise around what is public, whatever the number of records is."""
    z, steps, size = 0.8, 400, 15
    noise, mechanism = Noise(seed=samples), bound(method)
    mechanism.prepare()
    # Records that add nothing: their gradients are h, or zero.
    own = mechanism._mean if method is DOPESGD else torch.zeros(size, dtype=F64)
    draws = []
    for _ in range(steps):
        total = summed(mechanism, rows(own.expand(samples, size)))
        draws.append(flat(stepped(mechanism, total, noise, z)) - LOT * own)
    N = torch.stack(draws) / (z * CLIP)
    count = steps * size
    # |·| < 5.5 standard errors fails with probability below 4e-8 per check.
    assert abs(float(N.mean())) < 5.5 / math.sqrt(count)
    assert float(N.mean(0).abs().max()) < 5.5 / math.sqrt(steps)
    assert abs(float(N.var()) - 1) < 5.5 * math.sqrt(2 / count)
    covariance = N.T @ N / steps
    off_diagonal = covariance - torch.diag(torch.diag(covariance))
    assert float(off_diagonal.abs().max()) < 5.5 / math.sqrt(steps)


@both
def test_it_costs_what_dpsgd_costs_and_says_what_is_public(method: Any) -> None:
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(2))
    engine, model, optimizer, loader = training.setup(
        method=method(public=(x, (x.sum(1) > 0).long()), clip=CLIP),
        noise_multiplier=0.83,
        criterion=nn.CrossEntropyLoss(),
    )
    training.train(model, optimizer, loader, epochs=2)
    assert engine.ledger.events == ((step_event(0.83, 0.25), 8),)
    assert [each.count for each in engine.ledger.public] == [12]


@both
def test_public_gradients_that_are_not_finite_are_an_error(method: Any) -> None:
    model = network()
    mechanism = bound(method, model)
    with torch.no_grad():
        model.weight[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"not finite.*lower the learning rate"):
        mechanism.prepare()


# -- the trajectory of a warm start ---------------------------------------------------------------


def phase(**fields: Any) -> dpspan.WarmStart:
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(2))
    said = {"max_epochs": 8, "batch_size": 6, "validation": 0, "learning_rate": 0.01, **fields}
    return dpspan.WarmStart(data=(x, (x.sum(1) > 0).long()), **said)


def in_trajectory(base: Any, **fields: Any) -> Any:
    said = {"public": phase().data, "rank": 3, "clip": CLIP, "trajectory": Trajectory(2), **fields}
    return base(**said)


def started(base: Any, **fields: Any) -> tuple[Any, ...]:
    """A run; its mechanism; and the weights along its warm start, as rows."""
    method = in_trajectory(base, **fields)
    said = {"method": method, "warm_start": method.recorded(phase())}
    engine, model, optimizer, loader = training.setup(criterion=nn.CrossEntropyLoss(), **said)
    seen = torch.stack([flat(weights) for weights in method.trajectory.weights])
    return engine, model, optimizer, loader, seen


def test_a_recorded_warm_start_is_the_same_to_the_last_bit() -> None:
    def noisy(x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)

    plain, recorded = training.network(), training.network()
    trajectory = Trajectory(every=3)
    method = in_trajectory(TrajectoryPDPSGD, trajectory=trajectory)
    before = training.weights(recorded).clone()
    ways = phase(augment=noisy), method.recorded(phase(augment=noisy))
    for model, way in zip((plain, recorded), ways, strict=True):
        way.run(model, nn.CrossEntropyLoss())
    assert torch.equal(training.weights(plain), training.weights(recorded))
    # 16 minibatches: before the 1st, 4th, 7th, 10th, 13th and 16th, and at the end.
    assert len(trajectory.weights) == 7
    assert torch.equal(flat(trajectory.weights[0]), before)
    assert torch.equal(flat(trajectory.weights[-1]), training.weights(recorded))


def test_its_subspace_has_the_principal_directions_and_stays() -> None:
    engine, model, optimizer, loader, seen = started(TrajectoryPDPSGD)
    mechanism = engine._running().mechanism
    mechanism.prepare()
    moves = (seen - seen.mean(0)).double()
    directions = torch.linalg.svd(moves, full_matrices=False).Vh[:3]
    v = torch.randn(seen.shape[1], dtype=F64)
    parts = v.float().split([p.numel() for p in model.parameters()])
    vector = {n: x.view_as(p) for x, (n, p) in zip(parts, model.named_parameters(), strict=True)}
    [subspace] = mechanism.span.parts.values()
    found = flat(subspace.project(vector)).double()
    assert torch.allclose(found, directions.T @ (directions @ v), atol=1e-4)
    before = mechanism.span
    start = training.weights(model).clone()
    training.train(model, optimizer, loader, epochs=2)
    assert mechanism.span is before
    # All that moved is in it.
    moved = (training.weights(model) - start).double()
    assert float(moved.norm()) > 0.01
    assert torch.allclose(directions.T @ (directions @ moved), moved, atol=1e-4)


@pytest.mark.parametrize("base", [TrajectoryPDPSGD, TrajectoryGEP])
def test_in_it_one_record_moves_the_sums_by_what_is_covered(base: Any) -> None:
    engine, *_, seen = started(base, **({"residual_clip": 0.3} if base is TrajectoryGEP else {}))
    mechanism = engine._running().mechanism
    mechanism.prepare()
    torch.manual_seed(0)
    for scale in (1e-20, 1e-3, 1.0, 1e4, 1e18, math.inf):
        matrix = scale * torch.randn(4, seen.shape[1])
        model = training.network()
        shapes = {name: p.shape for name, p in model.named_parameters()}
        sums = [mechanism.clipped_sum(_as_gradients(x, shapes)) for x in (matrix, matrix[:-1])]
        w, r = [], []
        for total in sums:
            for name, value in total.items():
                (r if name in shapes else w).append(value.double().flatten())
        assert float((w[0] - w[1]).norm()) <= CLIP * (1 + 1e-5)
        if r:
            half = len(r) // 2
            assert float((torch.cat(r[:half]) - torch.cat(r[half:])).norm()) <= 0.3 * (1 + 1e-5)


def _as_gradients(matrix: Tensor, shapes: dict[str, torch.Size]) -> PerSampleGradients:
    columns = matrix.split([shape.numel() for shape in shapes.values()], dim=1)
    terms = {
        name: [Rows(part.reshape(-1, *shapes[name]))]
        for name, part in zip(shapes, columns, strict=True)
    }
    return PerSampleGradients(shapes, terms, len(matrix), like=matrix)


def test_its_run_is_accounted_and_described() -> None:
    engine, model, optimizer, loader, _ = started(TrajectoryGEP)
    training.train(model, optimizer, loader)
    assert engine.ledger.events == ((step_event(1.0, 0.25), 4),)
    text = json.dumps(engine.certificate(delta=1e-5))
    assert "weights along the warm start" in text
    assert "Trajectory(every=2)" in text


def test_what_has_no_trajectory_is_refused() -> None:
    method = in_trajectory(TrajectoryPDPSGD)
    with pytest.raises(ValueError, match="Expected a warm_start"):
        method.recorded(None)
    with pytest.raises(ValueError, match="Expected validation: 0"):
        method.recorded(phase(validation=0.2)).run(training.network(), nn.CrossEntropyLoss())
    engine, *_ = started(TrajectoryPDPSGD, rank=9)
    with pytest.raises(ValueError, match="more than 9 weights, got 9: give it more epochs"):
        engine._running().mechanism.prepare()
    assert isinstance(method.recorded(phase()), RecordedWarmStart)


# -- as rows of an experiment ---------------------------------------------------------------------

TINY = """
title: A tiny experiment
paper: nobody
about: Two classes of squares.
data:
  name: images
  file: squares
  classes: 2
  records: 120
  held_out: 40
  public:
    opt-in: {source: opt-in, samples: 20, labelled: true}
model: {name: mlp, hidden: [4]}
training: {epochs: 2, batch_size: 30, optimizer: {name: sgd}}
targets: {noise_multiplier: [1.0]}
rows:
  DOPE-SGD:
    method: {name: dope-sgd, public: opt-in, augment: {name: affine}}
  AdaDPS:
    method: {name: adadps, public: opt-in, stability: 0.3}
    warm_start: &warm {public: opt-in, max_epochs: 20, validation: 0, augment: {name: affine}}
  PDP-SGD:
    method: {name: trajectory-pdpsgd, public: opt-in, rank: 3, every: 4}
    warm_start: *warm
  GEP:
    method: {name: trajectory-gep, public: opt-in, rank: 3, every: 4, residual_clip: 0.1}
    warm_start: *warm
"""


@pytest.mark.parametrize("row", ["DOPE-SGD", "AdaDPS", "PDP-SGD", "GEP"])
def test_rows_train(row: str, tmp_path: Path) -> None:
    rng, parts = np.random.default_rng(0), {}
    for name, count in (("train", 200), ("test", 60)):
        y = np.arange(count) % 2
        x = (rng.integers(0, 100, (count, 10, 10)) + 150 * y[:, None, None]).astype(np.uint8)
        parts |= {f"x_{name}": x, f"y_{name}": y}
    np.savez(tmp_path / "squares.npz", **parts)
    tiny = parse(TINY, TrainingExperiment, name="tiny.yaml")
    run = Run("tiny", row, 1.0, 0.5, 0, False, tiny.digest(row))
    found = train(run, tiny, Place(data=tmp_path, commit="abc"))
    assert found["accuracy"] > 0.8
    dpsgd = replace(run, row="DP-SGD")
    same = parse(
        TINY + "  DP-SGD:\n    method: {name: dpsgd}\n", TrainingExperiment, name="tiny.yaml"
    )
    assert found["epsilon"] == train(dpsgd, same, Place(data=tmp_path, commit="abc"))["epsilon"]
