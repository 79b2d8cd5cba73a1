"""Mirror descent: the mixture against plain autograd, and DP-SGD's privacy with nothing added."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dpspan
from dpspan import (
    DPSGD,
    AutomaticClipping,
    ConstantMixing,
    CosineMixing,
    FlatClipping,
    MirrorDescent,
    PrivacyEngine,
    PublicData,
    WarmStart,
)
from dpspan.accounting.events import step_event
from dpspan.gradients.layers.terms import Rows
from dpspan.gradients.operator import PerSampleGradients
from dpspan.mechanisms import Setting
from dpspan.mechanisms.noise import Noise
from helpers.oracle import clip_rows, per_sample_matrix
from helpers.subspaces import flat, stepped, summed
from helpers.traces import traces
from helpers.training import N, data, network, setup, train, weights

F64 = torch.float64
CLIP, LOT = 0.7, 10


def public_tensors(n: int = 12, seed: int = 9) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g, dtype=F64)
    return x, (x.sum(1) > 0).long()


X, Y = public_tensors()


def method(**fields: Any) -> MirrorDescent:
    arguments = {"public": (X, Y), "mixing": CosineMixing(steps=7), "clip": CLIP, **fields}
    return MirrorDescent(**arguments)


def precise(**changes: Any) -> tuple[Any, ...]:
    """A run in float64, where other orders of summation leave no trace."""
    x, y = data().tensors
    arguments = {
        "data_loader": DataLoader(TensorDataset(x.double(), y), batch_size=LOT),
        "criterion": nn.CrossEntropyLoss(),
        "module": network().double(),
        "method": method(),
        **changes,
    }
    return setup(**arguments)


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


class Recorder:
    """A loss that writes down which public samples it was asked for."""

    def __init__(self, scale: float = 1.0) -> None:
        self.inputs: list[Tensor] = []
        self.scale = scale

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        self.inputs.append(x.clone())
        return self.scale * losses(model, x, y)


def public_mean(model: nn.Module, x: Tensor, y: Tensor, clip: float | None = None) -> Tensor:
    rows = per_sample_matrix(model, losses, x, y)
    return (rows if clip is None else clip_rows(rows, clip)).mean(0)


def steps_of(
    model: Any, optimizer: Any, loader: Any, reduction: str = "mean"
) -> Iterator[tuple[Tensor, nn.Module, Tensor, Tensor]]:
    """Train, handing over each step's gradient (zero within a batch), its weights and its batch."""
    for x, y in loader:
        before = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, reduction=reduction).backward()
        optimizer.step()
        twin = network().double()
        twin.load_state_dict(before)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        yield torch.cat([grad.flatten() for grad in grads]), twin, x, y


# -- the mixture ----------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("public_clip", [None, 0.4])
@pytest.mark.parametrize("pieces", [None, 3])
def test_a_step_is_the_mixture_of_mean_gradients(
    reduction: str, public_clip: float | None, pieces: int | None
) -> None:
    """Against autograd, one sample at a time, in the units of param.grad; noise is negligible."""
    K = 7
    engine, model, optimizer, loader = precise(
        method=method(mixing=CosineMixing(steps=K), public_clip=public_clip),
        noise_multiplier=1e-13,
        loss_reduction=reduction,
        max_physical_batch_size=pieces,
        criterion=nn.CrossEntropyLoss(reduction=reduction),
    )
    whole: list[tuple[Tensor, Tensor]] = []
    step = 0
    for gradient, before, x, y in steps_of(model, optimizer, loader, reduction):
        whole.append((x, y))
        if engine.ledger.steps == step:  # not the last piece of a batch yet
            continue
        xs, ys = (torch.cat(parts) for parts in zip(*whole, strict=True))
        whole = []
        private = clip_rows(per_sample_matrix(before, losses, xs, ys), CLIP).sum(0) / LOT
        alpha = math.cos(math.pi * step / (2 * K))
        expected = alpha * private + (1 - alpha) * public_mean(before, X, Y, public_clip)
        assert torch.allclose(gradient, expected, atol=1e-9)
        step += 1
    assert step == engine.ledger.steps == 4


def test_some_public_samples_a_step() -> None:
    recorder = Recorder()
    _, model, optimizer, loader = precise(
        method=method(mixing=ConstantMixing(share=0.3), public_samples=5, public_loss=recorder),
        noise_multiplier=1e-13,
    )
    recorder.inputs.clear()
    drawn = []
    for gradient, before, x, y in steps_of(model, optimizer, loader):
        (asked,) = recorder.inputs
        recorder.inputs.clear()
        chosen = [int((row == X).all(1).nonzero()) for row in asked]
        assert len(set(chosen)) == 5
        drawn.append(tuple(chosen))
        private = clip_rows(per_sample_matrix(before, losses, x, y), CLIP).sum(0) / LOT
        expected = 0.3 * private + 0.7 * public_mean(before, X[chosen], Y[chosen])
        assert torch.allclose(gradient, expected, atol=1e-9)
    assert len(set(drawn)) == len(drawn) == 4  # C(12, 5) = 792 choices


def test_all_private_is_dpsgd_exactly() -> None:
    """Bit by bit, noise and all, and no public gradient is computed."""
    recorder = Recorder()
    one = ConstantMixing(share=1.0)
    _, model, optimizer, loader = precise(method=method(mixing=one, public_loss=recorder))
    tried = len(recorder.inputs)
    train(model, optimizer, loader, epochs=2)
    assert len(recorder.inputs) == tried == 1
    _, twin, twin_optimizer, twin_loader = precise(method=DPSGD(clip=CLIP))
    train(twin, twin_optimizer, twin_loader, epochs=2)
    assert torch.equal(weights(model), weights(twin))


def test_all_public_is_gradient_descent_on_public_data() -> None:
    nothing = ConstantMixing(share=0.0)
    with pytest.warns(UserWarning, match="reached α = 0: steps are charged"):
        engine, model, optimizer, loader = precise(method=method(mixing=nothing))
    train(model, optimizer, loader)
    twin = network().double()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(twin(X), Y).backward()
        optimizer.step()
    assert torch.allclose(weights(model), weights(twin), atol=1e-12)
    assert engine.ledger.steps == 4  # the private release happened, if for nothing
    assert any("α = 0" in warning for warning in engine.ledger.warnings)


def test_public_gradients_are_not_clipped_unless_asked() -> None:
    """Ten thousand times the loss is ten thousand times the gradient."""
    before = network().double()
    for scale in (1.0, 1e4):
        mechanism = bound(mixing=ConstantMixing(share=0.5), public_loss=Recorder(scale))
        released = flat(stepped(mechanism, zeros(before), Noise(seed=0), 0.0))
        expected = 0.5 * LOT * scale * public_mean(before, X, Y)
        assert torch.allclose(released, expected, rtol=1e-9)
    mechanism = bound(
        mixing=ConstantMixing(share=0.5), public_loss=Recorder(1e4), public_clip=CLIP / 2
    )
    released = flat(stepped(mechanism, zeros(before), Noise(seed=0), 0.0))
    assert float(released.norm()) <= 0.5 * LOT * CLIP / 2


@pytest.mark.parametrize("rule", [FlatClipping(), AutomaticClipping()], ids=str)
def test_the_rule_for_clip_factors_is_the_private_ones(rule: Any) -> None:
    g = torch.Generator().manual_seed(0)
    gradients = rows(torch.randn(9, 15, generator=g))
    total = summed(linear(clipping=rule), gradients)
    plain = DPSGD(clip=CLIP, clipping=rule).bind(Setting(model=nn.Linear(4, 3)))
    assert torch.equal(flat(total), flat(summed(plain, gradients)))


# -- schedules ------------------------------------------------------------------------------------


def test_the_papers_schedule() -> None:
    schedule = CosineMixing(steps=100)
    alphas = [schedule.alpha(t) for t in range(131)]
    assert alphas[0] == 1.0
    assert alphas[50] == pytest.approx(math.sqrt(0.5))
    assert alphas[99] == pytest.approx(math.pi / 200, rel=1e-3)
    assert alphas[100:] == [0.0] * 31
    assert all(a > b for a, b in pairwise(alphas[:101]))
    assert ConstantMixing(share=0.4).alpha(17) == 0.4


@dataclass(frozen=True)
class Alternating:
    first: float = 1.0
    second: float = 0.25

    def alpha(self, step: int) -> float:
        return self.second if step % 2 else self.first


def test_a_schedule_of_ones_own() -> None:
    engine, model, optimizer, loader = precise(
        method=method(mixing=Alternating(), diagnose=1), noise_multiplier=1e-13
    )
    train(model, optimizer, loader)
    assert [note["alpha"] for note in engine.diagnostics()] == [1.0, 0.25, 1.0, 0.25]
    assert engine.state_dict()["run"]["mixing"] == "Alternating(first=1.0, second=0.25)"


class Nameless:
    def __init__(self, share: float) -> None:
        self.share = share

    def alpha(self, step: int) -> float:
        return self.share


class Called(Nameless):
    def __repr__(self) -> str:
        return f"Called({self.share})"


def test_a_schedule_must_say_its_parameters() -> None:
    """Or a run could be resumed with others, unnoticed."""
    with pytest.raises(ValueError, match=r"Expected mixing to have a repr, .* frozen dataclass"):
        method(mixing=Nameless(0.5))
    assert method(mixing=Called(0.5)).describe()["mixing"] == "Called(0.5)"


@pytest.mark.parametrize("bad", [1.5, -0.1, math.nan, "half", True])
def test_a_schedule_outside_its_range_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"Expected alpha\("):
        precise(method=method(mixing=Alternating(first=bad)))
    engine, model, optimizer, loader = precise(method=method(mixing=Alternating(second=bad)))
    with pytest.raises(ValueError, match=r"Expected alpha\("):
        train(model, optimizer, loader)
    assert engine.ledger.steps == 1  # refused before anything was charged or released


# -- privacy --------------------------------------------------------------------------------------


def bound(**fields: Any) -> Any:
    setting = Setting(
        model=network().double(), criterion=nn.CrossEntropyLoss(), expected_batch_size=LOT
    )
    return method(**fields).bind(setting)


def zeros(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) for name, p in model.named_parameters()}


def rows(values: Tensor) -> PerSampleGradients:
    """Rows of 15 numbers as gradients of nn.Linear(4, 3)."""
    n = len(values)
    shapes = {"weight": torch.Size((3, 4)), "bias": torch.Size((3,))}
    terms = {"weight": [Rows(values[:, :12].view(n, 3, 4))], "bias": [Rows(values[:, 12:])]}
    return PerSampleGradients(shapes, terms, n, like=values)


def linear(**fields: Any) -> Any:
    torch.manual_seed(0)
    setting = Setting(
        model=nn.Linear(4, 3), criterion=nn.CrossEntropyLoss(), expected_batch_size=LOT
    )
    public = torch.ones(5, 4), torch.arange(5) % 3
    return method(**{"public": public, **fields}).bind(setting)


special = st.sampled_from([0.0, 1e-38, 1e-20, 1.0, 1e4, 1e18, 1e25, 3e38, math.inf, math.nan])


@settings(max_examples=120, deadline=None)
@given(
    scales=st.lists(special, min_size=1, max_size=5),
    newcomer=special,
    direction=st.integers(0, 2**16),
    automatic=st.booleans(),
    alpha=st.sampled_from([0.01, 0.5, 1.0]),
)
def test_adding_one_sample_moves_a_step_by_at_most_alpha_times_the_clip(
    scales: list[float], newcomer: float, direction: int, automatic: bool, alpha: float
) -> None:
    g = torch.Generator().manual_seed(direction)
    rule = AutomaticClipping() if automatic else FlatClipping()
    factors = torch.tensor([*scales, newcomer])
    values = torch.randn(len(factors), 15, generator=g) * factors[:, None]
    sums, steps = [], []
    for present in (values, values[:-1]):
        mechanism = linear(clipping=rule, mixing=ConstantMixing(share=alpha))
        total = summed(mechanism, rows(present))
        sums.append(flat(total).double())
        steps.append(flat(stepped(mechanism, total, Noise(seed=0), 0.0)).double())
    rounding = 4 * len(factors) * torch.finfo(torch.float32).eps
    assert all(x.isfinite().all() for x in (*sums, *steps))
    assert float((sums[0] - sums[1]).norm()) <= CLIP * (1 + rounding)
    # The public part, of length below 4·L, is the same in both, but the mixture rounds with it.
    slack = 4 * 4 * LOT * torch.finfo(torch.float32).eps
    assert float((steps[0] - steps[1]).norm()) <= alpha * CLIP * (1 + rounding) + slack


@pytest.mark.parametrize("samples", [0, 1, 400])
def test_noise_law(samples: int) -> None:
    """On zero gradients: α·z·C/L of white noise around (1 − α)·h, whatever n is."""
    z, alpha, steps, size = 0.7, 0.35, 400, 15
    noise, mechanism = Noise(seed=samples), linear(mixing=ConstantMixing(share=alpha))
    total = summed(mechanism, rows(torch.zeros(samples, size)))
    draws = [flat(stepped(mechanism, total, noise, z)) / LOT for _ in range(steps)]
    model = nn.Linear(4, 3)
    torch.manual_seed(0)
    model.reset_parameters()
    centre = (1 - alpha) * public_mean(model, torch.ones(5, 4), torch.arange(5) % 3)
    assert float(centre.norm()) > 0.1  # or its being there would go unseen
    N = ((torch.stack(draws) - centre) / (alpha * z * CLIP / LOT)).double()
    count = steps * size
    # |·| < 5.5 standard errors fails with probability below 4e-8 per check.
    assert abs(float(N.mean())) < 5.5 / math.sqrt(count)
    assert float(N.mean(0).abs().max()) < 5.5 / math.sqrt(steps)
    assert abs(float(N.var()) - 1) < 5.5 * math.sqrt(2 / count)
    assert stats.kstest(N.flatten().numpy(), "norm").pvalue > 1e-6
    covariance = N.T @ N / steps
    off_diagonal = covariance - torch.diag(torch.diag(covariance))
    assert float(off_diagonal.abs().max()) < 5.5 / math.sqrt(steps)
    lagged = (N[1:] * N[:-1]).sum() / math.sqrt((steps - 1) * size)
    assert abs(float(lagged)) < 5.5


def test_noise_is_drawn_at_every_step_of_the_engine() -> None:
    """Two runs that differ in nothing but their entropy."""
    results = []
    for _ in range(2):
        _, model, optimizer, loader = precise(engine=PrivacyEngine(), sample_rate=1.0)
        train(model, optimizer, loader)
        results.append(weights(model))
    assert not torch.allclose(*results, atol=1e-3)


def test_it_costs_what_dpsgd_costs() -> None:
    """ε to the last digit, for every schedule; and the same noise for a target."""
    schedules = [CosineMixing(steps=50), ConstantMixing(share=0.01), Alternating()]
    methods = [DPSGD(clip=CLIP), *(method(mixing=mixing) for mixing in schedules)]
    engines = []
    for each in methods:
        engine, model, optimizer, loader = precise(method=each, noise_multiplier=0.83)
        train(model, optimizer, loader, epochs=2)
        assert engine.ledger.events == ((step_event(0.83, 0.25), 8),)
        engines.append(engine)
    assert engines[0].get_epsilon(1e-5) == engines[1].get_epsilon(1e-5)
    assert calibrated(methods[0]) == calibrated(methods[1])


def calibrated(each: Any) -> float:
    engine, model = PrivacyEngine(accountant="rdp"), network().double()
    engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data(), batch_size=10),
        criterion=nn.CrossEntropyLoss(),
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=2,
        method=each,
    )
    return engine.noise_multiplier


def test_which_public_samples_are_drawn_does_not_depend_on_private_data() -> None:
    """Other records, other batch sizes, other noise: at the same weights the same public part."""
    asked = []
    for seed, rate in ((0, 0.25), (1, 0.9)):
        recorder, model = Recorder(), network().double()
        g = torch.Generator().manual_seed(100 + seed)
        records = TensorDataset(torch.randn(N, 6, generator=g, dtype=F64), data().tensors[1])
        _, model, optimizer, loader = precise(
            engine=PrivacyEngine(debug_seed=seed),
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            data_loader=DataLoader(records, batch_size=10),
            sample_rate=rate,
            method=method(mixing=ConstantMixing(share=0.5), public_samples=5, public_loss=recorder),
        )
        while len(recorder.inputs) < 5:
            train(model, optimizer, loader)
        asked.append(torch.cat(recorder.inputs[:5]))
    assert torch.equal(*asked)


# -- through the engine ---------------------------------------------------------------------------


def test_pieces_and_empty_batches() -> None:
    """In pieces of any size the same steps; at q = 0.04 about every fifth batch is empty."""
    results = []
    for pieces in (None, 1, 2):
        recorder = Recorder()
        mixed = method(mixing=ConstantMixing(share=0.5), public_samples=5, public_loss=recorder)
        engine, model, optimizer, loader = precise(
            method=mixed, sample_rate=0.04, max_physical_batch_size=pieces
        )
        drawn: list[Any] = []
        told = loader.on_piece
        loader.on_piece = lambda p, told=told, drawn=drawn: (drawn.append(p), told(p))
        train(model, optimizer, loader)
        assert sum(piece.first and piece.samples == 0 for piece in drawn) > 1
        assert sum(piece.first for piece in drawn) == engine.ledger.steps == len(loader) == 25
        assert pieces is None or len(drawn) > 30
        assert sum(map(len, recorder.inputs)) == 1 + 25 * 5  # once a step, not once a piece
        assert max(map(len, recorder.inputs)) <= (pieces or 5)
        results.append(weights(model))
    assert results[0].isfinite().all()
    assert torch.allclose(results[0], results[1], atol=1e-9)
    assert torch.allclose(results[0], results[2], atol=1e-9)


def test_nan_records_contribute_nothing() -> None:
    x, y = data().tensors
    poisoned = x.double().clone()
    poisoned[3], poisoned[11] = math.nan, 1e300
    runs = []
    for records in (poisoned, torch.where(poisoned.abs().amax(1, True) < 100, poisoned, 0.0)):
        changes = {"sample_rate": 1.0, "noise_multiplier": 1e-13}
        loader = DataLoader(TensorDataset(records, y), batch_size=LOT)
        _, model, optimizer, loader = precise(data_loader=loader, **changes)
        ((gradient, before, *_),) = steps_of(model, optimizer, loader)
        assert gradient.isfinite().all()
        runs.append(gradient)
    # In the first, the two records are gone or clipped: each may account for a clip's length.
    assert float((runs[0] - runs[1]).norm()) <= 4 * CLIP / LOT
    before = network().double()
    keep = (poisoned.abs().amax(1) < 100).nonzero().flatten()
    clean = clip_rows(per_sample_matrix(before, losses, poisoned[keep], y[keep]), CLIP).sum(0)
    assert float((LOT * runs[0] - clean).norm()) <= CLIP * (1 + 1e-9)  # NaN: none; 1e300: one clip


def resumed_in_the_middle(tmp_path: Path, **fields: Any) -> tuple[Any, ...]:
    engine, model, optimizer, loader = precise(method=method(**fields))
    for step, _ in enumerate(steps_of(model, optimizer, loader)):
        if step == 2:
            break
    return engine, engine.save_checkpoint(tmp_path / "run.pt", module=model)


def test_a_resumed_run_goes_on(tmp_path: Path) -> None:
    """Every record in every batch and no noise to speak of: nothing but the state can differ."""
    everything = {
        "sample_rate": 1.0,
        "noise_multiplier": 1e-13,
        "method": method(public_samples=5),
    }
    _, whole, optimizer, loader = precise(**everything)
    train(whole, optimizer, loader, epochs=5)
    engine, model, optimizer, loader = precise(**everything)
    train(model, optimizer, loader, epochs=2)
    path = engine.save_checkpoint(tmp_path / "run.pt", module=model)
    saved = copy.deepcopy(model.state_dict())
    resumed, model, optimizer, loader = precise(**everything)
    resumed.load_checkpoint(path, module=model)
    train(model, optimizer, loader, epochs=3)
    assert torch.allclose(weights(model), weights(whole), atol=1e-9)
    assert resumed.ledger.steps == 5
    # With the weights alone it would have begun with α = 1 again.
    _, other, optimizer, loader = precise(**everything)
    other.load_state_dict(saved)
    train(other, optimizer, loader, epochs=3)
    assert not torch.allclose(weights(other), weights(whole), atol=1e-3)


def test_a_resumed_run_does_not_replay_noise(tmp_path: Path) -> None:
    results = []
    engine, model, optimizer, loader = precise(engine=PrivacyEngine(), sample_rate=1.0)
    train(model, optimizer, loader)
    path = engine.save_checkpoint(tmp_path / "run.pt", module=model)
    for _ in range(2):
        resumed, model, optimizer, loader = precise(engine=PrivacyEngine(), sample_rate=1.0)
        resumed.load_checkpoint(path, module=model)
        train(model, optimizer, loader)
        results.append(weights(model))
    assert not torch.allclose(*results, atol=1e-3)


def test_other_public_data_or_schedules_are_refused(tmp_path: Path) -> None:
    engine, path = resumed_in_the_middle(tmp_path)
    other, twin, *_ = precise(method=method(public=public_tensors(seed=5)))
    with pytest.raises(ValueError, match="saved with other public data"):
        other.load_checkpoint(path, module=twin)
    other, twin, *_ = precise(method=method(mixing=CosineMixing(steps=8)))
    with pytest.raises(ValueError, match=r"mixing is 'CosineMixing\(steps=7\)' there"):
        other.load_checkpoint(path, module=twin)
    state = engine.state_dict()["mechanism"]
    assert json.loads(json.dumps(state)) == state == {"step": 3, "public": [digest()]}
    with pytest.raises(ValueError, match="state with step and public"):
        bound().load_state_dict({"step": 3})
    for bad in (-5, True, 1.0, "3"):
        with pytest.raises(ValueError, match="step to be an integer of at least 0, got"):
            bound().load_state_dict({**state, "step": bad})


def digest() -> str:
    return PublicData.of((X, Y)).digest


def test_the_books_name_the_public_data() -> None:
    engine, *_ = precise(method=method(public=PublicData.of((X, Y), name="leaflets")))
    document = engine.certificate(1e-5)
    (record,), training = document["public"], document["training"]
    assert (record["name"], record["count"], record["sha256"]) == ("leaflets", 12, digest())
    assert record["detail"].startswith("MirrorDescent")
    assert training["method"] == "MirrorDescent"
    assert (training["clip"], training["public_clip"]) == (CLIP, None)


def test_overlap_is_refused_and_nothing_recorded() -> None:
    x, engine = X.clone(), PrivacyEngine()
    x[3] = data().tensors[0][17].double()
    with pytest.raises(ValueError, match=r"1 of the 12 .* occur in the private .* sample 3"):
        precise(engine=engine, method=method(public=(x, Y)))
    assert (engine.ledger.events, engine.ledger.public, engine.ledger.warnings) == ((), (), ())


def test_after_a_warm_start_on_the_same_data() -> None:
    start = WarmStart(data=(X, Y), validation=0, max_epochs=20, learning_rate=0.05)
    engine, model, optimizer, loader = precise(warm_start=start, noise_multiplier=1e-13)
    for step, (gradient, before, x, y) in enumerate(steps_of(model, optimizer, loader)):
        alpha = math.cos(math.pi * step / 14)
        private = clip_rows(per_sample_matrix(before, losses, x, y), CLIP).sum(0) / LOT
        expected = alpha * private + (1 - alpha) * public_mean(before, X, Y)
        assert torch.allclose(gradient, expected, atol=1e-9)
    assert len(engine.ledger.public) == 2


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = network(), nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(self.drop(x))


def test_public_samples_leave_no_trace_in_the_model() -> None:
    counted, states = [], []
    for each in (DPSGD(clip=CLIP), method()):
        model = Stateful().double()
        engine, model, optimizer, loader = precise(module=model, method=each)
        buffer = model.calls
        torch.manual_seed(3)
        train(model, optimizer, loader)
        assert model.calls is buffer
        counted.append(int(buffer))
        states.append(torch.get_rng_state())
        engine.detach()
        assert not traces(model)
    assert counted[0] == counted[1]
    assert torch.equal(*states)  # torch's own generator was left alone


# -- diagnostics ----------------------------------------------------------------------------------


def test_diagnostics_are_of_released_and_public_gradients() -> None:
    engine, model, optimizer, loader = precise(
        method=method(mixing=ConstantMixing(share=0.5), diagnose=2), noise_multiplier=1.0
    )
    seen = [(gradient, public_mean(before, X, Y)) for gradient, before, *_ in
            steps_of(model, optimizer, loader)]  # fmt: skip
    notes = engine.diagnostics()
    assert json.loads(json.dumps(notes, allow_nan=False)) == notes
    assert [note["step"] for note in notes] == [0, 2]
    for note in notes:
        mixed, public = seen[note["step"]]
        noisy = 2 * mixed - public  # what DP-SGD released, noise and all
        assert note["public_norm"] == pytest.approx(float(public.norm()), rel=1e-9)
        assert note["released_norm"] == pytest.approx(float(noisy.norm()), rel=1e-9)
        cosine = float(noisy @ public / (noisy.norm() * public.norm()))
        assert note["cosine"] == pytest.approx(cosine, abs=1e-9)
    assert set(notes[0]) == {"step", "alpha", "public_norm", "released_norm", "cosine"}
    engine, model, optimizer, loader = precise()
    train(model, optimizer, loader)
    assert engine.diagnostics() == []


def test_looking_does_not_change_the_run() -> None:
    results = []
    for diagnose in (0, 1):
        _, model, optimizer, loader = precise(method=method(diagnose=diagnose))
        train(model, optimizer, loader)
        results.append(weights(model))
    assert torch.equal(*results)


# -- refusals -------------------------------------------------------------------------------------


def test_unlabelled_public_data_are_refused() -> None:
    engine = PrivacyEngine()
    with pytest.raises(ValueError, match=r"Expected labels with the public data .* inputs only"):
        precise(engine=engine, method=method(public=X))
    assert engine.ledger.public == ()


def test_a_loss_is_needed() -> None:
    with pytest.raises(ValueError, match=r"Expected a criterion or a loss .* public_loss="):
        precise(criterion=None)
    precise(criterion=None, method=method(public_loss=losses))


def test_labels_of_other_classes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"from 0 to 1.* got 7 .*leave out samples of other"):
        precise(method=method(public=(X, torch.full((12,), 7))))


def test_inputs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Public inputs of shape \(1, 5\).* do not fit the model"):
        precise(method=method(public=(X[:, :5], Y)))


def test_a_public_gradient_that_is_not_finite_is_no_step() -> None:
    infinite = Recorder(scale=math.inf)
    engine, model, optimizer, loader = precise(
        method=method(mixing=ConstantMixing(share=0.5), public_loss=infinite)
    )
    before = weights(model)
    with pytest.raises(ValueError, match=r"public samples is not finite.* lower the learning rate"):
        train(model, optimizer, loader)
    assert torch.equal(weights(model), before)
    assert engine.ledger.steps == 0  # the public pass comes before the charge and the release


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("clip", 0.0), ("clip", math.inf), ("clip", math.nan), ("public_clip", -1.0),
        ("public_samples", 0), ("public_samples", 2.5), ("diagnose", -1), ("seed", True),
        ("mixing", 0.5), ("mixing", None),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(argument: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"Expected {argument}"):
        method(**{argument: value})


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan, "all"])
def test_bad_shares_are_named(share: Any) -> None:
    with pytest.raises(ValueError, match="Expected share"):
        ConstantMixing(share=share)


@pytest.mark.parametrize("steps", [0, 1.5, True])
def test_bad_steps_are_named(steps: Any) -> None:
    with pytest.raises(ValueError, match="Expected steps"):
        CosineMixing(steps=steps)


def test_one_clip_only() -> None:
    assert method(clip=None).with_clip(2.0).clip == 2.0
    with pytest.raises(ValueError, match=r"clip=0.7 in MirrorDescent and max_grad_norm=2.0"):
        method().with_clip(2.0)
    assert method(clip=None).describe()["clip"] == 1.0


def test_the_method_is_public_configuration() -> None:
    assert "tensor" not in repr(method())
    assert method() == method(public=public_tensors(seed=5))
    described = method(public_loss=losses).describe()
    assert json.loads(json.dumps(described)) == described
    assert described["public_loss"] == "losses"
    assert dpspan.MirrorDescent is MirrorDescent
