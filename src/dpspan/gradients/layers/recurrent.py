"""nn.LSTM, nn.GRU and nn.RNN, one step after the other instead of in torch's fused kernel; cells.

The kernel hides what per-sample gradients are made of. Here the inputs of all steps go through one
product, and each step adds the product of the state before it. The gradients b (n, T, ·) of these
sums are all that is needed: the input's weight has the rows Σ_t b_t ⊗ x_t, the state's
Σ_t b_t ⊗ h_{t−1}, and a bias has Σ_t b_t.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from dpspan.gradients.layers.linear import Outer
from dpspan.gradients.layers.terms import Rows, Term

Terms = Callable[[Tensor], Iterator[tuple[str, Term]]]
Listen = Callable[[Tensor, Terms], Tensor]  # gives the tensor back; its gradient goes to the terms
State = tuple[Tensor, ...]  # h, and c of an LSTM

_KINDS = (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell)
_OF_CELL = ["weight_ih", "weight_hh", "bias_ih", "bias_hh"]


def is_recurrent(module: nn.Module) -> bool:
    """Whether it computes what torch's class does, with the parameters of that class."""
    if not isinstance(module, _KINDS):
        return False
    names = _OF_CELL if isinstance(module, nn.RNNCellBase) else module._flat_weights_names
    return method_of(module, "forward") in [kind.forward for kind in _KINDS] and (
        sorted(module._parameters) == sorted(names)
    )


class InPlaceOf:
    """What a capture puts in place of a forward pass, `inner`."""

    inner: Any


def method_of(module: nn.Module, name: str) -> object:
    """The function that a module runs as this method, below what a capture puts in its place."""
    bound = getattr(module, name, None)
    return getattr(bound.inner if isinstance(bound, InPlaceOf) else bound, "__func__", None)


def is_of_opacus(module: nn.Module) -> bool:
    """Whether it is one of Opacus' layers; asked without importing Opacus."""
    names = {f"{kind.__module__}.{kind.__name__}" for kind in type(module).__mro__}
    return "opacus.layers.dp_rnn.DPRNNBase" in names


def sequences(module: nn.Module, x: Tensor | PackedSequence) -> int:
    """How many samples an input holds; none if it has no dimension for them."""
    if isinstance(x, PackedSequence):
        return int(x.batch_sizes[0])
    if isinstance(module, nn.RNNBase):
        return x.shape[0 if module.batch_first else 1] if x.dim() == 3 else 0
    return x.shape[0] if x.dim() == 2 else 0


def step_by_step(
    module: nn.Module,
    weights: Mapping[str, Tensor],
    listen: Listen,
    input: Tensor | PackedSequence,
    hx: Any = None,
) -> Any:
    """What `module(input, hx)` returns, with `weights` in place of its own."""
    lstm, batch = isinstance(module, nn.LSTM | nn.LSTMCell), sequences(module, input)
    if isinstance(module, nn.RNNCellBase):
        assert isinstance(input, Tensor)
        if hx is None:
            zeros = input.new_zeros(batch, module.hidden_size)
            hx = (zeros, zeros) if lstm else zeros
        _, state = _sweep(_mode(module), weights, "", listen, input[None], hx if lstm else (hx,))
        return state if lstm else state[0]
    assert isinstance(module, nn.RNNBase)
    packed = input if isinstance(input, PackedSequence) else None
    data = input.data if isinstance(input, PackedSequence) else input
    ways = ("", "_reverse") if module.bidirectional else ("",)
    if hx is None:
        widths = module.proj_size or module.hidden_size, module.hidden_size
        start = [data.new_zeros(module.num_layers * len(ways), batch, width) for width in widths]
        hx = tuple(start) if lstm else start[0]
    module.check_forward_args(data, hx, None if packed is None else packed.batch_sizes)
    starts: Iterator[State] = zip(*(hx if lstm else (hx,)), strict=True)

    going: list[Tensor] | None = None  # at each step, which sequences have not ended
    if packed is not None:
        x, lengths = pad_packed_sequence(packed)  # samples in the order they had before packing
        mask = torch.arange(len(x), device="cpu").view(-1, 1, 1) < lengths.view(-1, 1)
        going = list(mask.to(x.device, non_blocking=True))
    else:
        x = data.transpose(0, 1) if module.batch_first else data  # (T, n, ·)

    ends: list[State] = []
    for layer in range(module.num_layers):
        if layer and module.dropout:
            x = F.dropout(x, module.dropout, module.training)
        outputs = []
        for way in ways:
            name = f"_l{layer}{way}"
            output, end = _sweep(module.mode, weights, name, listen, x, next(starts), going)
            outputs.append(output)
            ends.append(end)
        x = torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]

    states = tuple(torch.stack(parts) for parts in zip(*ends, strict=True))
    hidden = states if lstm else states[0]
    if packed is not None:
        if packed.sorted_indices is not None:
            x = x.index_select(1, packed.sorted_indices)
        again = pack_padded_sequence(x, lengths.sort(descending=True).values)
        return packed._replace(data=again.data), hidden
    return x.transpose(0, 1) if module.batch_first else x, hidden


def _mode(cell: nn.RNNCellBase) -> str:
    if isinstance(cell, nn.RNNCell):
        return f"RNN_{cell.nonlinearity.upper()}"
    return "LSTM" if isinstance(cell, nn.LSTMCell) else "GRU"


def _sweep(
    mode: str,
    weights: Mapping[str, Tensor],
    name: str,
    listen: Listen,
    x: Tensor,
    state: State,
    going: list[Tensor] | None = None,
) -> tuple[Tensor, State]:
    """One layer in one direction: its outputs (T, n, ·) and where it ends."""
    steps, batch = x.shape[:2]

    def of_input(grad: Tensor) -> Iterator[tuple[str, Term]]:
        return _terms(f"weight_ih{name}", f"bias_ih{name}", x.detach().transpose(0, 1), grad)

    def product(weight: str, bias: str, added: Tensor) -> Callable[[int, Tensor], Tensor]:
        """A product at each step, added to what there is: its gradient is the sum's."""
        w, met = weights[weight].T, [x] * steps

        def of_state(grad: Tensor) -> Iterator[tuple[str, Term]]:
            return _terms(weight, bias, torch.stack(met, 1), grad)

        sums = listen(added, of_state).unbind()

        def at(t: int, h: Tensor) -> Tensor:
            met[t] = h.detach()
            return torch.addmm(sums[t], h, w)

        return at

    w, b = weights[f"weight_ih{name}"], weights.get(f"bias_ih{name}")
    from_x = listen(F.linear(x, w, b), of_input)
    bias = weights.get(f"bias_hh{name}", x.new_zeros(w.shape[0]))
    # A GRU gates the product of its state before it adds it.
    added = bias.expand(from_x.shape) if mode == "GRU" else from_x + bias
    from_h = product(f"weight_hh{name}", f"bias_hh{name}", added)
    project = None
    if f"weight_hr{name}" in weights:
        width = len(weights[f"weight_hr{name}"])
        project = product(f"weight_hr{name}", "", x.new_zeros(steps, batch, width))

    cell, inputs, outputs = _CELLS[mode], from_x.unbind(), [x] * steps
    for t in range(steps - 1, -1, -1) if name.endswith("_reverse") else range(steps):
        new = cell(inputs[t], from_h(t, state[0]), *state)
        if project is not None:
            new = (project(t, new[0]), *new[1:])
        if going is not None:
            new = tuple(torch.where(going[t], *pair) for pair in zip(new, state, strict=True))
        state, outputs[t] = new, new[0]
    return torch.stack(outputs), state


def _terms(weight: str, bias: str, a: Tensor, grad: Tensor) -> Iterator[tuple[str, Term]]:
    b = grad.transpose(0, 1).contiguous()
    yield weight, Outer(a, b)
    yield bias, Rows(b.sum(1))


def _lstm(_: Tensor, sums: Tensor, h: Tensor, c: Tensor) -> State:
    i, f, g, o = sums.chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(from_x: Tensor, from_h: Tensor, h: Tensor) -> State:
    width = h.shape[1]
    gates_x, new_x = from_x.split([2 * width, width], 1)
    gates_h, new_h = from_h.split([2 * width, width], 1)
    reset, keep = (gates_x + gates_h).sigmoid().chunk(2, 1)
    new = (new_x + reset * new_h).tanh()
    return (new + keep * (h - new),)


_CELLS: dict[str, Callable[..., State]] = {
    "LSTM": _lstm,
    "GRU": _gru,
    "RNN_TANH": lambda _, sums, h: (sums.tanh(),),
    "RNN_RELU": lambda _, sums, h: (sums.relu(),),
}
