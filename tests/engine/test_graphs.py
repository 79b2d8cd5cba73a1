"""Batches of one size, filled up with stand-ins that do not count; on a GPU replayed as graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpspan
from dpspan import DPSGD, GEP, PDPSGD, RGP, BiasedGEP, CaptureError, MirrorDescent, PrivacyEngine
from dpspan.engine.private_step import stays_in_place
from dpspan.engine.sampling import PoissonDraw
from dpspan.gradients.capture import Capture
from dpspan.gradients.operator import PerSampleGradients
from dpspan.mechanisms.dpsgd import DPSGDMechanism
from dpspan.model.networks import PaperCNN, ResNet20
from helpers.oracle import per_sample_matrix
from helpers.problems import PROBLEMS, loss_per_sample, make
from helpers.training import data, setup, train, weights

PUBLIC = torch.randn(12, 6, generator=torch.Generator().manual_seed(2)), torch.arange(12) % 2
METHODS = {
    "DPSGD": DPSGD(clip=1.0),
    "GEP": GEP(public=PUBLIC, rank=4, clip=1.0),
    "BiasedGEP": BiasedGEP(public=PUBLIC, rank=4, clip=1.0),
    "PDPSGD": PDPSGD(public=PUBLIC, rank=4, clip=1.0),
    "RGP": RGP(rank=1, clip=1.0),
    "an adaptive clip": DPSGD(clip=1.0, clipping=dpspan.AdaptiveClipping(rate=1.0)),
    "MirrorDescent": MirrorDescent(
        public=PUBLIC, mixing=dpspan.ConstantMixing(share=0.5), clip=1.0
    ),
}


def with_a_record_of(values: float) -> DataLoader[Any]:
    """The usual data, of which record 0, which stands in, is made of this number."""
    x, y = data().tensors
    x = x.clone()
    x[0] = values
    return DataLoader(TensorDataset(x, y), batch_size=10)


# -- stand-ins ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROBLEMS)
def test_stand_ins_have_gradients_of_zero_in_every_layer(name: str) -> None:
    model, x = make(name)
    live = len(x) - 1
    with Capture(model) as capture:
        capture.expect(len(x), live=live)
        loss_per_sample(model, x).sum().backward()
        found = capture.collect().matrix()
    assert torch.allclose(found[:live], per_sample_matrix(model, loss_per_sample, x[:live]))
    assert not found[live:].any()


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("size", [None, 4], ids=["default", "pieces"])
def test_a_padded_step_is_the_same_step(method: Any, size: int | None) -> None:
    arguments = {"method": method, "criterion": nn.CrossEntropyLoss()}
    _, plain, *rest = setup(**arguments)
    sizes = train(plain, *rest, epochs=3)
    _, padded, *rest = setup(**arguments, cuda_graphs=True, max_physical_batch_size=size)
    filled = train(padded, *rest, epochs=3)
    assert len(set(sizes)) > 1
    assert set(filled) == {size or 24}  # 10 + 2.33·√10, in eights
    assert torch.allclose(weights(plain), weights(padded), atol=1e-5)


@pytest.mark.parametrize("values", [float("nan"), float("inf"), 1e30, -3.0])
def test_a_record_that_stands_in_counts_only_where_it_was_drawn(values: float) -> None:
    losses = {"loss_reduction": "sum"}
    results = []
    for padded in (False, True):
        loader = with_a_record_of(values)
        _, model, optimizer, loader = setup(data_loader=loader, cuda_graphs=padded, **losses)
        for x, y in loader:
            optimizer.zero_grad()
            nn.CrossEntropyLoss(reduction="sum")(model(x), y).backward()
            optimizer.step()
        results.append(weights(model))
    assert results[0].isfinite().all()
    assert torch.allclose(*results, atol=1e-5)


def test_a_draw_larger_than_the_padding_takes_another_piece_and_is_never_cut() -> None:
    engine, model, optimizer, loader = setup(
        cuda_graphs=True, max_physical_batch_size=8, sample_rate=0.9, expected_batch_size=36
    )
    pieces = []
    listening, loader.on_piece = loader.on_piece, lambda p: (pieces.append(p), listening(p))
    train(model, optimizer, loader)
    assert engine.ledger.steps == 1
    assert [piece.size for piece in pieces] == [8] * len(pieces)
    assert [piece.samples for piece in pieces[:-1]] == [8] * (len(pieces) - 1)
    assert sum(piece.samples for piece in pieces) > 20
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_an_empty_draw_is_a_batch_like_any_other() -> None:
    engine, model, optimizer, loader = setup(
        cuda_graphs=True,
        sample_rate=1e-9,
        expected_batch_size=10,
        noise_multiplier=0.0,
        non_private=True,
    )
    loader._draw = PoissonDraw(records=40, sample_rate=1e-9, steps_per_epoch=3)
    before = weights(model)
    assert train(model, optimizer, loader) == [24] * 3
    assert torch.equal(weights(model), before)
    assert engine.ledger.steps == 3


def test_the_size_comes_from_public_numbers() -> None:
    engine, *_ = setup(cuda_graphs=True, sample_rate=0.1, expected_batch_size=1000.0)
    assert engine.plan.most_at_once() == 1080


def test_a_model_that_is_called_twice_is_refused() -> None:
    _, model, _, loader = setup(cuda_graphs=True)
    with pytest.raises(CaptureError, match="more than once for a batch"):
        for x, _ in loader:
            (model(x) + model(-x)).sum().backward()


def only_record_0_has_feature_0(collate: Any = None) -> DataLoader[Any]:
    x, y = data().tensors
    x = x.clone()
    x[:, 0], x[0] = 0.0, torch.tensor([50.0, 0, 0, 0, 0, 0])
    return DataLoader(TensorDataset(x, y), batch_size=10, collate_fn=collate)


def sorted_by_size(records: list[Any]) -> tuple[Tensor, Tensor]:
    """As recipes for packed sequences do: the longest first."""
    x, y = (torch.stack(column) for column in zip(*records, strict=True))
    order = x.norm(dim=1).argsort(descending=True)
    return x[order], y[order]


def test_a_collate_fn_may_choose_the_order_of_records() -> None:
    """Record 0, which would come first, moves its feature's weights only where it was drawn."""
    for seed in range(4):
        engine = PrivacyEngine(debug_seed=seed)
        loader = only_record_0_has_feature_0(sorted_by_size)
        _, model, optimizer, loader = setup(
            engine, data_loader=loader, cuda_graphs=True, noise_multiplier=0.0, non_private=True
        )
        for x, y in loader:
            before = model[0].weight[:, 0].detach().clone()
            drawn = bool(x[0, 0])
            optimizer.zero_grad()
            nn.CrossEntropyLoss()(model(x), y).backward()
            optimizer.step()
            moved = (model[0].weight[:, 0] - before).norm() / 0.5 * 10  # learning rate, batch
            assert moved <= 1.0 if drawn else moved == 0


@pytest.mark.parametrize("change", [lambda x: x, lambda x: (x - 3.0) / 7.0])
def test_a_loop_that_reorders_rows_is_refused(change: Any) -> None:
    _, model, _, loader = setup(cuda_graphs=True)
    with pytest.raises(CaptureError, match="into another order"):
        for x, y in loader:
            order = x.norm(dim=1).argsort()
            nn.CrossEntropyLoss()(model(change(x)[order]), y[order]).backward()


def test_stand_ins_of_a_late_piece_are_looked_at() -> None:
    """Full pieces have none: which batches are probed must not decide which are looked at."""
    engine, model, optimizer, loader = setup(
        data_loader=DataLoader(data(), batch_size=20), cuda_graphs=True, max_physical_batch_size=7
    )
    for x, y in loader:
        optimizer.zero_grad()
        nn.CrossEntropyLoss()(model(x), y).backward()
        optimizer.step()
    assert not [w for w in engine.certificate(1e-5)["warnings"] if "cuda_graphs" in w]


def test_a_loop_that_changes_rows_one_by_one_is_fine() -> None:
    engine, model, optimizer, loader = setup(cuda_graphs=True)
    for x, y in loader:
        optimizer.zero_grad()
        nn.CrossEntropyLoss()(model((x - 3.0) / 7.0), y).backward()
        optimizer.step()
    assert not [w for w in engine.certificate(1e-5)["warnings"] if "cuda_graphs" in w]


@pytest.mark.filterwarnings("ignore:dpspan")
def test_what_cannot_be_seen_is_on_the_certificate() -> None:
    engine, model, optimizer, loader = setup(cuda_graphs=True)
    for x, y in loader:
        optimizer.zero_grad()
        nn.CrossEntropyLoss()(model(x + torch.rand_like(x)), y).backward()
        optimizer.step()
    assert [w for w in engine.certificate(1e-5)["warnings"] if "keep their order" in w]


@pytest.mark.filterwarnings("ignore:dpspan")  # that such batches cannot be checked
def test_a_batch_without_tensors_of_records_is_refused() -> None:
    loader = DataLoader(data(), batch_size=10, collate_fn=lambda records: [str(r) for r in records])
    _, _, _, loader = setup(data_loader=loader, cuda_graphs=True)
    with pytest.raises(CaptureError, match="no tensor with the records in front"):
        next(iter(loader))


def test_an_empty_first_draw_does_not_blind_the_checks() -> None:
    """A model that remembers the last batch is refused at the first draw that shows it."""

    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.Linear(6, 2), 1.0

        def forward(self, x: Tensor) -> Tensor:
            scale, self.last = self.last, float(x.detach().abs().mean())
            return self.layer(x * scale)

    _, model, optimizer, loader = setup(module=Remembers(), cuda_graphs=True)

    class EmptyFirst(PoissonDraw):
        def epoch(self, generator: Any) -> Any:
            yield torch.empty(0, dtype=torch.long)
            yield from super().epoch(generator)

    loader._draw = EmptyFirst(records=40, sample_rate=0.25, steps_per_epoch=4)
    with pytest.raises(ValueError):  # noqa: PT011  which of the checks it is does not matter
        train(model, optimizer, loader)


def test_who_overrides_the_clipped_sum_says_again_that_it_stays_in_place() -> None:
    class Other(DPSGDMechanism):
        def clipped_sum(self, gradients: Any) -> Any:
            return super().clipped_sum(gradients)

    own = DPSGDMechanism(1.0, dpspan.FlatClipping())
    assert stays_in_place(own)
    assert not stays_in_place(Other(1.0, dpspan.FlatClipping()))


def test_samples_that_do_not_count_are_in_no_sum() -> None:
    model, x = make("mlp")
    J = dpspan.per_sample_gradients(model, loss_per_sample, x)
    counted = torch.arange(len(x)) < 2
    some = PerSampleGradients(
        J.shapes, {n: [t] for n, t in J.terms.items()}, len(x), like=J.like, counted=counted
    )
    assert some.norm_bounds()[2:].isinf().all()
    assert torch.equal(some.norm_bounds()[:2], J.norm_bounds()[:2])
    ones = torch.ones(len(x), dtype=J.like.dtype)
    for derived in (some, some.select(list(J.shapes)[:1]), some.derived(J.terms)):
        expected = J.combine(ones * counted)
        for name, value in derived.combine(ones).items():
            assert torch.allclose(value, expected[name])


def test_a_model_that_is_given_a_gradient_is_refused() -> None:
    """A replay would not pass the gradient on to what comes before."""
    _, model, _, loader = setup(cuda_graphs=True)
    with pytest.raises(CaptureError, match="something that has a gradient"):
        for x, _ in loader:
            model(x.requires_grad_()).sum().backward()


@pytest.mark.filterwarnings("ignore:dpspan")  # that the model is not called as a whole
def test_sums_of_an_abandoned_batch_are_forgotten() -> None:
    engine, model, optimizer, loader = setup(cuda_graphs=True)
    for _ in loader:  # left before its step
        engine._run._graphs.sums = {"0.weight": torch.full((8, 6), torch.nan)}  # as of a replay
        break
    for x, y in loader:
        optimizer.zero_grad()
        for layer in model:  # no call of the whole model, which would begin anew itself
            x = layer(x)
        nn.CrossEntropyLoss()(x, y).backward()
        optimizer.step()
    assert weights(model).isfinite().all()


# -- graphs ---------------------------------------------------------------------------------------


def images(n: int = 300, channels: int = 1, side: int = 28) -> TensorDataset:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, channels, side, side, generator=g)
    return TensorDataset(x, torch.arange(n) % 10)


def trained(model: nn.Module, dataset: TensorDataset, graphs: bool, **options: Any) -> Tensor:
    """Weights after ten steps, of which from the fourth on graphs are replayed."""
    engine, model, optimizer, loader = setup(
        module=model.cuda(),
        data_loader=DataLoader(dataset, batch_size=30),
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        cuda_graphs=graphs,
        **options,
    )
    for x, y in loader:
        optimizer.zero_grad()
        nn.CrossEntropyLoss()(model(x.cuda()), y.cuda()).backward()
        optimizer.step()
    if graphs:
        recordings = engine._run._graphs._recordings
        assert len(recordings) == 1
    return weights(model)


def alike(kinds: int = 10, each: int = 4) -> tuple[Tensor, Tensor]:
    """Public images of a few kinds, so that rounding does not choose which directions are kept."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(kinds, 1, 28, 28, generator=g).repeat(each, 1, 1, 1)
    return x + 0.01 * torch.randn(x.shape, generator=g), torch.arange(kinds).repeat(each)


ON_A_GPU = {
    "DPSGD": DPSGD(clip=1.0),
    "GEP": GEP(public=alike(), public_labels="real", rank=10, clip=1.0),
    "PDPSGD": PDPSGD(public=alike(), public_labels="real", rank=10, clip=1.0),
    "RGP": RGP(rank=2, clip=1.0),
}


@pytest.mark.gpu
@pytest.mark.parametrize("method", ON_A_GPU.values(), ids=ON_A_GPU)
@pytest.mark.parametrize("size", [None, 16], ids=["whole", "pieces"])
def test_replayed_steps_are_the_same_steps(method: Any, size: int | None) -> None:
    results = []
    for graphs in (False, True):
        torch.manual_seed(0)
        options = {"method": method, "max_physical_batch_size": size}
        results.append(trained(PaperCNN(), images(), graphs, **options))
    assert (results[0] - results[1]).norm() < 1e-3 * results[0].norm()


@pytest.mark.gpu
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_replayed_steps_of_a_resnet(tf32: bool, autocast: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = tf32
    results = []
    try:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            for graphs in (False, True):
                torch.manual_seed(0)
                results.append(trained(ResNet20(), images(channels=3, side=32), graphs))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    slack = 3e-2 if autocast else 3e-3
    assert (results[0] - results[1]).norm() < slack * results[0].norm()


@pytest.mark.gpu
def test_two_replays_draw_different_dropout() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(784, 10, bias=False)).cuda()
    same = TensorDataset(torch.ones(300, 1, 28, 28), torch.zeros(300, dtype=torch.long))
    _, model, optimizer, loader = setup(
        PrivacyEngine(),
        module=model,
        data_loader=DataLoader(same, batch_size=30),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        cuda_graphs=True,
    )
    outputs = []
    for _ in range(2):
        for x, _ in loader:
            optimizer.zero_grad()
            out = model(x.cuda())
            out.sum(1).mean().backward()
            optimizer.step()
            outputs.append(out.detach())
    replayed = torch.stack(outputs[3:])
    rows = replayed.flatten(0, 1)
    assert len(rows.unique(dim=0)) == len(rows)  # between records, and between replays


@pytest.mark.gpu
@pytest.mark.parametrize("values", [float("nan"), 1e30])
def test_stand_ins_do_not_count_in_a_replay(values: float) -> None:
    x, y = (t.clone() for t in images().tensors)
    x[0] = values
    results = []
    for graphs in (False, True):
        torch.manual_seed(0)
        results.append(trained(PaperCNN(), TensorDataset(x, y), graphs))
    assert results[0].isfinite().all()
    assert (results[0] - results[1]).norm() < 1e-3 * results[0].norm()


@pytest.mark.gpu
def test_weights_that_move_in_memory_are_recorded_anew() -> None:
    torch.manual_seed(0)
    _, model, optimizer, loader = setup(
        module=PaperCNN().cuda(), data_loader=DataLoader(images(), batch_size=30), cuda_graphs=True
    )
    for number, (x, y) in enumerate(loader):
        if number == 5:
            for parameter in model.parameters():
                parameter.data = torch.zeros_like(parameter)
        out = model(x.cuda())
        assert bool(out.any()) == (number < 5)
        if number >= 5:
            break
        optimizer.zero_grad()
        nn.CrossEntropyLoss()(out, y.cuda()).backward()
        optimizer.step()


class Parts(nn.Module):
    """Its loop calls a layer of its own outside of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(784, 10), nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.flatten(1))


@pytest.mark.gpu
def test_a_layer_outside_of_the_models_call_is_refused_by_name() -> None:
    _, model, optimizer, loader = setup(
        module=Parts().cuda(), data_loader=DataLoader(images(), batch_size=30), cuda_graphs=True
    )
    with pytest.raises(CaptureError, match="inside of the model's own call"):
        for x, y in loader:
            optimizer.zero_grad()
            nn.CrossEntropyLoss()(model.head(model(x.cuda())), y.cuda()).backward()
            optimizer.step()


class Waits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(784, 10)

    def forward(self, x: Tensor) -> Tensor:
        assert float(x.abs().sum()) >= 0
        return self.layer(x.flatten(1))


@pytest.mark.gpu
def test_a_model_that_waits_for_the_gpu_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match="cannot be recorded as a CUDA graph"):
        trained(Waits(), images(), True)


@pytest.mark.gpu
def test_a_replayed_step_never_waits_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpspan.model.guard._RARELY", 2**40)
    torch.manual_seed(0)
    _, model, optimizer, loader = setup(
        module=ResNet20().cuda(),
        data_loader=DataLoader(images(900, 3, 32), batch_size=30),
        cuda_graphs=True,
    )
    for number, (x, y) in enumerate(loader, start=1):
        batch = x.cuda(), y.cuda()
        checked = number < 6 or number.bit_count() == 1
        torch.cuda.set_sync_debug_mode("default" if checked else "error")
        try:
            optimizer.zero_grad()
            nn.CrossEntropyLoss()(model(batch[0]), batch[1]).backward()
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
