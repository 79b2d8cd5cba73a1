"""Ways around the clip, the noise or the ledger that ordinary loops and models find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import dpspan
from dpspan import CaptureError, PrivacyEngine
from dpspan.accounting.promises import Budget
from helpers.training import data, network, private_with_epsilon, setup, train, weights


def test_one_sample_at_a_time_is_refused() -> None:
    """A batch of one must not be taken for an input that all samples share."""
    for pick in (lambda x: x[:1], lambda x: x[x[:, 0] == x[:, 0].max()]):
        engine, model, optimizer, loader = setup()
        with pytest.raises(CaptureError, match=r"saw 1 samples, the batch has"):
            for x, _ in loader:
                model(pick(x)).sum().backward()
                optimizer.step()
        assert engine.ledger.steps == 0


def test_checks_that_failed_fail_again() -> None:
    class Centre(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    engine, model, optimizer, loader = setup(module=nn.Sequential(nn.Linear(6, 2), Centre()))
    for _ in range(2):
        with pytest.raises(dpspan.UnsupportedModule):
            train(model, optimizer, loader)

    class Contrast(nn.Module):
        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return (output - output.mean(0)).square().mean()

    criterion = Contrast()
    other, model, optimizer, loader = setup(criterion=criterion)
    for _ in range(2):
        with pytest.raises(ValueError, match="mixes samples"):
            for x, y in loader:
                criterion(model(x), y).backward()
                optimizer.step()
    assert engine.ledger.steps == other.ledger.steps == 0


def test_rolling_back_does_not_make_a_partition_free() -> None:
    engine, model, optimizer, loader = setup(poisson_sampling=False)
    train(model, optimizer, loader)
    for _ in range(3):
        state = engine.state_dict()
        train(model, optimizer, loader)
        state["ledger"] = engine.state_dict()["ledger"]
        engine.load_state_dict(state)
    assert engine.ledger.steps == 4


def test_autocast_around_the_step_changes_nothing() -> None:
    _, plain, optimizer, loader = setup()
    train(plain, optimizer, loader)
    _, model, optimizer, loader = setup()
    for x, y in loader:
        optimizer.zero_grad()
        nn.CrossEntropyLoss()(model(x), y).backward()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            optimizer.step()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    assert torch.allclose(weights(model), weights(plain), atol=1e-6)


class TokenModel(nn.Module):
    """Returns its own loss: a mean over all tokens that are not ignored mixes samples."""

    def __init__(self, *, per_sample: bool) -> None:
        super().__init__()
        self.layer, self.per_sample = nn.Linear(6, 2), per_sample

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(self.layer(x), y, reduction="none")
        weights = (x[:, 0] > 0).float()
        if self.per_sample:
            return (losses * weights).mean()
        return (losses * weights).sum() / weights.sum().clamp(min=1)


@pytest.mark.parametrize("per_sample", [True, False])
def test_loss_inside_the_model(per_sample: bool) -> None:
    engine, model, optimizer, loader = setup(module=TokenModel(per_sample=per_sample))

    def loop() -> None:
        for x, y in loader:
            model(x, y).backward()
            optimizer.step()

    if per_sample:
        loop()
        assert engine.ledger.steps == 4
    else:
        with pytest.raises(dpspan.UnsupportedModule, match="mean of one loss per sample"):
            loop()


def test_ignored_labels_are_noticed_whenever_they_come_and_however_they_are_passed() -> None:
    criterion = nn.CrossEntropyLoss()
    setup(criterion=criterion)
    logits = torch.randn(8, 2, requires_grad=True)
    target = torch.zeros(8, dtype=torch.long)
    criterion(logits, target)
    target[0] = -100
    with pytest.raises(ValueError, match="mixes samples"):
        criterion(logits, target)
    with pytest.raises(ValueError, match="mixes samples"):
        criterion(input=logits, target=target)


@pytest.mark.parametrize("how", ["data", "frozen parameter"])
def test_private_averages_are_found_however_they_are_stored(how: str) -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))
            self.centre = nn.Parameter(torch.zeros(6), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            if how == "data":
                self.mean.data.lerp_(x.detach().mean(0), 0.5)
            else:
                with torch.no_grad():
                    self.centre.lerp_(x.mean(0), 0.5)
            return x

    engine, model, optimizer, loader = setup(module=nn.Sequential(Average(), nn.Linear(6, 2)))
    with pytest.raises(CaptureError, match="was changed by the private batch"):
        train(model, optimizer, loader)
    assert engine.ledger.steps == 0


class Keeper(nn.Module):
    """Keeps records where a saved model would carry them away."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(6, 2), torch.zeros(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.detach().clone()
        return self.layer(x)


def test_extra_state_is_refused() -> None:
    class Extra(Keeper):
        def get_extra_state(self) -> Tensor:
            return self.seen

    message = r"0 \(Extra\): its get_extra_state puts into state_dict.*remove that method"
    with pytest.raises(dpspan.UnsupportedModule, match=message):
        setup(module=nn.Sequential(Extra()))
    assigned = nn.Linear(6, 2)
    assigned.get_extra_state = lambda: torch.zeros(1)  # type: ignore[method-assign]
    with pytest.raises(dpspan.UnsupportedModule, match="get_extra_state"):
        setup(module=assigned)


def test_other_ways_into_the_saved_model_are_found() -> None:
    class Saved(Keeper):
        def _save_to_state_dict(self, destination: dict[str, Tensor], *rest: object) -> None:
            super()._save_to_state_dict(destination, *rest)  # type: ignore[arg-type]
            destination["seen"] = self.seen

    class Stash(Keeper):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "stash"):
                self.register_buffer("stash", x.detach().clone())
            return self.layer(x)

    for module, name in ((Saved(), "seen"), (Stash(), "stash")):
        engine, model, optimizer, loader = setup(module=module)
        with pytest.raises(CaptureError, match=f"'{name}' was changed by the private batch"):
            train(model, optimizer, loader)
        assert engine.ledger.steps == 0


def test_a_cache_that_does_not_depend_on_the_samples_may_be_made() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "places"):
                self.register_buffer("places", torch.arange(6.0))
            return self.layer(x + self.places)

    engine, model, optimizer, loader = setup(module=Positions())
    train(model, optimizer, loader)
    assert engine.ledger.steps == 4


def test_inputs_of_varying_length_are_put_on_record() -> None:
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.unsqueeze(2)).sum(1)

    engine, model, optimizer, loader = setup(module=Pool())
    with pytest.warns(UserWarning, match="shape of the inputs varies"):
        for number, (x, y) in enumerate(loader):
            nn.CrossEntropyLoss()(model(x[:, : 3 + number]), y).backward()
            optimizer.step()
    assert any("varies" in warning for warning in engine.certificate(1e-5)["warnings"])


def test_parts_called_one_by_one_are_put_on_record() -> None:
    engine, model, optimizer, loader = setup()
    with pytest.warns(UserWarning, match="not called as a whole"):
        for x, y in loader:
            nn.CrossEntropyLoss()(model[2](model[1](model[0](x))), y).backward()
            optimizer.step()
    assert engine.ledger.steps == 4


def test_a_single_layer_is_a_model() -> None:
    engine, model, optimizer, loader = setup(module=nn.Linear(6, 2))
    train(model, optimizer, loader)
    assert engine.ledger.steps == 4


def test_a_failed_start_leaves_no_budget_and_no_hooks() -> None:
    engine = PrivacyEngine()
    bad = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with pytest.raises(dpspan.UnsupportedModule):
        engine.make_private_with_epsilon(
            module=bad,
            optimizer=torch.optim.SGD(bad.parameters(), lr=0.1),
            data_loader=DataLoader(data(), batch_size=10),
            target_epsilon=8.0,
            target_delta=1e-5,
            epochs=1,
        )
    assert engine.ledger.budget is None
    private_with_epsilon(engine, target_epsilon=1.0)
    assert engine.ledger.budget == Budget(epsilon=1.0, delta=1e-5)
    with pytest.raises(ValueError, match="already has a budget"):
        private_with_epsilon(PrivacyEngine(ledger=engine.ledger), target_epsilon=2.0)


def test_a_model_or_optimizer_of_another_run_is_refused() -> None:
    first, model, optimizer, _ = setup()
    with pytest.raises(ValueError, match=r"belongs to another private run: call detach"):
        setup(module=model)
    first.detach()
    setup(module=model, optimizer=optimizer)


def test_objects_in_a_checkpoint_are_refused_when_saving(tmp_path: Path) -> None:
    engine, model, *_ = setup()
    with pytest.raises(ValueError, match="Cannot save checkpoint_dict"):
        engine.save_checkpoint(tmp_path / "a.pt", module=model, checkpoint_dict={"a": object})
    assert not list(tmp_path.iterdir())


def test_a_model_with_dropout_that_returns_its_loss_trains() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.dropout = nn.Linear(6, 2), nn.Dropout(0.3)

        def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.layer(self.dropout(x))
            return nn.functional.cross_entropy(logits, labels), logits

    engine, model, optimizer, loader = setup(module=WithLoss())
    for x, y in loader:
        model(x, labels=y)[0].backward()
        optimizer.step()
    assert engine.ledger.steps == 4


def test_an_epoch_left_between_backward_and_step_does_not_haunt_the_next() -> None:
    engine, model, optimizer, loader = setup()
    for x, y in loader:
        nn.CrossEntropyLoss()(model(x), y).backward()
        break
    train(model, optimizer, loader)
    assert engine.ledger.steps == 4


def test_nothing_is_handed_out_after_detach() -> None:
    engine, model, optimizer, loader = setup()
    train(model, optimizer, loader)
    engine.detach()
    with pytest.raises(RuntimeError, match="ended the private run"):
        train(model, optimizer, loader)


def test_a_step_counter_is_no_leak() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x

    engine, model, optimizer, loader = setup(module=nn.Sequential(Counting(), nn.Linear(6, 2)))
    train(model, optimizer, loader)
    assert int(model[0].calls) == engine.ledger.steps == 4


def test_a_counter_of_records_is_a_leak() -> None:
    """How many were drawn is private, and a buffer is saved with the model, without noise."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += len(x)
            return x

    _, model, optimizer, loader = setup(module=nn.Sequential(Counting(), nn.Linear(6, 2)))
    with pytest.raises(CaptureError, match=r"'0\.seen' was changed by the private batch"):
        train(model, optimizer, loader)


def test_flattened_tokens_are_cut_between_samples() -> None:
    """As many ignored tokens in every sample: the mean over tokens is a mean over samples."""
    criterion = nn.CrossEntropyLoss()
    embed = nn.Embedding(2, 3)
    _, model, optimizer, loader = setup(module=embed, criterion=criterion)
    for _, y in loader:
        tokens = y[:, None].repeat(1, 5)
        labels = tokens.clone()
        labels[:, 0] = -100
        criterion(model(tokens).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()


def test_a_criterion_may_return_more_than_the_loss() -> None:
    class Both(nn.Module):
        def forward(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            loss = nn.functional.cross_entropy(output, target)
            return loss, loss.detach()

    criterion = Both()
    _, model, optimizer, loader = setup(criterion=criterion)
    for x, y in loader:
        criterion(model(x), y)[0].backward()
        optimizer.step()


def test_a_batch_larger_than_the_dataset_is_the_dataset() -> None:
    loader = DataLoader(data(5), batch_size=64)
    engine, model, optimizer, loader = setup(data_loader=loader)
    assert train(model, optimizer, loader) == [5]
    assert engine.certificate(1e-5)["training"]["expected_batch_size"] == 5.0


class LateAverage(nn.Module):
    """Starts to keep a private average only after some batches."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.start, self.calls = start, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += torch.is_grad_enabled() and self.training
        if self.calls > self.start:
            self.mean.lerp_(x.detach().mean(0), 0.5)
        return x


def test_a_buffer_that_was_quiet_on_the_first_batch_is_still_watched() -> None:
    engine, model, optimizer, loader = setup(
        module=nn.Sequential(LateAverage(start=8), nn.Linear(6, 2))
    )
    with pytest.raises(CaptureError, match=r"'0\.mean' was changed by the private batch"):
        train(model, optimizer, loader, epochs=3)
    assert 0 < engine.ledger.steps < 12


def test_a_running_maximum_is_not_taken_for_a_counter() -> None:
    """Exchanging samples may leave a maximum as it is: it must differ on blank input too."""

    class Maximum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("most", torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            torch.maximum(self.most, x.detach().abs().amax(0), out=self.most)
            return x

    for seed in range(4):
        _, model, optimizer, loader = setup(
            engine=PrivacyEngine(debug_seed=seed),
            module=nn.Sequential(Maximum(), nn.Linear(6, 2)),
        )
        with pytest.raises(CaptureError, match=r"'0\.most' was changed"):
            train(model, optimizer, loader)


def test_a_rehearsal_that_cannot_be_compared_leaves_nothing_behind() -> None:
    rehearsed = []

    class Opaque(nn.Module):
        """Its output has no batch in front, so two runs cannot be compared."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 2)
            self.register_buffer("seen", torch.zeros(6))

        def forward(self, x: Tensor) -> list[Tensor]:
            rehearsed.append(True)
            if len(rehearsed) == 1:
                self.seen.copy_(x.detach().mean(0))
            return [self.layer(x).T]

    _, model, optimizer, loader = setup(module=Opaque())
    with pytest.warns(UserWarning, match="could not be checked"):
        for x, y in loader:
            nn.CrossEntropyLoss()(model(x)[0].T, y).backward()
            optimizer.step()
    assert not model.seen.any()


def outside() -> dict[str, tuple[nn.Module, Any]]:
    """Models, and losses in which something is trained that is no part of them."""
    layer, head, other = nn.Linear(6, 6), nn.Linear(2, 2), nn.Linear(6, 2)
    prompt = torch.zeros(6, requires_grad=True)
    holder = nn.Sequential(nn.Linear(6, 2))
    holder.temperature = torch.ones(2, requires_grad=True)  # type: ignore[assignment]
    return {
        "an encoder in front": (network(), lambda m, x: m(layer(x))),
        "a head behind": (network(), lambda m, x: head(m(x))),
        "another model": (network(), lambda m, x: m(x) + other(x)),
        "a tensor": (network(), lambda m, x: m(x + prompt)),
        "a tensor of the model that is no parameter": (holder, lambda m, x: m(x) * m.temperature),
    }


@pytest.mark.parametrize("name", outside())
@pytest.mark.parametrize("inside", [False, True])
def test_what_is_trained_outside_of_the_model_is_refused(name: str, inside: bool) -> None:
    """Its gradient would have neither clip nor noise."""
    model, call = outside()[name]
    engine, model, optimizer, loader = setup(
        module=model, criterion=nn.CrossEntropyLoss() if inside else None
    )
    with pytest.raises(CaptureError, match="no part of the private model"):
        for x, y in loader:
            nn.CrossEntropyLoss()(call(model, x), y).backward()
            optimizer.step()
    assert engine.ledger.steps == 0


def test_frozen_layers_outside_and_gradients_of_inputs_are_fine() -> None:
    encoder = nn.Linear(6, 6).requires_grad_(False)
    engine, model, optimizer, loader = setup()
    for x, y in loader:
        nn.CrossEntropyLoss()(model(encoder(x).requires_grad_()), y).backward()
        optimizer.step()
    assert engine.ledger.steps == 4
