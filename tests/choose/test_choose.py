"""Comparing public candidates without privacy: the parts, and the table that says what it is."""

import json
import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpspan.accounting.certificate import certificate
from dpspan.accounting.ledger import Ledger
from dpspan.choose import ProbeNetwork, gsd, rank_public
from dpspan.choose.probe import PIECE, Probe, drawn, energies, principal_subspace
from dpspan.model.per_sample import per_sample_gradients
from dpspan.public.data import PublicData, Samples
from helpers.oracle import top_directions
from helpers.stripes import conv_network, images, labels

CE = nn.CrossEntropyLoss()


# -- samples ---------------------------------------------------------------------------------------


def test_so_many_samples_of_anything():
    x, y = images(50, 0), labels(50)
    forms = [x, (x, y), {"x": x}, TensorDataset(x, y), DataLoader(TensorDataset(x, y), 7)]
    picked = [drawn(form, 20, seed=3, name="a", kind=Samples) for form in forms]
    inputs = [data.batches[0][0] for data in picked]
    assert [data.count for data in picked] == [20] * 5
    for found in inputs[1], inputs[2]["x"], inputs[3], inputs[4]:
        assert torch.equal(found, inputs[0])  # the same ones, however they came
    assert {data.name for data in picked} == {"a"}
    assert drawn(x, 20, seed=4, name="a", kind=Samples).digest != picked[0].digest
    assert drawn(x, 60, seed=3, name="a", kind=Samples).count == 50


def test_large_datasets_are_not_read_as_a_whole():
    class Counting(TensorDataset):
        read = 0

        def __getitem__(self, index):
            Counting.read += 1
            return super().__getitem__(index)

    drawn(Counting(images(500, 0)), 10, seed=0, name="a", kind=Samples)
    assert Counting.read == 10


# -- probe -----------------------------------------------------------------------------------------


def test_the_probe_is_the_papers():
    probe = ProbeNetwork(channels=3, classes=14)
    assert sum(p.numel() for p in probe.parameters()) == 30_782
    assert [tuple(p.shape) for p in probe.parameters()][::2] == [
        (64, 3, 8, 8),
        (16, 64, 4, 4),
        (14, 144),
    ]


@pytest.mark.parametrize(("channels", "side", "classes"), [(1, 28, 10), (3, 32, 2), (4, 224, 7)])
def test_the_probe_takes_images_of_any_size(channels, side, classes):
    probe = ProbeNetwork(channels=channels, classes=classes)
    assert probe(torch.randn(2, channels, side, side)).shape == (2, classes)


def test_the_probe_is_the_same_for_a_seed_and_leaves_torchs_numbers_alone():
    before = torch.get_rng_state()
    one, same, other = (ProbeNetwork(channels=1, classes=2, seed=s) for s in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    weights = [next(m.parameters()) for m in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_probe_compares_datasets():
    probe, x = ProbeNetwork(channels=1, classes=4), torch.randn(12, 1, 10, 10)
    assert gsd(probe, CE, x, x, 4) < 1e-6
    assert 0.1 < gsd(probe, CE, x, torch.randn(12, 1, 10, 10) ** 3, 4) <= 1.0


# -- captured energy -------------------------------------------------------------------------------


def captured_energy(model, loss_fn, private, public, rank):
    """What the table has the mean of, by its parts."""
    probe = Probe.of(model, loss_fn, seed=0, piece=PIECE)
    subspace = principal_subspace(probe.gradients(PublicData.of(public)), rank, of="public")
    mine = Samples.of(private, name="private")
    return energies(probe.gradients(mine, own_labels=True), [subspace])[:, 0]


def test_energy_by_projections_written_out():
    model = conv_network().double()
    x, y, u = images(12, 1).double(), labels(12), images(20, 2).double()
    found = captured_energy(model, CE, (x, y), u, 5)

    def loss(model, x, y):
        return nn.functional.cross_entropy(model(x), y, reduction="none")

    g = per_sample_gradients(model, loss, x, y).matrix()
    h = Probe(model=model, loss_fn=CE).gradients(PublicData.of(u)).matrix()
    v = top_directions(h, 5)
    expected = (g @ v.T).square().sum(1) / g.square().sum(1)
    assert torch.allclose(found, expected, atol=1e-9)
    assert found.min() >= 0
    assert found.max() <= 1


def test_energy_of_a_samples_own_span_is_all():
    x = images(6, 1)
    assert captured_energy(conv_network(), CE, x, x, 6).min() > 0.999


def test_dropout_is_off_as_in_the_private_choice():
    model = nn.Sequential(conv_network(), nn.Dropout(0.5)).train()
    x, y, u = images(12, 1), labels(12), images(20, 2)
    in_training = captured_energy(model, CE, (x, y), u, 5)
    ranked = rank_public(model, CE, (x, y), {"u": u}, rank=5)
    assert model.training
    (row,) = ranked.rows
    assert torch.equal(in_training, captured_energy(model.eval(), CE, (x, y), u, 5))
    assert row.unprivate_captured_energy == pytest.approx(float(in_training.mean()), abs=1e-6)


# -- the table -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranking():
    candidates = {
        "far": (images(60, 2, stripes=True), labels(60)),
        "near": (images(60, 1), labels(60)),
    }
    private = TensorDataset(images(80, 3), labels(80))
    return rank_public(
        conv_network(),
        CE,
        private,
        candidates,
        rank=6,
        samples=50,
    )


def test_rows_are_in_order_and_hold_what_the_parts_give(ranking):
    assert [row.name for row in ranking.rows] == ["near", "far"]
    near, far = ranking.rows
    mine = drawn(TensorDataset(images(80, 3), labels(80)), 50, seed=0, name="private", kind=Samples)
    data = drawn((images(60, 1), labels(60)), 50, seed=0, name="near", kind=PublicData)
    assert near.unprivate_gsd == pytest.approx(gsd(conv_network(), CE, mine, data, 6), abs=1e-9)
    energy = captured_energy(conv_network(), CE, mine, data, 6).mean()
    assert near.unprivate_captured_energy == pytest.approx(float(energy), abs=1e-6)
    assert near.unprivate_captured_energy > far.unprivate_captured_energy
    assert [row.samples for row in ranking.rows] == [50, 50]


def test_all_pairs_are_there(ranking):
    pairs = ranking.unprivate_pairs
    assert set(pairs) == {"private", "near", "far"}
    assert all(pairs[a][b] == pairs[b][a] for a in pairs for b in pairs)
    assert all(pairs[a][a] == 0.0 for a in pairs)
    assert pairs["private"]["near"] == ranking.rows[0].unprivate_gsd


def test_it_says_that_it_is_not_private(ranking):
    text = str(ranking)
    assert "NOT PRIVATE" in text
    assert "near" in text
    document = json.loads(json.dumps(ranking.to_dict()))
    assert document["private"] is False
    assert "NOT PRIVATE" in document["warning"]
    numbers = {key for key, value in document["rows"][0].items() if isinstance(value, float)}
    assert numbers
    assert all(key.startswith("unprivate_") for key in numbers)


def test_it_cannot_go_on_a_certificate(ranking):
    with pytest.raises(ValueError, match=r"Cannot put training\.ranking into the certificate"):
        certificate(Ledger(), delta=1e-5, training={"ranking": ranking})


def test_looking_is_noted_but_not_what_was_seen():
    ledger = Ledger()
    rank_public(conv_network(), CE, images(20, 3), {"near": images(20, 1)}, rank=3, ledger=ledger)
    (warning,) = ledger.warnings
    assert warning == "unprivate: public data were ranked by private data, without noise"
    assert ledger.events == ()


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        ({}, "Expected at least 1 public candidate, got 0."),
        ({"private": images(9, 1)}, "Expected no candidate of the name 'private': rename it."),
    ],
)
def test_rankings_that_cannot_be(candidates, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        rank_public(conv_network(), CE, images(9, 3), candidates, rank=2)


def test_a_private_label_that_is_no_class_is_not_shown() -> None:
    x, y = images(12, 1), labels(12)
    y[3] = 777
    with pytest.raises(ValueError, match=r"Expected labels from 0 to \d") as caught:
        captured_energy(conv_network(), CE, (x, y), images(20, 2), 5)
    assert "777" not in str(caught.value)
