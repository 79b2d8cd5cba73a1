"""The adaptive clip: one release of both parts, its sensitivity, its noise, where it goes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpspan import (
    DPSGD,
    GEP,
    PDPSGD,
    RGP,
    AdaptiveClipping,
    ConstantMixing,
    MirrorDescent,
    PrivacyEngine,
    RandomSubspace,
)
from dpspan.app.config.methods import DPSGDSection, MirrorDescentSection
from dpspan.gradients.capture import Capture
from dpspan.gradients.layers.terms import Rows
from dpspan.gradients.operator import PerSampleGradients
from dpspan.mechanisms import Setting
from dpspan.mechanisms.adaptive import BELOW, AdaptiveMechanism
from dpspan.mechanisms.base import of_parameters
from dpspan.mechanisms.noise import Noise
from helpers.training import setup, train

CLIP, LOT = 1.5, 40.0


def mechanism(clip: float = CLIP, **options: float) -> AdaptiveMechanism:
    setting = Setting(model=nn.Linear(1, 1), expected_batch_size=LOT)
    bound = DPSGD(clip=clip, clipping=AdaptiveClipping(**options)).bind(setting)
    assert isinstance(bound, AdaptiveMechanism)
    return bound


def rows(values: Tensor, counted: Tensor | None = None) -> PerSampleGradients:
    shapes, terms = {"w": values.shape[1:]}, {"w": [Rows(values)]}
    return PerSampleGradients(shapes, terms, len(values), like=values, counted=counted)


special = st.sampled_from([0.0, 1e-38, 1e-20, 0.3, 1.0, 1e4, 1e25, 3e38, math.inf, math.nan])


@settings(max_examples=150, deadline=None)
@given(
    scales=st.lists(special, min_size=1, max_size=5),
    newcomer=special,
    direction=st.integers(0, 2**16),
    clip=st.sampled_from([1e-3, 1.5, 1e3]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_a_record_moves_both_parts_together_by_one_of_each(
    scales: list[float], newcomer: float, direction: int, clip: float, dtype: torch.dtype
) -> None:
    g = torch.Generator().manual_seed(direction)
    factors = torch.tensor([*scales, newcomer], dtype=dtype)
    values = torch.randn(len(factors), 20, generator=g, dtype=dtype) * factors[:, None]
    more, less = (mechanism(clip).clipped_sum(rows(v)) for v in (values, values[:-1]))
    rounding = 4 * len(factors) * torch.finfo(dtype).eps
    assert float((more["w"] - less["w"]).double().norm()) <= clip * (1 + rounding)
    assert float((more[BELOW] - less[BELOW]).abs()) <= 0.5


def test_what_is_summed() -> None:
    values = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.5], [3.0, 0.0], [math.nan, 0.0]])
    total = mechanism().clipped_sum(rows(values))
    assert torch.allclose(total["w"], torch.tensor([2.5, 1.5]), rtol=1e-5)
    # The third is above by the margin for rounding.
    assert float(total[BELOW]) == 0.5 + 0.5 - 0.5 - 0.5 - 0.5
    counted = torch.tensor([True, True, False, False, False])
    assert float(mechanism().clipped_sum(rows(values, counted))[BELOW]) == 1.0
    nobody = mechanism().clipped_sum(rows(values[:0]))
    assert float(nobody[BELOW]) == 0


@pytest.mark.parametrize("share", [0.01, 0.3])
def test_the_noise_of_both_parts_is_worth_one_gaussian(share: float) -> None:
    z, steps, bound = 1.7, 4000, mechanism(share=share)
    total = {"w": torch.zeros(10), BELOW: torch.zeros(1, dtype=torch.float64)}
    noise = Noise(seed=3)
    released = [bound.release(total, noise, z) for _ in range(steps)]
    gradient = torch.stack([each["w"] for each in released]).double()
    count = torch.stack([each[BELOW] for each in released])
    # In units of what a record can add: C, and ½.
    z1, z2 = float(gradient.std()) / CLIP, float(count.std()) / 0.5
    # The standard error of a deviation of n numbers is 1/√(2n) of it.
    assert z1 == pytest.approx(z / math.sqrt(1 - share), rel=5 / math.sqrt(2 * 10 * steps))
    assert z2 == pytest.approx(z / math.sqrt(share), rel=5 / math.sqrt(2 * steps))
    assert 1 / z1**2 + 1 / z2**2 == pytest.approx(1 / z**2, rel=0.06)
    together = torch.corrcoef(torch.cat([gradient[:, :1], count], 1).T)[0, 1]
    assert abs(float(together)) < 5 / math.sqrt(steps)


def test_noise_follows_the_clip() -> None:
    bound, total = mechanism(), {"w": torch.zeros(5000), BELOW: torch.zeros(1).double()}
    bound.load_state_dict({"step": 7, "public": [], "clip": 0.1})
    assert float(bound.release(total, Noise(seed=0), 2.0)["w"].std()) == pytest.approx(
        0.2, rel=0.06
    )


def test_the_clip_moves_by_the_formula_and_finds_the_quantile() -> None:
    bound = mechanism(rate=0.3, quantile=0.25)
    found = bound.gradient({"w": torch.ones(2), BELOW: torch.tensor([8.0]).double()})
    assert float(bound.clip) == pytest.approx(CLIP * math.exp(-0.3 * (8 / LOT + 0.5 - 0.25)))
    assert set(found) == {"w"}
    bound.gradient({"w": torch.ones(2), BELOW: torch.tensor([1e9]).double()})
    assert float(bound.clip) > CLIP * math.exp(-0.3 * 2)  # no step is longer than the rate

    for start in (1e-3, 50.0):
        bound, noise = mechanism(start, quantile=0.25), Noise(seed=1)
        norms = torch.linspace(0.5, 4.5, int(LOT)).double()
        values = norms[:, None] * torch.eye(1, 6).double()
        reached = []
        for _ in range(400):
            bound.gradient(bound.release(bound.clipped_sum(rows(values)), noise, 0.5))
            reached.append(float(bound.clip))
        assert sum(reached[-200:]) / 200 == pytest.approx(1.5, abs=0.15)


def test_training_costs_what_it_cost_and_says_how() -> None:
    clipping = AdaptiveClipping(quantile=0.4)
    engine, model, optimizer, loader = setup(
        PrivacyEngine(accountant="rdp"), method=DPSGD(clip=1.0, clipping=clipping)
    )
    train(model, optimizer, loader, epochs=2)
    plain, *_ = setup(PrivacyEngine(accountant="rdp"))
    assert engine.plan.event == plain.plan.event
    assert "AdaptiveClipping(quantile=0.4, rate=0.2, share=0.01)" in str(engine.plan)
    training = engine.certificate(1e-5)["training"]
    assert training["clipping"] == "AdaptiveClipping(quantile=0.4, rate=0.2, share=0.01)"
    notes = engine.diagnostics()
    assert [note["step"] for note in notes[:3]] == [1, 2, 4]
    assert all(isinstance(note["clip"], float) for note in notes)
    assert notes[-1]["clip"] != 1.0


def test_pieces_of_a_batch_add_up() -> None:
    whole, pieces = mechanism(), mechanism()
    values = torch.randn(30, 8, generator=torch.Generator().manual_seed(0)).double()
    total = whole.clipped_sum(rows(values))
    parts = [pieces.clipped_sum(rows(part)) for part in values.split(7)]
    added = {name: sum(part[name] for part in parts) for name in total}
    for name in total:
        assert torch.allclose(added[name], total[name])


def test_a_run_goes_on_with_its_clip() -> None:
    method = DPSGD(clip=1.0, clipping=AdaptiveClipping(rate=1.0))
    engine, model, optimizer, loader = setup(method=method)
    train(model, optimizer, loader)
    state = engine.state_dict()
    again, *_ = setup(method=method)
    again.load_state_dict(state)
    assert again.state_dict()["mechanism"] == state["mechanism"]
    assert state["mechanism"]["clip"] != 1.0
    fixed, *_ = setup()
    with pytest.raises(ValueError, match="does not fit this run"):
        fixed.load_state_dict(state)
    with pytest.raises(ValueError, match="a method's state with step and public and clip"):
        mechanism().load_state_dict({"step": 1, "public": []})


def test_a_clip_that_is_loaded_counts_for_whole_batches_only() -> None:
    """What was clipped by another one before has noise by this one: it must not be released."""
    method = DPSGD(clip=1.0, clipping=AdaptiveClipping())
    engine, model, optimizer, loader = setup(
        method=method, sample_rate=1.0, expected_batch_size=1.0, max_physical_batch_size=20
    )
    state = engine.state_dict()
    state["mechanism"]["clip"] = 1e-4
    for place, (x, y) in enumerate(loader):
        nn.CrossEntropyLoss()(model(x), y).backward()
        optimizer.step()
        if place == 0:  # between the two pieces of the batch
            engine.load_state_dict(state)
    numbers = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert 0 < float(numbers.norm()) < 0.01  # of the clip 1 it was 10


def test_mirror_descent_has_it_too() -> None:
    x, y = torch.randn(60, 4), torch.arange(60) % 2
    method = MirrorDescent(
        public=(x[:20], y[:20]),
        mixing=ConstantMixing(share=0.5),
        clip=1.0,
        clipping=AdaptiveClipping(rate=1.0, share=0.5),  # so little noise that no share is cut
    )

    def started() -> tuple[PrivacyEngine, nn.Module, torch.optim.Optimizer, DataLoader]:
        engine, model = PrivacyEngine(accountant="rdp"), nn.Linear(4, 2)
        made = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(x[20:], y[20:]), batch_size=10),
            criterion=nn.CrossEntropyLoss(),
            noise_multiplier=1.0,
            method=method,
        )
        return engine, *made

    engine, model, optimizer, loader = started()
    train(model, optimizer, loader)
    state = engine.state_dict()
    again, *_ = started()
    again.load_state_dict(state)
    kept = again.state_dict()["mechanism"]["private"]
    assert kept == state["mechanism"]["private"]
    assert kept["clip"] != 1.0


def test_empty_batches_only_move_the_clip_by_noise() -> None:
    bound = mechanism()
    total = bound.clipped_sum(rows(torch.zeros(0, 3)))
    released = bound.release(total, Noise(seed=0), 1.0)
    assert torch.isfinite(released["w"]).all()
    assert set(of_parameters(released)) == {"w"}
    bound.gradient(released)
    assert math.isfinite(float(bound.clip))


@pytest.mark.parametrize("options", [{"quantile": 1.0}, {"rate": 0.0}, {"share": 1.0}])
def test_options_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        AdaptiveClipping(**options)


def test_methods_with_a_fixed_clip_refuse_it() -> None:
    for method in (
        RGP(clip=1.0),
        GEP(subspace=RandomSubspace(rank=2), clip=1.0),
        PDPSGD(subspace=RandomSubspace(rank=2), clip=1.0),
    ):
        with pytest.raises(ValueError, match=r"has a fixed clip: AdaptiveClipping is for DPSGD"):
            replace(method, clipping=AdaptiveClipping())


def test_in_yaml() -> None:
    built = DPSGDSection(clipping="adaptive").build(None, steps=1)
    assert built.clipping == AdaptiveClipping()
    section = DPSGDSection.model_validate({"clipping": {"name": "adaptive", "quantile": 0.2}})
    assert section.build(None, steps=1).clipping == AdaptiveClipping(quantile=0.2)
    assert MirrorDescentSection(clipping="adaptive").clipping == "adaptive"


@pytest.mark.parametrize("live", [0, 3, 7])
def test_what_fills_up_a_padded_batch_does_not_count(live: int) -> None:
    model, x = nn.Linear(4, 2), torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    capture = Capture(model)
    capture.expect(7, live=live)
    (1e-6 * model(x)).sum().backward()
    total = mechanism().clipped_sum(capture.collect())
    assert float(total[BELOW]) == live / 2  # all of them are short
