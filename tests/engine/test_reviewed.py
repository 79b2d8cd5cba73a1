"""What a review of the engine, the capture and the guard together has found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpspan
from dpspan.engine.checkpoint import load_file, save_file
from dpspan.support.errors import CaptureError
from dpspan.support.left_as_found import left_as_found

CRITERION = nn.CrossEntropyLoss()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def private(model: nn.Module, inputs: Tensor | None = None, **options: Any) -> Any:
    x = torch.randn(200, 4) if inputs is None else inputs
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = dpspan.PrivacyEngine(accountant="rdp")
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(trained, lr=0.1),
        data_loader=DataLoader(TensorDataset(x, torch.randint(2, (200,))), batch_size=20),
        noise_multiplier=1.0,
        **options,
    )
    return engine, *made


def train(model: nn.Module, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        CRITERION(model(x), y).backward()
        optimizer.step()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.scores = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.scores.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.words(x).mean(1))
        return scores


def test_tied_weights_are_trained_for_more_than_one_step() -> None:
    engine, model, optimizer, loader = private(
        Tied(), torch.randint(11, (200, 7)), criterion=CRITERION
    )
    train(model, optimizer, loader)
    assert engine.ledger.steps == 10
    assert engine.certificate(1e-5)["private"]
    engine.state_dict()


class OnFrozen(nn.Module):
    """A head on frozen weights of another kind, which come first."""

    def __init__(self, frozen: Tensor) -> None:
        super().__init__()
        self.frozen = nn.Parameter(frozen, requires_grad=False)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(x @ self.frozen.float().T)
        return scores


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "method",
    [dpspan.DPSGD(clip=1.0), dpspan.GEP(public=torch.randn(20, 4), rank=3, clip=1.0)],
    ids=["DPSGD", "GEP"],
)
def test_arithmetic_is_that_of_trained_weights(dtype: torch.dtype, method: Any) -> None:
    model = OnFrozen(torch.randint(0, 5, (6, 4)).to(dtype))
    _, model, optimizer, loader = private(model, method=method, criterion=CRITERION)
    train(model, optimizer, loader)
    assert model.head.weight.grad.dtype == torch.float32


def public_gep(loss: Callable[..., Tensor]) -> dpspan.GEP:
    return dpspan.GEP(public=torch.randn(20, 4), rank=3, public_loss=loss)


def test_a_public_pass_that_fails_leaves_the_capture_unarmed() -> None:
    calls: list[int] = []

    def failing(model: nn.Module, x: Tensor) -> Tensor:
        calls.append(len(x))
        outputs: Tensor = model(x)
        if len(calls) == 3:
            raise RuntimeError("the public loss fails")
        return outputs.square().sum(1)

    _, model, optimizer, loader = private(network(), method=public_gep(failing))
    with pytest.raises(RuntimeError, match="the public loss fails"):
        train(model, optimizer, loader)
    with pytest.raises(CaptureError, match="outside a private step"):
        CRITERION(model(torch.randn(20, 4)), torch.randint(2, (20,))).backward()


def test_a_parameter_that_was_exchanged_is_watched_too() -> None:
    _, model, optimizer, loader = private(network(), criterion=CRITERION)
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    optimizer.param_groups[0]["params"] = list(model.parameters())
    x, y = next(iter(loader))
    with pytest.raises(CaptureError, match=r"0\.weight"):
        CRITERION(model[2](torch.tanh(F.linear(x, model[0].weight))), y).backward()
        optimizer.step()


class Keeping(nn.Module):
    """Writes to its buffer, through `written` or another reference to it."""

    def __init__(self, *, past_autograd: bool) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(4))
        self.also, self.past_autograd = [self.kept], past_autograd

    def forward(self, x: Tensor) -> Tensor:
        place = self.also[0].data if self.past_autograd else self.also[0]
        place.copy_(x.mean(0))
        return x


@pytest.mark.parametrize("past_autograd", [False, True])
def test_buffers_written_through_another_reference_are_put_back(past_autograd: bool) -> None:
    model = Keeping(past_autograd=past_autograd)
    with left_as_found(model), torch.no_grad():
        model(torch.ones(3, 4))
    assert torch.equal(model.kept, torch.zeros(4))


def test_a_teacher_copied_from_the_model_may_see_public_samples() -> None:
    teachers: list[nn.Module] = []

    def distilled(model: nn.Module, x: Tensor) -> Tensor:
        target = teachers[0](x).detach() if teachers else 1.0
        return (model(x) - target).square().sum(1)

    engine, model, optimizer, loader = private(network(), method=public_gep(distilled))
    teachers.append(copy.deepcopy(model))
    with torch.no_grad():
        teachers[0][2].bias.add_(1.0)
    train(model, optimizer, loader)
    assert engine.ledger.steps == 10


OLD_DEFAULTS = {"embedding_share": 0.5, "leftover": False, "clean_residual": False}


@pytest.mark.parametrize("used", [{}, {"leftover": True}, {"embedding_share": 0.9}])
def test_options_that_are_gone_are_accepted_unless_they_were_used(tmp_path: Any, used: Any) -> None:
    method = dpspan.GEP(public=torch.ones(20, 4).cumsum(0), rank=3)
    engine, model, *_ = private(network(), method=method, criterion=CRITERION)
    path = tmp_path / "of 0.1"
    engine.save_checkpoint(path, module=model)
    content = load_file(path, {"engine", "module", "optimizer", "checkpoint_dict"})
    content["engine"]["run"] |= OLD_DEFAULTS | used
    save_file(path, content)
    again, model, *_ = private(network(), method=method, criterion=CRITERION)
    if not used:
        again.load_checkpoint(path, module=model)
        return
    with pytest.raises(ValueError, match=f"{next(iter(used))} is .* there, None here"):
        again.load_checkpoint(path, module=model)


def test_random_carriers_are_known_by_their_old_name() -> None:
    method = dpspan.RGP(rank=1, carriers="random", layers=lambda name: name == "0.weight")
    engine, *_ = private(network(), method=method, criterion=CRITERION)
    state = engine.state_dict()
    state["run"] |= {"carriers": "Chance()", "orthogonal": True, "full_scale": 1.0}
    engine.load_state_dict(state)
    state["run"]["orthogonal"] = False
    with pytest.raises(ValueError, match="orthogonal is False there"):
        engine.load_state_dict(state)
