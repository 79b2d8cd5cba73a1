"""Sets of trainable parameters: what each holds, and that everything else is frozen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpspan import DPSGD, BiasOnly, FirstAndLast, LastLayers, LoRA, Named, train_only
from helpers.needs import extra
from helpers.oracle import clip_rows, per_sample_matrix
from helpers.training import data, network, setup


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.scale * self.norm(self.inner(x)))


class Attention(nn.Module):
    """Modules that read the weights of their layers, and one that calls them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.project = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.project(self.encoder(x)).mean(1))


def trainable(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


# -- the sets -------------------------------------------------------------------------------------

HEAD = {"head.weight", "head.bias"}
SETS: dict[str, tuple[Any, set[str]]] = {
    "last": (LastLayers(), HEAD),
    "last two": (LastLayers(2), HEAD | {"norm.weight", "norm.bias"}),
    "first and last": (FirstAndLast(), HEAD | {"inner.0.weight", "inner.0.bias"}),
    "a module": (Named(("head",)), HEAD),
    "a parameter": (Named(("inner.2.weight", "scale")), {"inner.2.weight", "scale"}),
    "what contains others": (
        Named(("inner",)),
        {"inner.0.weight", "inner.0.bias", "inner.2.weight", "inner.2.bias"},
    ),
    "bias": (BiasOnly(), {"inner.0.bias", "inner.2.bias", "norm.bias", "head.bias"}),
    "bias and head": (
        BiasOnly(also=("head",)),
        HEAD | {"inner.0.bias", "inner.2.bias", "norm.bias"},
    ),
}


@pytest.mark.parametrize("name", SETS)
def test_what_a_set_holds(name: str) -> None:
    which, expected = SETS[name]
    model = Body()
    model.inner[0].requires_grad_(False)  # whatever was frozen before does not matter
    keys = list(model.state_dict())
    assert train_only(model, which) is model
    assert trainable(model) == expected
    assert list(model.state_dict()) == keys


def test_all_layers_are_all_but_loose_parameters() -> None:
    model = Body()
    everything = trainable(model)
    assert trainable(train_only(model, LastLayers(4))) == everything - {"scale"}
    with pytest.raises(ValueError, match=r"at most the 4 layers .* got LastLayers\(count=5\)"):
        train_only(model, LastLayers(5))


def test_torchs_attention_is_one_layer() -> None:
    model = nn.Sequential(nn.Embedding(9, 8), nn.MultiheadAttention(8, 2), nn.Tanh())
    inside = {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}
    assert trainable(train_only(model, LastLayers(1))) == {f"1.{name}" for name in inside}


def test_one_layer_is_first_and_last() -> None:
    with pytest.raises(ValueError, match=r"FirstAndLast\(\) chooses no parameter"):
        train_only(nn.Tanh(), FirstAndLast())
    assert trainable(train_only(nn.Linear(3, 2), FirstAndLast())) == {"weight", "bias"}


def test_tied_parameters_go_together() -> None:
    """The name under which torch lists a tied parameter is not the one of the last layer."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    assert trainable(train_only(model, LastLayers(1))) == {"0.weight"}
    assert trainable(train_only(model, Named(("2.weight",)))) == {"0.weight"}


def test_biases_of_attention_and_recurrent_layers() -> None:
    model = nn.ModuleDict({"a": nn.MultiheadAttention(8, 2), "r": nn.GRU(3, 4)})
    expected = {"a.in_proj_bias", "a.out_proj.bias", "r.bias_ih_l0", "r.bias_hh_l0"}
    assert trainable(train_only(model, BiasOnly())) == expected


def test_names_are_whole() -> None:
    """'inner.2' is no 'inner.20', nor 'head' a 'header'."""
    model = nn.ModuleDict({"head": nn.Linear(2, 2), "header": nn.Linear(2, 2)})
    assert trainable(train_only(model, Named(("head",)))) == HEAD


class Norms:
    """A set of one's own."""

    def names(self, model: nn.Module) -> set[str]:
        return {name for name, _ in model.named_parameters() if name.startswith("norm")}


def test_a_set_of_ones_own() -> None:
    assert trainable(train_only(Body(), Norms())) == {"norm.weight", "norm.bias"}
    with pytest.raises(ValueError, match="chooses no parameter of this model"):
        train_only(network(), Norms())


@pytest.mark.parametrize("which", [Named(("fc",)), BiasOnly(also=("fc",)), LoRA(also=("fc",))])
def test_unknown_names_are_refused_with_those_there_are(which: Any) -> None:
    if isinstance(which, LoRA):
        extra("peft")
    model = Body()
    before, keys = trainable(model), list(model.state_dict())
    with pytest.raises(ValueError, match=r"no parameter at 'fc'.* inner, inner.0, .* head\."):
        train_only(model, which)
    assert trainable(model) == before
    assert list(model.state_dict()) == keys


def test_models_without_biases_have_no_bitfit() -> None:
    with pytest.raises(ValueError, match=r"BiasOnly\(also=\(\)\) chooses no parameter"):
        train_only(nn.Linear(3, 2, bias=False), BiasOnly())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: LastLayers(0), "count"),
        (lambda: Named("head"), "paths"),
        (lambda: Named(["head"]), "paths"),
        (lambda: BiasOnly(also="head"), "also"),
        (lambda: LoRA(rank=0), "rank"),
        (lambda: LoRA(alpha=0), "alpha"),
        (lambda: LoRA(targets="query"), "targets"),
        (lambda: LoRA(targets=()), "targets"),
        (lambda: LoRA(also=("",)), "also"),
    ],
)
def test_bad_arguments_are_named(make: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=f"Expected {expected} to be"):
        make()


# -- LoRA -----------------------------------------------------------------------------------------


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpspan.model.trainable.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'dpspan\[lora\]'"):
        train_only(Body(), LoRA())


def adapters(*paths: str) -> set[str]:
    return {f"{path}.lora_{side}.default.weight" for path in paths for side in "AB"}


@pytest.mark.parametrize(
    ("which", "paths", "also"),
    [
        (LoRA(rank=3), ("inner.0", "inner.2", "head"), set()),
        (LoRA(rank=3, also=("head",)), ("inner.0", "inner.2"), HEAD),
        (LoRA(rank=3, targets=("inner.2",), also=("scale",)), ("inner.2",), {"scale"}),
        (LoRA(rank=3, targets=("0", "head")), ("inner.0", "head"), set()),
    ],
)
def test_where_adapters_are(which: LoRA, paths: tuple[str, ...], also: set[str]) -> None:
    extra("peft")
    model, x = Body(), torch.randn(5, 6)
    before = model(x)
    assert train_only(model, which) is model
    assert trainable(model) == adapters(*paths) | also
    assert torch.equal(model(x), before)  # adapters begin as nothing
    sizes = {p.shape for n, p in model.named_parameters() if n in adapters(*paths)}
    assert all(3 in shape for shape in sizes)


def test_an_adapter_is_the_papers() -> None:
    """h = W₀x + (alpha/r)·BAx."""
    extra("peft")
    model, x = nn.Sequential(nn.Linear(6, 4)), torch.randn(5, 6)
    w, b = model[0].weight.detach().clone(), model[0].bias.detach().clone()
    for alpha, factor in ((None, 1.0), (8, 4.0)):
        adapted = nn.Sequential(nn.Linear(6, 4))
        adapted.load_state_dict(model.state_dict())
        train_only(adapted, LoRA(rank=2, alpha=alpha))
        A, B = (p for p in adapted.parameters() if p.requires_grad)
        nn.init.normal_(B)
        expected = x @ (w + factor * B @ A).T + b
        assert torch.allclose(adapted(x), expected, atol=1e-5)


def test_convolutions_by_name() -> None:
    extra("peft")
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 2))
    train_only(model, LoRA(rank=2, targets=("0",), also=("2",)))
    assert trainable(model) == adapters("0") | {"2.weight", "2.bias"}
    for without in (nn.Sequential(nn.Conv2d(1, 4, 3)), nn.Linear(3, 2)):
        with pytest.raises(ValueError, match=r"no Linear layer .* name its Conv2d"):
            train_only(without, LoRA())


def test_layers_that_are_read_and_never_called_get_no_adapter() -> None:
    extra("peft")
    model = train_only(Attention(), LoRA(rank=2, also=("head",)))
    assert trainable(model) == adapters("project") | HEAD
    for target in ("out_proj", "encoder.linear1"):
        with pytest.raises(ValueError, match=r"is read, not called\).* adapter: project, head\."):
            train_only(Attention(), LoRA(targets=(target,)))


def test_such_an_adapter_would_not_count() -> None:
    """Why they are refused: in evaluation torch's encoder layer goes past its own sublayers."""
    peft = extra("peft")
    model, x = Attention().eval(), torch.randn(3, 4, 8)
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["linear1"]), model)
    before = model(x).detach()
    nn.init.normal_(model.encoder.linear1.lora_B["default"].weight)
    with torch.no_grad():
        assert torch.allclose(model(x), before, atol=1e-5)  # the adapter is ignored
    assert not torch.allclose(model.train()(x), before, atol=1e-2)  # while it is trained


@pytest.mark.parametrize("target", ["norm", "outside", "head"])
def test_targets_that_cannot_be_are_refused(target: str) -> None:
    extra("peft")
    model = Body()
    keys = list(model.state_dict())
    with pytest.raises(
        ValueError, match=rf"outside of `also`.* got '{target}'\. .*: inner.0, inner.2\."
    ):
        train_only(model, LoRA(targets=("inner.0", target), also=("head",)))
    assert list(model.state_dict()) == keys


class Twice(nn.Module):
    """One layer by two names, or one block of layers."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first = self.second = part
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).tanh()))


@pytest.mark.parametrize("which", [LoRA(), LoRA(targets=("first",)), LoRA(also=("second",))])
def test_a_layer_by_two_names_is_refused(which: LoRA) -> None:
    """An adapter would be put around it by one of them only."""
    extra("peft")
    model = Twice(nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"first, second are one layer.* with also\."):
        train_only(model, which)
    assert "first.weight" in model.state_dict()
    train_only(model, LoRA(rank=2, also=("first", "second")))
    assert trainable(model) == {"first.weight", "first.bias"} | adapters("head")


def test_a_block_by_two_names_has_one_adapter() -> None:
    extra("peft")
    model = train_only(Twice(nn.Sequential(nn.Linear(8, 8))), LoRA(rank=2))
    assert model.first is model.second
    assert trainable(model) == adapters("first.0", "head")


def test_adapters_are_put_in_once() -> None:
    extra("peft")
    model = train_only(Body(), LoRA(rank=2))
    with pytest.raises(ValueError, match="has LoRA adapters already"):
        train_only(model, LoRA(rank=2))


def test_private_gradients_of_adapters_are_those_of_autograd() -> None:
    """A step of DP-SGD on adapters and head against autograd, one sample at a time."""
    extra("peft")
    model = train_only(Body(), LoRA(rank=2, also=("head",))).double()
    for name, p in model.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(p)  # or the gradient of A would be zero
    x, y = data().tensors
    records = torch.utils.data.TensorDataset(x.double(), y)
    rows = per_sample_matrix(
        model, lambda m, x, y: nn.functional.cross_entropy(m(x), y), x.double(), y
    )
    expected = clip_rows(rows, 0.5).sum(0) / 10
    _, model, optimizer, loader = setup(
        module=model,
        method=DPSGD(clip=0.5),
        data_loader=torch.utils.data.DataLoader(records, batch_size=10),
        sample_rate=1.0,
        noise_multiplier=1e-13,
    )
    ((x, y),) = loader
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    grads = [p.grad.flatten() for p in model.parameters() if p.requires_grad]
    assert torch.allclose(torch.cat(grads), expected, atol=1e-9)
