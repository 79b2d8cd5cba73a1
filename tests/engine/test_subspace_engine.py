"""Methods with public data through the engine: training, books, checkpoints, refusals."""

from __future__ import annotations

import copy
import json
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dpspan
from dpspan import (
    DPSGD,
    GEP,
    PDPSGD,
    BiasedGEP,
    Eigh,
    Lanczos,
    PowerIteration,
    PrivacyEngine,
    PublicData,
    RandomLabels,
    RandomSubspace,
    WarmStart,
)
from dpspan.accounting.events import step_event
from dpspan.mechanisms import Setting
from dpspan.mechanisms.noise import Noise
from dpspan.model.per_sample import recorded
from helpers.oracle import gep, pdpsgd, per_sample_matrix, top_directions
from helpers.subspaces import stepped, summed
from helpers.traces import traces
from helpers.training import N, data, network, setup, train, weights

F64 = torch.float64
CLIP, RESIDUAL_CLIP = 1.0, 0.3


def criterion() -> nn.Module:
    return nn.CrossEntropyLoss()


def public_tensors(n: int = 12, seed: int = 9) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g, dtype=F64)
    return x, (x.sum(1) > 0).long()


def private_loader(n: int = N) -> DataLoader[Any]:
    x, y = data(n).tensors
    return DataLoader(TensorDataset(x.double(), y), batch_size=10)


def precise(**changes: Any) -> tuple[Any, ...]:
    """A run in float64, where other orders of summation leave no trace."""
    module = changes.pop("module", None) or network()
    arguments = {"data_loader": private_loader(), "criterion": criterion(), **changes}
    return setup(module=module.double(), **arguments)


X, Y = public_tensors()

METHODS: dict[str, Callable[..., Any]] = {
    "DPSGD": lambda **_: DPSGD(clip=CLIP),
    "PDPSGD": lambda **f: PDPSGD(**{"public": (X, Y), "rank": 5, "clip": CLIP, **f}),
    "PDPSGD random": lambda **f: PDPSGD(
        subspace=RandomSubspace(rank=5),
        clip=CLIP,
        **{k: v for k, v in f.items() if k == "diagnose"},
    ),
    "BiasedGEP": lambda **f: BiasedGEP(**{"public": (X, Y), "rank": 5, "clip": CLIP, **f}),
    "GEP": lambda **f: GEP(
        **{"public": (X, Y), "rank": 5, "clip": CLIP, "residual_clip": RESIDUAL_CLIP, **f}
    ),
}
IN_PUBLIC = ["PDPSGD", "BiasedGEP", "GEP"]


def keeper(engine: PrivacyEngine) -> Any:
    mechanism: Any = engine._running().mechanism
    mechanism.prepare()
    return mechanism


def basis(engine: PrivacyEngine) -> Tensor:
    """The directions of the present step, as one k × p matrix, up to rotation and sign."""
    span = keeper(engine).span
    identity = torch.eye(span.dimensions, dtype=F64)
    rows = [torch.cat([v.flatten() for v in span.lift(e).values()]) for e in identity]
    return torch.stack(rows).double()


def steps_of(model: Any, optimizer: Any, loader: Any) -> Iterator[Tensor]:
    """Train, handing over the gradient of each step as the optimizer sees it."""
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        yield torch.cat([p.grad.flatten() for p in model.parameters()])


# -- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_pieces_and_empty_batches(name: str) -> None:
    """In pieces of any size the same steps; at q = 0.04 about every fifth batch is empty."""
    results = []
    for pieces in (None, 1, 2):
        engine, model, optimizer, loader = precise(
            method=METHODS[name](), sample_rate=0.04, max_physical_batch_size=pieces
        )
        drawn: list[Any] = []
        told = loader.on_piece
        loader.on_piece = lambda p, told=told, drawn=drawn: (drawn.append(p), told(p))
        before = weights(model)
        sizes = train(model, optimizer, loader)
        assert max(sizes) <= (pieces or N)
        assert sum(piece.first and piece.samples == 0 for piece in drawn) > 1
        assert sum(piece.first for piece in drawn) == engine.ledger.steps == len(loader) == 25
        assert pieces is None or len(drawn) > 30  # some batches came in several
        assert weights(model).isfinite().all()
        assert not torch.equal(weights(model), before)
        results.append(weights(model))
    assert torch.allclose(results[0], results[1], atol=1e-9)
    assert torch.allclose(results[0], results[2], atol=1e-9)


@pytest.mark.parametrize("name", IN_PUBLIC)
def test_a_step_is_the_papers_with_noise_over_the_lot_size(name: str) -> None:
    """Against the oracle at the present weights, with the same batches and no noise to speak of."""
    method = METHODS[name](public_labels="real")
    engine, model, optimizer, loader = precise(method=method, noise_multiplier=1e-12)
    batches: list[tuple[Tensor, Tensor]] = []
    feed = ((batches.append((x, y)), (x, y))[1] for x, y in loader)
    before = copy.deepcopy(model)
    for gradient in steps_of(model, optimizer, feed):
        private, public = (
            per_sample_matrix(before, lambda m, x, y: F.cross_entropy(m(x), y), *batch)
            for batch in (batches[-1], (X, Y))
        )
        v = top_directions(public, 5)
        inside, outside = gep(private, v, CLIP, RESIDUAL_CLIP)
        expected = {
            "PDPSGD": pdpsgd(private, v, CLIP),
            "BiasedGEP": inside,
            "GEP": inside + outside,
        }
        assert torch.allclose(gradient, expected[name] / 10, atol=1e-8)
        before = copy.deepcopy(model)
    assert engine.ledger.steps == 4


def sources() -> dict[str, Any]:
    pairs = TensorDataset(X, Y)
    return {
        "tensors": (X, Y),
        "dataset": pairs,
        "loader": DataLoader(pairs, batch_size=5),
        "shuffled loader": DataLoader(pairs, batch_size=12, shuffle=True),
        "public data": PublicData.of((X, Y)),
        "inputs": X,
        "inputs in a tuple": (X,),
        "unlabelled dataset": TensorDataset(X),
    }


@pytest.mark.parametrize("name", IN_PUBLIC)
def test_public_data_come_in_any_form(name: str) -> None:
    """The same samples give the same run, whatever they came in; random labels need none."""
    expected: dict[str, Tensor] = {}
    for labels in ("real", "random"):
        for kind, source in sources().items():
            if labels == "real" and ("inputs" in kind or "unlabelled" in kind):
                continue
            method = METHODS[name](public=source, public_labels=labels)
            engine, model, optimizer, loader = precise(method=method)
            train(model, optimizer, loader)
            assert torch.allclose(
                weights(model), expected.setdefault(labels, weights(model)), atol=1e-9
            ), kind
            (record,) = engine.ledger.public
            assert record.count == 12
    assert not torch.allclose(expected["real"], expected["random"], atol=1e-4)


def test_unlabelled_data_have_no_real_labels() -> None:
    engine = PrivacyEngine(debug_seed=0)
    with pytest.raises(ValueError, match=r"Expected labels with .* public_labels='random'"):
        precise(engine=engine, method=METHODS["GEP"](public=X, public_labels="real"))
    assert engine.ledger.public == ()


@pytest.mark.parametrize("name", ["PDPSGD", "GEP"])
def test_any_solver_gives_the_same_steps(name: str) -> None:
    results = [
        run_to_the_end(METHODS[name](solver=solver))
        for solver in (Eigh(), Lanczos(), PowerIteration(iterations=300))
    ]
    # Noise is drawn in the solver's own coordinates, so only its law is the same: compare without.
    for other in results[1:]:
        assert torch.allclose(results[0], other, atol=1e-6)


def run_to_the_end(method: Any, **changes: Any) -> Tensor:
    _, model, optimizer, loader = precise(method=method, noise_multiplier=1e-12, **changes)
    train(model, optimizer, loader)
    return weights(model)


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


GROUPS: dict[str, tuple[Any, list[set[str]]]] = {
    "number": (
        2,
        [
            {"body.0.weight", "body.0.bias"},
            {"body.2.weight", "body.2.bias", "head.weight", "head.bias"},
        ],
    ),
    "by_stage": (
        dpspan.by_stage,
        [
            {"body.0.weight", "body.0.bias", "body.2.weight", "body.2.bias"},
            {"head.weight", "head.bias"},
        ],
    ),
    "function": (
        lambda name: name.endswith("bias"),
        [
            {"body.0.weight", "body.2.weight", "head.weight"},
            {"body.0.bias", "body.2.bias", "head.bias"},
        ],
    ),
}


@pytest.mark.parametrize("name", IN_PUBLIC)
@pytest.mark.parametrize("kind", GROUPS)
def test_groups_of_parameters(kind: str, name: str) -> None:
    groups, expected = GROUPS[kind]
    results = []
    for pieces in (None, 3):
        method = METHODS[name](groups=groups, rank=6)
        engine, model, optimizer, loader = precise(
            module=Stages(), method=method, max_physical_batch_size=pieces
        )
        train(model, optimizer, loader)
        results.append(weights(model))
        found = list(keeper(engine).span.parts)
        assert [set(names) for names in found] == expected
        assert keeper(engine).span.dimensions == 6
        told = engine.state_dict()["run"]["groups"]
        assert told == 2 if kind == "number" else told.endswith(("by_stage", "<lambda>"))
    assert torch.allclose(*results, atol=1e-9)
    alone = run_to_the_end(METHODS[name](rank=6), module=Stages())
    grouped = run_to_the_end(METHODS[name](rank=6, groups=groups), module=Stages())
    assert not torch.allclose(alone, grouped, atol=1e-4)


# -- what it costs --------------------------------------------------------------------------------


def test_more_groups_than_directions_are_refused_at_the_beginning() -> None:
    with pytest.raises(ValueError, match="rank of at least 4, the groups, got 2"):
        precise(method=METHODS["PDPSGD"](rank=2, groups=lambda name: name))


def test_every_method_costs_the_same() -> None:
    """ε for the same z, q and T to the last digit, and the same events."""
    engines = {}
    for name, make in METHODS.items():
        engine, model, optimizer, loader = precise(method=make(), noise_multiplier=0.83)
        train(model, optimizer, loader, epochs=2)
        assert engine.ledger.events == ((step_event(0.83, 0.25), 8),)
        engines[name] = engine
    assert engines["GEP"].get_epsilon(1e-5) == engines["DPSGD"].get_epsilon(1e-5)
    noise = [calibrated(METHODS[name]()).noise_multiplier for name in ("DPSGD", "GEP")]
    assert noise[0] == noise[1]


def calibrated(method: Any) -> PrivacyEngine:
    engine, model = PrivacyEngine(accountant="rdp"), network().double()
    engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=private_loader(),
        criterion=criterion(),
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=2,
        method=method,
    )
    return engine


def test_the_certificate_names_the_public_data() -> None:
    warm = public_tensors(8, seed=4)
    named = PublicData.of((X, Y), name="leaflets")
    start = WarmStart(data=PublicData.of(warm, name="textbook"), validation=0, max_epochs=3)
    engine, model, optimizer, loader = precise(
        method=METHODS["GEP"](public=named), warm_start=start
    )
    train(model, optimizer, loader)
    document = json.loads(json.dumps(engine.certificate(1e-5)))
    assert document["public"] == [
        {
            "name": "textbook",
            "count": 8,
            "sha256": PublicData.of(warm).digest,
            "detail": "warm start: 3 epochs of Adam at 0.001, batches of 50, seed 0",
        },
        {
            "name": "leaflets",
            "count": 12,
            "sha256": named.digest,
            "detail": "GEP: public gradients",
        },
    ]
    training = document["training"]
    assert training["method"] == "GEP"
    assert (training["rank"], training["residual_clip"]) == (5, RESIDUAL_CLIP)
    assert "RandomLabels" in training["public_labels"]
    assert document["steps"] == 4


def test_nothing_public_is_on_the_certificate_of_other_methods() -> None:
    for name in ("DPSGD", "PDPSGD random"):
        engine, *_ = precise(method=METHODS[name]())
        assert engine.certificate(1e-5)["public"] == []


# -- public and private data stay apart -----------------------------------------------------------


def overlapping() -> tuple[Tensor, Tensor]:
    """Public samples, of which the fourth is a private record under another label."""
    x, y = X.clone(), Y.clone()
    x[3], y[3] = data().tensors[0][17].double(), 1 - data().tensors[1][17]
    return x, y


@pytest.mark.parametrize("use", [*IN_PUBLIC, "warm start"])
def test_overlap_is_refused_and_nothing_recorded(use: str) -> None:
    engine, model = PrivacyEngine(), network().double()
    before, warm = weights(model), None
    method = METHODS["DPSGD"]() if use == "warm start" else METHODS[use](public=overlapping())
    if use == "warm start":
        warm = WarmStart(data=overlapping(), validation=0, max_epochs=2)
    with pytest.raises(
        ValueError, match=r"1 of the 12 .* occur in the private .* sample 3"
    ) as said:
        precise(engine=engine, module=model, method=method, warm_start=warm)
    assert "dpspan.without_public" in str(said.value)
    assert "do not publish" in str(said.value)
    state = engine.ledger.state_dict()
    fresh = PrivacyEngine().ledger.state_dict() | {"saved_by": state["saved_by"]}
    assert state == fresh  # neither data nor warnings nor steps
    assert torch.equal(weights(model), before)
    assert not traces(model)
    # The same model and engine go on with other public data.
    _, model, optimizer, loader = precise(engine=engine, module=model, method=METHODS["GEP"]())
    train(model, optimizer, loader)
    assert engine.ledger.steps == 4


def test_overlap_is_cured_on_the_private_side() -> None:
    rest = dpspan.without_public(private_loader().dataset, overlapping())
    assert len(rest) == N - 1
    loader = DataLoader(rest, batch_size=10)
    engine, model, optimizer, loader = precise(
        method=METHODS["GEP"](public=overlapping()), data_loader=loader
    )
    train(model, optimizer, loader)
    assert engine.ledger.steps == len(loader)


# -- warm start -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_warm_start_comes_before_every_method(name: str) -> None:
    x, y = public_tensors(40, seed=4)
    model = network().double()
    before, loss_before = weights(model), F.cross_entropy(model(x), y).item()
    start = WarmStart(data=(x, y), max_epochs=30, learning_rate=0.05)
    engine, model, optimizer, loader = precise(
        module=model, method=METHODS[name](), warm_start=start
    )
    warm = weights(model)
    assert engine.ledger.steps == 0  # it cost nothing
    assert not torch.equal(warm, before)
    assert F.cross_entropy(model(x), y).item() < 0.7 * loss_before
    # What follows is a run from those weights, with nothing left over from the public training.
    twin = copy.deepcopy(network().double())
    _, twin, twin_optimizer, twin_loader = precise(method=METHODS[name](), module=twin)
    with torch.no_grad():
        for p, start_at in zip(twin.parameters(), model.parameters(), strict=True):
            p.copy_(start_at)
    train(model, optimizer, loader)
    train(twin, twin_optimizer, twin_loader)
    assert torch.equal(weights(model), weights(twin))
    (record, *_) = engine.ledger.public
    assert record.detail.startswith("warm start: ")


def test_warm_start_is_refused_without_labels() -> None:
    engine, model = PrivacyEngine(), network().double()
    before = weights(model)
    with pytest.raises(ValueError, match="labelled public data for a warm start"):
        precise(engine=engine, module=model, warm_start=WarmStart(data=X))
    assert engine.ledger.public == ()
    assert torch.equal(weights(model), before)


def test_what_is_refused_is_refused_before_the_warm_start() -> None:
    engine, model = PrivacyEngine(), network().double()
    before = weights(model)
    start = WarmStart(data=(X, Y), validation=0, max_epochs=2)
    with pytest.raises(ValueError, match="max_physical_batch_size"):
        precise(engine=engine, module=model, warm_start=start, max_physical_batch_size=0)
    assert torch.equal(weights(model), before)
    assert engine.ledger.public == ()


# -- checkpoints ----------------------------------------------------------------------------------


def changing(**fields: Any) -> Any:
    """GEP whose public samples and labels depend on the number of the step."""
    return METHODS["GEP"](public_labels=RandomLabels(redraw=True), public_samples=8, **fields)


def stopped_in_the_middle(tmp_path: Path, method: Any) -> tuple[PrivacyEngine, nn.Module, Path]:
    engine, model, optimizer, loader = precise(method=method)
    for step, _ in enumerate(steps_of(model, optimizer, loader)):
        if step == 2:
            break
    return engine, model, engine.save_checkpoint(tmp_path / "run.pt", module=model)


def test_a_resumed_run_has_the_subspace_it_would_have_had(tmp_path: Path) -> None:
    engine, model, path = stopped_in_the_middle(tmp_path, changing())
    resumed, twin, *_ = precise(method=changing())
    resumed.load_checkpoint(path, module=twin)
    assert torch.equal(weights(twin), weights(model))
    assert resumed.ledger.events == engine.ledger.events
    v, u = basis(engine), basis(resumed)
    assert torch.allclose(v.T @ v, u.T @ u, atol=1e-9)
    # A run that took the weights alone would choose other samples and labels.
    fresh, other, *_ = precise(method=changing())
    other.load_state_dict(model.state_dict())
    w = basis(fresh)
    assert not torch.allclose(v.T @ v, w.T @ w, atol=1e-2)


def test_a_resumed_run_goes_on(tmp_path: Path) -> None:
    """Every record in every batch and no noise to speak of: nothing but the state can differ."""
    everything = {"sample_rate": 1.0, "noise_multiplier": 1e-12}
    _, whole, optimizer, loader = precise(method=changing(), **everything)
    for _ in range(5):
        train(whole, optimizer, loader)
    engine, model, optimizer, loader = precise(method=changing(), **everything)
    for _ in range(2):
        train(model, optimizer, loader)
    path = engine.save_checkpoint(tmp_path / "run.pt", module=model)
    resumed, model, optimizer, loader = precise(method=changing(), **everything)
    resumed.load_checkpoint(path, module=model)
    for _ in range(3):
        train(model, optimizer, loader)
    assert torch.allclose(weights(model), weights(whole), atol=1e-7)
    assert resumed.ledger.steps == 5


def test_a_resumed_run_keeps_its_random_directions(tmp_path: Path) -> None:
    method = METHODS["PDPSGD random"]()
    engine, _, path = stopped_in_the_middle(tmp_path, method)
    resumed, twin, *_ = precise(method=method)
    resumed.load_checkpoint(path, module=twin)
    assert torch.allclose(basis(resumed), basis(engine), atol=1e-9)


def test_other_public_data_are_refused(tmp_path: Path) -> None:
    _, _, path = stopped_in_the_middle(tmp_path, METHODS["GEP"]())
    other, twin, *_ = precise(method=METHODS["GEP"](public=public_tensors(12, seed=5)))
    before = weights(twin)
    with pytest.raises(
        ValueError, match=r"saved with other public data\. Pass the same public data"
    ):
        other.load_checkpoint(path, module=twin)
    assert torch.equal(weights(twin), before)
    method, _, _ = precise(method=METHODS["GEP"](rank=4))[:3]
    with pytest.raises(ValueError, match="rank is 5 there, 4 here"):
        method.load_checkpoint(path, module=twin)


def test_a_refused_state_changes_nothing(tmp_path: Path) -> None:
    engine, _, _ = stopped_in_the_middle(tmp_path, METHODS["GEP"]())
    other, _, _, loader = precise(method=METHODS["GEP"](public=public_tensors(12, seed=5)))
    books, position = other.ledger.state_dict(), loader.state_dict()
    with pytest.raises(ValueError, match="other public data"):
        other.load_state_dict(engine.state_dict())
    assert other.ledger.state_dict() == books
    assert loader.state_dict() == position


# -- diagnostics ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*IN_PUBLIC, "PDPSGD random"])
def test_diagnostics_know_nothing_of_private_data(name: str) -> None:
    """Two runs that differ in private gradients only, at the same weights and with the same noise:
    what is not noisy is the same to the last digit."""
    noted = []
    for size in (0.0, 1.0):
        method = METHODS[name](diagnose=1, groups=1)
        model = network().double()
        engine, model, optimizer, loader = precise(
            module=model, method=method, optimizer=torch.optim.SGD(model.parameters(), lr=0.0)
        )
        energies = []
        for x, y in loader:
            optimizer.zero_grad()
            (size * F.cross_entropy(model(x), y)).backward()
            optimizer.step()
            grads = torch.cat([p.grad.flatten() for p in model.parameters()])
            energies.append(float((10 * grads).square().sum()))
        notes = engine.diagnostics()
        assert json.loads(json.dumps(notes, allow_nan=False)) == notes
        # What is told of the gradient is what the optimizer saw, noise and all.
        assert [n["released_energy"].pop("gradient") for n in notes] == pytest.approx(energies)
        embedding = [n["released_energy"].pop("embedding") for n in notes]
        if name != "GEP":
            assert embedding == pytest.approx(energies)
        if size == 0:  # of nothing but noise, which the engine's debug_seed tells
            std = CLIP * (math.sqrt(2) if name == "GEP" else 1)
            drawn = Noise(seed=1).normal(torch.zeros(5, dtype=F64), std)
            assert embedding[0] == pytest.approx(float(drawn.square().sum()))
        assert all(n.pop("released_energy") == {} for n in notes)
        noted.append(notes)
    assert noted[0] == noted[1]
    first, second = noted[0][:2]
    public = {"step", "noise_energy", "rank", "eigenvalues", "stable_rank"}
    assert set(first) == public
    assert set(second) - set(first) <= {"drift"}
    assert first["rank"] == [5]
    p = sum(parameter.numel() for parameter in network().parameters())
    expected = {"embedding": 5 * CLIP**2}
    if name == "GEP":
        expected = {"embedding": 2 * 5 * CLIP**2, "residual": 2 * p * RESIDUAL_CLIP**2}
    assert first["noise_energy"] == pytest.approx(expected)
    if name in IN_PUBLIC:
        assert second["drift"] == [pytest.approx(0, abs=1e-9)]  # the weights did not move
        assert len(first["eigenvalues"][0]) == 12


def test_drift_and_spectrum_are_those_of_the_public_gradients() -> None:
    method = METHODS["GEP"](diagnose=2, public_labels="real")
    engine, model, optimizer, loader = precise(method=method)
    bases, values, before = [], [], copy.deepcopy(model)
    for _ in steps_of(model, optimizer, loader):
        h = per_sample_matrix(before, lambda m, x, y: F.cross_entropy(m(x), y), X, Y)
        bases.append(top_directions(h, 5))
        values.append(torch.linalg.svdvals(h).square())
        before = copy.deepcopy(model)
    notes = engine.diagnostics()
    assert [note["step"] for note in notes] == [0, 2]
    assert "drift" not in notes[0]
    for note in notes:
        squares = values[note["step"]]
        assert note["eigenvalues"][0] == pytest.approx(squares.tolist(), abs=1e-9)
        assert note["stable_rank"] == [pytest.approx(float(squares.sum() / squares[0]))]
    drift = 1 - float((bases[2] @ bases[1].T).square().sum()) / 5
    assert notes[1]["drift"] == [pytest.approx(drift, abs=1e-8)]
    assert drift > 1e-4


def test_no_notes_unless_asked() -> None:
    engine, model, optimizer, loader = precise(method=METHODS["GEP"]())
    train(model, optimizer, loader)
    assert engine.diagnostics() == []


# -- the model is the user's ----------------------------------------------------------------------


class Counting(nn.Module):
    """Counts its calls, which is no secret, and holds a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = network(), nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("shift", torch.full((6,), 0.125))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(self.drop(x + self.shift))


def test_buffers_and_modes_are_left_alone() -> None:
    """Public samples pass through the model and leave no trace: as many calls as with DP-SGD."""
    counted = {}
    for name in ("DPSGD", *IN_PUBLIC):
        torch.manual_seed(0)
        model = Counting()
        model.inner[1].eval()
        engine, model, optimizer, loader = precise(module=model, method=METHODS[name](refresh=2))
        held = dict(model.named_buffers())
        modes = [module.training for module in model.modules()]
        train(model, optimizer, loader, epochs=2)
        assert modes == [module.training for module in model.modules()]
        assert all(now is held[key] for key, now in model.named_buffers())
        assert torch.equal(model.shift, torch.full((6,), 0.125, dtype=F64))
        counted[name] = int(model.calls)
        engine.detach()
        assert not traces(model)
    assert len(set(counted.values())) == 1


def test_private_dropout_does_not_depend_on_the_public_pass() -> None:
    """torch's generator goes on where the private batch left it."""
    states = []
    for name in ("DPSGD", "GEP"):
        torch.manual_seed(3)
        _, model, optimizer, loader = precise(
            module=nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2)),
            method=METHODS[name](),
        )
        torch.manual_seed(7)
        train(model, optimizer, loader)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("solver", [Eigh(), PowerIteration()], ids=repr)
def test_public_gradients_go_before_the_next_ones_come(
    solver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are what takes memory: there is one set of them at a time."""
    made: list[Any] = []
    held: list[int] = []

    def watched(*args: Any) -> Any:
        held.append(sum(there() is not None for there in made))
        gradients = recorded(*args)
        made.append(weakref.ref(gradients))
        return gradients

    monkeypatch.setattr("dpspan.public.gradients.recorded", watched)
    _, model, optimizer, loader = precise(method=METHODS["GEP"](solver=solver))
    train(model, optimizer, loader)
    assert held == [0, 0, 0, 0]


# -- public gradients that span nothing -----------------------------------------------------------


class PublicLoss:
    """A loss for public samples that can be spoilt and mended between steps."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        return self.factor * model(x).square().sum(1)


SPOILT = {
    "all zero": (0.0, "are all zero, so they span no subspace.*or use DPSGD"),
    "nan": (math.nan, "are not finite, so they span no subspace.*lower the learning rate"),
    "infinite": (math.inf, "are not finite, so they span no subspace.*lower the learning rate"),
}
CASES = [
    (Eigh(), "all zero", 0),
    (Eigh(), "all zero", 2),
    (Eigh(), "nan", 0),
    (Eigh(), "infinite", 2),
    (Lanczos(), "all zero", 2),
    (Lanczos(), "nan", 0),
    (PowerIteration(), "all zero", 0),
    (PowerIteration(), "all zero", 2),
    (PowerIteration(), "nan", 0),
    (PowerIteration(), "nan", 2),
]


@pytest.mark.parametrize(("solver", "kind", "at"), CASES)
def test_public_gradients_that_span_nothing(solver: Any, kind: str, at: int) -> None:
    """An error before the step is charged or the weights move; then the run can go on."""
    factor, message = SPOILT[kind]
    loss = PublicLoss()
    method = METHODS["GEP"](public=X, public_loss=loss, solver=solver)
    engine, model, optimizer, loader = precise(method=method)
    for step, (x, y) in enumerate(loader):
        loss.factor = factor if step == at else 1.0
        before, charged = weights(model), engine.ledger.steps
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if step != at:
            optimizer.step()
            assert engine.ledger.steps == charged + 1
            assert weights(model).isfinite().all()
            continue
        with pytest.raises(ValueError, match=message):
            optimizer.step()
        assert engine.ledger.steps == charged
        assert torch.equal(weights(model), before)
        assert all(p.grad is None for p in model.parameters())
    assert engine.ledger.steps == 3
    assert keeper(engine).step == 3
    assert engine.get_epsilon(1e-5) > 0


def test_a_run_that_stops_there_has_cost_nothing() -> None:
    loss = PublicLoss()
    loss.factor = 0.0
    engine, model, optimizer, loader = precise(
        method=METHODS["BiasedGEP"](public=X, public_loss=loss)
    )
    with pytest.raises(ValueError, match="all zero"):
        train(model, optimizer, loader)
    engine.detach()
    assert engine.ledger.steps == 0
    assert engine.get_epsilon(1e-5) == 0
    assert not traces(model)


def test_a_wrong_physical_batch_size_is_told_by_its_name() -> None:
    with pytest.raises(ValueError, match="Expected max_physical_batch_size to be an integer"):
        precise(method=METHODS["GEP"](), max_physical_batch_size=0)


def test_public_inputs_that_do_not_fit_are_refused_before_training() -> None:
    with pytest.raises(ValueError, match=r"Public inputs of shape \(1, 4\).* do not fit the model"):
        precise(method=METHODS["GEP"](public=X[:, :4]))


# -- warnings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IN_PUBLIC)
def test_more_directions_than_public_samples_warn_once(name: str) -> None:
    engine, model, optimizer, loader = precise(method=METHODS[name](rank=30))
    with pytest.warns(UserWarning, match="span 12 directions, fewer than rank=30") as caught:
        train(model, optimizer, loader, epochs=2)
    assert len([w for w in caught if "directions" in str(w.message)]) == 1
    (told,) = [w for w in engine.certificate(1e-5)["warnings"] if "directions" in w]
    assert told.startswith("the public gradients span 12 directions, fewer than rank=30")
    assert keeper(engine).span.dimensions == 12


def test_a_rank_that_goes_up_and_down_warns_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    public = torch.randn(400, 6)
    engine, model, optimizer, loader = setup(
        module=model,
        method=METHODS["GEP"](public=public, rank=75),
        criterion=criterion(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, loader, epochs=3)
    assert len([w for w in caught if "directions" in str(w.message)]) == 1
    assert len([w for w in engine.ledger.warnings if "directions" in w]) == 1


# -- what is missing ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IN_PUBLIC)
def test_a_loss_for_public_samples_is_needed(name: str) -> None:
    engine = PrivacyEngine(debug_seed=0)
    with pytest.raises(ValueError, match=r"pass criterion= to make_private, or public_loss="):
        precise(engine=engine, method=METHODS[name](), criterion=None)
    assert engine.ledger.public == ()
    # Either will do, and random directions need neither.
    precise(engine=engine, method=METHODS[name](public=X, public_loss=PublicLoss()), criterion=None)
    precise(method=METHODS["PDPSGD random"](), criterion=None)


def test_the_clip_comes_from_either_side_but_not_from_both() -> None:
    engine, *_ = precise(method=GEP(public=X, rank=3), max_grad_norm=2.0)
    training = engine.certificate(1e-5)["training"]
    assert (training["clip"], training["residual_clip"]) == (2.0, 0.4)
    with pytest.raises(ValueError, match=r"clip=1\.0 in GEP and max_grad_norm=2\.0"):
        precise(method=METHODS["GEP"](), max_grad_norm=2.0)


def test_start_epoch_counts_the_epochs_of_the_run() -> None:
    """Plain DP-SGD in the first epoch, number for number; then not."""
    plain, projected = (
        precise(method=method) for method in (METHODS["DPSGD"](), METHODS["PDPSGD"](start_epoch=1))
    )
    for expected_equal in (True, False):
        for _, model, optimizer, loader in (plain, projected):
            train(model, optimizer, loader)
        assert torch.equal(weights(plain[1]), weights(projected[1])) is expected_equal


def test_methods_are_made_without_an_engine_too() -> None:
    """The expert's way: a mechanism for gradients of one's own."""
    model = network().double()
    mechanism = METHODS["GEP"]().bind(Setting(model=model, criterion=criterion()))
    J = dpspan.per_sample_gradients(model, lambda m, x: m(x).square().sum(1), X)
    released = stepped(mechanism, summed(mechanism, J), Noise(seed=0), 1.0)
    assert {name: value.shape for name, value in released.items()} == J.shapes
