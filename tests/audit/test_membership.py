"""Membership inference: that it finds what leaks, and no leak where there is none."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from dpspan import PrivacyEngine
from dpspan.audit import MembershipResult, membership_inference
from dpspan.audit.membership import balanced_rate, best_threshold, tpr_at_1_percent_fpr
from helpers.training import data, network, setup, train, weights

CLASSES = 5


def random_labels(n: int, seed: int) -> TensorDataset:
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(n, 10, generator=g), torch.randint(CLASSES, (n,), generator=g))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, CLASSES))


@pytest.fixture(scope="module")
def overfit() -> nn.Module:
    """A model that knows its 60 training samples by heart, in training mode."""
    model = mlp()
    model.eval()  # without dropout
    inputs, labels = random_labels(60, seed=1).tensors
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(300):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    assert loss < 0.01
    return model.train()


def given(model: nn.Module, inputs: Tensor, labels: Any) -> Tensor:
    """The samples are their own losses."""
    return inputs


def attack_losses(members: Any, non_members: Any, **arguments: Any) -> MembershipResult:
    both = (torch.as_tensor(np.asarray(losses, float)) for losses in (members, non_members))
    return membership_inference(nn.Identity(), *both, loss=given, **arguments)


def numbers(result: MembershipResult) -> list[float]:
    low, high = result.confidence
    rates = [result.success_rate, low, high, result.auc, result.tpr_at_1_percent_fpr]
    return [*rates, result.threshold, result.members, result.non_members]


# -- what it finds --------------------------------------------------------------------------------


def test_a_model_that_overfits_gives_its_members_away(overfit: nn.Module) -> None:
    result = membership_inference(overfit, random_labels(60, 1), random_labels(60, 2))
    assert result.success_rate > 0.8
    assert result.auc > 0.85
    assert result.confidence[0] > 0.6
    assert (result.members, result.non_members) == (60, 60)


def test_the_smaller_loss_is_the_members() -> None:
    result = attack_losses(np.linspace(0, 1, 300), np.linspace(2, 3, 300))
    assert result.success_rate == result.auc == result.tpr_at_1_percent_fpr == 1
    assert 1 < result.threshold < 2
    assert result.confidence[0] < 1
    assert result.confidence[1] == pytest.approx(1)


def test_members_of_larger_loss_are_not_found() -> None:
    result = attack_losses(np.linspace(2, 3, 300), np.linspace(0, 1, 300))
    assert result.success_rate == 0.5
    assert result.auc == result.tpr_at_1_percent_fpr == 0
    assert result.threshold == -math.inf


@pytest.mark.parametrize("seed", range(5))
def test_an_untrained_model_gives_nothing_away(seed: int) -> None:
    arguments = {"seed": seed}
    result = membership_inference(mlp(), random_labels(400, 1), random_labels(400, 2), **arguments)
    low, high = result.confidence
    assert low <= 0.5 <= high
    assert high - low < 0.2
    assert abs(result.auc - 0.5) < 0.1


def test_the_threshold_knows_nothing_of_the_half_that_is_evaluated() -> None:
    """Losses of pure chance: a threshold fitted to the evaluated half would never do badly."""
    random = np.random.default_rng(0)
    rates = [
        attack_losses(random.random(40), random.random(40), seed=seed).success_rate
        for seed in range(300)
    ]
    assert abs(np.mean(rates) - 0.5) < 0.015  # fitted on the evaluated half 0.58, on both 0.56
    assert np.mean(np.less(rates, 0.5)) > 0.3


def test_auc_and_tpr_are_of_the_half_that_is_evaluated() -> None:
    """Over all samples they would not depend on the split."""
    random = np.random.default_rng(0)
    members, others = random.normal(0, 1, 300), random.normal(1, 1, 300)
    results = [attack_losses(members, others, seed=seed) for seed in range(10)]
    assert len({result.auc for result in results}) > 5
    assert len({result.tpr_at_1_percent_fpr for result in results}) > 1
    assert np.mean([r.auc for r in results]) == pytest.approx(norm.cdf(1 / math.sqrt(2)), abs=0.04)


def test_the_interval_covers_the_true_rate_95_times_in_100() -> None:
    random = np.random.default_rng(0)
    covered = []
    for seed in range(400):
        result = attack_losses(random.normal(0, 1, 60), random.normal(1, 1, 200), seed=seed)
        tpr, fpr = norm.cdf(result.threshold), norm.cdf(result.threshold - 1)
        covered.append(result.confidence[0] <= (1 + tpr - fpr) / 2 <= result.confidence[1])
    assert 0.93 <= np.mean(covered) <= 0.98


@pytest.mark.parametrize("sizes", [(30, 1000), (1000, 30), (21, 24)])
def test_a_larger_set_counts_no_more_than_the_other(sizes: tuple[int, int]) -> None:
    """Where all look alike, the larger set would be right to guess; half of them are not."""
    result = attack_losses(*(np.ones(size) for size in sizes))
    assert result.success_rate == result.auc == 0.5
    assert (result.members, result.non_members) == sizes


def test_the_halves_are_halves() -> None:
    """The width of the interval tells how many samples were evaluated."""
    result = attack_losses(np.zeros(401), np.ones(40))
    assert (result.success_rate, result.confidence) == balanced_rate(201, 201, 0, 20)


# -- ties and extremes ----------------------------------------------------------------------------


def test_tied_losses_stay_together() -> None:
    """1 % of the non-members cannot be picked out of those that look alike."""
    result = attack_losses(np.zeros(200), np.zeros(200))
    assert (result.tpr_at_1_percent_fpr, result.auc, result.success_rate) == (0, 0.5, 0.5)


@pytest.mark.parametrize("distinct", [3, 40, 10**6])
def test_thresholds_and_rates_as_counted_by_hand(distinct: int) -> None:
    random = np.random.default_rng(distinct)
    for _ in range(20):
        inside = random.integers(distinct, size=150).astype(float)
        outside = random.integers(distinct // 10, distinct + 1, size=random.integers(100, 400))
        cuts = [-math.inf, *sorted({*inside, *outside})]
        tpr = [np.mean(inside <= cut) for cut in cuts]
        fpr = [np.mean(outside <= cut) for cut in cuts]
        threshold = best_threshold(inside, outside)
        gain = np.mean(inside <= threshold) - np.mean(outside <= threshold)
        assert gain == pytest.approx(np.max(np.subtract(tpr, fpr)))
        assert threshold not in cuts or threshold == -math.inf
        best = max(t for t, f in zip(tpr, fpr, strict=True) if f <= 0.01)
        assert tpr_at_1_percent_fpr(inside, outside) == pytest.approx(best)


def test_auc_counts_a_tie_as_one_half() -> None:
    """Half of the pairs are in order and half are tied, but for the chance of the split."""
    result = attack_losses(np.repeat([0.0, 1.0], 2000), np.ones(40))
    assert result.auc == pytest.approx(0.75, abs=0.02)


def test_1_percent_needs_100_non_members_to_evaluate_on() -> None:
    losses = np.linspace(0, 1, 200)
    assert attack_losses(losses, losses + 2).tpr_at_1_percent_fpr == 1
    fewer = attack_losses(losses, losses[:198] + 2)
    assert math.isnan(fewer.tpr_at_1_percent_fpr)
    assert fewer.auc == 1
    assert attack_losses(losses[:20], losses + 2).tpr_at_1_percent_fpr == 1


def test_infinite_losses_are_the_largest_and_the_smallest() -> None:
    inf = np.full(40, math.inf)
    assert attack_losses(np.zeros(40), inf).success_rate == 1
    assert attack_losses(-inf, np.zeros(40)).success_rate == 1
    assert attack_losses(-inf, inf).success_rate == 1
    assert attack_losses(inf, np.zeros(40)).success_rate == 0.5


def test_losses_that_are_neighbours_as_numbers_are_told_apart() -> None:
    first = 1.0
    for _ in range(4):  # the middle is rounded to the even one of the two
        second = np.nextafter(first, 2)
        assert attack_losses(np.full(40, first), np.full(40, second)).success_rate == 1
        first = second


def test_nan_is_refused() -> None:
    losses = torch.ones(40)
    losses[:3] = math.nan
    with pytest.raises(ValueError, match=r"3 of the 40 members are NaN"):
        attack_losses(losses, torch.ones(40))
    with pytest.raises(ValueError, match=r"3 of the 40 non-members are NaN"):
        attack_losses(torch.ones(40), losses)


# -- the interval ---------------------------------------------------------------------------------


def test_the_interval_is_newcombes() -> None:
    """Newcombe (1998), table II, method 10: 56/70 − 48/80, as differences of shares."""
    rate, (low, high) = balanced_rate(56, 70, 48, 80)
    assert 2 * rate - 1 == pytest.approx(0.2)
    assert (2 * low - 1, 2 * high - 1) == pytest.approx((0.0524, 0.3339), abs=5e-5)
    rate, (low, high) = balanced_rate(9, 10, 3, 10)
    assert (2 * low - 1, 2 * high - 1) == pytest.approx((0.1705, 0.8090), abs=5e-5)
    rate, (low, high) = balanced_rate(10, 10, 0, 10)
    assert (2 * low - 1, 2 * high - 1) == pytest.approx((0.6075, 1.0), abs=5e-5)


# -- samples in, losses out -----------------------------------------------------------------------


class OneByOne(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(random_labels(60, 1))


class TensorsAtOnce(IterableDataset[Any]):
    """Batches that need no collation, one of them empty."""

    def __iter__(self) -> Any:
        inputs, labels = random_labels(60, 1).tensors
        for rows in (slice(0, 13), slice(13, 13), slice(13, 60)):
            yield inputs[rows], labels[rows]


class Named(Dataset[Any]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, Any]:
        inputs, label = random_labels(60, 1)[index]
        return {"input": inputs, "label": int(label)}


def as_dict(label: str) -> dict[str, Tensor]:
    inputs, labels = random_labels(60, 1).tensors
    return {"input": inputs, label: labels}


@pytest.mark.parametrize(
    "members",
    [
        random_labels(60, 1).tensors,
        list(random_labels(60, 1).tensors),
        as_dict("labels"),
        as_dict("label"),
        Named(),
        OneByOne(),
        DataLoader(random_labels(60, 1), batch_size=7),
        DataLoader(TensorsAtOnce(), batch_size=None),
    ],
    ids=["tuple", "list", "labels", "label", "mappings", "iterable", "loader", "unbatched"],
)
def test_whatever_holds_the_samples_gives_the_same(overfit: nn.Module, members: Any) -> None:
    others = random_labels(60, 2)
    expected = membership_inference(overfit, random_labels(60, 1), others)
    result = membership_inference(overfit, members, others, batch_size=16)
    assert numbers(result) == pytest.approx(numbers(expected), rel=1e-3, nan_ok=True)


def test_the_batch_size_is_kept_to() -> None:
    sizes = []

    def loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        assert inputs.shape == (len(labels), 10)
        sizes.append(len(labels))
        return labels.float()

    for source in (random_labels(60, 1), random_labels(60, 1).tensors):
        membership_inference(mlp(), source, source, loss=loss, batch_size=25)
        assert sizes == [25, 25, 10] * 2
        sizes.clear()


def test_the_losses_are_the_criterions(overfit: nn.Module) -> None:
    members, others = random_labels(60, 1), random_labels(60, 2)

    def squares(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        return (model(inputs) - one_hot(labels)).square().mean(1)

    def one_hot(labels: Tensor) -> Tensor:
        return nn.functional.one_hot(labels, CLASSES).float()

    expected = membership_inference(overfit, members, others, loss=squares)
    sets = [(x, one_hot(y)) for x, y in (members.tensors, others.tensors)]
    result = membership_inference(overfit, *sets, criterion=nn.MSELoss(reduction="sum"))
    assert numbers(result) == pytest.approx(numbers(expected), nan_ok=True)
    by_default = membership_inference(overfit, members, others)
    by_name = membership_inference(overfit, members, others, criterion=nn.CrossEntropyLoss())
    assert by_default.describe() == by_name.describe()
    assert by_default.threshold != result.threshold


def test_a_hugging_face_model_has_its_scores_as_logits(overfit: nn.Module) -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = overfit

        def forward(self, input: Tensor) -> Any:
            return SimpleNamespace(logits=self.inner(input))

    others = random_labels(60, 2)
    result = membership_inference(Classifier(), as_dict("labels"), others)
    expected = membership_inference(overfit, random_labels(60, 1), others)
    assert numbers(result) == pytest.approx(numbers(expected), nan_ok=True)


def test_samples_without_labels_need_a_loss_of_their_own() -> None:
    samples = torch.randn(40, 10, generator=torch.Generator().manual_seed(0))

    def norms(model: nn.Module, inputs: Tensor, labels: None) -> Tensor:
        assert labels is None
        return model(inputs).norm(dim=1)

    for source in (samples, (samples,)):
        membership_inference(mlp(), source, samples, loss=norms)
        with pytest.raises(ValueError, match="Expected samples with labels for CrossEntropyLoss"):
            membership_inference(mlp(), source, samples)


# -- what it leaves behind ------------------------------------------------------------------------


class Counting(nn.Module):
    """Counts its samples in one buffer, replaces another, and has dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        assert not self.training
        assert not torch.is_grad_enabled()
        self.seen.add_(len(inputs))
        self.last = inputs[0]
        return self.inner(inputs)


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(fails: bool) -> None:
    model = Counting().train()
    model.inner[0].eval()
    buffers, state = dict(model.named_buffers()), torch.get_rng_state()
    modes, before = [m.training for m in model.modules()], weights(model)
    members = random_labels(60 if not fails else 10, 1)
    try:
        membership_inference(model, members, random_labels(60, 2))
    except ValueError:
        assert fails
    assert [m.training for m in model.modules()] == modes
    assert all(dict(model.named_buffers())[name] is x for name, x in buffers.items())
    assert model.seen == model.last == 0
    assert torch.equal(weights(model), before)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_buffers_are_not_written_for_nothing() -> None:
    """A batch norm's statistics, saved for a backward pass that is under way."""
    model = nn.Sequential(nn.Linear(10, CLASSES), nn.BatchNorm1d(CLASSES)).eval()
    loss = model(torch.randn(4, 10)).sum()
    membership_inference(model, random_labels(40, 1), random_labels(40, 2))
    loss.backward()


def test_the_same_seed_gives_the_same_result(overfit: nn.Module) -> None:
    others = random_labels(60, 2)
    loader = DataLoader(random_labels(60, 1), batch_size=10, shuffle=True)
    same = [membership_inference(overfit, loader, others, seed=4) for _ in range(3)]
    assert same[0].describe() == same[1].describe() == same[2].describe()
    assert len({membership_inference(overfit, loader, others, seed=s).auc for s in range(9)}) > 1


def test_a_private_run_can_be_audited_at_any_time() -> None:
    """Neither a step nor the gradients of the batch under way change."""
    released = []
    for audited in (False, True):
        engine, model, optimizer, loader = setup(noise_multiplier=0.5)
        criterion = nn.CrossEntropyLoss()
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            if audited:
                membership_inference(model, data(), data(), criterion=criterion)
            loss.backward()
            optimizer.step()
        released.append((weights(model), engine.get_epsilon(delta=1e-5)))
    assert torch.equal(released[0][0], released[1][0])
    assert released[0][1] == released[1][1]


def test_private_training_of_a_real_run_gives_less_away() -> None:
    """The same training, with and without privacy, of labels that can only be learnt by heart."""
    members, others = random_labels(60, 1), random_labels(60, 2)
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train(model, optimizer, DataLoader(members, batch_size=20), epochs=100)
    assert membership_inference(model, members, others).auc > 0.9
    private = []
    for seed in range(4):
        model = mlp()
        _, model, optimizer, loader = setup(
            PrivacyEngine(debug_seed=seed),
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            data_loader=DataLoader(members, batch_size=20),
            noise_multiplier=8.0,  # ε = 0.7 at δ = 0.01, of which the mean rate is 0.66 at most
        )
        train(model, optimizer, loader, epochs=30)
        private.append(membership_inference(model, members, others).auc)
    # An area from 60 and 60 samples has a standard deviation of about 0.05.
    assert sum(private) / 4 < 0.66 + 3 * 0.05 / 2


# -- the result as data ---------------------------------------------------------------------------


def test_the_result_can_be_written_as_json_and_says_that_it_is_not_private() -> None:
    result = attack_losses(np.linspace(2, 3, 40), np.linspace(0, 1, 50))
    described = json.loads(json.dumps(result.describe(), allow_nan=False))
    assert described == {
        "success_rate": 0.5,
        "confidence": list(result.confidence),
        "auc": 0.0,
        "tpr_at_1_percent_fpr": None,
        "threshold": None,
        "members": 40,
        "non_members": 50,
        "unprivate": True,
    }
    assert {type(x) for x in numbers(result)} == {float, int}


def test_what_a_rate_near_one_half_means_is_documented() -> None:
    text = " ".join((MembershipResult.__doc__ or "").split())
    assert "proves nothing" in text
    assert "without noise" in text


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 19])
def test_too_few_samples_are_refused(n: int) -> None:
    few, enough = random_labels(n, 1), random_labels(20, 2)
    for source in (few, few.tensors, DataLoader(few, batch_size=5)):
        with pytest.raises(ValueError, match=rf"Expected at least 20 members, got {n}\."):
            membership_inference(mlp(), source, enough)
        with pytest.raises(ValueError, match=rf"Expected at least 20 non-members, got {n}\."):
            membership_inference(mlp(), enough, source)
    membership_inference(mlp(), enough, enough)


def test_a_private_loader_is_refused() -> None:
    _, model, _, loader = setup()
    with pytest.raises(TypeError, match="The members were given as a PrivateLoader"):
        membership_inference(model, loader, data())


@pytest.mark.parametrize(
    ("members", "error", "message"),
    [
        (3, TypeError, "Cannot read samples from a int"),
        ([*random_labels(3, 1)], ValueError, "A batch of samples has 3 parts"),
        ((torch.zeros(20, 10), torch.zeros(19)), ValueError, r"first dimensions of \[19, 20\]"),
        ((torch.zeros(20, 10), 1), TypeError, "samples in the first dimension, got a int"),
        (torch.zeros(()), TypeError, "got a tensor without dimensions"),
        (({}, None), TypeError, "samples in the first dimension, got a NoneType"),
    ],
)
def test_what_cannot_be_read_is_refused(members: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        membership_inference(mlp(), members, random_labels(40, 2))
    assert caught.value.__notes__ == ["This was said of the members."]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"seed": -1}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"loss": 3}, "loss to be a function"),
        ({"loss": given, "criterion": nn.MSELoss()}, "not both"),
        ({"loss": lambda m, x, y: x.sum()}, r"shape \(40,\), got \(\)"),
        ({"loss": lambda m, x, y: x}, r"shape \(40,\), got \(40, 10\)"),
        ({"loss": lambda m, x, y: 1.0}, r"shape \(40,\), got float"),
        ({"criterion": nn.Linear(1, 1)}, "pass loss="),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    samples = random_labels(40, 1)
    with pytest.raises(ValueError, match=message):
        membership_inference(mlp(), samples, samples, **arguments)


def test_a_model_may_be_frozen() -> None:
    frozen = membership_inference(network().requires_grad_(False), data(), data())
    assert frozen.describe() == membership_inference(network(), data(), data()).describe()
