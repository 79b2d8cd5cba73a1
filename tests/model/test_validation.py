"""Modules that mix samples are refused by name; fix() replaces them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import weight_norm

import dpspan
from dpspan.model.isolation import NotComparable, Stage, probe, tensors_of
from dpspan.model.networks import WideResNet
from helpers.needs import extra
from helpers.problems import PROBLEMS, make


def refused(model: nn.Module, *patterns: str) -> None:
    for pattern in patterns:
        with pytest.raises(dpspan.UnsupportedModule, match=pattern):
            dpspan.validate(model)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_batch_norm_in_any_form(
    kind: type[nn.Module], frozen: bool, training: bool, affine: bool
) -> None:
    norm = kind(4, affine=affine).train(training)
    for p in norm.parameters():
        p.requires_grad_(not frozen)
    model = nn.Sequential(nn.Linear(4, 4), norm)
    refused(model, rf"1 \({kind.__name__}\).*dpspan\.fix\(model\)")
    fixed = dpspan.fix(model)
    dpspan.validate(fixed)
    assert isinstance(fixed[1], nn.GroupNorm)
    assert isinstance(model[1], kind)  # the original is untouched
    assert fixed[1].training is training
    assert all(p.requires_grad is not frozen for p in fixed[1].parameters())


def test_fix_keeps_affine_weights_and_works_on_features() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8)
    nn.init.normal_(norm.weight)
    fixed = dpspan.fix(nn.Sequential(nn.Linear(4, 8), norm))
    assert torch.equal(fixed[1].weight, norm.weight)
    output = fixed(torch.randn(16, 4))
    # One number per group would normalise to zero: the output would be the bias.
    assert output.std(0).min() > 0.01


def test_instance_norm_with_running_statistics() -> None:
    model = nn.Sequential(nn.InstanceNorm2d(4, affine=True, track_running_stats=True))
    refused(model, r"0 \(InstanceNorm2d\).*track_running_stats=False")
    fixed = dpspan.fix(model)
    dpspan.validate(fixed)
    assert fixed[0].running_mean is None
    dpspan.validate(nn.InstanceNorm2d(4, affine=True))


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.filterwarnings("ignore")  # Opacus' own
def test_opacus_layers_become_torchs(kind: str, layers: int, both: bool) -> None:
    opacus = extra("opacus.layers")
    torch.manual_seed(0)
    options = {"num_layers": layers, "bidirectional": both, "batch_first": True}
    if kind == "RNN":
        options["nonlinearity"] = "relu"
    model = nn.ModuleDict({"rnn": getattr(opacus, f"DP{kind}")(3, 5, **options)})
    refused(model, rf"rnn \(DP{kind}\).*dpspan\.fix")
    with pytest.raises(dpspan.CaptureError, match=rf"'rnn' \(DP{kind}\).*dpspan\.fix"):
        dpspan.Capture(model)
    fixed = dpspan.fix(model)
    dpspan.validate(fixed)
    assert type(fixed["rnn"]) is getattr(nn, kind)
    x = torch.randn(4, 6, 3)
    assert torch.allclose(fixed["rnn"](x)[0], model["rnn"](x)[0], atol=1e-6)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_torchs_recurrent_layers_need_no_fix(kind: type[nn.RNNBase]) -> None:
    model = nn.Sequential(kind(3, 5, num_layers=2, bidirectional=True))
    dpspan.validate(model)
    fixed = dpspan.fix(model)
    assert type(fixed[0]) is kind
    fixed.load_state_dict(model.state_dict())
    model.load_state_dict(fixed.state_dict())


class OwnBatchNorm(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class OwnInstanceNorm(nn.InstanceNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, OwnBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, OwnInstanceNorm)
MODULES: list[Callable[[], nn.Module]] = [
    *(partial(kind, 12, affine=affine) for kind in NORMS for affine in (False, True)),
    *(
        partial(kind, 12, affine=affine, track_running_stats=track)
        for kind in INSTANCE_NORMS
        for affine in (False, True)
        for track in (False, True)
    ),
    partial(nn.LazyBatchNorm2d, track_running_stats=False),
    *(partial(kind, 3, 4) for kind in (nn.LSTM, nn.GRU, nn.RNN)),
    *(partial(kind, 3, 4, batch_first=True) for kind in (nn.LSTM, nn.GRU, nn.RNN)),
    *(partial(kind, 3, 4) for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell)),
    partial(nn.MultiheadAttention, 8, 2),
    partial(nn.TransformerEncoderLayer, 8, 2),
    partial(nn.Embedding, 5, 3, max_norm=1.0),
    partial(nn.LazyLinear, 3),
    lambda: weight_norm(nn.Linear(3, 3)),
    *(partial(lambda name: make(name)[0], name) for name in PROBLEMS),
]


@pytest.mark.parametrize("trainable", [True, False])
def test_what_is_advised_to_be_fixed_is_fixed(trainable: bool) -> None:
    advised = 0
    for build in MODULES:
        model = nn.Sequential(nn.Linear(2, 2), build())
        for parameter in model[1].parameters():
            if not is_lazy(parameter):
                parameter.requires_grad_(trainable)
        fixed = dpspan.fix(model)
        advised += "dpspan.fix" in problems_of(model)
        assert "dpspan.fix" not in problems_of(fixed)
        if "dpspan.fix" not in problems_of(model):
            assert problems_of(fixed) == problems_of(model)
            assert str(fixed) == str(model)  # and nothing else is touched
    assert advised > 10


def problems_of(model: nn.Module) -> str:
    try:
        dpspan.validate(model)
    except dpspan.UnsupportedModule as error:
        return str(error)
    return ""


def test_fix_says_what_it_replaces(caplog: pytest.LogCaptureFixture) -> None:
    norm = nn.BatchNorm2d(8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, norm, nn.InstanceNorm2d(8))
    with caplog.at_level("INFO", logger="dpspan"):
        dpspan.fix(model)
    (line,) = caplog.messages  # one module in two places is replaced once
    assert line.startswith("fix: 1: BatchNorm2d(8")
    assert "becomes GroupNorm(2, 8" in line


@pytest.mark.parametrize("channels", [4, 6, 8, 12, 16, 24, 32, 64, 100, 512])
def test_a_replaced_batch_norm_is_alive_behind_global_pooling(channels: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(channels), nn.Flatten())
    x = torch.randn(16, channels, 5, 5, requires_grad=True)
    output = dpspan.fix(model)(x)
    assert output.std(0).min() > 0.1
    (grad,) = torch.autograd.grad((output * torch.randn_like(output)).sum(), x)
    assert (grad.flatten(1).norm(dim=1) > 1e-2).all()  # a sign, of two channels, has none


def test_frozen_recurrent_layer_is_fine() -> None:
    model = nn.Sequential(nn.LSTM(3, 5, batch_first=True).requires_grad_(False), nn.Linear(5, 2))
    dpspan.validate(model)


def test_other_refusals() -> None:
    refused(nn.MultiheadAttention(8, 2), "batch_first=True")
    refused(nn.Embedding(5, 3, max_norm=1.0), "max_norm rewrites")
    refused(nn.Embedding(5, 3, scale_grad_by_freq=True), "scale_grad_by_freq mixes")
    refused(nn.Sequential(nn.LazyLinear(3)), "not initialised")
    for lazy in (nn.LazyBatchNorm2d(), nn.LazyInstanceNorm2d(track_running_stats=True)):
        refused(lazy, "not initialised: run the model once on sample input first$")  # then fix
    refused(nn.Linear(3, 3).requires_grad_(False), "no trainable parameter")
    refused(nn.Linear(3, 3, dtype=torch.cfloat), "its parameters are complex")


def test_fix_keeps_a_shared_module_shared() -> None:
    norm = nn.BatchNorm1d(4)
    fixed = dpspan.fix(nn.Sequential(norm, nn.Linear(4, 4), norm))
    assert isinstance(fixed[0], nn.GroupNorm)
    assert fixed[0] is fixed[2]


def test_all_problems_are_listed_at_once() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Embedding(5, 3, max_norm=1.0))
    with pytest.raises(dpspan.UnsupportedModule) as caught:
        dpspan.validate(model)
    assert "0 (BatchNorm1d)" in str(caught.value)
    assert "1 (Embedding)" in str(caught.value)


class HandMadeBatchNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0) + 1)


class OneByOne(nn.Module):
    """Cuts the batch up inside the model: a lone sample must not pass for a shared input.

    It is taken as a whole instead, and then nothing is mixed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(x[i : i + 1])[0] for i in range(len(x))])


class Positions(nn.Module):
    """Position embeddings of shape (1, T, d), used as they are or in a way that mixes copies."""

    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.use = nn.Embedding(5, 3), use

    def forward(self, x: Tensor) -> Tensor:
        return x + self.use(self.embed(torch.arange(5)[None]))


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x.mean(0, keepdim=True))


class Dropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5)


class WithLoss(nn.Module):
    """Returns (loss, logits), as Hugging Face's models do, with dropout."""

    def __init__(self, *, over_tokens: bool) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(4, 2), nn.Dropout(0.3)
        self.over_tokens = over_tokens

    def forward(self, x: Tensor, counts: Tensor) -> dict[str, Tensor]:
        logits = self.layer(self.dropout(x))
        losses = logits.square().sum(1) * counts
        loss = losses.sum() / counts.sum() if self.over_tokens else (losses / counts).mean()
        return {"loss": loss, "logits": logits}


def run_probe(model: nn.Module, *args: Any) -> set[str] | None:
    call, samples = (args, {}), len(args[0])
    with dpspan.Capture(model) as capture:
        capture.expect(samples)
        paths = frozenset(path for path, x in tensors_of(call).items() if len(x) == samples)
        return probe(Stage(model, call, samples, 1, paths, capture, True), thorough=True)


MIXING = {
    "statistics": nn.Sequential(nn.Linear(4, 4), Dropout(), HandMadeBatchNorm(), nn.Linear(4, 2)),
    "statistics behind a loop": nn.Sequential(OneByOne(), HandMadeBatchNorm()),
    "pooled": Pooled(),
}


@pytest.mark.parametrize("name", MIXING)
def test_probe_finds_mixing(name: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(dpspan.UnsupportedModule, match="mixes samples"):
        run_probe(MIXING[name], torch.randn(8, 4))


def test_probe_names_the_module() -> None:
    with pytest.raises(dpspan.UnsupportedModule, match=r"'2' \(HandMadeBatchNorm\)"):
        run_probe(MIXING["statistics"], torch.randn(8, 4))


@pytest.mark.parametrize(
    "model",
    [
        OneByOne(),
        Positions(lambda p: p),
        Positions(lambda p: p[0]),
        Positions(lambda p: p.mean(0, keepdim=True)),
    ],
)
def test_probe_passes_what_is_taken_as_a_whole(model: nn.Module) -> None:
    shape = (8, 4) if isinstance(model, OneByOne) else (8, 5, 3)
    run_probe(model, torch.randn(shape))


def test_probe_and_a_loss_inside_the_model() -> None:
    torch.manual_seed(0)
    x, counts = torch.randn(8, 4), torch.arange(1.0, 9.0)
    run_probe(WithLoss(over_tokens=False), x, counts)
    with pytest.raises(dpspan.UnsupportedModule, match="mean of one loss per sample"):
        run_probe(WithLoss(over_tokens=True), x, counts)


def test_probe_tells_harmless_buffers_from_averages() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.mean.lerp_(x.detach().mean(0), 0.1)
            return self.layer(x)

    model = Counting()
    assert run_probe(model, torch.randn(8, 4)) == {"calls"}
    assert int(model.calls) == 0  # a rehearsal leaves no trace
    assert not model.mean.any()


def test_probe_says_when_runs_cannot_be_compared() -> None:
    class OwnNoise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.generator = nn.Linear(4, 4), torch.Generator()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x + torch.randn(x.shape, generator=self.generator))

    with pytest.raises(NotComparable, match="random numbers"):
        run_probe(OwnNoise(), torch.randn(8, 4))


def test_probe_passes_ordinary_models_and_leaves_no_trace() -> None:
    for name in PROBLEMS:
        model, x = make(name)
        state = torch.random.get_rng_state()
        if len(x) > 1:
            run_probe(model, x)
        assert torch.equal(state, torch.random.get_rng_state())
        assert all(p.grad is None for p in model.parameters())
    broken = torch.full((5, 4), float("nan"))
    assert run_probe(nn.Sequential(nn.Linear(4, 4)), broken) is None  # nothing can be said


def test_standardised_weights_count_by_their_direction() -> None:
    torch.manual_seed(0)
    model = WideResNet(depth=10, widen=1, groups=4)
    found, x = dpspan.standardised(model), torch.randn(3, 3, 8, 8)
    assert type(model.conv) is nn.Conv2d  # a copy was changed
    assert found.state_dict().keys() == model.state_dict().keys()
    before = found(x)
    assert not torch.allclose(before, model(x))
    with torch.no_grad():
        for layer in found.modules():
            if isinstance(layer, nn.Conv2d):
                layer.weight.mul_(3.0).add_(0.7)
    assert torch.allclose(found(x), before, atol=1e-4)
    y = torch.tensor([0, 1, 2])
    loss = nn.CrossEntropyLoss(reduction="none")
    J = dpspan.per_sample_gradients(found, lambda m, x, y: loss(m(x), y), x, y)
    for row in range(3):
        found.zero_grad()
        loss(found(x[row : row + 1]), y[row : row + 1]).backward()
        plain = torch.cat([p.grad.flatten() for p in found.parameters()])
        assert torch.allclose(J.matrix()[row], plain, rtol=1e-3, atol=1e-5 * float(plain.norm()))
