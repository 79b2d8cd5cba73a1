"""The warm start: when it stops, what it uses, and that it leaves nothing behind."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dpspan.public.augmentation import RandomAffine
from dpspan.public.warm_start import WarmStart
from helpers.training import data, network, setup, weights

CRITERION = nn.CrossEntropyLoss()


def with_dropout() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))


def random_labels(n: int = 40) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    return torch.randn(n, 6, generator=g), torch.randint(2, (n,), generator=g)


def count_samples(model: nn.Module) -> None:
    """A buffer that every forward changes."""
    model.register_buffer("seen", torch.zeros(()))

    def add(module: nn.Module, args: tuple[Tensor]) -> None:
        module.seen.add_(len(args[0]))

    model.register_forward_pre_hook(add)


def cross_entropy(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(inputs), labels, reduction="none")


def worse_the_better_it_fits(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Whatever training gains, the held-out samples lose."""
    losses = cross_entropy(model, inputs, labels)
    return losses if model.training else -losses


class Calls:
    """A loss that writes down what it was asked, and may fail."""

    def __init__(self, fail_at: int = -1, error: type[BaseException] = RuntimeError) -> None:
        self.training: list[Tensor] = []
        self.evaluation: list[Tensor] = []
        self.fail_at, self.error = fail_at, error

    def __call__(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        (self.training if model.training else self.evaluation).append(inputs)
        if len(self.training) == self.fail_at:
            raise self.error
        return cross_entropy(model, inputs, labels)


def rows(pieces: list[Tensor]) -> set[tuple[float, ...]]:
    return {tuple(row) for piece in pieces for row in piece.tolist()}


# -- when it stops --------------------------------------------------------------------------------


def test_it_learns_what_can_be_learnt() -> None:
    model = network()
    result = WarmStart(data=data(200), learning_rate=1e-2, max_epochs=60).run(model, CRITERION)
    assert min(result.held_out) < 0.5 * result.held_out[0]
    assert min(result.held_out) == result.held_out[result.epochs]
    x = torch.randn(1000, 6, generator=torch.Generator().manual_seed(9))
    right = (model(x).argmax(1) == (x.sum(1) > 0)).float().mean()
    assert right > 0.93


def test_random_labels_stop_early() -> None:
    start = WarmStart(data=random_labels(), patience=7, learning_rate=1e-2)
    result = start.run(network(), CRITERION)
    assert len(result.held_out) == 1 + result.epochs + 7 < start.max_epochs
    assert result.held_out[-1] > min(result.held_out)


def test_training_that_does_not_help_leaves_the_model_as_it_was() -> None:
    model = network()
    count_samples(model)
    before = weights(model)
    start = WarmStart(data=data(), loss=worse_the_better_it_fits, learning_rate=0.1, patience=3)
    result = start.run(model, None)
    assert result.epochs == 0
    assert len(result.held_out) == 4
    assert min(result.held_out) == result.held_out[0]
    assert torch.equal(weights(model), before)
    assert model.seen == 0


def test_a_later_gain_within_the_patience_is_found() -> None:
    """Held-out losses 5, 6, 7, 4, 8, 9, 10: the fourth is the best, and patience 3 gets there."""
    losses = iter([5.0, 6.0, 7.0, 4.0, 8.0, 9.0, 10.0])

    def prescribed(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        own = cross_entropy(model, inputs, labels)
        return own if model.training else torch.full_like(own, next(losses))

    start = WarmStart(data=data(), loss=prescribed, patience=3)
    result = start.run(network(), None)
    assert result == (3, (5.0, 6.0, 7.0, 4.0, 8.0, 9.0, 10.0))


def test_max_epochs_ends_the_search() -> None:
    result = WarmStart(data=data(), max_epochs=4).run(network(), CRITERION)
    assert len(result.held_out) == 5


@pytest.mark.parametrize("samples", [3, 40])
def test_nothing_held_out_trains_for_exactly_max_epochs(samples: int) -> None:
    calls = Calls()
    start = WarmStart(data=data(samples), validation=0, max_epochs=5, loss=calls)
    result = start.run(network(), None)
    assert result == (5, ())
    assert len(calls.training) == 5
    assert not calls.evaluation


# -- what it uses ---------------------------------------------------------------------------------


def test_all_samples_for_the_epochs_found_from_the_weights_it_had() -> None:
    model, twin = with_dropout(), with_dropout()
    dataset = data(110)
    start = WarmStart(data=dataset, max_epochs=9, learning_rate=1e-2, weight_decay=0.1, seed=4)
    epochs = start.run(model, CRITERION).epochs
    assert epochs > 1

    x, y = dataset.tensors
    optimizer = torch.optim.Adam(twin.parameters(), lr=1e-2, weight_decay=0.1)
    shuffle = torch.Generator().manual_seed(5)
    with torch.random.fork_rng([]):
        torch.manual_seed(4)  # the dropout's
        for _ in range(epochs):
            for batch in torch.randperm(110, generator=shuffle).tensor_split(3):
                batch = batch.sort().values
                optimizer.zero_grad()
                CRITERION(twin(x[batch]), y[batch]).backward()
                optimizer.step()
    assert torch.allclose(weights(model), weights(twin), atol=1e-6)


def test_held_out_samples_only_decide_when_to_stop() -> None:
    """In the search they are never trained on; afterwards they are."""
    calls = Calls()
    WarmStart(data=data(), max_epochs=1, batch_size=8, loss=calls).run(network(), None)
    search, final = calls.training[:4], calls.training[4:]  # 32 samples in 4 batches, 40 in 5
    assert len(rows(search)) == 32
    assert len(rows(calls.evaluation)) == 8
    assert not rows(search) & rows(calls.evaluation)
    assert rows(final) == rows(search) | rows(calls.evaluation)


def test_augmentation_changes_what_is_trained_on_and_nothing_else() -> None:
    calls = Calls()
    start = WarmStart(
        data=random_labels(), loss=calls, max_epochs=2, augment=lambda x: x + 100 * torch.rand(())
    )
    start.run(network(), None)
    original = rows([random_labels()[0]])
    assert not rows(calls.training) & original
    assert rows(calls.evaluation) <= original
    assert len(rows(calls.training)) > len(original)  # other draws for every minibatch


def test_the_same_seed_augments_alike() -> None:
    data_ = random_labels()
    seen = []
    for seed in (0, 0, 1):
        calls = Calls()
        WarmStart(
            data=data_,
            loss=calls,
            max_epochs=1,
            validation=0,
            batch_size=40,
            augment=lambda x: x + torch.rand(()),
            seed=seed,
        ).run(network(), None)
        seen.append(rows(calls.training))
    assert seen[0] == seen[1] != seen[2]


def test_minibatches_are_of_even_size_and_in_a_new_order() -> None:
    calls = Calls()
    start = WarmStart(data=data(), max_epochs=2, batch_size=13, validation=0, loss=calls)
    start.run(network(), None)
    assert [len(x) for x in calls.training] == [10] * 8
    assert rows(calls.training[:4]) == rows(calls.training[4:])
    assert rows(calls.training[:1]) != rows(calls.training[4:5])


def test_held_out_loss_is_taken_in_evaluation_mode_over_all_pieces() -> None:
    model = with_dropout()
    twin = copy.deepcopy(model).eval()
    calls = Calls()
    result = WarmStart(data=data(), batch_size=3, max_epochs=1, loss=calls).run(model, None)
    x = torch.cat(calls.evaluation[:3])
    assert len(x) == 8
    expected = CRITERION(twin(x), (x.sum(1) > 0).long()).item()
    assert result.held_out[0] == pytest.approx(expected, rel=1e-6)


def test_the_split_is_drawn_by_the_seed() -> None:
    held_out = []
    for seed in (0, 0, 1):
        calls = Calls()
        WarmStart(data=data(), max_epochs=1, loss=calls, seed=seed).run(network(), None)
        held_out.append(rows(calls.evaluation))
    assert held_out[0] == held_out[1] != held_out[2]


class MeanOverTime(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.unsqueeze(-1)).mean(1)


def test_samples_of_different_lengths_share_a_minibatch() -> None:
    """Six of one length and four of another, in one step: every sample counts the same."""
    lengths = [3] * 6 + [5] * 4
    records = [(torch.arange(n) - i / 2, i % 2) for i, n in enumerate(lengths)]
    loader = DataLoader(records, batch_size=2)
    model, twin = MeanOverTime(), MeanOverTime()
    start = WarmStart(data=loader, validation=0, max_epochs=3, learning_rate=0.1)
    start.run(model, CRITERION)
    optimizer = torch.optim.Adam(twin.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        losses = [CRITERION(twin(x[None]), torch.tensor([y])) for x, y in records]
        torch.stack(losses).mean().backward()
        optimizer.step()
    assert torch.allclose(weights(model), weights(twin), atol=1e-5)


def test_frozen_parameters_do_not_move() -> None:
    model = network()
    model[0].requires_grad_(False)
    frozen, moving = model[0].weight.clone(), model[2].weight.clone()
    WarmStart(data=data(), validation=0, max_epochs=3, weight_decay=0.5).run(model, CRITERION)
    assert torch.equal(model[0].weight, frozen)
    assert not torch.equal(model[2].weight, moving)


def test_buffers_end_as_training_on_all_samples_left_them() -> None:
    """Not with what the search added."""
    model = network()
    count_samples(model)
    result = WarmStart(data=data(), max_epochs=3).run(model, CRITERION)
    assert model.seen == 40 * result.epochs > 0


class Output:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, *, left: Tensor, right: Tensor) -> Output:
        return Output(self.inner(torch.cat([left, right], 1)))


def test_mappings_and_logits() -> None:
    x, y = data().tensors
    plain, keywords = network(), Keywords()
    WarmStart(data=(x, y), max_epochs=3).run(plain, CRITERION)
    halves = {"left": x[:, :3], "right": x[:, 3:]}
    WarmStart(data=(halves, y), max_epochs=3).run(keywords, CRITERION)
    assert torch.allclose(weights(plain), weights(keywords))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_criterion_is_asked_per_sample_whatever_its_reduction(reduction: str) -> None:
    models = network(), network()
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    WarmStart(data=data(), max_epochs=3).run(models[0], criterion)
    WarmStart(data=data(), max_epochs=3, loss=cross_entropy).run(models[1], None)
    assert torch.allclose(weights(models[0]), weights(models[1]), atol=1e-6)
    assert criterion.reduction == reduction


def test_own_loss_goes_before_the_criterion() -> None:
    calls = Calls()
    WarmStart(data=data(), max_epochs=1, loss=calls).run(network(), CRITERION)
    assert calls.training


@pytest.mark.parametrize(
    "source",
    [data(), DataLoader(data(), batch_size=7), data().tensors],
    ids=["dataset", "loader", "tensors"],
)
def test_any_source(source: Any) -> None:
    models = network(), network()
    WarmStart(data=source, max_epochs=2).run(models[0], CRITERION)
    WarmStart(data=data(), max_epochs=2).run(models[1], CRITERION)
    assert torch.equal(weights(models[0]), weights(models[1]))


# -- what it leaves behind ------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_model() -> None:
    models = [with_dropout() for _ in range(3)]
    for model, seed in zip(models, (5, 5, 6), strict=True):
        torch.rand(1)  # whatever happened before
        WarmStart(data=data(), max_epochs=3, seed=seed).run(model, CRITERION)
    assert torch.equal(weights(models[0]), weights(models[1]))
    assert not torch.equal(weights(models[0]), weights(models[2]))


@pytest.mark.parametrize("fail_at", [-1, 3])
def test_torchs_random_state_is_not_touched(fail_at: int) -> None:
    model = with_dropout()
    state = torch.get_rng_state()
    loader = DataLoader(data(), batch_size=10, shuffle=True)
    start = WarmStart(data=loader, max_epochs=3, batch_size=5, loss=Calls(fail_at))
    try:
        start.run(model, None)
    except RuntimeError:
        assert fail_at == 3
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("fail_at", [1, 6, 18])  # first batch, second epoch, after the search
def test_after_an_error_the_model_is_as_it_was(fail_at: int, error: type[BaseException]) -> None:
    model = network().eval()
    count_samples(model)
    model[0].train()
    before = weights(model)
    start = WarmStart(data=data(), max_epochs=4, batch_size=8, loss=Calls(fail_at, error))
    with pytest.raises(error):
        start.run(model, None)
    assert torch.equal(weights(model), before)
    assert model.seen == 0
    assert [m.training for m in model.modules()] == [False, True, False, False]
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("validation", [0, 0.2])
def test_divergence_says_so_and_restores_the_model(validation: float) -> None:
    model = with_dropout()  # no tanh to keep the logits finite
    before = weights(model)
    start = WarmStart(data=data(), learning_rate=1e30, validation=validation, max_epochs=10)
    with pytest.raises(ValueError, match="Lower learning_rate"):
        start.run(model, CRITERION)
    assert torch.equal(weights(model), before)


def test_a_finite_loss_with_a_gradient_that_is_not_is_divergence() -> None:
    def root_at_zero(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        return (0 * model(inputs)).abs().sqrt().sum(1)

    model = network()
    before = weights(model)
    with pytest.raises(ValueError, match="the weights are no longer finite"):
        WarmStart(data=data(), loss=root_at_zero, validation=0, max_epochs=1).run(model, None)
    assert torch.equal(weights(model), before)


def test_one_infinite_loss_is_divergence_even_if_its_gradient_is_finite() -> None:
    def infinite(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(model, inputs, labels) + math.inf * (inputs == inputs.max()).any(1)

    with pytest.raises(ValueError, match="Lower learning_rate"):
        WarmStart(data=data(), loss=infinite, validation=0, max_epochs=1).run(network(), None)


def test_bad_weights_are_not_blamed_on_the_learning_rate() -> None:
    model = network()
    nn.init.constant_(model[0].bias, math.nan)
    with pytest.raises(ValueError, match="even before the warm start"):
        WarmStart(data=data()).run(model, CRITERION)


@pytest.mark.parametrize("training", [True, False])
def test_modes_are_as_found_and_no_gradient_stays(training: bool) -> None:
    model = network().train(training)
    model[1].train(not training)
    CRITERION(model(torch.ones(1, 6)), torch.zeros(1).long()).backward()
    twin = network()
    for m in (model, twin):
        WarmStart(data=data(), max_epochs=2).run(m, CRITERION)
    assert [m.training for m in model] == [training, not training, training]
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(weights(model), weights(twin))  # nor did the old gradient take part


def test_it_trains_under_no_grad_too() -> None:
    model = network()
    before = weights(model)
    with torch.no_grad():
        WarmStart(data=data(), validation=0, max_epochs=1).run(model, CRITERION)
    assert not torch.equal(weights(model), before)


# -- what it says ---------------------------------------------------------------------------------


def test_descriptions_are_plain_data() -> None:
    start = WarmStart(data=data(), max_epochs=2, loss=cross_entropy)
    described = json.loads(json.dumps(start.describe()))
    assert described == {
        "max_epochs": 2, "batch_size": 50, "learning_rate": 1e-3, "weight_decay": 0.0,
        "validation": 0.2, "patience": 20, "loss": "cross_entropy", "seed": 0,
        "augment": None,
    }  # fmt: skip
    assert WarmStart(data=data()).describe()["loss"] is None
    assert WarmStart(data=data(), loss=Calls()).describe()["loss"] == "Calls"
    augment = RandomAffine(degrees=5.0)
    assert WarmStart(data=data(), augment=augment).describe()["augment"] == repr(augment)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("max_epochs", 0), ("max_epochs", 1.5), ("batch_size", 0), ("patience", 0),
        ("learning_rate", 0.0), ("learning_rate", math.nan), ("learning_rate", math.inf),
        ("weight_decay", -1.0), ("weight_decay", math.inf), ("validation", 1.0),
        ("validation", -0.1), ("validation", True), ("seed", -1), ("seed", 0.5), ("loss", "mean"),
        ("augment", "mirror"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(argument: str, value: Any) -> None:
    with pytest.raises(ValueError, match=argument):
        WarmStart(**{"data": data(), argument: value})


def test_unlabelled_data_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected labelled public data"):
        WarmStart(data=data().tensors[0]).run(network(), CRITERION)


def test_neither_criterion_nor_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected a criterion or a loss"):
        WarmStart(data=data()).run(network(), None)


def test_too_few_samples_to_split_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 5 .* got 4.* validation=0"):
        WarmStart(data=data(4)).run(network(), CRITERION)
    assert WarmStart(data=data(5), max_epochs=1).run(network(), CRITERION).held_out


@pytest.mark.parametrize("label", [2, -1])
def test_labels_that_the_model_does_not_have_are_named(label: int) -> None:
    x, y = data().tensors
    y = y.clone()
    y[17] = label
    with pytest.raises(ValueError, match=rf"from 0 to 1, .* got {label} at sample 17"):
        WarmStart(data=(x, y)).run(network(), CRITERION)


def test_ignored_labels_and_probabilities_are_not_refused() -> None:
    x, y = data().tensors
    probabilities = nn.functional.one_hot(y).float()
    WarmStart(data=(x, probabilities), max_epochs=1).run(network(), CRITERION)
    y = y.clone()
    y[17] = -100
    WarmStart(data=(x, y), max_epochs=1).run(network(), CRITERION)


def test_a_loss_that_is_not_per_sample_is_refused() -> None:
    def mean(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(model, inputs, labels).mean()

    with pytest.raises(ValueError, match=r"one loss per sample, shape \(8,\), got \(\)"):
        WarmStart(data=data(), loss=mean).run(network(), None)


def test_a_criterion_without_reduction_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Identity has no `reduction`.* WarmStart\(loss="):
        WarmStart(data=data()).run(network(), nn.Identity())


def test_labels_that_broadcast_are_refused() -> None:
    """Outputs (n, 1) minus labels (n,) is every sample against every label."""
    x, y = data().tensors
    model = nn.Sequential(nn.Linear(6, 1))
    broadcast = pytest.warns(UserWarning, match="target size")
    with broadcast, pytest.raises(ValueError, match=r"shape \(8, 8\).* \(8, 1\)"):
        WarmStart(data=(x, y.float())).run(model, nn.MSELoss())
    WarmStart(data=(x, y.float()[:, None]), max_epochs=1).run(model, nn.MSELoss())


class ByToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 12)

    def forward(self, x: Tensor) -> Output:
        return Output(self.inner(x).view(-1, 4, 3))


def test_scores_by_token_need_a_loss() -> None:
    with pytest.raises(ValueError, match=r"returns shape \(8, 4, 3\).* for 8 .*WarmStart\(loss="):
        WarmStart(data=data()).run(ByToken(), CRITERION)


def test_the_hooks_of_the_criterion_are_not_for_public_data() -> None:
    criterion = nn.CrossEntropyLoss()
    criterion.register_forward_hook(lambda *_: pytest.fail("called"))
    WarmStart(data=data(), max_epochs=1).run(network(), criterion)


def test_a_frozen_model_is_refused() -> None:
    with pytest.raises(ValueError, match="unfreeze"):
        WarmStart(data=data()).run(network().requires_grad_(False), CRITERION)


def test_a_model_in_a_private_run_is_refused() -> None:
    engine, model, *_ = setup()
    with pytest.raises(ValueError, match="before make_private"):
        WarmStart(data=data()).run(model, CRITERION)
    engine.detach()
    WarmStart(data=data(), max_epochs=1).run(model, CRITERION)


def test_the_data_is_neither_printed_nor_compared() -> None:
    start = WarmStart(data=data().tensors)
    assert "tensor" not in repr(start)
    assert start != WarmStart(data=start.data)
