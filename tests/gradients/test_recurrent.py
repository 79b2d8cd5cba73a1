"""Recurrent layers as they are: the same outputs as torch's kernel, and exact gradients."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
)
from torch.utils.data import DataLoader, TensorDataset

import dpspan
from helpers.oracle import clip_rows, per_sample_matrix
from helpers.problems import Recurrent, loss_per_sample

N, STEPS = 5, 6
KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "LSTM": nn.LSTM,
    "LSTM with projection": partial(nn.LSTM, proj_size=2),
    "GRU": nn.GRU,
    "RNN": nn.RNN,
    "RNN with relu": partial(nn.RNN, nonlinearity="relu"),
}
LENGTHS = {
    "no": None,
    "sorted": torch.tensor([6, 5, 3, 3, 1]),
    "unsorted": torch.tensor([3, 6, 1, 5, 3]),
}


def tensors(output: Any, states: Any, layer: nn.RNNBase) -> list[Tensor]:
    """All that a recurrent layer returns, with the batch in front."""
    if isinstance(output, PackedSequence):
        output, _ = pad_packed_sequence(output, batch_first=True, total_length=STEPS)
    elif not layer.batch_first:
        output = output.transpose(0, 1)
    parts = states if isinstance(states, tuple) else (states,)
    return [output, *(part.transpose(0, 1) for part in parts)]


@pytest.mark.parametrize("packed", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_torchs_layer(kind: str, packed: str) -> None:
    lengths = LENGTHS[packed]
    for layers, both, bias, batch_first, given in itertools.product((1, 2), *4 * [(False, True)]):
        torch.manual_seed(0)
        layer = KINDS[kind](
            3, 4, num_layers=layers, bidirectional=both, bias=bias, batch_first=batch_first
        ).double()
        data = torch.randn(N, STEPS, 3, dtype=torch.float64)
        many, width = layers * (1 + both), layer.proj_size or 4
        starts = [torch.randn(many, N, w, dtype=torch.float64) for w in (width, 4)]

        def run(
            model: nn.RNNBase,
            index: Tensor,
            data: Tensor = data,
            starts: list[Tensor] = starts,
            given: bool = given,
        ) -> list[Tensor]:
            own = [start[:, index] for start in starts]
            hx = (tuple(own) if model.mode == "LSTM" else own[0]) if given else None
            x: Any = data[index] if model.batch_first else data[index].transpose(0, 1)
            if lengths is not None:
                x = pack_padded_sequence(
                    x, lengths[index], model.batch_first, enforce_sorted=packed == "sorted"
                )
            return tensors(*model(x, hx), model)

        def loss(model: nn.RNNBase, index: Tensor, run: Any = run) -> Tensor:
            flat = torch.cat([part.flatten(1) for part in run(model, index)], 1)
            return (flat.sin() * torch.linspace(-1, 2, flat.shape[1])).sum(1)

        index = torch.arange(N)
        expected, oracle = run(layer, index), per_sample_matrix(layer, loss, index)
        with dpspan.Capture(layer) as capture:
            capture.expect(N)
            for ours, theirs in zip(run(layer, index), expected, strict=True):
                assert ours.shape == theirs.shape
                assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
        J = dpspan.per_sample_gradients(layer, loss, index)
        assert torch.allclose(J.matrix(), oracle, rtol=0, atol=1e-11)
        assert torch.allclose(J.norms(), oracle.norm(dim=1))


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_lies_between_layers(kind: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(N, STEPS, 3, dtype=torch.float64)
    layer = KINDS[kind](3, 4, num_layers=2, batch_first=True, dropout=1.0).double()
    expected = layer(x)[0]  # everything dropped: nothing is left to chance
    with dpspan.Capture(layer) as capture:
        capture.expect(N)
        assert torch.allclose(layer(x)[0], expected, rtol=0, atol=1e-12)
        layer.eval().dropout = 0.5
        assert torch.allclose(layer(x)[0], layer.eval()(x)[0], rtol=0, atol=1e-12)
    layer.train()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        torch.manual_seed(1)
        return loss_per_sample(model, x)

    # Under one seed the gradient of the sum is a difference of sums: the same masks in both.
    J = dpspan.per_sample_gradients(layer, loss, x)
    step, direction = 1e-6, torch.randn_like(layer.weight_hh_l0)
    sums = []
    for sign in (1, -1):
        moved = copy.deepcopy(layer)
        with torch.no_grad():
            moved.weight_hh_l0.add_(direction, alpha=sign * step)
        with dpspan.Capture(moved) as capture:
            capture.expect(N)
            sums.append(loss(moved, x))
    change = (sums[0] - sums[1]) / (2 * step)
    start = layer.weight_ih_l0.numel()  # what stands before weight_hh_l0 in a row
    slopes = J.matrix()[:, start : start + direction.numel()] @ direction.flatten()
    assert torch.allclose(slopes, change, rtol=1e-6)


class Head(nn.Module):
    """The three ways in which people read a recurrent layer."""

    def __init__(self, kind: str, read: str, layers: int, both: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 3)
        self.rnn = KINDS[kind](3, 4, num_layers=layers, bidirectional=both, batch_first=True)
        width = self.rnn.proj_size or 4
        many = 1 if read == "last state" or not both else 2
        self.read, self.fc = read, nn.Linear(width * many, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        output, states = self.rnn(self.embed(tokens))
        h = states[0] if isinstance(states, tuple) else states
        if self.read == "last output":
            return self.fc(output[:, -1])
        if self.read == "both ends" and self.rnn.bidirectional:
            return self.fc(torch.cat([h[-2], h[-1]], 1))
        return self.fc(h[-1])


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("read", ["last state", "last output", "both ends"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_a_step_of_the_engine_is_the_sum_of_clipped_gradients(
    kind: str, read: str, layers: int, both: bool
) -> None:
    torch.manual_seed(0)
    model = dpspan.fix(Head(kind, read, layers, both).double())
    x, y = torch.randint(0, 11, (N, STEPS)), torch.randint(0, 3, (N,))

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y, reduction="none")

    clip = 0.5
    expected = clip_rows(per_sample_matrix(model, loss, x, y), clip).sum(0) / N
    noiseless_step(model, TensorDataset(x, y), clip)
    grads = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.allclose(grads, expected, atol=1e-6)  # the clip's margin for rounding


def noiseless_step(
    model: nn.Module, records: Any, clip: float, collate_fn: Any = None
) -> dpspan.PrivacyEngine:
    engine = dpspan.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(records, batch_size=len(records), collate_fn=collate_fn),
        noise_multiplier=0.0,
        max_grad_norm=clip,
        sample_rate=1.0,
        non_private=True,
    )
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return engine


def test_packed_sequences_straight_from_the_loader() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.fc = nn.GRU(3, 4), nn.Linear(4, 3)

        def forward(self, x: PackedSequence) -> Tensor:
            output, states = self.rnn(x)
            return self.fc(states[-1] + pad_packed_sequence(output)[0].sum(0))

    torch.manual_seed(0)
    model = Packed().double()
    records = [(torch.randn(k, 3, dtype=torch.float64), k % 3) for k in (3, 6, 1, 5, 3)]

    def collate(rows: list[Any]) -> tuple[PackedSequence, Tensor]:
        sequences, labels = zip(*rows, strict=True)
        return pack_sequence(sequences, enforce_sorted=False), torch.tensor(labels)

    rows = []
    for record in records:
        x, y = collate([record])
        loss = nn.functional.cross_entropy(model(x), y)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in grads]))
    expected = clip_rows(torch.stack(rows), 0.5).sum(0) / N
    with pytest.warns(UserWarning, match="keep samples apart"):  # nobody could look
        engine = noiseless_step(model, records, 0.5, collate)
    grads = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.allclose(grads, expected, atol=1e-6)
    assert "keep samples apart" in str(engine.ledger.warnings)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_forward_passes(kind: str, autocast: bool) -> None:
    torch.manual_seed(0)
    layer, x = KINDS[kind](3, 4, num_layers=2, batch_first=True), torch.randn(N, STEPS, 3)
    oracle = per_sample_matrix(layer, loss_per_sample, x)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        J = dpspan.per_sample_gradients(layer, loss_per_sample, x)
    error = (J.matrix() - oracle).norm() / oracle.norm()
    assert error < (0.05 if autocast else 1e-5)  # bfloat16 has eight bits


class Cells(nn.Module):
    """A loop over cells, as people write it, with a state that starts from the data."""

    def __init__(self, kind: type[nn.Module], start: bool, bias: bool) -> None:
        super().__init__()
        self.first, self.cell = nn.Linear(3, 4), kind(3, 4, bias=bias)
        self.start = start

    def forward(self, x: Tensor) -> Tensor:
        state = None
        if self.start:
            h = self.first(x[:, 0])
            state = (h, h.tanh()) if isinstance(self.cell, nn.LSTMCell) else h
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return torch.cat(state, 1) if isinstance(state, tuple) else state


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_in_a_loop(kind: type[nn.Module], start: bool, bias: bool) -> None:
    torch.manual_seed(0)
    model, x = Cells(kind, start, bias).double(), torch.randn(N, STEPS, 3).double()
    J = dpspan.per_sample_gradients(model, loss_per_sample, x)
    oracle = per_sample_matrix(model, loss_per_sample, x)
    assert torch.allclose(J.matrix(), oracle, rtol=0, atol=1e-11)


# -- refusals -------------------------------------------------------------------------------------


def test_a_batch_in_the_wrong_dimension_is_refused_by_name() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(3, 4)  # batch_first is False by default

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x)[0]

    with pytest.raises(
        dpspan.CaptureError,
        match=r"'rnn' \(LSTM\) saw 6 samples, the batch has 5\..*batch_first=True",
    ):
        dpspan.per_sample_gradients(Wrong(), loss_per_sample, torch.randn(N, STEPS, 3))
    with pytest.raises(dpspan.CaptureError, match=r"'rnn' \(LSTM\) saw 0 samples"):
        dpspan.per_sample_gradients(Wrong(), loss_per_sample, torch.randn(N, 3))


def test_as_many_steps_as_samples_do_not_hide_the_wrong_dimension() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.fc = nn.LSTM(3, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.rnn(x)[0][:, -1])

    records = TensorDataset(torch.randn(N, N, 3), torch.randint(0, 3, (N,)))
    with pytest.raises(dpspan.UnsupportedModule, match=r"'rnn' \(LSTM\).*mixes samples"):
        noiseless_step(Wrong(), records, 1.0)


def test_inputs_and_states_changed_in_place_are_refused() -> None:
    layer = nn.RNN(3, 4, batch_first=True)
    for which in (0, 1):
        x, h = torch.randn(N, STEPS, 3), torch.randn(1, N, 4)
        with dpspan.Capture(layer) as capture:
            capture.expect(N)
            output, _ = layer(x, h)
            (x, h)[which].zero_()
            with pytest.raises(dpspan.CaptureError, match="modified in place"):
                output.sum().backward()


def test_a_layer_that_is_not_torchs_own_is_refused() -> None:
    class Own(nn.LSTM):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)[0]

    with pytest.raises(dpspan.UnsupportedModule, match=r"0 \(Own\).*make an unchanged torch layer"):
        dpspan.validate(nn.Sequential(Own(3, 4, batch_first=True)))
    normed = torch.nn.utils.weight_norm(nn.LSTM(3, 4), "weight_hh_l0")
    with pytest.raises(dpspan.UnsupportedModule, match=r"\(LSTM\).*weights are not those"):
        dpspan.validate(normed)
    dpspan.validate(nn.Sequential(Own(3, 4).requires_grad_(False), nn.Linear(4, 2)))


# -- no trace -------------------------------------------------------------------------------------


def test_the_layer_stays_torchs_own() -> None:
    layer = nn.LSTM(3, 4, batch_first=True)
    x, keys = torch.randn(N, STEPS, 3), list(layer.state_dict())
    expected, oracle = layer(x)[0], per_sample_matrix(layer, loss_per_sample, x)
    with dpspan.Capture(layer) as capture:
        assert torch.equal(layer(x)[0], expected)  # nothing is expected: torch's kernel runs
        capture.expect(N)
        layer(x)[0].sum().backward()
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(twin(x)[0], expected)
            J = dpspan.per_sample_gradients(twin, loss_per_sample, x)
            assert torch.allclose(J.matrix(), oracle, atol=1e-5)
    assert list(layer.state_dict()) == keys
    assert "forward" not in vars(layer)


def test_two_captures_at_once() -> None:
    torch.manual_seed(0)
    model, x = Recurrent(nn.GRU(3, 4, batch_first=True)).double(), torch.randn(N, STEPS, 3).double()
    with dpspan.Capture(model):
        J = dpspan.per_sample_gradients(model, loss_per_sample, x)
    assert torch.allclose(J.matrix(), per_sample_matrix(model, loss_per_sample, x))
    assert "forward" not in vars(model.rnn)


def test_frozen_weights_have_no_gradient() -> None:
    layer = nn.LSTM(3, 4, batch_first=True).double()
    layer.weight_ih_l0.requires_grad_(False)
    x = torch.randn(N, STEPS, 3).double()
    J = dpspan.per_sample_gradients(layer, loss_per_sample, x)
    assert "weight_ih_l0" not in J.shapes
    assert torch.allclose(J.matrix(), per_sample_matrix(layer, loss_per_sample, x))
