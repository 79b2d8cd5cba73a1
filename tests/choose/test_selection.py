"""Private choice: ε-DP checked exhaustively, draws against closed forms, scores by brute force."""

import itertools
import json
import math
import random
import re
from fractions import Fraction
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import gammaln
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dpspan.accounting.calibration import calibrate
from dpspan.accounting.epsilon import pld_epsilon, pld_interval, renyi
from dpspan.accounting.events import event_from_json, event_to_json, pure_event, step_event
from dpspan.accounting.ledger import Ledger
from dpspan.accounting.picking import MECHANISMS, coin, pick, probability_of_best
from dpspan.accounting.promises import Budget
from dpspan.choose import selection
from dpspan.choose.probe import Probe, principal_subspace
from dpspan.choose.selection import UNIT, choose_public, resolution, sampled_batches, totals
from dpspan.engine.engine import PrivacyEngine
from dpspan.model.networks import ResNet20
from dpspan.model.per_sample import per_sample_gradients
from dpspan.public.data import PublicData
from dpspan.support.errors import BudgetExceeded, UnsupportedModule
from helpers.oracle import top_directions
from helpers.stripes import images, labels

CE = nn.CrossEntropyLoss()
DELTA = 1e-5


# -- the mechanisms: probabilities, by definition -------------------------------------------------


def law(mechanism, scores, epsilon):
    """The probability of each index: over all orders of permute-and-flip, or by weights."""
    best = max(scores)
    taken = [math.exp(epsilon * (q - best)) for q in scores]
    if mechanism == "exponential":
        return np.array(taken) / sum(taken)
    total = np.zeros(len(scores))
    orders = list(itertools.permutations(range(len(scores))))
    for order in orders:
        reached = 1.0
        for index in order:
            total[index] += reached * taken[index] / len(orders)
            reached *= 1 - taken[index]
    return total


def largest_ratio(mechanism, epsilon, candidates):
    """Over all score vectors and all records of a grid: the worst |log P/P'|."""
    grid, worst = (0.0, 0.5, 1.0, 2.0, 3.5), 0.0
    for scores in itertools.product(grid, repeat=candidates):
        before = law(mechanism, scores, epsilon)
        assert before.sum() == pytest.approx(1.0)
        for record in itertools.product((0.0, 0.3, 1.0), repeat=candidates):
            after = law(mechanism, [q + s for q, s in zip(scores, record, strict=True)], epsilon)
            worst = max(worst, float(np.abs(np.log(after / before)).max()))
    return worst


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize(("candidates", "epsilon"), [(2, 0.1), (2, 1.0), (2, 4.0), (3, 1.0)])
def test_one_record_changes_no_probability_by_more_than_epsilon(mechanism, candidates, epsilon):
    worst = largest_ratio(mechanism, epsilon, candidates)
    assert worst <= epsilon * (1 + 1e-9)
    if mechanism == "permute-and-flip":  # which is as much as ε allows
        assert worst == pytest.approx(epsilon)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_what_is_kept_for_rounding_covers_others_that_move_by_a_254th(mechanism):
    """By 1/254 either way, beside the record's own 0 to 1."""
    epsilon = 1.0
    moves = list(itertools.product((0.0, 1.0), repeat=2))

    def worst(eta):
        ratios = [0.0]
        for lead, record in itertools.product(np.linspace(-3, 3, 25), moves):
            before = law(mechanism, [lead, 0.0], epsilon * 127 / 128)
            for off in itertools.product((-eta, eta), repeat=2):
                sums = [lead + record[0] + off[0], record[1] + off[1]]
                after = law(mechanism, sums, epsilon * 127 / 128)
                ratios.append(float(np.abs(np.log(after / before)).max()))
        return max(ratios)

    assert worst(1 / 254) <= epsilon * (1 + 1e-9)
    if mechanism == "permute-and-flip":  # and no more than that
        assert worst(1 / 240) > epsilon


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
def test_sampling_records_costs_what_the_formula_says(mechanism, rate):
    """All Poisson samples of tiny data, the mechanism run with ε₀ on each."""
    epsilon = 0.7
    on_sample = math.log1p(math.expm1(epsilon) / rate)
    grid = list(itertools.product((0.0, 0.4, 1.0), repeat=2))

    def probability(records, lead):
        total = np.zeros(2)
        for kept in itertools.product((False, True), repeat=len(records)):
            chance = math.prod(rate if keep else 1 - rate for keep in kept)
            sums = [sum(r[j] for r, k in zip(records, kept, strict=True) if k) for j in range(2)]
            total += chance * law(mechanism, [sums[0] + lead, sums[1]], on_sample)
        return total

    worst = 0.0
    for lead in (0, 8):  # of one candidate, from records that are in every sample
        for data in itertools.combinations_with_replacement(grid, 2):
            before = probability(data, lead)
            for record in grid:
                after = probability((*data, record), lead)
                worst = max(worst, float(np.abs(np.log(after / before)).max()))
    assert 0.99 * epsilon < worst <= epsilon * (1 + 1e-9)


def test_permute_and_flip_is_the_largest_score_with_exponential_noise():
    scores, epsilon, n = np.array([0.0, 1.0, 1.5, 3.0]), 0.8, 200_000
    noise = np.random.default_rng(0).exponential(1 / epsilon, size=(n, 4))
    seen = np.bincount((scores + noise).argmax(1), minlength=4) / n
    expected = law("permute-and-flip", scores, epsilon)
    assert np.all(np.abs(seen - expected) < 5 * np.sqrt(expected * (1 - expected) / n))


def test_only_the_exponential_mechanism_is_cheaper_than_its_epsilon():
    """It is ε²/8-zCDP, by its bounded range; permute-and-flip is not, so no event may say so."""
    epsilon = 1.0
    divergences = {}
    for mechanism in MECHANISMS:
        before, after = (law(mechanism, scores, epsilon) for scores in ((0, 0), (1, 0)))
        divergences[mechanism] = float((before * np.log(before / after)).sum())
    assert divergences["exponential"] <= epsilon**2 / 8
    assert divergences["permute-and-flip"] > 2 * epsilon**2 / 8


# -- the mechanisms: draws -----------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [Fraction(0), Fraction(1, 7), Fraction(1), Fraction(5, 2), 6])
def test_a_coin_of_probability_exp_minus_gamma(gamma):
    n, p = 40_000, math.exp(-gamma)
    below = random.Random(1).randrange
    seen = sum(coin(Fraction(gamma), below) for _ in range(n)) / n
    assert abs(seen - p) <= 5 * math.sqrt(p * (1 - p) / n)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("scores", [(0, 3, 5), (4, 4, 4), (0, 0, 1000), (2, 1, 0, 2)])
def test_draws_have_the_law(mechanism, scores):
    n, epsilon = 20_000, Fraction(0.4)
    below = random.Random(2).randrange
    drawn = [pick(mechanism, scores, epsilon, below) for _ in range(n)]
    seen = np.bincount(drawn, minlength=len(scores)) / n
    expected = law(mechanism, scores, float(epsilon))
    assert np.all(np.abs(seen - expected) <= 5 * np.sqrt(expected * (1 - expected) / n) + 1e-12)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("candidates", [2, 3, 5])
@pytest.mark.parametrize("gap", [0.01, 1.0, 4.0])
def test_success_is_the_probability_of_the_best(mechanism, candidates, gap):
    scores = [0.0] * (candidates - 1) + [gap]
    assert probability_of_best(mechanism, candidates, gap) == pytest.approx(
        law(mechanism, scores, 1.0)[-1]
    )


def test_permute_and_flip_never_errs_more_often():
    for candidates, gap in itertools.product((2, 3, 10), (0.1, 1.0, 5.0)):
        flip, exponential = (probability_of_best(name, candidates, gap) for name in MECHANISMS)
        assert flip > exponential


# -- how close candidates may be ------------------------------------------------------------------


def test_a_gap_of_5_per_cent_at_a_tenth_of_epsilon_takes_about_460_records():
    assert resolution(465, 2, 0.1) < 0.05 < resolution(455, 2, 0.1)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("candidates", [2, 6])
def test_success_is_as_predicted(mechanism, candidates):
    records, epsilon, n = 800, 0.2, 8000
    gap = resolution(records, candidates, epsilon, mechanism=mechanism)
    behind = round(0.3 * UNIT) * records
    ahead = behind + round(gap * UNIT * records)
    below = random.Random(3).randrange
    rate = Fraction(epsilon) * Fraction(127, 128) / UNIT
    scores = [behind] * (candidates - 1) + [ahead]
    seen = sum(pick(mechanism, scores, rate, below) == candidates - 1 for _ in range(n)) / n
    assert abs(seen - 0.95) < 5 * math.sqrt(0.95 * 0.05 / n)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_success_on_a_sample_is_at_least_as_predicted(mechanism):
    """Differences of −1 and 1, the worst case, drawn from Poisson samples."""
    records, epsilon, rate, n = 20_000, 0.5, 0.1, 2000
    gap = resolution(records, 2, epsilon, mechanism=mechanism, sample_rate=rate)
    assert gap < 0.1
    generator, below = np.random.default_rng(4), random.Random(4).randrange
    ups = round(records * (1 + gap) / 2)
    first, second = generator.binomial(ups, rate, n), generator.binomial(records - ups, rate, n)
    on_sample = Fraction(math.log1p(math.expm1(epsilon) / rate)) * Fraction(127, 128)
    picked = [
        pick(mechanism, [int(a), int(b)], on_sample, below)
        for a, b in zip(first, second, strict=True)
    ]
    assert np.mean(picked) < 0.05  # the second: the wrong one


def test_resolution_grows_finer():
    assert resolution(1000, 2, 0.1) < resolution(1000, 2, 0.05) < resolution(500, 2, 0.02)
    assert resolution(1000, 2, 0.1) < resolution(1000, 8, 0.1)
    assert resolution(1000, 2, 0.1) < resolution(1000, 2, 0.1, mechanism="exponential")
    assert resolution(1000, 2, 0.1) < resolution(1000, 2, 0.1, sample_rate=0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 2, 0.1), "Expected records to be an integer of at least 1, got 0."),
        ((10, 1, 0.1), "Expected candidates to be an integer of at least 2, got 1."),
        ((10, 2, 0), "Expected 0 < epsilon <= 10, got 0.0."),
        ((10, 2, -1), "Expected 0 < epsilon <= 10, got -1.0."),
        ((10, 2, "some"), "Expected epsilon to be a number, got 'some'."),
    ],
)
def test_resolutions_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        resolution(*arguments)


@pytest.mark.parametrize("rate", [-1, 0, 2])
def test_sample_rates_that_cannot_be(rate):
    with pytest.raises(ValueError, match=re.escape(f"Expected 0 < sample_rate <= 1, got {rate}.")):
        resolution(10, 2, 0.1, sample_rate=rate)


# -- scores ---------------------------------------------------------------------------------------


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)


def conv_network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.GroupNorm(2, 6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(216, 4),
    )


def probe(model, loss=CE, **settings):
    return Probe(model=model, loss_fn=loss, **settings)


def subspaces(model, *sources, rank=4):
    return [
        principal_subspace(probe(model).gradients(PublicData.of(x)), rank, of="x") for x in sources
    ]


def sums(model, spans, x, y, threshold=None, piece=7):
    batches = zip(x.split(piece), y.split(piece), strict=True)
    return totals(probe(model, piece=piece), spans, batches, threshold)


@pytest.mark.parametrize("make", [network, conv_network])
def test_scores_are_the_energy_of_projections_written_out(make):
    model = make().double()
    spans = subspaces(model, images(20, 1).double(), images(20, 2, stripes=True).double())
    x, y = images(9, 3).double(), labels(9)

    def loss(model, x, y):
        return nn.functional.cross_entropy(model(x), y, reduction="none")

    g = per_sample_gradients(model, loss, x, y).matrix()
    found = probe(model).scores(spans, x, y)
    for j, source in enumerate((images(20, 1), images(20, 2, stripes=True))):
        h = probe(model).gradients(PublicData.of(source.double())).matrix()
        v = top_directions(h, 4)
        expected = (g @ v.T).square().sum(1) / g.square().sum(1)
        assert torch.allclose(found[:, j], expected, atol=1e-9)
    whole = [math.floor(float(s)) for s in (found * UNIT).floor().sum(0)]
    assert sums(model, spans, x, y) == pytest.approx(whole, abs=len(x))


ODD = {
    "nan": torch.full((1, 1, 6, 6), math.nan),
    "inf": torch.full((1, 1, 6, 6), math.inf),
    "huge": torch.full((1, 1, 6, 6), 1e30),
    "tiny": torch.full((1, 1, 6, 6), 1e-30),
    "zero": torch.zeros(1, 1, 6, 6),
    "inside": images(1, 1),
    "outside": images(1, 2, stripes=True),
}


@pytest.mark.parametrize("threshold", [None, 0.0, 0.37, 1.0])
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("make", [network, conv_network])
def test_one_record_raises_each_sum_by_0_to_1(make, kind, threshold):
    model = make().double()
    spans = subspaces(model, images(20, 1).double(), images(20, 2, stripes=True).double())
    x, y = images(10, 5).double(), labels(11)
    more = torch.cat([x[:3], ODD[kind].double(), x[3:]])  # all later ones move up a place
    before = sums(model, spans, x, torch.cat([y[:3], y[4:]]), threshold)
    after = sums(model, spans, more, y, threshold)
    assert len(before) == 2 + (threshold is not None)
    # In float64 the others' scores move by rounding alone: one unit each, at the most.
    for low, high in zip(before, after, strict=True):
        assert -len(x) <= high - low <= UNIT + len(x)
    if threshold is not None:
        assert after[2] - before[2] == math.floor(threshold * UNIT)
    if kind in ("nan", "inf"):
        assert after[:2] == pytest.approx(before[:2], abs=len(x))


@pytest.mark.parametrize("make", [network, conv_network])
def test_a_records_place_in_its_batch_changes_its_score_by_rounding_alone(make):
    """In float32: the share of ε that is kept for it allows sums to move by 1/254."""
    model, x, y = make(), images(64, 5), labels(64)
    score = partial(probe(model, piece=64).scores, subspaces(model, images(20, 1)))
    backwards = score(x.flip(0), y.flip(0)).flip(0)
    assert (score(x, y) - backwards).abs().sum() < 1 / 254


def test_all_batches_are_of_one_size():
    """The last bits of a result depend on it."""
    sizes = []

    def loss(model, x, y):
        sizes.append((len(x), len(y)))
        return nn.functional.cross_entropy(model(x), y, reduction="none")

    model, x, y = network(), images(20, 5), labels(20)
    by_eights, spans = probe(model, loss, piece=8), subspaces(model, images(20, 1))
    batches = list(zip(x.split(8), y.split(8), strict=True))  # 8, 8 and 4 records
    assert len(totals(by_eights, spans, batches, 0.5)) == 2
    assert sizes == [(8, 8)] * 3
    # What fills them up does not count.
    assert totals(by_eights, spans, batches, 0.5)[1] == 20 * UNIT // 2


def test_one_record_in_single_precision_stays_within_what_is_kept_for_rounding():
    """With the last piece one short, and with the record at the front, so that all move up."""
    torch.manual_seed(0)
    model = ResNet20(classes=4)
    spans = subspaces(model, colours(12, 1), colours(12, 2))
    x, y = colours(33, 5), labels(33)

    def moved(piece):
        score = partial(probe(model, piece=piece).scores, spans)

        def scores(first):
            pieces = zip(x[first:].split(16), y[first:].split(16), strict=True)
            return torch.cat([score(*piece) for piece in pieces])

        return float((scores(0)[1:] - scores(1)).abs().max())

    # So that 60,000 of them, either way as often, stay below 1/254 by a wide margin.
    assert moved(16) <= min(moved(1), 1e-7)  # filled up, and as they come


def colours(n, seed):
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


class Rowwise(nn.Module):
    """A model whose gradient for the loss below is the input row itself."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1, bias=False)

    def forward(self, x):
        return self.linear(x)[:, 0]


@settings(max_examples=40, deadline=None)
@given(
    data=st.lists(st.tuples(*[st.floats(width=32)] * 3), min_size=1, max_size=5),
    record=st.tuples(*[st.floats(width=32)] * 3),
    threshold=st.floats(0, 1),
)
def test_any_record_raises_each_sum_by_0_to_1(data, record, threshold):
    """Rows of any floats, infinity and NaN among them, one record at a time."""
    model, public = Rowwise(), torch.eye(3)[:, None]

    def loss(model, x, *labels):
        return model(x)

    spans = [
        principal_subspace(probe(model, loss).gradients(PublicData.of(x)), 1, of="x")
        for x in public
    ]

    def sums_of(rows):
        batches = [(torch.tensor([row], dtype=torch.float32), torch.zeros(1)) for row in rows]
        return totals(probe(model, loss, piece=1), spans, batches, threshold)

    before, after = sums_of(data), sums_of([*data, record])
    assert all(0 <= b - a <= UNIT for a, b in zip(before, after, strict=True))
    assert after[3] == len(data) * math.floor(threshold * UNIT) + math.floor(threshold * UNIT)
    if not all(map(math.isfinite, record)):
        assert after[:3] == before[:3]


def test_every_bad_basis_gives_scores_in_range():
    model = network()
    spans = subspaces(model, images(20, 1))
    for term in spans[0].gradients.terms.values():
        term.values.mul_(1000.0)
    scores = probe(model).scores(spans, images(5, 0), labels(5))
    assert scores.min() >= 0
    assert scores.max() == 1


# -- the choice -----------------------------------------------------------------------------------

NEAR, FAR = images(60, 1), images(60, 2, stripes=True)
CANDIDATES = {"far": FAR, "near": NEAR}


def private(n=400):
    return TensorDataset(images(n, 3), labels(n))


def test_it_finds_the_candidate_that_captures_most():
    ledger = Ledger()
    choice = choose_public(
        network(), CE, private(), CANDIDATES, ledger=ledger, epsilon=1.0, rank=4, records=400
    )
    assert choice.name == "near"  # ahead by more than 100 of 400 records: wrong with exp(−100)
    assert choice.public is not None
    assert torch.equal(next(choice.public.pieces())[1], NEAR)
    few = choose_public(
        network(), CE, private(), CANDIDATES, ledger=Ledger(), epsilon=1.0, rank=4, samples=50
    )
    assert few.public.count == 50  # what was compared
    assert choice.candidates == ("far", "near")
    assert "With 400 records, ε = 1 and 2 candidates, the best is found in 95% of" in choice.note
    assert "if its captured energy is 0.0058 above every other's" in choice.note
    assert ledger.events == ((pure_event(1.0), 1),)
    assert {record.name for record in ledger.public} == {"far", "near"}
    assert all("ε = 1, rank 4" in record.detail for record in ledger.public)


@pytest.mark.parametrize("mechanism", ["permute-and-flip", "exponential"])
@pytest.mark.parametrize("source", ["dataset", "loader", "tensors", "sample"])
def test_private_records_come_in_any_form(source, mechanism):
    data = private()
    given = {
        "dataset": data,
        "loader": DataLoader(data, batch_size=10, shuffle=True),
        "tensors": data.tensors,
        "sample": data,
    }[source]
    choice = choose_public(
        network(),
        CE,
        given,
        CANDIDATES,
        ledger=Ledger(),
        epsilon=2.0,
        rank=4,
        mechanism=mechanism,
        sample_rate=0.25 if source == "sample" else 1.0,
    )
    assert (choice.name, choice.mechanism) == ("near", mechanism)
    assert "data.records in a configuration" in choice.note


def test_no_public_data_unless_one_captures_enough():
    shared = {"ledger": Ledger(), "epsilon": 2.0, "rank": 4}
    none = choose_public(network(), CE, private(), CANDIDATES, threshold=0.999, **shared)
    assert (none.name, none.public, none.threshold) == (None, None, 0.999)
    some = choose_public(network(), CE, private(), CANDIDATES, threshold=0.001, **shared)
    assert some.name == "near"
    one = choose_public(network(), CE, private(), {"near": NEAR}, threshold=0.001, **shared)
    assert one.name == "near"


def test_mappings_and_losses_of_ones_own():
    class Rows(Dataset):
        def __len__(self):
            return 300

        def __getitem__(self, index):
            return {"input": ROWS[0][index], "labels": ROWS[1][index]}

    ROWS = images(300, 3), labels(300)

    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = network()

        def forward(self, input):
            return self.inside(input)

    candidates = {name: {"input": x} for name, x in CANDIDATES.items()}
    choice = choose_public(Takes(), CE, Rows(), candidates, ledger=Ledger(), epsilon=2.0, rank=4)
    assert choice.name == "near"

    def loss(model, x, y):
        return nn.functional.cross_entropy(model(x), y, reduction="none")

    labelled = {name: (x, labels(60)) for name, x in CANDIDATES.items()}
    choice = choose_public(
        network(), loss, private(), labelled, ledger=Ledger(), epsilon=2.0, rank=4
    )
    assert choice.name == "near"


def test_the_choice_is_random():
    """Two copies of one candidate: both come up."""
    names = {
        choose_public(
            network(), CE, private(20), {"a": NEAR, "b": NEAR}, ledger=Ledger(), rank=2, piece=20
        ).name
        for _ in range(24)  # one alone: 2 in 2²⁴
    }
    assert names == {"a", "b"}


def test_an_empty_sample_leaves_chance():
    names = {
        choose_public(
            network(),
            CE,
            private(2),
            CANDIDATES,
            ledger=Ledger(),
            threshold=0.5,
            sample_rate=1e-12,
            rank=2,
            piece=20,
        ).name
        for _ in range(60)  # one of three missing: 3·(2/3)⁶⁰
    }
    assert names == {"near", "far", None}


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(network(), nn.Dropout(0.5)).train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch_random, numpy_random = torch.get_rng_state(), np.random.get_state()[1].copy()
    choice = choose_public(model, CE, private(), CANDIDATES, ledger=Ledger(), epsilon=2.0, rank=4)
    assert choice.name == "near"
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), torch_random)
    assert np.array_equal(np.random.get_state()[1], numpy_random)


# -- what is refused -------------------------------------------------------------------------------


class Untouchable(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        raise AssertionError("private records must not be read")


def test_what_the_budget_does_not_allow_is_not_computed():
    ledger = Ledger(budget=Budget(epsilon=0.5, delta=DELTA))
    with pytest.raises(BudgetExceeded):
        choose_public(network(), CE, Untouchable(), CANDIDATES, ledger=ledger, epsilon=0.6)
    assert ledger.events == ()
    assert ledger.public == ()


def test_nothing_is_charged_for_what_was_not_released():
    ledger = Ledger()
    with pytest.raises(AssertionError):
        choose_public(network(), CE, Untouchable(), CANDIDATES, ledger=ledger)
    assert ledger.events == ()


def test_the_ledger_is_written_before_the_draw(monkeypatch):
    ledger = Ledger()
    monkeypatch.setattr(ledger, "charge", lambda event: 1 / 0)
    monkeypatch.setattr("secrets.randbelow", lambda n: pytest.fail("drawn before the charge"))
    with pytest.raises(ZeroDivisionError):
        choose_public(network(), CE, private(), CANDIDATES, ledger=ledger, rank=4)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("sample_rate", [1.0, 0.5, 0.05])
@pytest.mark.parametrize("epsilon", [0.1, 2.0])
def test_the_draw_spends_what_is_charged(monkeypatch, mechanism, sample_rate, epsilon):
    """ε₀ on a sample of that very rate, less the 128th that is kept; and ε on the ledger."""
    drawn, rates = [], []

    def watched(name, scores, rate, below):
        assert name == mechanism
        drawn.append(rate)
        return 0

    def read(loader, rate, piece, units):
        rates.append(rate)
        return sampled_batches(loader, rate, piece, units)

    monkeypatch.setattr(selection, "pick", watched)
    monkeypatch.setattr(selection, "sampled_batches", read)
    ledger = Ledger()
    choose_public(
        network(), CE, private(), CANDIDATES,
        ledger=ledger, rank=4, epsilon=epsilon, sample_rate=sample_rate, mechanism=mechanism,
    )  # fmt: skip
    on_sample = math.log(1 + (math.exp(epsilon) - 1) / sample_rate)
    assert float(drawn[0] * UNIT) == pytest.approx(on_sample * 127 / 128, rel=1e-12)
    assert rates == [sample_rate]
    assert ledger.events == ((pure_event(epsilon), 1),)


@pytest.mark.parametrize("rate", [0.3, 0.05])
def test_each_record_is_in_the_sample_with_that_probability(rate):
    n = 4000
    loader = DataLoader(TensorDataset(torch.arange(n)[:, None], torch.zeros(n).long()))
    read = torch.cat([x for x, _ in sampled_batches(loader, rate, 500)])[:, 0]
    assert len(set(read.tolist())) == len(read)
    assert abs(len(read) - n * rate) < 6 * math.sqrt(n * rate * (1 - rate))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epsilon": 0}, "Expected 0 < epsilon <= 10, got 0.0."),
        ({"epsilon": 11}, "Expected 0 < epsilon <= 10, got 11.0."),
        ({"epsilon": "much"}, "Expected epsilon to be a number, got 'much'."),
        ({"threshold": 1.1}, "Expected 0 <= threshold <= 1, got 1.1."),
        ({"sample_rate": 0}, "Expected 0 < sample_rate <= 1, got 0."),
        (
            {"mechanism": "best"},
            "Expected mechanism to be one of ['exponential', 'permute-and-flip'], got 'best'.",
        ),
        (
            {"candidates": {"a": NEAR}},
            "Expected at least 2 candidates to choose from, got 1. With one, pass threshold=",
        ),
        ({"candidates": {}, "threshold": 0.5}, "Expected at least 2 candidates"),
        (
            {"records": 20},
            "With 20 records, ε = 0.1 and 2 candidates no candidate could be told from the others "
            "with 95% success (the lead would have to be 1.2, of at most 1): the choice would be "
            "chance, and nothing was spent. Raise epsilon",
        ),
    ],
)
def test_choices_that_cannot_be(arguments, message):
    ledger = Ledger()
    asked = {"candidates": CANDIDATES, "ledger": ledger, **arguments}
    with pytest.raises(ValueError, match=re.escape(message)):
        choose_public(network(), CE, Untouchable(), asked.pop("candidates"), **asked)
    assert ledger.events == ()


def test_private_data_that_cannot_be_read():
    with pytest.raises(TypeError, match="Cannot read private records from a str: give a DataLoad"):
        choose_public(network(), CE, "records", CANDIDATES, ledger=Ledger())
    unlabelled = TensorDataset(images(20, 3))
    with pytest.raises(ValueError, match=re.escape("Expected private batches of (inputs, labels)")):
        choose_public(network(), CE, unlabelled, CANDIDATES, ledger=Ledger(), rank=2)
    engine = PrivacyEngine()
    model = network()
    _, _, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(private(40), batch_size=10),
        noise_multiplier=1.0,
    )
    with pytest.raises(TypeError, match="private already"):
        choose_public(network(), CE, loader, CANDIDATES, ledger=Ledger())
    with pytest.raises(ValueError, match="belongs to a private run"):
        choose_public(model, CE, private(40), CANDIDATES, ledger=Ledger())


def test_public_copies_of_private_records():
    ledger = Ledger()
    data = private(50)
    copied = {"near": NEAR, "copied": data.tensors[0][:5]}
    with pytest.raises(ValueError, match="5 of the 5 samples of the public data 'copied' also"):
        choose_public(network(), CE, data, copied, ledger=ledger, rank=2)
    assert ledger.events == ()
    assert ledger.public == ()


# -- records that would change the scores of others -----------------------------------------------


class Changed(nn.Module):
    """The network on inputs that a function has changed."""

    def __init__(self, change):
        super().__init__()
        self.inside, self.change = network(), change

    def forward(self, x):
        return self.inside(self.change(x))


def quantised(x):
    """Whole multiples of one step for the batch, as int8 with a scale per tensor has them."""
    step = x.detach().abs().amax().clamp(min=6.0) / 127
    return x + ((x / step).round() * step - x).detach()


MIXING = {
    "mean": lambda x: x - x.mean(0, keepdim=True),
    "a weak mean": lambda x: x + 1e-3 * x.mean(0, keepdim=True),
    "outliers scale all": lambda x: 6 * x / x.detach().abs().amax().clamp(min=6.0),
    "outliers coarsen all": quantised,
    "the one before": lambda x: x + 0.1 * x.roll(1, 0),
    "all before": lambda x: x + 0.01 * x.cumsum(0),
    "random": lambda x: nn.functional.dropout(x, 0.5, training=True),
}


@pytest.mark.parametrize("name", MIXING)
def test_models_that_mix_records_are_refused_before_any_is_read(name):
    ledger = Ledger()
    with pytest.raises(
        UnsupportedModule, match=r"depends on the other samples .* public samples of 'far'\)"
    ):
        choose_public(Changed(MIXING[name]), CE, Untouchable(), CANDIDATES, ledger=ledger, rank=4)
    assert ledger.events == ()


def test_one_public_sample_is_enough_to_see_it():
    single = {"a": NEAR[:1], "b": NEAR[1:2]}
    with pytest.raises(UnsupportedModule, match="depends on the other samples"):
        choose_public(
            Changed(MIXING["mean"]), CE, Untouchable(), single, ledger=Ledger(), rank=1, seed=1
        )


def test_words_mix_too():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table, self.head = nn.Embedding(30, 6), nn.Linear(6, 4)

        def forward(self, tokens):
            x = self.table(tokens).mean(1)
            return self.head(x / x.detach().abs().amax())

    words = torch.randint(30, (60, 5), generator=torch.Generator().manual_seed(0))
    with pytest.raises(UnsupportedModule, match="depends on the other samples"):
        choose_public(
            Words(), CE, Untouchable(), {"a": words, "b": words.flip(0)}, ledger=Ledger(), rank=4
        )


class Balanced(nn.CrossEntropyLoss):
    """Counts a sample by how frequent its class is in the batch."""

    def forward(self, outputs, labels):
        share = (labels[:, None] == labels).float().mean(1, keepdim=True)
        return super().forward(outputs * share, labels)


def centred(model, x, y):
    return nn.functional.cross_entropy(model(x - x.mean(0)), y, reduction="none")


class Remembering:
    """A loss that carries something from batch to batch, outside of the model."""

    seen: ClassVar[list] = [torch.zeros(())]

    def __call__(self, model, x, y):
        before = self.seen[-1]
        self.seen.append(before.lerp(x.detach().mean(), 0.01))
        return nn.functional.cross_entropy(model(x - before), y, reduction="none")


@pytest.mark.parametrize("loss", [Balanced(), centred, Remembering()], ids=["class", "mean", "old"])
def test_losses_that_mix_records_are_refused_before_any_is_read(loss):
    labelled = {name: (x, labels(60)) for name, x in CANDIDATES.items()}
    with pytest.raises(UnsupportedModule, match="depends on the other samples"):
        choose_public(network(), loss, Untouchable(), labelled, ledger=Ledger(), rank=4)


class Running(nn.Module):
    """Keeps a mean of what it has seen, in evaluation too."""

    def __init__(self, register=True):
        super().__init__()
        self.inside = network()
        if register:
            self.register_buffer("mean", torch.zeros(1, 1, 6, 6))
        else:
            self.mean = torch.zeros(1, 1, 6, 6)

    def forward(self, x):
        out = self.inside(x - self.mean)
        self.mean = self.mean.lerp(x.detach().mean(0, keepdim=True), 1e-3)
        return out


def test_models_that_remember_records_are_refused_before_any_is_read():
    with pytest.raises(UnsupportedModule, match="'mean' changes with the samples that the model"):
        choose_public(Running(), CE, Untouchable(), CANDIDATES, ledger=Ledger(), rank=4)


@pytest.mark.parametrize("register", [True, False])
def test_nothing_is_carried_from_batch_to_batch(register):
    """Not by what the check cannot see either."""
    model, x, y = Running(register), images(24, 5), labels(24)
    spans = subspaces(model, images(20, 1), images(20, 2, stripes=True))
    x[3] = math.nan  # in the first batch
    after = sums(model, spans, x[8:], y[8:], piece=8)
    assert after == [
        whole - first
        for whole, first in zip(
            sums(model, spans, x, y, piece=8),
            sums(model, spans, x[:8], y[:8], piece=8),
            strict=True,
        )
    ]


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = network()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return self.inside(x)


def test_a_counter_is_no_memory_of_records():
    model = Counting()
    choice = choose_public(model, CE, private(), CANDIDATES, ledger=Ledger(), epsilon=2.0, rank=4)
    assert choice.name == "near"
    assert model.calls == 0


@pytest.mark.parametrize("piece", [1, 2, 64])
def test_pieces_of_any_size(piece):
    """A piece of one record has no company; one of 64 is more than a candidate has samples."""
    choice = choose_public(
        network(), CE, private(60), CANDIDATES, ledger=Ledger(), epsilon=5.0, rank=4, piece=piece
    )
    assert choice.name == "near"


# -- augmentation ---------------------------------------------------------------------------------


class Augmented(Dataset):
    """Draws from everything that scripts seed."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        drawn = torch.rand(()).item(), np.random.random(), random.random()
        return torch.tensor(drawn, dtype=torch.float64), index


def read(workers, **arguments):
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    loader = DataLoader(Augmented(), batch_size=2, num_workers=workers, **arguments)
    return torch.cat([x for x, _ in sampled_batches(loader, 1.0, 2)])


@pytest.mark.parametrize("workers", [0, 1])
def test_augmentation_is_fresh_whatever_seeds_were_set(workers):
    """With numbers that anybody knows, a record would decide how the others are augmented."""
    first = read(workers)
    states = torch.get_rng_state(), np.random.random(), random.random()
    second = read(workers)
    assert torch.equal(torch.get_rng_state(), states[0])  # which are left as they were
    assert (np.random.random(), random.random()) == states[1:]
    assert len({float(x) for x in torch.cat([first, second]).flatten()}) == 36


def mark(worker):
    torch.rand = lambda size: torch.tensor(7.0)


def test_workers_begin_as_the_loader_says():
    assert (read(1, worker_init_fn=mark)[:, 0] == 7).all()


# -- losses that are functions --------------------------------------------------------------------


class Words(Dataset):
    """Sequences of any length, each with a label."""

    def __init__(self, sequences):
        self.sequences = sequences

    def __len__(self):
        return len(self.sequences)

    def __getitem__(self, index):
        return self.sequences[index], int(self.sequences[index].sum()) % 2


class Unmasked(nn.Module):
    """Padding counts in the mean: a record's output depends on the length it is padded to."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(50, 8), nn.Linear(8, 2)

    def forward(self, tokens):
        return self.head(self.tokens(tokens).mean(1))


def padded(records):
    sequences, labels = zip(*records, strict=True)
    return nn.utils.rnn.pad_sequence(sequences, batch_first=True), torch.tensor(labels)


def mixed(records):
    """Padded as before; and each record is mixed with the next."""
    x, y = padded(records)
    return torch.where(torch.arange(len(x))[:, None] % 2 == 0, x, x.roll(1, 0)), y


def twice(records):
    x, y = padded(records)
    return torch.cat([x, x]), torch.cat([y, y])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("collate", [padded, mixed])
def test_one_long_record_raises_each_sum_by_0_to_1_whatever_collates(collate, workers, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = Unmasked().double()
    sequences = [torch.randint(1, 50, (5 + i % 3,), generator=generator) for i in range(40)]
    long = torch.randint(1, 50, (200,), generator=generator)
    candidates = {
        "a": torch.randint(1, 50, (60, 5), generator=generator),
        "b": torch.randint(0, 2, (60, 5), generator=generator),
    }
    seen = []

    def remembered(*arguments, **settings):
        seen.append(totals(*arguments, **settings))
        return seen[-1]

    monkeypatch.setattr(selection, "totals", remembered)
    for records in (sequences, [long, *sequences]):
        loader = DataLoader(Words(records), batch_size=16, collate_fn=collate, num_workers=workers)
        choose_public(model, CE, loader, candidates, ledger=Ledger(), rank=8, piece=16)
    before, after = seen
    for low, high in zip(before, after, strict=True):
        assert -len(sequences) <= high - low <= UNIT + len(sequences)  # one unit of rounding each


def test_every_record_is_read_once_whatever_its_shape():
    sequences = [torch.full((1 + i % 4,), i) for i in range(30)]
    loader = DataLoader(Words(sequences), collate_fn=padded)
    batches = list(sampled_batches(loader, 1.0, 4))
    assert sorted(int(row[0]) for x, _ in batches for row in x) == list(range(30))
    assert all(len(x) == len(y) <= 4 for x, y in batches)


def test_every_record_is_asked_for_alone():
    """A dataset that reads several at once could let one change the others."""

    class AtOnce(TensorDataset):
        def __getitems__(self, indices):
            raise AssertionError("several records were asked for at once")

    loader = DataLoader(AtOnce(torch.arange(9.0)[:, None], torch.zeros(9).long()))
    assert torch.cat([x for x, _ in sampled_batches(loader, 1.0, 4)]).flatten().tolist() == [
        *range(9)
    ]


WORDS = {"a": torch.ones(9, 5).long(), "b": torch.arange(45).view(9, 5)}


def test_a_record_of_two_rows_would_count_twice():
    loader = DataLoader(Words([torch.ones(5).long()] * 20), collate_fn=twice)
    with pytest.raises(ValueError, match="one row for each record"):
        choose_public(Unmasked(), CE, loader, WORDS, ledger=Ledger(), rank=2)


def test_functions_need_labels_to_come_with_the_candidates():
    def loss(model, x, y):
        return nn.functional.cross_entropy(model(x), y, reduction="none")

    message = (
        "Expected loss_fn to take a model and what 'far' holds, inputs and no labels, got "
        "loss(model, x, y): add them, or pass a criterion, which gets random ones."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        choose_public(network(), loss, Untouchable(), CANDIDATES, ledger=Ledger(), rank=4)


# -- the price -------------------------------------------------------------------------------------


def composed_response(epsilon, count, delta):
    """ε of `count` times randomised response, from its definition."""
    i = np.arange(count + 1)
    log_binomial = gammaln(count + 1) - gammaln(i + 1) - gammaln(count - i + 1)
    mass = np.exp(log_binomial + (count - i) * epsilon - count * math.log1p(math.exp(epsilon)))
    losses = (count - 2 * i) * epsilon
    low, high = 0.0, count * epsilon
    for _ in range(60):
        middle = (low + high) / 2
        exceeded = (mass * np.clip(1 - np.exp(middle - losses), 0, None)).sum() > delta
        low, high = (middle, high) if exceeded else (low, middle)
    return high


@pytest.mark.parametrize(("epsilon", "count"), [(0.1, 1), (0.1, 7), (1.0, 3), (0.5, 20)])
def test_the_event_costs_what_randomised_response_costs(epsilon, count):
    """Which is the most that anything ε-DP can cost; Laplace noise costs less."""
    events = [(pure_event(epsilon), count)]
    exact = composed_response(epsilon, count, DELTA)
    assert exact - 1e-9 <= pld_epsilon(events, DELTA) <= exact + 2e-3 * count * epsilon
    assert pld_epsilon([(dp_event.LaplaceDpEvent(1 / epsilon), count)], DELTA) < exact
    ledger = Ledger(accountant="rdp")
    ledger.charge(pure_event(epsilon), count)
    assert ledger.spending(DELTA).accountant == "rdp"
    assert exact <= ledger.epsilon(DELTA)
    assert ledger.warnings == ()


@pytest.mark.parametrize("order", [1.5, 2.0, 8.0, 200.0])
@pytest.mark.parametrize("epsilon", [0.01, 0.3, 2.0])
def test_the_events_renyi_divergence_is_that_of_randomised_response(order, epsilon):
    p = 1 / (1 + math.exp(-epsilon))
    total = p**order * (1 - p) ** (1 - order) + (1 - p) ** order * p ** (1 - order)
    _, (divergence,) = renyi([(pure_event(epsilon), 3)], [order])
    assert divergence == pytest.approx(3 * math.log(total) / (order - 1))


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_choice_is_paid_from_the_budget_of_training(accountant):
    step = step_event(1.0, 0.01)
    alone, both = Ledger(accountant=accountant), Ledger(accountant=accountant)
    both.charge(pure_event(0.1))
    for ledger in (alone, both):
        ledger.charge(step, 1000)
    assert alone.epsilon(DELTA) < both.epsilon(DELTA) < alone.epsilon(DELTA) + 0.1
    assert both.spending(DELTA).accountant == accountant
    assert both.warnings == ()


def test_a_choice_leaves_the_grid_of_pld_as_fine_as_steps_need():
    fine = [(step_event(50.0, 1e-4), 100)]
    assert pld_interval([*fine, (pure_event(0.1), 1)]) < 1e-4


@pytest.mark.parametrize("accountant", [pytest.param("pld", marks=pytest.mark.slow), "rdp"])
def test_calibration_makes_room_for_the_choice(accountant):
    target, rate, steps = 1.0, 0.01, 200
    spent = Ledger(accountant=accountant)
    spent.charge(pure_event(0.2))
    without = calibrate(target, DELTA, rate, steps, accountant=accountant)
    z = calibrate(target, DELTA, rate, steps, spent=spent)
    assert z > without * 1.005
    spent.charge(step_event(z, rate), steps)
    assert 0.99 * target < spent.epsilon(DELTA) <= target


def test_replacing_a_record_has_no_price_for_a_choice():
    ledger = Ledger()
    ledger.charge(pure_event(0.1))
    assert ledger.replace_one_epsilon(DELTA) == math.inf


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_an_event_without_noise_is_not_private(accountant):
    ledger = Ledger(accountant=accountant)
    ledger.charge(dp_event.DiscreteLaplaceDpEvent(0.0, 1))
    assert ledger.epsilon(DELTA) == math.inf


@pytest.mark.parametrize("epsilon", [0, -1, math.inf])
def test_events_that_cannot_be(epsilon):
    with pytest.raises(ValueError, match=re.escape("Expected epsilon > 0 and finite")):
        pure_event(epsilon)


def test_the_event_survives_json():
    text = json.dumps(event_to_json(pure_event(0.1)))
    assert event_from_json(json.loads(text)) == pure_event(0.1)


def test_a_run_that_begins_with_a_choice():
    """Through the engine, to the certificate."""
    engine = PrivacyEngine()
    model, data = network(), private(400)
    choice = choose_public(model, CE, data, CANDIDATES, ledger=engine.ledger, epsilon=0.5, rank=4)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=100),
        target_epsilon=2.0,
        target_delta=DELTA,
        epochs=2,
    )
    for x, y in loader:
        optimizer.zero_grad()
        CE(model(x), y).backward()
        optimizer.step()
    document = engine.certificate()
    assert document["private"]
    assert 0.5 < document["epsilon"] <= 2.0
    assert document["events"][0]["event"] == event_to_json(pure_event(0.5))
    assert {record["name"] for record in document["public"]} == set(choice.candidates)
    again = Ledger()
    again.load_state_dict(engine.ledger.state_dict())
    assert again.epsilon(DELTA) == engine.get_epsilon(DELTA)
