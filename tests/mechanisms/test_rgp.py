"""RGP: the paper's theorem and corollary, the joint clip, the noise, and training."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dpspan import RGP, Capture, PrivacyEngine, per_sample_gradients
from dpspan.gradients.layers.terms import Rows
from dpspan.gradients.operator import Left, Right
from dpspan.mechanisms import Setting
from dpspan.mechanisms.carriers import (
    Carrier,
    History,
    RandomCarriers,
    carried_weights,
    orthonormal,
)
from dpspan.mechanisms.low_rank import unprivate_projection_residual
from dpspan.mechanisms.noise import Noise
from helpers.subspaces import flat, stepped
from helpers.training import data, network, setup, train, weights

F64 = torch.float64
CLIP = 0.7
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(7, 9), (7,)),
    "linear on sequences": (lambda: nn.Linear(7, 9), (5, 7)),
    "conv1d": (lambda: nn.Conv1d(3, 8, 3, padding=1), (3, 11)),
    "conv2d": (lambda: nn.Conv2d(3, 8, 3, stride=2, padding=1), (3, 9, 9)),
    "conv2d in groups": (lambda: nn.Conv2d(4, 8, 3, groups=2, padding=(1, 0)), (4, 6, 7)),
    "conv2d dilated": (
        lambda: nn.Conv2d(3, 8, 3, padding=2, dilation=2, padding_mode="circular"),
        (3, 7, 7),
    ),
    "conv3d": (lambda: nn.Conv3d(2, 6, 2), (2, 4, 3, 4)),
}


def carrier(shape: torch.Size, rank: int, seed: int = 0) -> Carrier:
    g = torch.Generator().manual_seed(seed)
    d_out, d_in = shape[0], shape[1:].numel()
    sizes = [(d_out, rank), (d_in, rank)]
    left, right = orthonormal([torch.randn(*size, generator=g, dtype=F64) for size in sizes])
    return Carrier(left, right.T)


def losses(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x).flatten(1)
    return (output.sin() * torch.linspace(-1, 2, output.shape[1], dtype=x.dtype)).sum(1)


# -- the paper's theorem and corollary ------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_small_gradients_are_those_of_the_reparametrized_layer(name: str) -> None:
    """Theorem 2.1: with W as L R + a constant, autograd gives ∂L and ∂R, sample by sample."""
    build, shape = LAYERS[name]
    torch.manual_seed(0)
    model, x = build().double(), torch.randn(6, *shape, dtype=F64)
    carriers = carrier(model.weight.shape, 2)
    small = per_sample_gradients(model, losses, x).compress({"weight": carriers})
    left, right = (part.clone().requires_grad_() for part in carriers)
    constant = model.weight.detach() - (left @ right).detach().view_as(model.weight)
    for i in range(len(x)):
        weight = (left @ right).view_as(constant) + constant
        output = torch.func.functional_call(
            model, {"weight": weight, "bias": model.bias.detach()}, (x[i : i + 1],)
        ).flatten(1)
        loss = (output.sin() * torch.linspace(-1, 2, output.shape[1], dtype=F64)).sum()
        expected = torch.autograd.grad(loss, (left, right))
        for part, value in zip((Left, Right), expected, strict=True):
            row = small.term(part("weight")).rows(i, i + 1)[0]
            assert torch.allclose(row, value.flatten(), atol=1e-10)


def test_the_reconstruction_is_the_orthogonal_projection() -> None:
    """Corollary 2.1.1, with its minus; with a plus it is no projection at all."""
    torch.manual_seed(0)
    carriers = carrier(torch.Size((9, 7)), 2)

    def project(g: Tensor) -> Tensor:
        return carriers.reconstruct(g @ carriers.right.T, carriers.left.T @ g)

    for _ in range(20):
        g, h = torch.randn(2, 9, 7, dtype=F64)
        p = project(g)
        assert torch.allclose(project(p), p, atol=1e-12)
        assert abs(float(((g - p) * project(h)).sum())) < 1e-10  # orthogonal to all of them
        inside = carriers.left @ torch.randn(2, 7, dtype=F64)
        inside = inside + torch.randn(9, 2, dtype=F64) @ carriers.right
        assert torch.allclose(project(inside), inside, atol=1e-12)
        left, right = g @ carriers.right.T, carriers.left.T @ g
        both = carriers.left @ carriers.left.T @ left @ carriers.right
        plus = left @ carriers.right + carriers.left @ right + both
        assert (g - plus).norm() > (g - p).norm() + 1e-3
        assert torch.allclose(p, plus - 2 * both, atol=1e-12)


def test_history_finds_the_directions_of_the_update() -> None:
    g = torch.Generator().manual_seed(0)
    first = torch.randn(9, 7, generator=g, dtype=F64)
    u, v = (torch.randn(size, 2, generator=g, dtype=F64) for size in (9, 7))
    weight = first + u @ v.T

    def draw(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=g, dtype=F64)

    (found,) = History().carriers([weight], [first], 2, 1, draw)
    assert torch.allclose(
        found.reconstruct(u @ v.T @ found.right.T, found.left.T @ (u @ v.T)), u @ v.T
    )
    assert torch.linalg.svdvals(torch.linalg.qr(u).Q.T @ found.left).min() > 1 - 1e-9
    # In the warm-up: those of the weight itself, by a power pass on it.
    (warm,) = History(warmup=5, iterations=30).carriers([weight], [first], 2, 4, draw)
    top = torch.linalg.svd(weight)
    assert torch.linalg.svdvals(top.U[:, :2].T @ warm.left).min() > 1 - 1e-6
    assert torch.linalg.svdvals(top.Vh[:2] @ warm.right.T).min() > 1 - 1e-6
    for source in (History(), RandomCarriers()):
        (made,) = source.carriers([weight], [first], 3, 7, draw)
        assert torch.allclose(made.left.T @ made.left, torch.eye(3, dtype=F64), atol=1e-12)
        assert torch.allclose(made.right @ made.right.T, torch.eye(3, dtype=F64), atol=1e-12)


@pytest.mark.parametrize("source", [History(), History(iterations=3), RandomCarriers()])
def test_stacks_of_weights_have_the_carriers_of_each(source: Any) -> None:
    g = torch.Generator().manual_seed(0)
    shapes = [(4, 9, 7), (2, 5, 12)]
    now, first = ([torch.randn(*s, generator=g, dtype=F64) for s in shapes] for _ in range(2))
    numbers = torch.randn(4, 12, 12, generator=g, dtype=F64)

    def of_all(stack: int, rows: int, columns: int) -> Tensor:
        return numbers[:stack, :rows, :columns]

    stacked = source.carriers(now, first, 3, 5, of_all)
    for stack, then, found in zip(now, first, stacked, strict=True):
        for i, weight in enumerate(stack):

            def of_one(rows: int, columns: int, i: int = i) -> Tensor:
                return numbers[i, :rows, :columns]

            (alone,) = source.carriers([weight], [then[i]], 3, 5, of_one)
            assert torch.allclose(found.left[i], alone.left, atol=1e-12)
            assert torch.allclose(found.right[i], alone.right, atol=1e-12)


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("spread", [1.0, 1e3, 1e6])  # of the singular values
def test_orthonormal_columns_span_the_matrix(dtype: torch.dtype, spread: float) -> None:
    g = torch.Generator().manual_seed(0)
    values = torch.logspace(0, -math.log10(spread), 4, dtype=F64)
    matrices = []
    for size in (4, 11, 300):
        basis, _ = torch.linalg.qr(torch.randn(size, 4, generator=g, dtype=F64))
        mixed = torch.randn(4, 4, generator=g, dtype=F64)
        matrices.append((1e-5 * basis * values @ mixed).to(dtype))
    exact = 1e-12 if dtype is F64 else 1e-6
    for columns, x in zip(orthonormal(matrices), matrices, strict=True):
        assert columns.dtype == dtype
        assert torch.allclose(columns.T @ columns, torch.eye(4, dtype=dtype), atol=exact)
        # A direction of this share of the matrix may turn by about as much as the fill's share.
        missed = x.double() - columns.double() @ (columns.double().T @ x.double())
        assert missed.norm() <= (1e-5 if dtype is F64 else 2e-5) * x.norm()


def test_orthonormal_columns_where_directions_are_missing() -> None:
    """A weight that has not moved, one that moved in one direction, and one beside them."""
    g = torch.Generator().manual_seed(0)
    line = torch.randn(9, 1, generator=g) @ torch.randn(1, 3, generator=g)
    found = orthonormal([torch.zeros(2, 5, 3), line, torch.randn(4, 3, generator=g)])
    for columns in found:
        assert torch.allclose(
            columns.mT @ columns, torch.eye(3).expand_as(columns.mT @ columns), atol=1e-6
        )
    assert torch.allclose(found[1] @ (found[1].T @ line), line, atol=1e-5)


def test_weights_of_one_shape_have_carriers_of_their_own() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    mechanism = RGP(rank=2, clip=1.0).bind(Setting(model=model))
    lefts = [carrier.left for carrier in mechanism.carriers().values()]
    assert len(lefts) == 3
    for one, other in pairwise(lefts):
        assert torch.linalg.matrix_norm(one.T @ other, 2) < 0.999


@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_s_carriers_are_those_of_its_own_updates(resumed: bool) -> None:
    """Each weight's, from where the first private step found it; in a new process, too."""
    g = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 12)).double()
    mechanism = RGP(rank=2, clip=1.0).bind(Setting(model=model))
    batch = torch.randn(3, 8, generator=g, dtype=F64)
    total = mechanism.clipped_sum(per_sample_gradients(model, losses, batch))
    stepped(mechanism, total, Noise(seed=0), 1.0)
    updates = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:  # an update of rank 2, which carriers of rank 2 find
            u, v = (torch.randn(size, 2, generator=g, dtype=F64) for size in parameter.shape)
            updates[name] = u @ v.T
            parameter.data += updates[name]
    if resumed:
        state, mechanism = mechanism.state_dict(), RGP(rank=2, clip=1.0).bind(Setting(model=model))
        mechanism.load_state_dict(state)
    found = mechanism.carriers()
    assert found.keys() == updates.keys()
    for name, update in updates.items():
        left, right = found[name]
        assert torch.allclose(left @ (left.T @ update), update, atol=1e-4)
        assert torch.allclose((update @ right.T) @ right, update, atol=1e-4)


# -- privacy --------------------------------------------------------------------------------------


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.LayerNorm(10), nn.Linear(10, 8)).double()


HEAD = {"head_scale": 0.1, "head_rate": 3.0}


@pytest.mark.parametrize("options", [{}, {"left_only": True}, HEAD])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3, 1e12])
def test_one_sample_moves_the_joint_tuple_by_at_most_the_clip(options: Any, size: float) -> None:
    model = small_model()
    mechanism = RGP(rank=2, clip=CLIP, **options).bind(Setting(model=model))
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(1), dtype=F64)

    def scaled(m: nn.Module, x: Tensor) -> Tensor:
        return size * losses(m, x)

    J = per_sample_gradients(model, scaled, x)
    alone = [
        flat(mechanism.clipped_sum(per_sample_gradients(model, scaled, x[i : i + 1])))
        for i in range(5)
    ]
    assert all(one.norm() <= CLIP for one in alone)
    assert torch.allclose(flat(mechanism.clipped_sum(J)), torch.stack(alone).sum(0), atol=1e-9)
    if size > 1:
        assert all(one.norm() > 0.99 * CLIP for one in alone)


def test_the_head_has_a_scale_before_the_clip_and_a_rate_after_the_noise() -> None:
    """Against one sample at a time, by hand."""
    model = small_model()
    x = torch.randn(6, 12, generator=torch.Generator().manual_seed(1), dtype=F64)
    mechanism = RGP(rank=2, clip=CLIP, **HEAD).bind(Setting(model=model))
    carrier = mechanism.carriers()["0.weight"]
    assert set(mechanism.carriers()) == {"0.weight"}
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for one in x.split(1):
        names, parameters = zip(*model.named_parameters(), strict=True)
        loss = losses(model, one).sum()
        own = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
        left, right = own["0.weight"] @ carrier.right.T, carrier.left.T @ own["0.weight"]
        left = left - carrier.left @ (carrier.left.T @ left)
        heads = [0.1 * own["3.weight"], 0.1 * own["3.bias"]]
        others = [left, right, own["0.bias"], own["2.weight"], own["2.bias"]]
        norm = torch.cat([part.flatten() for part in (*heads, *others)]).norm()
        factor = min(1.0, CLIP / float(norm))
        expected["0.weight"] += factor * (left @ carrier.right + carrier.left @ right)
        for name in ("0.bias", "2.weight", "2.bias"):
            expected[name] += factor * own[name]
        for name, head in zip(("3.weight", "3.bias"), heads, strict=True):
            expected[name] += 3.0 * factor * head
    total = mechanism.clipped_sum(per_sample_gradients(model, losses, x))
    update = stepped(mechanism, total, Noise(seed=0), 0.0)
    for name, value in expected.items():
        assert torch.allclose(update[name], value, atol=1e-9)


def test_a_head_needs_a_linear_layer() -> None:
    with pytest.raises(ValueError, match="a model with a trainable linear layer"):
        RGP(head_scale=0.1).bind(Setting(model=nn.Sequential(nn.Conv2d(8, 8, 3))))


def test_carriers_of_the_weights_never_turn_to_the_history() -> None:
    model = small_model()
    J = per_sample_gradients(model, losses, torch.randn(4, 12, dtype=F64))
    found = []
    for carriers in ("weights", History(warmup=2), "history"):
        mechanism = RGP(rank=2, clip=1.0, carriers=carriers).bind(Setting(model=model))
        for _ in range(2):
            stepped(mechanism, mechanism.clipped_sum(J), Noise(seed=0), 1.0)
        found.append(mechanism.carriers()["0.weight"].left)
    assert not torch.allclose(found[0], found[1], atol=1e-3)  # the third step is beyond that one
    assert torch.equal(found[1], found[2])  # nothing has moved


def test_the_part_of_the_left_gradient_inside_the_carrier_is_not_released() -> None:
    """It takes no part in the update, so it must not use up the clip."""
    model = small_model()
    J = per_sample_gradients(model, losses, torch.randn(4, 12, dtype=F64))
    mechanism = RGP(rank=2, clip=1e9).bind(Setting(model=model))
    carrier, total = mechanism.carriers()["0.weight"], mechanism.clipped_sum(J)
    assert (carrier.left.T @ total[Left("0.weight")]).abs().max() < 1e-12
    whole = J.combine(torch.ones(4, dtype=F64))["0.weight"]
    update = stepped(mechanism, total, Noise(seed=0), 0.0)["0.weight"]
    expected = carrier.reconstruct(whole @ carrier.right.T, carrier.left.T @ whole)
    assert torch.allclose(update, expected, atol=1e-12)


@pytest.mark.parametrize("n", [0, 1, 400])
def test_every_trained_number_gets_its_noise(n: int) -> None:
    """Of zero gradients: full ones have variance (zC)², carried ones that of the projection."""
    model = small_model()
    model[2].requires_grad_(False)
    mechanism = RGP(rank=2, clip=CLIP).bind(Setting(model=model))
    x, z, draws = torch.zeros(n, 12, dtype=F64), 1.3, 1500

    def nothing(m: nn.Module, x: Tensor) -> Tensor:
        return 0 * m(x).sum(1)

    J = per_sample_gradients(model, nothing, x)
    noise = Noise(seed=1)
    released = [stepped(mechanism, mechanism.clipped_sum(J), noise, z) for _ in range(draws)]
    assert set(released[0]) == {"0.weight", "0.bias", "3.weight", "3.bias"}  # frozen: not there
    std = z * CLIP
    for name, dims in (("0.bias", 10), ("0.weight", 2 * (10 + 12) - 4), ("3.weight", 2 * 18 - 4)):
        energy = sum(float(step[name].square().sum()) for step in released) / draws
        expected = dims * std**2
        assert abs(energy - expected) < 5 * expected * math.sqrt(2 / (dims * draws))
    for left, right in pairwise(released):
        assert not torch.equal(left["0.weight"], right["0.weight"])


@pytest.mark.parametrize("options", [{}, {"left_only": True}, HEAD])
def test_the_noise_that_is_noted_is_the_noise_of_the_update(options: Any) -> None:
    model = small_model()
    mechanism = RGP(rank=2, clip=CLIP, **options).bind(Setting(model=model))
    assert mechanism.diagnostics() == []
    J = per_sample_gradients(model, losses, torch.randn(4, 12, dtype=F64))
    nothing = {name: torch.zeros_like(v) for name, v in mechanism.clipped_sum(J).items()}
    found: dict[str, list[float]] = {"carriers": [], "full": []}
    for seed in range(300):
        update = stepped(mechanism, dict(nothing), Noise(seed=seed), 2.0)
        carried = set(mechanism.carriers())
        for part, names in (("carriers", carried), ("full", set(update) - carried)):
            found[part].append(float(flat({n: update[n] for n in names}).square().sum()))
    (note,) = mechanism.diagnostics()  # once: it does not change
    for part, energies in found.items():
        mean = sum(energies) / 300
        # At least 36 squared normals a draw: five standard deviations of the mean of 300
        assert mean == pytest.approx(note["noise_energy"][part], rel=5 * math.sqrt(2 / 36 / 300))


def test_tied_weights_stay_full() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.mix = nn.Embedding(20, 12), nn.Linear(12, 12)
            self.head = nn.Linear(12, 20, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.mix(self.tokens(tokens)))

    model = Tied()
    assert set(carried_weights(model, 2, None)) == {"mix.weight"}
    mechanism = RGP(rank=2, clip=CLIP).bind(Setting(model=model))
    tokens = torch.randint(0, 20, (3, 4))
    J = per_sample_gradients(model, lambda m, t: m(t).flatten(1).sin().sum(1), tokens)
    total = mechanism.clipped_sum(J)
    assert total["tokens.weight"].shape == (20, 12)
    assert flat(total).norm() <= 3 * CLIP
    released = stepped(mechanism, total, Noise(seed=0), 1.0)
    assert (released["tokens.weight"] != 0).all()  # tokens that nobody used, too


@pytest.mark.parametrize("name", LAYERS)
def test_a_capture_with_carriers_keeps_the_images_only(name: str) -> None:
    build, shape = LAYERS[name]
    torch.manual_seed(0)
    model, x = build().double(), torch.randn(6, *shape, dtype=F64)
    carriers = {"weight": carrier(model.weight.shape, 2)}
    expected = per_sample_gradients(model, losses, x).compress(carriers)
    with Capture(model) as capture:
        capture.expect(6, carriers=carriers)
        losses(model, x).sum().backward()
        small = capture.collect()
    assert small.shapes == expected.shapes
    assert torch.allclose(small.matrix(), expected.matrix(), atol=1e-12)
    assert all(isinstance(term, Rows) for term in small.terms.values())


def test_what_carriers_miss() -> None:
    """The paper's equations 5 and 6."""
    g = torch.randn(9, 7, generator=torch.Generator().manual_seed(0), dtype=F64)
    u, values, v = torch.linalg.svd(g, full_matrices=False)
    own = unprivate_projection_residual(g, Carrier(u[:, :2], v[:2]))
    assert torch.allclose(own, values[2:].norm() / values.norm())
    other = carrier(torch.Size((9, 7)), 2)
    left, right = (torch.eye(n, dtype=F64) for n in (9, 7))
    missed = (left - other.left @ other.left.T) @ g @ (right - other.right.T @ other.right)
    assert torch.allclose(unprivate_projection_residual(g, other), missed.norm() / g.norm())


# -- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", [RGP(rank=1, clip=1.0), RGP(rank=1, clip=1.0, carriers="random")]
)
def test_training_learns(method: RGP) -> None:
    torch.manual_seed(0)
    engine, model, optimizer, loader = setup(method=method, noise_multiplier=0.3)
    train(model, optimizer, loader, epochs=40)
    x, y = data()[:]
    assert (model(x).argmax(1) == y).float().mean() > 0.8
    assert engine.certificate(1e-5)["training"]["method"] == "RGP"


def test_pieces_and_one_batch_agree() -> None:
    results = []
    for pieces in (None, 3):
        _, model, optimizer, loader = setup(
            method=RGP(rank=1, clip=1.0),
            max_physical_batch_size=pieces,
            module=network().double(),
            data_loader=DataLoader([(x.double(), y) for x, y in data()], batch_size=10),
        )
        train(model, optimizer, loader, epochs=2)
        results.append(weights(model))
    assert torch.allclose(results[0], results[1], atol=1e-10)


def test_a_resumed_run_has_the_history_it_would_have_had(tmp_path: Path) -> None:
    engine, model, optimizer, loader = setup(method=RGP(rank=1, clip=1.0))
    train(model, optimizer, loader)
    path = engine.save_checkpoint(tmp_path / "run.pt", module=model, optimizer=optimizer)
    other, again, second, _ = setup(PrivacyEngine(debug_seed=3), method=RGP(rank=1, clip=1.0))
    with torch.no_grad():
        for p in again.parameters():
            p.add_(1.0)  # another start
    other.load_checkpoint(path, module=again, optimizer=second)
    mine, theirs = (e._running().mechanism.carriers() for e in (engine, other))
    for name, found in mine.items():
        assert torch.equal(found.left, theirs[name].left)
        assert torch.equal(found.right, theirs[name].right)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 0}, "rank to be an integer of at least 1"),
        ({"clip": 0.0}, "clip > 0"),
        ({"carriers": "svd"}, "carriers history or weights or random"),
        ({"seed": -1}, "seed to be an integer of at least 0"),
        ({"head_scale": 0.0}, "head_scale > 0"),
        ({"head_rate": 2.0}, "head_rate= is for a head with a head_scale="),
    ],
)
def test_bad_configuration_is_refused(fields: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RGP(**fields)


def test_a_rank_that_saves_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"becomes smaller with rank=6\. Lower the rank"):
        RGP(rank=6).bind(Setting(model=network()))
    with pytest.raises(ValueError, match="among those that layers= chooses"):
        RGP(rank=1, layers=lambda name: False).bind(Setting(model=network()))
    with pytest.raises(ValueError, match="Give one of the two"):
        RGP(clip=1.0).with_clip(2.0)
    with pytest.raises(ValueError, match="warmup to be an integer of at least 1"):
        History(warmup=0)


@pytest.mark.parametrize("name", LAYERS)
def test_an_empty_batch_has_empty_images(name: str) -> None:
    build, shape = LAYERS[name]
    model = build().double()
    with Capture(model) as capture:
        capture.expect(0, carriers={"weight": carrier(model.weight.shape, 2)})
        losses(model, torch.zeros(0, *shape, dtype=F64)).sum().backward()
        small = capture.collect()
    assert small.samples == 0
    assert all(len(term.rows(0, 0)) == 0 for term in small.terms.values())


def test_a_parameter_whose_name_has_a_colon_is_trained() -> None:
    class Tasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(12, 9)
            self.shift = nn.ParameterDict({"task:bias": nn.Parameter(torch.zeros(9))})

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(x) + sum(self.shift.values())

    torch.manual_seed(0)
    model = Tasks()
    mechanism = RGP(rank=2, clip=1e9).bind(Setting(model=model))
    J = per_sample_gradients(model, losses, torch.randn(4, 12))
    released = stepped(mechanism, mechanism.clipped_sum(J), Noise(seed=0), 0.0)
    assert released.keys() == dict(model.named_parameters()).keys()
    expected = J.combine(torch.ones(4))
    for name in ("mix.bias", "shift.task:bias"):
        assert torch.allclose(released[name], expected[name], atol=1e-6)


def test_a_small_gradient_never_has_the_name_of_a_parameter() -> None:
    names = ["weight", Left("weight"), Right("weight")]
    assert len(set(names)) == 3
    assert [names.index(name) for name in names] == [0, 1, 2]
    assert {Left("weight"): 1}[Left("weight")] == 1
    assert str(Left("weight")) == "weight"


def test_weights_of_one_shape_get_their_own_updates() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3))).double()
    mechanism = RGP(rank=2, clip=1.0).bind(Setting(model=model))
    carriers = dict(mechanism.carriers())
    released = {}
    for name, (left, right) in carriers.items():
        released |= {Left(name): torch.randn_like(left), Right(name): torch.randn_like(right)}
    for name, update in mechanism.gradient(dict(released)).items():
        expected = carriers[name].reconstruct(released[Left(name)], released[Right(name)])
        assert torch.allclose(update, expected.view_as(update))
