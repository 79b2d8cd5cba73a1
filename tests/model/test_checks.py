"""What loops, losses and models do to a private run that no clip bounds: it must be noticed."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import dpspan
from dpspan import CaptureError, PrivacyEngine, UnsupportedModule
from dpspan.accounting.certificate import weights_sha256
from dpspan.accounting.ledger import RECORDS_TOLD
from dpspan.model.criterion import Reductions
from dpspan.model.guard import _RARELY
from helpers.training import data, setup, train

NAN, INF = math.nan, math.inf


def loop(loss: Callable[[Any, Tensor, Tensor], Tensor], epochs: int = 1, **changes: Any) -> Any:
    """Train with a loss computed by the loop itself; the engine."""
    engine, model, optimizer, loader = setup(**changes)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss(model, x, y).backward()
            optimizer.step()
    return engine


def told(engine: PrivacyEngine) -> list[str]:
    warnings = engine.certificate(1e-5)["warnings"]
    return [warning for warning in warnings if not warning.startswith(RECORDS_TOLD)]


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws of the checks that are the same in every run of the tests."""
    generator = torch.Generator().manual_seed(0)

    def randbits(bits: int) -> int:
        return int(torch.randint(2**bits, (), generator=generator))

    monkeypatch.setattr("secrets.randbits", randbits)


# -- a criterion that keeps something ------------------------------------------------------------


class Centred(nn.Module):
    """Subtracts a running mean of the outputs that it has seen."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        if how == "plain":
            self.centre = torch.zeros(2)
        else:
            self.register_buffer("centre", torch.zeros(2))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(output - self.centre, target)
        if self.how == "plain":
            self.centre = 0.9 * self.centre + 0.1 * output.detach().mean(0)
        elif self.how == "data":
            self.centre.data.lerp_(output.detach().mean(0), 0.1)
        elif self.how == "buffer":
            self.centre.lerp_(output.detach().mean(0), 0.1)
        return loss


@pytest.mark.parametrize("how", ["buffer", "data", "plain"])
def test_a_criterion_must_not_keep_an_average_of_private_outputs(how: str) -> None:
    criterion = Centred(how)
    message = r"'criterion\.centre' was changed by the private batch.* build the criterion anew"
    with pytest.raises(CaptureError, match=message):
        loop(lambda model, x, y: criterion(model(x), y), criterion=criterion)


def test_nor_may_the_loop_update_it() -> None:
    criterion = Centred("constant")

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        output = model(x)
        criterion.centre = 0.9 * criterion.centre + 0.1 * output.detach().mean(0)
        return criterion(output, y)

    with pytest.raises(CaptureError, match=r"'criterion\.centre' was changed"):
        loop(loss, criterion=criterion)


def test_a_criterion_may_keep_what_nothing_depends_on() -> None:
    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = torch.zeros(())
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            loss = F.cross_entropy(output, target)
            self.last, self.mask = loss.detach(), torch.eye(len(output))
            self.calls += 1
            return loss

    criterion = Noting()
    engine = loop(lambda model, x, y: criterion(model(x), y), epochs=2, criterion=criterion)
    assert engine.ledger.steps == int(criterion.calls) == 8
    assert told(engine) == []


def test_a_criterion_with_trainable_parameters_is_refused() -> None:
    class Temperature(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(output * self.scale, target)

    criterion = Temperature()
    message = r"Temperature\) has the trainable parameter 'scale'.*criterion\.requires_grad_\(False"
    with pytest.raises(ValueError, match=message):
        setup(criterion=criterion)
    setup(criterion=criterion.requires_grad_(False))


def test_a_criterion_may_hold_the_model() -> None:
    model = nn.Linear(6, 2)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(output, target)

    criterion = Whole()
    engine = loop(lambda m, x, y: criterion(m(x), y), 2, module=model, criterion=criterion)
    assert told(engine) == []


# -- mixing, hidden by a record or by chance -----------------------------------------------------


class Centre(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        return self.second(hidden - 0.5 * hidden.mean(0))


class Statistics(Centre):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.batch_norm(self.first(x), None, None, training=True))


@pytest.mark.parametrize("kind", [Centre, Statistics])
@pytest.mark.parametrize("broken", [NAN, INF, 1e3, 1e6, 1e20])
@pytest.mark.parametrize("count", [1, 3])
def test_broken_records_do_not_hide_mixing(
    kind: type[nn.Module], broken: float, count: int, seeds: None
) -> None:
    x, y = data(60).tensors
    x = x.clone()
    x[:: 60 // count][:count] = broken
    loader = DataLoader(TensorDataset(x, y), batch_size=60)
    with pytest.raises(UnsupportedModule, match="mixes samples"):
        loop(lambda m, x, y: F.cross_entropy(m(x), y), module=kind(), data_loader=loader)


@pytest.mark.parametrize("broken", [NAN, INF, 1e3, 1e20])
def test_nor_are_they_taken_for_mixing(broken: float) -> None:
    x, y = data(60).tensors
    x = x.clone()
    x[::20] = broken
    loader = DataLoader(TensorDataset(x, y), batch_size=60)
    criterion = nn.CrossEntropyLoss()
    engine = loop(lambda m, x, y: criterion(m(x), y), 4, data_loader=loader, criterion=criterion)
    assert told(engine) == []


@pytest.mark.filterwarnings("ignore:dpspan")
def test_a_batch_that_decides_nothing_has_not_passed() -> None:
    """All records of two batches are broken: the model is looked at until some are not."""
    seen = [0]

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen[0] += 1
        return F.cross_entropy(model(x * NAN if seen[0] < 3 else x), y)

    with pytest.raises(UnsupportedModule, match="mixes samples"):
        loop(loss, module=Centre())
    assert seen[0] == 3
    engine = loop(lambda m, x, y: F.cross_entropy(m(x * NAN), y))
    assert any("no gradient was finite" in warning for warning in told(engine))


class Now(nn.Module):
    """Mixes hidden layers with some probability."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 2)
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        if torch.rand(()) < self.probability:
            hidden = 0.5 * hidden + 0.5 * hidden[torch.randperm(len(hidden))]
        return self.second(hidden)


@pytest.mark.parametrize("probability", [0.3, 0.5])
def test_mixing_now_and_then_is_found(probability: float, seeds: None) -> None:
    """In 6 + 2·4 comparisons of 20 steps all are missed with probability 0.7^14 < 0.01."""
    for _ in range(10):
        torch.manual_seed(0)
        with pytest.raises(UnsupportedModule, match="mixes samples"):
            loop(lambda m, x, y: F.cross_entropy(m(x), y), epochs=5, module=Now(probability))


def test_dropout_is_not_mixing() -> None:
    for _ in range(5):
        network = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 2))
        engine = loop(lambda m, x, y: F.cross_entropy(m(x), y), epochs=4, module=network)
        assert told(engine) == []


def test_a_model_that_starts_to_mix_later_is_found() -> None:
    class Later(Centre):
        after = 5

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x).relu()
            return self.second(hidden - (0.5 * hidden.mean(0) if steps[0] > self.after else 0))

    steps = [0]

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        steps[0] += 1
        return F.cross_entropy(model(x), y)

    with pytest.raises(UnsupportedModule, match="mixes samples"):
        loop(loss, epochs=3, module=Later())
    assert steps[0] == 8


def test_only_earlier_samples_seen() -> None:
    """A sample that sees those before it: kept samples must not all stand in front."""

    class Before(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.cumsum(0) / 3)

    for _ in range(5):
        with pytest.raises(UnsupportedModule, match="mixes samples"):
            loop(lambda m, x, y: F.cross_entropy(m(x), y), module=Before())


def test_memory_in_a_plain_attribute_is_found() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.mean = nn.Linear(6, 2), torch.zeros(6)

        def forward(self, x: Tensor) -> Tensor:
            output = self.layer((x - self.mean).tanh())
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return output

    with pytest.raises(UnsupportedModule, match=r"'0\.mean' keeps something of a batch"):
        loop(lambda m, x, y: F.cross_entropy(m(x), y), module=nn.Sequential(Running()))


def test_a_model_may_note_what_nothing_depends_on() -> None:
    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(6, 2), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.activations = self.layer(x)
            return self.activations * min(1.0, 0.5 + 0.1 * self.calls)

    engine = loop(lambda m, x, y: F.cross_entropy(m(x), y), epochs=2, module=Noting())
    assert told(engine) == []


# -- losses --------------------------------------------------------------------------------------


class Contrast(nn.Module):
    """Pulls samples of one class together: every term sees the whole batch."""

    def forward(self, z: Tensor, y: Tensor, temperature: float = 0.1) -> Tensor:
        z = F.normalize(z, dim=1)
        alike = z @ z.T / temperature - 1e9 * torch.eye(len(z))
        positive = (y[:, None] == y[None]).float() - torch.eye(len(z))
        terms = (alike.log_softmax(1) * positive).sum(1) / positive.sum(1).clamp(min=1)
        return -terms.mean()


class OnlyOutputs(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return (z - z.mean(0)).square().mean()


class ThreeTensors(nn.Module):
    def forward(self, z: Tensor, y: Tensor, *, weights: Tensor) -> dict[str, Tensor]:
        losses = F.cross_entropy(z, y, reduction="none") * weights
        return {"loss": losses.sum() / weights.sum()}


class Late(nn.Module):
    share = 0.0

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y) + self.share * Contrast()(z, y)


@pytest.mark.parametrize(
    ("criterion", "call"),
    [
        (Contrast(), lambda c, z, x, y: c(z, y)),
        (Contrast(), lambda c, z, x, y: c(z, y, 0.2)),
        (Contrast(), lambda c, z, x, y: c(z=z, y=y, temperature=0.2)),
        (OnlyOutputs(), lambda c, z, x, y: c(z)),
        (ThreeTensors(), lambda c, z, x, y: c(z, y, weights=x[:, 0].sigmoid())["loss"]),
    ],
)
def test_losses_that_mix_samples_are_found_whatever_they_are_given(
    criterion: nn.Module, call: Callable[..., Tensor]
) -> None:
    with pytest.raises(ValueError, match="mixes samples"):
        loop(lambda m, x, y: call(criterion, m(x), x, y), criterion=criterion)


@pytest.mark.parametrize("broken", [NAN, 1e20])
def test_a_broken_record_does_not_hide_a_loss_that_mixes(broken: float, seeds: None) -> None:
    x, y = data(60).tensors
    x = x.clone()
    x[0] = broken
    loader = DataLoader(TensorDataset(x, y), batch_size=60)
    with pytest.raises(ValueError, match="mixes samples"):
        criterion = Contrast()
        loop(lambda m, x, y: criterion(m(x), y), data_loader=loader, criterion=criterion)


def test_a_loss_that_mixes_from_the_second_epoch_on_is_found() -> None:
    criterion, seen = Late(), [0]

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen[0] += 1
        criterion.share = float(seen[0] > 4)
        return criterion(model(x), y)

    with pytest.raises(ValueError, match="mixes samples"):
        loop(loss, epochs=2, criterion=criterion)
    assert seen[0] == 8


def test_a_loss_by_hand_that_mixes_is_found() -> None:
    for by_hand in (
        lambda m, x, y: Contrast()(m(x), y),
        lambda m, x, y: F.cross_entropy(F.batch_norm(m(x), None, None, training=True), y),
        lambda m, x, y: F.cross_entropy(m(x) - m(x).mean(0), y),
    ):
        with pytest.raises(ValueError, match="The loss mixes samples"):
            loop(by_hand)


MEANS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "mean": lambda m, x, y: F.cross_entropy(m(x), y),
    "scaled": lambda m, x, y: 0.5 * F.cross_entropy(m(x), y) / 2,
    "smoothed": lambda m, x, y: F.cross_entropy(m(x), y, label_smoothing=0.1),
    "soft labels": lambda m, x, y: F.cross_entropy(m(x), F.one_hot(y, 2).float()),
    "divided": lambda m, x, y: F.cross_entropy(m(x), y, reduction="none").sum() / len(x),
    "sum divided": lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum") / len(x),
    "two": lambda m, x, y: F.cross_entropy(m(x), y) + 0.1 * m(x).square().mean(),
    "stacked": lambda m, x, y: torch.stack([F.cross_entropy(m(x), y)] * 3).mean(),
    "squared": lambda m, x, y: F.mse_loss(m(x)[:, 0], y.float()),
    "absolute": lambda m, x, y: F.l1_loss(m(x)[:, 0], y.float()),
    "logits": lambda m, x, y: F.binary_cross_entropy_with_logits(m(x)[:, 0], y.float()),
    "divergence": lambda m, x, y: F.kl_div(
        m(x).log_softmax(1), F.one_hot(y, 2).float(), reduction="batchmean"
    ),
}
SUMS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "sum": lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum"),
    "added": lambda m, x, y: F.cross_entropy(m(x), y, reduction="none").sum(),
    "squared": lambda m, x, y: F.mse_loss(m(x)[:, 0], y.float(), reduction="sum"),
}


@pytest.mark.parametrize("name", MEANS)
def test_means_by_hand_are_seen_to_be_means(name: str) -> None:
    assert told(loop(MEANS[name], epochs=2)) == []
    if name in ("mean", "squared"):
        with pytest.raises(ValueError, match=r"a mean over the batch, but loss_reduction is 'sum'"):
            loop(MEANS[name], loss_reduction="sum")


@pytest.mark.parametrize("name", SUMS)
def test_sums_by_hand_are_refused_where_a_mean_is_declared(name: str) -> None:
    assert told(loop(SUMS[name], epochs=2, loss_reduction="sum")) == []
    with pytest.raises(ValueError, match=r"a sum over the batch.*Pass loss_reduction='sum'"):
        loop(SUMS[name])
    with pytest.raises(ValueError, match="a sum over the batch"):
        loop(lambda m, x, y: SUMS[name](m, x, y) + 0.1 * MEANS["mean"](m, x, y))


@pytest.mark.parametrize("name", ["divided", "sum divided", "divergence"])
def test_a_sum_over_the_samples_is_a_mean_where_a_sum_is_declared(name: str) -> None:
    with pytest.raises(ValueError, match="a mean over the batch, but loss_reduction is 'sum'"):
        loop(MEANS[name], epochs=2, loss_reduction="sum")


def test_a_sum_over_a_constant_is_no_mean_however_many_samples_there_are() -> None:
    look, loss = Reductions(), torch.ones(12, requires_grad=True).sum() / 12
    assert look(loss, 12) == {None}  # it may be by accident
    assert look(loss, 6) == {"sum"}
    look = Reductions()
    assert look(loss, 12) == {None}
    assert look(torch.ones(8, requires_grad=True).sum() / 8, 8) == {"mean"}
    assert look(loss, 12) == {"mean"}
    assert not look.doubtful
    assert look(loss, 5) == {None}
    assert look.doubtful
    assert Reductions()(loss, 12, fixed=True) == {"mean"}


def test_a_divisor_of_one_term_is_not_taken_for_that_of_another() -> None:
    """Smoothed labels: a mean over samples, and one over samples and classes."""
    look = Reductions()
    for samples in (4, 8, 16):
        x = torch.ones(samples, 2, requires_grad=True)
        found = look(0.9 * (x[:, :1].sum() / samples) + 0.1 * (x.sum() / (2 * samples)), samples)
    assert found == {"mean"}
    assert not look.doubtful


@pytest.mark.parametrize("constant", [10, 9])  # the expected batch size, and another
def test_a_sum_over_a_constant_is_a_sum(constant: int) -> None:
    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m(x), y, reduction="sum") / constant

    assert told(loop(loss, epochs=4, loss_reduction="sum")) == []
    with pytest.raises(ValueError, match="a sum over the batch, but loss_reduction is 'mean'"):
        loop(loss, epochs=4)


def test_where_the_graph_is_silent_the_certificate_says_so() -> None:
    with pytest.warns(UserWarning, match="pass criterion="):
        engine = loop(lambda m, x, y: (F.cross_entropy(m(x), y, reduction="none") / 10).sum())
        assert any("the loss could not be checked" in warning for warning in told(engine))


def test_a_model_that_returns_a_sum_where_a_mean_is_declared() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.dropout = nn.Linear(6, 2), nn.Dropout(0.3)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.layer(self.dropout(x))
            return F.cross_entropy(logits, y, reduction="none").mul(2).sum(), logits

    with pytest.raises(UnsupportedModule, match=r"WithLoss returns is not the mean"):
        loop(lambda m, x, y: m(x, y)[0], module=WithLoss())
    engine = loop(lambda m, x, y: m(x, y)[0], module=WithLoss(), loss_reduction="sum")
    assert told(engine) == []


def test_outputs_are_ordinary_tensors_to_the_loop() -> None:
    kept: list[Any] = []

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        output = model(x)
        kept.append(output.detach())
        kept.append(pickle.loads(pickle.dumps(output.detach().cpu())))
        assert output.detach().numpy().shape == (len(x), 2)
        assert f"{output.argmax(1)}"
        gathered = [output[:1], output[1:]]
        return F.cross_entropy(torch.cat(gathered), y)

    assert told(loop(loss)) == []
    assert all(type(x) is Tensor for x in kept)


# -- collate_fn ----------------------------------------------------------------------------------


def mixed(records: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = default_collate(records)
    labels = F.one_hot(y, 2).float()
    return 0.5 * x + 0.5 * x.roll(1, 0), 0.5 * labels + 0.5 * labels.roll(1, 0)


def mixed_at_random(records: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = default_collate(records)
    if torch.rand(()) < 0.5:
        x = 0.7 * x + 0.3 * x[torch.randperm(len(x))]
    return x, y


def with_the_one_before(records: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = default_collate(records)
    x[1:] = x[1:] + 0.1 * x[:-1]
    return x, y


def standardised(records: list[Any]) -> dict[str, Tensor]:
    x, y = default_collate(records)
    return {"x": (x - x.mean(0)) / (x.std(0) + 1e-5), "y": y}


@pytest.mark.parametrize("collate", [mixed, mixed_at_random, with_the_one_before, standardised])
@pytest.mark.parametrize("alike", [True, False])
def test_a_collate_fn_that_mixes_records_is_refused(
    collate: Callable[..., Any], alike: bool, seeds: None
) -> None:
    x, y = data().tensors
    x = torch.full_like(x, 10.0) if alike else x
    loader = DataLoader(TensorDataset(x, y), batch_size=10, collate_fn=collate)
    with pytest.raises(ValueError, match=r"collate_fn .* mixes records.*records one by one"):
        setup(data_loader=loader)


def padded(records: list[Any]) -> tuple[Tensor, Tensor]:
    longest = max(int(x[0].abs() * 4) for x, _ in records) + 1
    rows = [F.pad(x[: int(x[0].abs() * 4) + 1], (0, max(0, longest - len(x)))) for x, _ in records]
    rows = [F.pad(row, (0, longest - len(row))) for row in rows]
    return torch.stack(rows), torch.stack([y for _, y in records])


def padded_in_front(records: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = padded(records)
    return x.flip(1), y


def in_order(records: list[Any]) -> tuple[Tensor, Tensor]:
    return default_collate(sorted(records, key=lambda record: float(record[0][1])))


def masked(records: list[Any]) -> tuple[Tensor, Tensor]:
    """Hides entries at random, as for a language model, in all records at once."""
    x, y = default_collate(records)
    return x.masked_fill(torch.rand(x.shape) < 0.3, 0.0), y


def augmented(records: list[Any]) -> tuple[Tensor, Tensor]:
    """Draws as often as a record says, record by record."""
    rows = []
    for x, _ in records:
        for _ in range(1 + int(x[0].abs() * 3)):
            x = x + 0.1 * torch.randn(6)
        rows.append(x)
    return torch.stack(rows), torch.stack([y for _, y in records])


@pytest.mark.parametrize("collate", [padded, padded_in_front, in_order, masked, augmented])
def test_collate_fns_that_keep_records_apart_are_not(collate: Callable[..., Any]) -> None:
    for _ in range(10):
        engine, *_ = setup(data_loader=DataLoader(data(), batch_size=10, collate_fn=collate))
        assert all(warning.startswith(RECORDS_TOLD) for warning in engine.ledger.warnings)


def test_a_collate_fn_with_random_numbers_of_its_own_is_put_on_record() -> None:
    generator = torch.Generator().manual_seed(0)

    def noisy(records: list[Any]) -> tuple[Tensor, Tensor]:
        x, y = default_collate(records)
        return x + torch.randn(x.shape, generator=generator), y

    def failing(records: list[Any]) -> Any:
        raise ValueError("the record of Mrs Smith")

    for collate in (noisy, failing):
        with pytest.warns(UserWarning, match="collate_fn .* could not be checked") as caught:
            setup(data_loader=DataLoader(data(), batch_size=10, collate_fn=collate))
        assert "Smith" not in str(caught[0].message)


# -- views ---------------------------------------------------------------------------------------


def with_views(
    assemble: Callable[[Tensor], Tensor], labels: Callable[[Tensor], Tensor], **changes: Any
) -> PrivacyEngine:
    criterion = nn.CrossEntropyLoss()
    return loop(
        lambda m, x, y: criterion(m(assemble(x)), labels(y)),
        criterion=criterion,
        views=2,
        **changes,
    )


def noisy(x: Tensor) -> Tensor:
    return x + 0.3 * torch.randn(x.shape)


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("augment", [lambda x: x, noisy])
def test_rows_view_after_view_are_refused(augment: Any, alike: bool) -> None:
    """By the inputs, even if all labels are the same."""
    x, y = data(200).tensors
    y = y * 0 if alike else y
    loader = DataLoader(TensorDataset(x, y), batch_size=100)
    with pytest.raises(CaptureError, match=r"view after view.*repeat_interleave\(2\)"):
        with_views(
            lambda x: torch.cat([augment(x), augment(x)]),
            lambda y: torch.cat([y, y]),
            data_loader=loader,
        )
    engine = with_views(
        lambda x: torch.stack([augment(x), augment(x)], 1).flatten(0, 1),
        lambda y: y.repeat_interleave(2),
        data_loader=loader,
    )
    assert told(engine) == []


def test_the_labels_tell_where_the_inputs_cannot() -> None:
    turn = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(0)))[0]
    with pytest.raises(CaptureError, match="view after view"):
        with_views(lambda x: torch.cat([-x @ turn] * 2), lambda y: torch.cat([y, y]))
    engine = with_views(
        lambda x: torch.stack([-x @ turn] * 2, 1).flatten(0, 1), lambda y: y.repeat_interleave(2)
    )
    assert told(engine) == []


def test_views_of_the_dataset() -> None:
    x, y = data().tensors
    x = torch.stack([x, x + 0.1], 1)
    loader = DataLoader(TensorDataset(x, y), batch_size=20)
    with pytest.raises(CaptureError, match="view after view"):
        with_views(
            lambda x: x.transpose(0, 1).flatten(0, 1),
            lambda y: torch.cat([y, y]),
            data_loader=loader,
        )
    engine = with_views(
        lambda x: x.flatten(0, 1), lambda y: y.repeat_interleave(2), data_loader=loader
    )
    assert told(engine) == []


def test_an_order_that_cannot_be_seen_is_put_on_record() -> None:
    with pytest.warns(UserWarning, match=r"views=2: it could not be checked"):
        engine = loop(
            lambda m, x, y: F.cross_entropy(
                m((x @ x.new_ones(6, 6)).repeat_interleave(2, 0) * 0), y.repeat_interleave(2)
            ),
            views=2,
        )
        assert any("rows of a record" in warning for warning in told(engine))


# -- state that changes later --------------------------------------------------------------------


class Delayed(nn.Module):
    """Copies what it sees into a buffer, past autograd, after some batches."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.layer, self.start = nn.Linear(6, 2), start
        self.register_buffer("seen", torch.zeros(6))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls >= self.start:
            self.seen.data.copy_(x.mean(0))
        return self.layer(x)


def by_hand(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def test_a_buffer_written_past_autograd_is_found_at_the_next_look() -> None:
    with pytest.raises(CaptureError, match="'seen' was changed by the private batch"):
        loop(by_hand, epochs=4, module=Delayed(start=5))


def test_even_if_the_model_was_rehearsed_meanwhile() -> None:
    """In a mode that is new, at the very step: rehearsals write to the buffer and put it back."""
    engine, model, optimizer, loader = setup(module=Delayed(start=3))
    with pytest.raises(CaptureError, match="'seen' was changed by the private batch"):
        for number, (x, y) in enumerate(loader):
            model.train(number < 2)
            optimizer.zero_grad()
            by_hand(model, x, y).backward()
            optimizer.step()
            engine.state_dict()
    assert number == 2


def test_or_when_something_is_saved_or_certified(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpspan.model.guard.fresh_seed", lambda: 1)  # not at a random step before
    engine, model, optimizer, loader = setup(engine=PrivacyEngine(), module=Delayed(start=3))
    for number, (x, y) in enumerate(loader):
        if number < 3:
            optimizer.zero_grad()
            by_hand(model, x, y).backward()
            optimizer.step()
    with pytest.raises(CaptureError, match="'seen' was changed"):
        engine.state_dict()
    with pytest.raises(CaptureError, match="'seen' was changed"):
        engine.save_checkpoint(tmp_path / "a", module=model)
    document = engine.certificate(1e-5)
    assert not document["private"]
    assert any("'seen' was changed" in reason for reason in document["not_private_because"])
    engine.detach()
    assert not engine.certificate(1e-5)["private"]


def test_or_at_a_random_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpspan.model.guard.fresh_seed", lambda: _RARELY)
    engine, model, optimizer, loader = setup(module=Delayed(start=3))
    with pytest.raises(CaptureError, match="'seen' was changed"):
        train(model, optimizer, loader)
    assert engine.ledger.steps == 2


def test_what_a_refused_batch_has_left_behind_stays_refused() -> None:
    class FromData(nn.Module):
        """Initialises itself from the first batch."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.mean = nn.Linear(6, 2), nn.Parameter(torch.zeros(6))
            self.mean.requires_grad_(False)
            self.register_buffer("ready", torch.tensor(False))

        def forward(self, x: Tensor) -> Tensor:
            if not self.ready and torch.is_grad_enabled():
                self.mean.data.copy_(x.detach().mean(0))
                self.ready.fill_(True)
            return self.layer(x)

    engine, model, optimizer, loader = setup(module=FromData())
    for _ in range(2):
        with pytest.raises(CaptureError, match="'mean' was changed"):
            train(model, optimizer, loader)
    assert engine.ledger.steps == 0


# -- inputs that may be a batch or not -----------------------------------------------------------


class Relative(nn.Module):
    """A bias for every pair of places, looked up with ids of shape (T, T)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.bias = nn.Embedding(5, 4), nn.Embedding(11, 1)
        self.head = nn.Linear(4, 2)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        bias = self.bias(places[:, None] - places[None] + 5)[..., 0]
        x = self.tokens(tokens) * mask[..., None]
        return self.head((bias.softmax(1) @ x).tanh().mean(1))


@pytest.mark.parametrize("square", [True, False])
def test_a_bias_by_places_is_exact_even_if_as_many_as_samples(square: bool) -> None:
    g = torch.Generator().manual_seed(0)
    n = 6
    tokens, y = torch.randint(5, (n, n), generator=g), torch.arange(n) % 2
    mask = torch.ones(n, n) if square else torch.ones(n, 1).expand(n, n)
    model = Relative()
    rows = alone(lambda x, m, y: F.cross_entropy(model(x, m), y), model, tokens, mask, y)
    engine, model, optimizer, private = setup(
        PrivacyEngine(accountant="rdp"),
        module=model,
        data_loader=DataLoader(TensorDataset(tokens, mask, y), batch_size=n),
        noise_multiplier=1e-9,
        sample_rate=1.0,
        expected_batch_size=1.0,
    )
    for batch in private:
        F.cross_entropy(model(*batch[:2]), batch[2]).backward()
        optimizer.step()
    released = torch.cat([p.grad.flatten() for p in model.parameters()])
    clipped = rows * (1 / rows.norm(dim=1, keepdim=True)).clamp(max=1)
    assert torch.allclose(released, clipped.sum(0), atol=1e-4)
    assert engine.ledger.steps == 1


def alone(loss: Callable[..., Tensor], model: nn.Module, *batch: Tensor) -> Tensor:
    """The gradients of one sample after the other, as rows."""
    parameters = list(model.parameters())
    rows = []
    for i in range(len(batch[0])):
        found = torch.autograd.grad(loss(*(x[i : i + 1] for x in batch)), parameters)
        rows.append(torch.cat([g.flatten() for g in found]))
    return torch.stack(rows)


class Causal(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.dropout(mask @ self.inner(x).tanh()).tanh().mean(1))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_mask_as_large_as_the_batch_is_not_taken_for_one(dropout: float) -> None:
    n = 6
    x = torch.randn(n, n, 4, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, torch.arange(n) % 2), batch_size=n)
    mask = torch.ones(n, n).tril()
    engine = loop(
        lambda m, x, y: F.cross_entropy(m(x, mask), y),
        epochs=4,
        module=Causal(dropout),
        data_loader=loader,
    )
    assert engine.ledger.steps == 4
    assert told(engine) == []


# -- per_sample_gradients ------------------------------------------------------------------------


class Second(nn.Module):
    """Works on the batch in the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x.transpose(0, 1)).tanh().mean(0))


class Places(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places, self.head = nn.Embedding(5, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x + self.places(torch.arange(x.shape[1]))).tanh().mean(1))


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


@pytest.mark.parametrize("kind", [Second, Places])
def test_rows_are_the_samples_whatever_else_is_as_long(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    x, y, model = torch.randn(5, 5, 3), torch.arange(5) % 2, kind()
    expected = alone(lambda x, y: losses(model, x, y).sum(), model, x, y)
    J = dpspan.per_sample_gradients(model, losses, x, y)
    assert torch.allclose(J.matrix(), expected, atol=1e-5)


class MeanTaken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0))


def test_rows_that_are_not_the_samples() -> None:
    x, y = torch.randn(5, 3), torch.arange(5) % 2
    with pytest.raises(UnsupportedModule, match="depends on the other samples"):
        dpspan.per_sample_gradients(MeanTaken(), losses, x, y)
    dpspan.per_sample_gradients(MeanTaken(), losses, x, y, check=False)


def test_the_check_of_rows_takes_no_random_numbers_and_no_notice_of_dropout() -> None:
    network = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    x, y = torch.randn(5, 3), torch.arange(5) % 2
    matrices, after = [], []
    for check in (True, False):
        torch.manual_seed(0)
        matrices.append(dpspan.per_sample_gradients(network, losses, x, y, check=check).matrix())
        after.append(torch.rand(3))
    assert torch.equal(*matrices)
    assert torch.equal(*after)


# -- other weights, other optimizers -------------------------------------------------------------


def test_copies_do_not_train_on_the_private_loader() -> None:
    engine, model, optimizer, loader = setup()
    twin, other = copy.deepcopy((model, optimizer))
    with pytest.raises(CaptureError, match="A copy of the private model was called"):
        train(twin, other, loader)
    for x, _ in loader:  # a teacher, say
        target = copy.deepcopy(model).requires_grad_(False)(x).softmax(1)
        with torch.no_grad():
            target = 0.5 * target + 0.5 * copy.deepcopy(twin)(x).softmax(1)
        optimizer.zero_grad()
        F.cross_entropy(model(x), target).backward()
        optimizer.step()
    assert engine.ledger.steps == 4
    x, y = data().tensors
    F.cross_entropy(twin(x), y).backward()  # on other data, between steps


def test_an_epoch_without_a_private_step_is_put_on_record() -> None:
    engine, *_, loader = setup()
    other = nn.Linear(6, 2)
    train(other, torch.optim.SGD(other.parameters(), lr=0.1), loader)
    with pytest.warns(UserWarning, match="without one private step"):
        assert any("without one private step" in warning for warning in told(engine))


def load(model: nn.Module) -> None:
    model.load_state_dict({n: 0.5 * x for n, x in model.state_dict().items()})


def write(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(0.5 * parameter.data)


@pytest.mark.parametrize("change", [load, write])
def test_weights_changed_between_steps_are_put_on_record(change: Any) -> None:
    engine, model, optimizer, loader = setup()
    with pytest.warns(UserWarning, match="changed between private steps.*'0.weight' first"):
        for x, y in loader:
            optimizer.zero_grad()
            by_hand(model, x, y).backward()
            optimizer.step()
            change(model)
    assert any("between private steps" in warning for warning in told(engine))


def test_resuming_is_no_such_change(tmp_path: Any) -> None:
    engine, model, optimizer, loader = setup()
    train(model, optimizer, loader)
    engine.save_checkpoint(tmp_path / "a", module=model, optimizer=optimizer)
    engine, model, optimizer, loader = setup()
    train(model, optimizer, loader)
    engine.load_checkpoint(tmp_path / "a", module=model, optimizer=optimizer)
    train(model, optimizer, loader)
    assert told(engine) == []


def test_the_certificate_names_its_weights() -> None:
    engine, model, optimizer, loader = setup()
    train(model, optimizer, loader)
    digest = engine.certificate(1e-5)["training"]["weights_sha256"]
    assert digest == weights_sha256(model.state_dict())
    assert digest != weights_sha256({n: x + 1 for n, x in model.state_dict().items()})
    assert digest != weights_sha256({f"a{n}": x for n, x in model.state_dict().items()})
    engine.detach()
    load(model)
    assert engine.certificate(1e-5)["training"]["weights_sha256"] == digest
    assert told(engine) == []


def test_digests_of_weights_of_every_type() -> None:
    for x in (torch.tensor(2.0), torch.ones(2, 3).T, torch.ones(3, dtype=torch.bfloat16)):
        assert weights_sha256({"a": x}) == weights_sha256({"a": x.clone()})
        assert weights_sha256({"a": x}) != weights_sha256({"a": x * 2})
    assert weights_sha256({"weight": torch.zeros(2)}).startswith("0b15b00b")  # as in 0.1
    flags = torch.tensor([True, False])
    assert weights_sha256({"a": flags}) != weights_sha256({"a": ~flags})


def test_the_optimizer_does_not_see_the_loss() -> None:
    seen = []

    class Polyak(torch.optim.Optimizer):
        """Its step would be the loss."""

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any) -> None:  # type: ignore[override]
            seen.append(float(closure()))

    model = nn.Linear(6, 2)
    engine, model, optimizer, loader = setup(module=model, optimizer=Polyak(model.parameters()))
    for x, y in loader:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = by_hand(model, x, y)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert all(math.isnan(value) for value in seen)
    assert len(seen) == engine.ledger.steps == 4
