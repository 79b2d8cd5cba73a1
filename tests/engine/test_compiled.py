"""Training under bfloat16 autocast and with torch.compile: the same step, clipped as surely."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpspan
from dpspan.gradients.capture import Capture
from dpspan.mechanisms import Method
from dpspan.support.errors import UnsupportedModule
from helpers.training import data, setup

PUBLIC = tuple(x[40:] for x in data(60).tensors)
METHODS: dict[str, Callable[[], Method]] = {
    "DP-SGD": lambda: dpspan.DPSGD(clip=1.0),
    "RGP": lambda: dpspan.RGP(rank=2, clip=1.0),
    "GEP": lambda: dpspan.GEP(public=PUBLIC, rank=5, clip=1.0),
}
WAYS = ["compiled before", "compiled after", "compiled in place", "bfloat16"]


class Network(nn.Module):
    """Sequences of two vectors: layers with rules, and something between them to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 24), nn.LayerNorm(24), nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.first(x.view(-1, 2, 3))))
        return self.last((h * torch.sigmoid(h)).mean(1))


def network(kind: type[nn.Module] = Network) -> nn.Module:
    torch.manual_seed(1)
    return kind()


def gradients(way: str, method: str, steps: int = 2) -> Tensor:
    """The released gradients of the first steps, one after the other; noise is the same for all."""
    model = network()
    if way == "compiled before":
        model = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
    _, model, optimizer, loader = setup(
        module=model,
        method=METHODS[method](),
        noise_multiplier=0.01,
        criterion=nn.CrossEntropyLoss(),
    )
    call: Any = model
    if way == "compiled after":
        call = torch.compile(model, backend="aot_eager")
    if way == "compiled in place":
        model.compile(backend="aot_eager")
    half: Any = contextlib.nullcontext()
    if way == "bfloat16":
        half = torch.autocast("cpu", dtype=torch.bfloat16)
    found = []
    for (x, y), _ in zip(loader, range(steps), strict=False):
        optimizer.zero_grad()
        with half:
            loss = nn.CrossEntropyLoss()(call(x), y)
        loss.backward()
        optimizer.step()
        found += [p.grad.flatten() for p in model.parameters()]
    return torch.cat(found)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", WAYS)
def test_the_released_gradient_is_that_of_the_plain_step(way: str, method: str) -> None:
    torch._dynamo.reset()
    expected = gradients("eager", method)
    error = float((gradients(way, method) - expected).norm() / expected.norm())
    # Eight bits in every product of the model (2⁻⁸ each), or another order of float32 sums.
    assert error < (0.05 if way == "bfloat16" else 1e-4)
    assert error > 0 or way != "bfloat16"


def test_bounds_hold_for_what_is_summed_under_autocast() -> None:
    model, (x, y) = network(), data(16)[:]
    with Capture(model) as capture:
        capture.expect(len(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
        loss.backward()
        per_sample = capture.collect()
    bounds = per_sample.norm_bounds()
    for i, one in enumerate(torch.eye(len(x))):
        summed = torch.cat([v.flatten() for v in per_sample.combine(one).values()]).double()
        assert float(summed.norm()) <= float(bounds[i]) <= 1.001 * float(summed.norm())


def test_dropout_is_drawn_anew_in_every_compiled_step() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 2))
    with Capture(model) as capture:
        compiled = torch.compile(model, backend="aot_eager")
        norms = []
        for _ in range(3):
            capture.expect(4)
            compiled(torch.ones(4, 6)).sum().backward()
            norms.append(capture.collect().matrix())
    assert not torch.equal(norms[1], norms[2])


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")  # torch's, on the way
@pytest.mark.parametrize("way", ["before", "after"])
def test_samples_that_a_compiled_model_mixes_are_found(way: str) -> None:
    class Mixing(Network):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0))

    torch._dynamo.reset()
    model = network(Mixing)
    if way == "before":
        model = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
    _, model, _, loader = setup(module=model)
    call: Any = torch.compile(model, backend="aot_eager") if way == "after" else model
    with pytest.raises(UnsupportedModule, match="mixes samples"):
        for x, _ in loader:
            call(x)


def test_a_compiled_loss_is_checked_like_any_other() -> None:
    if not hasattr(torch._dynamo.config, "nontraceable_tensor_subclasses"):
        pytest.skip("this torch cannot compile a loss that is looked at; it says so")
    torch._dynamo.reset()
    _, model, optimizer, loader = setup(module=network())

    @torch.compile(backend="eager")
    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y, reduction="sum")

    with pytest.raises(ValueError, match="loss_reduction is 'mean'"):
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(x, y).backward()
            optimizer.step()


def test_layers_stay_out_of_graphs_and_what_lies_between_is_in_them() -> None:
    torch._dynamo.reset()
    compiled: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        compiled.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    model, (x, _) = network(), data(4)[:]
    with Capture(model) as capture:
        call = torch.compile(model, backend=backend)
        capture.expect(len(x))
        call(x).sum().backward()
        capture.collect()
    assert any("sigmoid" in name for name in compiled)
    assert not any("linear" in name or "layer_norm" in name for name in compiled)
