"""GSD against full SVDs of gradients written out row by row, and what it must never do."""

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from dpspan.choose.gsd import gsd, subspace_distance
from dpspan.choose.probe import Probe, principal_subspace
from dpspan.model.networks import PaperCNN
from dpspan.model.per_sample import per_sample_gradients
from dpspan.public.data import PublicData, Samples
from dpspan.support.errors import UnsupportedModule
from helpers.oracle import per_sample_matrix
from helpers.traces import traces

CE = nn.CrossEntropyLoss()


def by_svd(j, h, k):
    """The definition, with p-dimensional singular vectors."""
    v, w = (torch.linalg.svd(x.double(), full_matrices=False)[2][:k] for x in (j, h))
    cosines = torch.linalg.svdvals(v @ w.T)
    return math.sqrt(max(0.0, k - float(cosines.square().sum()))) / math.sqrt(k)


def labelled_loss(model, x, y):
    return cross_entropy(model(x), y, reduction="none")


def images(n, seed, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    low = torch.randn(n, 1, 7, 7, generator=g)
    x = nn.functional.interpolate(low, (28, 28)) + 0.3 * torch.randn(n, 1, 28, 28, generator=g)
    return x.to(dtype), torch.randint(10, (n,), generator=g)


def cnn(dtype=torch.float32):
    torch.manual_seed(0)
    return PaperCNN().to(dtype)


class Rowwise(nn.Module):
    """A linear model whose gradient for the loss below is the input row itself."""

    def __init__(self, p, dtype=torch.float64):
        super().__init__()
        self.linear = nn.Linear(p, 1, bias=False).to(dtype)

    def forward(self, x):
        return self.linear(x)[:, 0]


def output(model, x):
    return model(x)


def rows(n, p, seed, dtype=torch.float64):
    return torch.randn(n, p, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# -- the value ----------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_the_value_from_full_svds(dtype, k):
    model, first, second = cnn(dtype), images(40, 1, dtype), images(50, 2, dtype)
    j, h = (per_sample_gradients(model, labelled_loss, *b).matrix() for b in (first, second))
    assert gsd(model, labelled_loss, first, second, k) == pytest.approx(by_svd(j, h, k), abs=1e-6)


def test_the_rows_are_those_of_autograd():
    model, first, second = cnn(torch.float64), images(20, 1, torch.float64), images(25, 2)
    second = second[0].double(), second[1]
    j, h = (per_sample_matrix(model, labelled_loss, *b) for b in (first, second))
    assert gsd(model, labelled_loss, first, second, 8) == pytest.approx(by_svd(j, h, 8), abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    k=st.integers(1, 5),
    near=st.sampled_from([0.0, 1e-9, 1e-6, 1e-3, 1.0]),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
)
def test_any_rows_give_the_definition_and_never_nan(seed, k, near, scale):
    x = rows(8, 12, seed)
    y = scale * (x + near * rows(8, 12, seed + 1))
    value = gsd(Rowwise(12), output, x, y, k)
    assert 0.0 <= value <= 1.0
    # √(k − Σ cos²) of the definition itself loses half of the digits near 0.
    assert value == pytest.approx(by_svd(x, y, k), abs=2e-7)


def test_a_small_angle_is_not_lost():
    """The definition in float64 cannot see it, a float32 Gram matrix could not see 1e-4."""
    angle = 1e-6
    x = torch.eye(2, 6, dtype=torch.float64) * torch.tensor([[2.0], [1.0]])
    y = x.clone()
    y[0, 0], y[0, 5] = 2 * math.cos(angle), 2 * math.sin(angle)
    expected = math.sin(angle) / math.sqrt(2)
    assert gsd(Rowwise(6), output, x, y, 2) == pytest.approx(expected, rel=1e-3)


def test_the_same_data_are_at_distance_0():
    x, y = images(60, 3)
    assert gsd(cnn(), CE, x, x) < 1e-6
    assert gsd(cnn(), labelled_loss, (x, y), (x, y)) < 1e-6


def test_pieces_change_nothing_that_matters():
    model, data = cnn(), PublicData.of(images(60, 3)[0])
    one, many = (
        principal_subspace(Probe(model=model, loss_fn=CE, piece=piece).gradients(data), 16, of="x")
        for piece in (60, 7)
    )
    assert subspace_distance(one, many) < 1e-4


def test_orthogonal_data_are_at_distance_1():
    x = torch.cat([rows(9, 5, 0), torch.zeros(9, 5, dtype=torch.float64)], dim=1)
    assert gsd(Rowwise(10), output, x, x.roll(5, 1), 4) == pytest.approx(1.0, abs=1e-12)


def test_half_of_the_directions_in_common():
    eye = torch.eye(4, dtype=torch.float64)
    assert gsd(Rowwise(4), output, eye[[0, 1]], eye[[1, 2]], 2) == pytest.approx(math.sqrt(0.5))


def test_it_is_symmetric():
    model, x, y = cnn(), images(40, 1)[0], images(50, 2)[0]
    assert gsd(model, CE, x, y, 8) == pytest.approx(gsd(model, CE, y, x, 8), abs=1e-12)


@pytest.mark.parametrize("scale", [1e-4, 3.0, 1e5])
def test_the_scale_of_gradients_does_not_matter(scale):
    model, x, y = cnn(), images(40, 1), images(50, 2)
    plain = gsd(model, labelled_loss, x, y, 8)
    scaled = gsd(model, lambda *batch: scale * labelled_loss(*batch), x, y, 8)
    assert scaled == pytest.approx(plain, abs=1e-5)


# -- labels -------------------------------------------------------------------------------------


def test_a_criterion_gives_both_sides_random_labels_of_the_models_classes():
    model, (x, y), (u, v) = cnn(), images(30, 1), images(30, 2)
    assert gsd(model, CE, (x, y), (u, v), 8) == gsd(model, CE, x, u, 8)
    assert gsd(model, CE, x, u, 8, seed=1) != gsd(model, CE, x, u, 8)
    far = y + 90  # of classes that the model does not have
    assert gsd(model, CE, (x, far), (u, far), 8) == gsd(model, CE, x, u, 8)


def test_gradients_with_the_datas_own_labels():
    model, (x, y) = cnn(), images(30, 1)
    of_both, of_inputs = (Samples.of(source, name="private") for source in ((x, y), x))
    probe = Probe(model=model, loss_fn=CE)
    own = probe.gradients(of_both, own_labels=True).matrix()
    assert torch.allclose(own, per_sample_gradients(model, labelled_loss, x, y).matrix())
    drawn = probe.gradients(of_inputs, own_labels=True).matrix()
    assert torch.equal(drawn, probe.gradients(of_both).matrix())


def test_several_labels_per_sample():
    model, x, u = cnn(), images(40, 1)[0], images(40, 2)[0]
    assert 0.0 < gsd(model, nn.BCEWithLogitsLoss(), x, u, 8) < 1.0
    assert gsd(model, nn.BCEWithLogitsLoss(), x, x, 8) < 1e-6


# -- what it leaves alone, and what it refuses ----------------------------------------------------


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(784, 10)).train()
    model[2].weight.grad = torch.ones_like(model[2].weight)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = traces(model)
    random = torch.get_rng_state()
    gsd(model, CE, images(20, 1)[0], images(20, 2)[0], 4)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(model[2].weight.grad, torch.ones_like(model[2].weight))
    assert model.training
    assert traces(model) == before
    assert all(p.requires_grad for p in model.parameters())


def test_dropout_is_off_as_in_the_private_choice():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 20), nn.Dropout(0.5), nn.Linear(20, 10))
    x, u = images(20, 1)[0], images(20, 2)[0]
    assert gsd(model.train(), CE, x, u, 4) == gsd(model.eval(), CE, x, u, 4)


def test_functions_get_the_labels_that_there_are_or_say_what_is_missing():
    model, (x, y) = cnn(), images(20, 1)
    missing = "inputs and no labels, got labelled_loss(model, x, y): add them, or pass a criterion"
    with pytest.raises(ValueError, match=re.escape(missing)):
        gsd(model, labelled_loss, (x, y), x, 4)
    unwanted = (
        "Expected loss_fn to take a model and what 'private' holds, inputs and labels, got "
        "output(model, x): leave them out, or let it take them."
    )
    with pytest.raises(ValueError, match=re.escape(unwanted)):
        gsd(model, output, (x, y), (x, y), 4)


def test_more_directions_than_there_are():
    message = (
        "Expected rank of at most 3, as many directions as the gradients of the 3 samples of "
        "'public' span in float64, got 4. Lower rank, or give more samples."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        gsd(Rowwise(9), output, rows(8, 9, 0), rows(3, 9, 1), 4)
    alike = rows(1, 9, 0).expand(8, 9)
    with pytest.raises(ValueError, match=r"at most 1, .* the 8 samples of 'private'"):
        gsd(Rowwise(9), output, alike, rows(8, 9, 1), 2)


@pytest.mark.parametrize(
    ("model", "x", "message"),
    [
        (Rowwise(5), torch.zeros(4, 5).double(), "'private' are all zero, so they span no"),
        (
            Rowwise(5),
            torch.full((4, 5), 1e200, dtype=torch.float64),
            "'private' are not finite, so they",
        ),
        (Rowwise(5), torch.full((4, 5), math.nan).double(), "hold NaN or infinity"),
    ],
)
def test_data_that_span_nothing(model, x, message):
    with pytest.raises(ValueError, match=message):
        gsd(model, output, x, rows(4, 5, 0), 2)


def test_models_whose_samples_have_no_gradient_of_their_own():
    with pytest.raises(UnsupportedModule, match="BatchNorm1d"):
        gsd(nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)), CE, rows(4, 5, 0), rows(4, 5, 1), 2)


def test_subspaces_of_different_rank():
    model = Rowwise(6)
    two, three = (
        principal_subspace(per_sample_gradients(model, output, rows(6, 6, 0)), k, of="x")
        for k in (2, 3)
    )
    with pytest.raises(ValueError, match=re.escape("another subspace of rank 2, got 3.")):
        subspace_distance(two, three)
