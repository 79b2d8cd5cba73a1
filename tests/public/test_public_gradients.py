"""Gradients of public samples against one-sample-at-a-time autograd, and their labels."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import dpspan
from dpspan.public.data import PublicData
from dpspan.public.gradients import (
    Labels,
    PublicGradientSource,
    RandomLabels,
    RealLabels,
    labels_of,
)
from helpers.oracle import per_sample_matrix
from helpers.traces import traces
from helpers.training import network, setup, train

N = 11


def inputs(*shape: int) -> Tensor:
    return torch.randn(N, *shape, generator=torch.Generator().manual_seed(3)).double()


def mlp(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    ).double()


def public_gradients(
    model: nn.Module,
    source: Any,
    *,
    labels: str | Labels = "random",
    criterion: nn.Module | None = None,
    loss: Callable[..., Tensor] | None = None,
    samples: int = 100,
    piece: int | None = None,
    seed: int = 0,
) -> PublicGradientSource:
    return PublicGradientSource(
        model=model,
        data=PublicData.of(source),
        labels=labels_of(labels),
        criterion=nn.CrossEntropyLoss() if criterion is None and loss is None else criterion,
        loss=loss,
        samples=samples,
        piece=piece,
        seed=seed,
    )


def assert_close(x: Tensor, y: Tensor) -> None:
    assert x.shape == y.shape
    assert torch.allclose(x, y, rtol=1e-9, atol=1e-12)


# -- against the oracle -------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [None, 1, 4, 50])
@pytest.mark.parametrize(("build", "shape"), [(mlp, (4,)), (cnn, (2, 4, 4))])
def test_real_labels_give_the_gradients_of_the_loss(
    build: Callable[[], nn.Module], shape: tuple[int, ...], piece: int | None
) -> None:
    model, x, y = build(), inputs(*shape), torch.arange(N) % 3
    H = public_gradients(model, (x, y), labels="real", piece=piece)(0)
    oracle = per_sample_matrix(model, lambda m, x, y: F.cross_entropy(m(x), y), x, y)
    assert H.samples == N
    assert_close(H.matrix(), oracle)


TARGETS = {
    "mse": (nn.MSELoss(), 3, torch.randn(N, 3).double()),
    "mse sum": (nn.MSELoss(reduction="sum"), 1, torch.randn(N, 1).double()),
    "bce": (nn.BCEWithLogitsLoss(), 2, torch.randint(0, 2, (N, 2)).double()),
    "huber": (nn.HuberLoss(), 3, torch.randn(N, 3).double()),
    "weighted": (nn.CrossEntropyLoss(torch.tensor([1.0, 2, 3]).double()), 3, torch.arange(N) % 3),
    "ignoring": (nn.CrossEntropyLoss(ignore_index=-1), 3, torch.arange(N) % 4 - 1),
    "probabilities": (nn.CrossEntropyLoss(), 3, torch.rand(N, 3).double()),
}


@pytest.mark.parametrize(("criterion", "outputs", "targets"), TARGETS.values(), ids=TARGETS)
def test_any_criterion_is_averaged_over_a_samples_outputs(
    criterion: nn.Module, outputs: int, targets: Tensor
) -> None:
    model, x = mlp(outputs), inputs(4)
    H = public_gradients(model, (x, targets), labels="real", criterion=criterion)(0)
    alone = type(criterion)(
        **{"weight": criterion.weight} if getattr(criterion, "weight", None) is not None else {},
        **{"ignore_index": -1} if getattr(criterion, "ignore_index", 0) == -1 else {},
        reduction="none",
    )
    oracle = per_sample_matrix(model, lambda m, x, y: alone(m(x), y).mean(), x, targets)
    assert_close(H.matrix(), oracle)


def test_a_loss_of_ones_own_gets_what_there_is() -> None:
    model, x, y = mlp(), inputs(4), torch.arange(N) % 3
    seen: list[int] = []

    def loss(model: nn.Module, *batch: Any) -> Tensor:
        seen.append(len(batch))
        return model(batch[0]).square().sum(1)

    oracle = per_sample_matrix(model, lambda m, x: m(x).square().sum(1), x)
    for source, labels, parts in (((x, y), "real", 2), ((x, y), "random", 2), (x, "random", 1)):
        H = public_gradients(model, source, labels=labels, loss=loss)(0)
        assert_close(H.matrix(), oracle)
        assert seen.pop() == parts
    with pytest.raises(ValueError, match="one loss per sample"):
        public_gradients(model, x, loss=lambda model, x: model(x).sum())(0)


class Tokens(nn.Module):
    """Takes a dict as Hugging Face models do, and answers as they do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(12, 4).double(), nn.Linear(4, 3).double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        mask = attention_mask.unsqueeze(2)
        mean = (self.embed(input_ids) * mask).sum(1) / mask.sum(1)
        return SimpleNamespace(logits=self.out(mean))


class Texts(Dataset):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> list[int]:
        return [1 + (index + i) % 11 for i in range(1 + index % 4)]


def pad(texts: list[list[int]]) -> dict[str, Tensor]:
    width = max(map(len, texts))
    return {
        "input_ids": torch.tensor([text + [0] * (width - len(text)) for text in texts]),
        "attention_mask": torch.tensor([[int(i < len(t)) for i in range(width)] for t in texts]),
        "labels": torch.tensor([len(text) % 3 for text in texts]),
    }


def test_dicts_are_keywords_and_padding_may_vary() -> None:
    model = Tokens()
    source = DataLoader(Texts(), batch_size=3, collate_fn=pad)
    whole = pad([Texts()[i] for i in range(N)])

    def loss(model: nn.Module, ids: Tensor, mask: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(input_ids=ids, attention_mask=mask).logits, y)

    oracle = per_sample_matrix(model, loss, *whole.values())
    assert_close(public_gradients(model, source, labels="real")(0).matrix(), oracle)
    assert_close(public_gradients(model, source, labels="real", piece=2)(0).matrix(), oracle)


# -- random labels ------------------------------------------------------------------------------


def class_labels(H: dpspan.PerSampleGradients) -> list[int]:
    """The last bias' gradient is softmax − onehot: negative for the label only."""
    rows = H.matrix()[:, -3:]
    assert ((rows < 0).sum(1) == 1).all()
    return rows.argmin(1).tolist()


def test_random_labels_are_drawn_once() -> None:
    model, x = mlp(), inputs(4)
    H = public_gradients(model, x)
    first = class_labels(H(0))
    assert set(first) == {0, 1, 2}
    assert class_labels(H(1)) == class_labels(H(7)) == first
    assert class_labels(public_gradients(model, x)(3)) == first
    assert class_labels(public_gradients(model, x, piece=2)(0)) == first
    other = public_gradients(model, x, labels=RandomLabels(seed=1))
    assert class_labels(other(0)) != first


def test_random_labels_drawn_anew_depend_on_the_refresh_alone() -> None:
    model, x = mlp(), inputs(4)
    H = public_gradients(model, x, labels=RandomLabels(redraw=True))
    by_refresh = [class_labels(H(refresh)) for refresh in range(4)]
    assert len({tuple(labels) for labels in by_refresh}) == 4
    resumed = public_gradients(model, x, labels=RandomLabels(redraw=True), piece=3)
    assert [class_labels(resumed(refresh)) for refresh in (3, 1)] == [by_refresh[3], by_refresh[1]]
    assert class_labels(H(1)) == by_refresh[1]


def test_random_labels_belong_to_samples_not_to_pieces() -> None:
    model, x = mlp(), inputs(4)
    every = public_gradients(model, x)(0).matrix()
    some = public_gradients(model, x, samples=6, piece=4)
    for refresh in range(3):
        rows = some(refresh).matrix()
        distance = torch.cdist(rows, every)
        assert (distance.min(1).values < 1e-9).all()  # each is one of them, with the same label
        assert (distance.argmin(1).diff() > 0).all()  # and in their order


class Keep(nn.Module):
    """Notes what a criterion is asked."""

    def __init_subclass__(cls) -> None:
        cls.asked = []

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        type(self).asked.append((outputs.detach(), labels))
        return super().forward(outputs, labels)  # type: ignore[misc]


@pytest.mark.parametrize(
    "kind", [nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss], ids=lambda k: k.__name__
)
def test_random_targets_of_a_regression_are_normal(kind: type) -> None:
    class Criterion(Keep, kind):
        pass

    x = torch.zeros(4000, 4).double()
    H = public_gradients(mlp(2), x, criterion=Criterion(), samples=4000)
    H(0)
    ((outputs, _), *_) = Criterion.asked
    labels = torch.cat([labels for _, labels in Criterion.asked])
    assert outputs.dtype == labels.dtype == torch.float64
    assert labels.shape == (4000, 2)
    assert abs(float(labels.mean())) < 0.05
    assert abs(float(labels.std()) - 1) < 0.05


@pytest.mark.parametrize("kind", [nn.BCEWithLogitsLoss, nn.BCELoss], ids=lambda k: k.__name__)
def test_random_labels_of_yes_and_no_are_coin_flips(kind: type) -> None:
    class Criterion(Keep, kind):
        pass

    model = nn.Sequential(mlp(2), nn.Sigmoid())
    public_gradients(model, torch.zeros(1000, 4).double(), criterion=Criterion(), samples=1000)(0)
    ((outputs, labels),) = Criterion.asked
    assert labels.dtype == outputs.dtype
    assert labels.shape == (1000, 2)
    assert set(labels.unique().tolist()) == {0.0, 1.0}
    assert abs(float(labels.mean()) - 0.5) < 0.06


@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.NLLLoss], ids=lambda k: k.__name__)
def test_random_classes_of_every_pixel(kind: type) -> None:
    class Criterion(Keep, kind):
        pass

    model = nn.Sequential(nn.Conv2d(2, 5, 1).double(), nn.LogSoftmax(1))
    H = public_gradients(model, inputs(2, 3, 4), criterion=Criterion(), piece=4)(0)
    assert H.samples == N
    labels = torch.cat([labels for _, labels in Criterion.asked])
    assert labels.shape == (N, 3, 4)
    assert labels.dtype == torch.int64
    assert set(labels.unique().tolist()) == set(range(5))


def test_labels_by_name() -> None:
    assert labels_of("random") == RandomLabels(redraw=False, seed=0)
    assert labels_of("redrawn") == RandomLabels(redraw=True, seed=0)
    assert labels_of("real") == RealLabels()
    mine = RandomLabels(redraw=True)
    assert labels_of(mine) is mine
    for bad in ("none", None, 3):
        with pytest.raises(ValueError, match=r"'random', 'redrawn', 'real', RandomLabels.*got"):
            labels_of(bad)
    for bad in (-1, 0.5, True):
        with pytest.raises(ValueError, match="seed to be an integer of at least 0"):
            RandomLabels(seed=bad)


# -- which samples ------------------------------------------------------------------------------


def test_a_fresh_subset_at_every_refresh() -> None:
    model, x = mlp(), torch.arange(40).double().unsqueeze(1).expand(40, 4) / 40
    seen: list[Tensor] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        seen.append(x[:, 0])
        return model(x).sum(1)

    H = public_gradients(model, x, loss=loss, samples=15, piece=4)
    assert (H.count, H.fixed, H.data.count) == (15, False, 40)

    def subset(gradients: PublicGradientSource, refresh: int) -> tuple[float, ...]:
        seen.clear()
        assert gradients(refresh).samples == 15
        assert [len(part) for part in seen] == [4, 4, 4, 3]
        return tuple(torch.cat(seen).tolist())

    subsets = [subset(H, refresh) for refresh in range(5)]
    assert all(list(drawn) == sorted(set(drawn)) for drawn in subsets)
    assert len(set(subsets)) == 5
    assert subset(H, 2) == subsets[2]
    assert subset(public_gradients(model, x, loss=loss, samples=15, piece=4), 2) == subsets[2]
    other = public_gradients(model, x, loss=loss, samples=15, piece=4, seed=1)
    assert subset(other, 2) != subsets[2]


def test_all_samples_if_there_are_no_more() -> None:
    for samples in (N, 1000):
        H = public_gradients(mlp(), inputs(4), samples=samples)
        assert (H.count, H.fixed) == (N, True)
        assert H(0).samples == N


# -- the model is left alone --------------------------------------------------------------------


def test_gradients_are_those_of_the_present_weights() -> None:
    model, x, y = mlp(), inputs(4), torch.arange(N) % 3
    H = public_gradients(model, (x, y), labels="real")
    before = H(0).matrix()
    with torch.no_grad():
        model[0].weight.mul_(2)
    oracle = per_sample_matrix(model, lambda m, x, y: F.cross_entropy(m(x), y), x, y)
    assert_close(H(1).matrix(), oracle)
    assert not torch.allclose(before, oracle)


class Counting(nn.Module):
    """Changes its buffers: one in place, one by replacing it, one by making it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4).double())
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        self.mean += x.detach().mean(0)
        self.calls = self.calls + 1
        self.register_buffer("cache", x.detach())
        return x


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_as_it_was(training: bool) -> None:
    counting = Counting()
    model = nn.Sequential(counting, nn.Dropout(0.5), mlp(), counting.__class__()).train(training)
    model[3].mean = torch.zeros(3).double()
    model[2][0].weight.requires_grad_(False)
    model[2][2].bias.grad = torch.ones(3).double()
    buffers = {name: (b, b._version, b.clone()) for name, b in model.named_buffers()}
    state = torch.get_rng_state()
    public_gradients(model, inputs(4), piece=4)(0)
    with pytest.raises(ValueError, match="do not fit"):
        public_gradients(model, inputs(7))(0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training == training for module in model.modules())
    assert [p.requires_grad for p in model.parameters()] == [False, True, True, True]
    assert torch.equal(model[2][2].bias.grad, torch.ones(3).double())
    assert all(p.grad is None for p in list(model.parameters())[:3])
    assert set(dict(model.named_buffers())) == set(buffers)
    for name, b in model.named_buffers():
        assert b is buffers[name][0]
        assert b._version == buffers[name][1]
        assert torch.equal(b, buffers[name][2])
    assert not traces(model)


def test_the_data_are_left_alone() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2)

    model, x = nn.Sequential(InPlace(), mlp()), inputs(4)
    H = public_gradients(model, x)
    assert torch.equal(H(0).matrix(), H(1).matrix())
    assert torch.equal(x, inputs(4))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch.pop("x")).sum(1)

    H = public_gradients(mlp(), {"x": x}, loss=loss)
    assert torch.equal(H(0).matrix(), H(1).matrix())


def test_dropout_is_the_same_in_every_process_and_new_at_every_refresh() -> None:
    model = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.Linear(50, 3)).double()
    H = public_gradients(model, inputs(4))
    torch.manual_seed(1)
    first = H(0).matrix()
    torch.manual_seed(2)
    assert torch.equal(H(0).matrix(), first)
    assert not torch.allclose(H(1).matrix(), first)


def test_the_criterion_is_left_alone_and_its_hooks_are_not_called() -> None:
    criterion = nn.CrossEntropyLoss()
    calls: list[int] = []
    criterion.register_forward_hook(lambda *_: calls.append(1))
    H = public_gradients(mlp(), inputs(4), criterion=criterion)
    criterion.register_forward_hook(lambda *_: calls.append(2))
    H(0)
    assert criterion.reduction == "mean"
    assert calls == []


@pytest.mark.parametrize("generic", [False, True])
def test_between_the_steps_of_a_private_run(generic: bool) -> None:
    class Scaled(nn.Module):  # no rule: torch.func takes it
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.inner = nn.Parameter(torch.ones(6)), network()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x * self.scale)

    criterion = nn.CrossEntropyLoss()
    module = Scaled() if generic else network()
    x, y = inputs(6).float(), torch.arange(N) % 2
    engine, model, optimizer, loader = setup(module=module, criterion=criterion)
    H = public_gradients(model, (x, y), labels="real", criterion=criterion, piece=4)
    expected = H(0).matrix()
    with torch.no_grad():
        assert torch.equal(H(0).matrix(), expected)
    train(model, optimizer, loader)
    after = H(1).matrix()
    engine.detach()
    oracle = per_sample_matrix(model, lambda m, x, y: F.cross_entropy(m(x), y), x, y)
    assert torch.allclose(after, oracle, atol=1e-5)
    assert not torch.allclose(after, expected, atol=1e-3)


# -- refusals -----------------------------------------------------------------------------------


class OwnLoss(nn.Module):
    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs.sum()


class Wrapper(OwnLoss):
    reduction = "mean"  # and pays no attention to it


def test_a_loss_is_needed() -> None:
    data = PublicData.of(inputs(4))
    with pytest.raises(
        ValueError, match=r"Expected a criterion or a loss .*criterion=.*or public_loss="
    ):
        PublicGradientSource(
            model=mlp(),
            data=data,
            labels=RandomLabels(),
            criterion=None,
            loss=None,
            samples=1,
            piece=None,
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": "real"}, r"labels with the public data 'public', got inputs only: .*'random'"),
        ({"criterion": OwnLoss()}, "OwnLoss has no `reduction`.*public_loss="),
        ({"criterion": nn.KLDivLoss()}, "for KLDivLoss: pass public_labels='real'.*public_loss="),
        ({"samples": 0}, "samples to be an integer of at least 1, got 0"),
    ],
)
def test_refused_at_once(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        public_gradients(mlp(), inputs(4), **changes)


def test_inputs_that_do_not_fit_the_model() -> None:
    message = r"Public inputs of shape \(11, 7\) \(float64\) do not fit the model: mat1 and mat2"
    with pytest.raises(ValueError, match=message) as caught:
        public_gradients(mlp(), inputs(7))(0)
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(ValueError, match=r"shape \(11, 4\) \(float32\) do not fit the model"):
        public_gradients(mlp(), inputs(4).float())(0)
    with pytest.raises(ValueError, match=r"of x: shape \(11, 4\) .*do not fit.*argument 'x'"):
        public_gradients(mlp(), {"x": inputs(4)})(0)


def test_the_librarys_own_errors_stay_what_they_are() -> None:
    class Branches(nn.Module):  # no rule, and torch.func cannot take it either
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4).double())

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale if x.sum().item() > 0 else x

    with pytest.raises(dpspan.CaptureError, match="cannot vectorise it"):
        public_gradients(nn.Sequential(Branches(), mlp()), inputs(4))(0)


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_outputs_and_labels_that_do_not_fit() -> None:
    x = inputs(4)
    with pytest.raises(ValueError, match=r"MSELoss cannot compare.*\(11, 3\).*\(11, 2\)"):
        public_gradients(mlp(), (x, torch.zeros(N, 2)), labels="real", criterion=nn.MSELoss())(0)
    # (n, 1) against (n,) would compare every sample with every other.
    with pytest.raises(ValueError, match=r"MSELoss gives losses of shape \(11, 11\)"):
        public_gradients(mlp(1), (x, torch.zeros(N)), labels="real", criterion=nn.MSELoss())(0)
    with pytest.raises(ValueError, match=r"Wrapper gives losses of shape \(\).*public_loss="):
        public_gradients(mlp(), (x, torch.zeros(N)), labels="real", criterion=Wrapper())(0)
    flat = nn.Sequential(mlp(1), nn.Flatten(0))
    with pytest.raises(
        ValueError, match=r"class scores \(samples, classes, …\), got 'shape \(11,\)'"
    ):
        public_gradients(flat, x)(0)


def test_classes_must_be_the_models() -> None:
    y = torch.arange(N) % 3
    for wrong in (3, -1):
        y[5] = wrong
        message = f"from 0 to 2, the model's classes, got {wrong} at sample 5 of 'public'"
        with pytest.raises(ValueError, match=message):
            public_gradients(mlp(), (inputs(4), y), labels="real", piece=2)(0)
    y[5] = -100  # ignored
    assert not public_gradients(mlp(), (inputs(4), y), labels="real")(0).matrix()[5].any()


@pytest.mark.parametrize(
    "answer",
    [
        lambda x: SimpleNamespace(logits=x.unsqueeze(1).expand(-1, 4, -1)),  # a label per token
        lambda x: (x, x),
        lambda x: x[:3],
    ],
)
def test_outputs_whose_meaning_is_unknown(answer: Callable[[Tensor], Any]) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Any:
            return answer(self.inner(x))

    with pytest.raises(ValueError, match=r"The model returns .* for 11 .*pass public_loss="):
        public_gradients(Odd(), inputs(4))(0)
