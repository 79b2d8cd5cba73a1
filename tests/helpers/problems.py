"""One table of models that every operation is run through, by the library and by the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from dpspan.gradients.layers.standardised import StandardisedConv2d

Factory = Callable[[], tuple[nn.Module, Tensor]]


def loss_per_sample(model: nn.Module, x: Tensor) -> Tensor:
    """A loss in which every output entry counts differently, so that no mix-up can cancel."""
    output = model(x)
    output = output[0] if isinstance(output, tuple) else output
    flat = output.flatten(1)
    weights = torch.linspace(-1.0, 2.0, flat.shape[1], dtype=flat.dtype, device=flat.device)
    return (torch.sin(flat) * weights).sum(1)


class Tied(nn.Module):
    """Token embedding tied to the output layer, position ids shared by all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6, padding_idx=0)
        self.positions = nn.Embedding(5, 6)
        self.norm = nn.LayerNorm(6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1])[None])
        return self.head(self.mix(self.norm(x)).tanh())


class _Half(nn.Module):
    def __init__(self, tokens: nn.Embedding) -> None:
        super().__init__()
        self.tokens, self.positions, self.mix = tokens, nn.Embedding(5, 6), nn.Linear(6, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = self.positions(torch.arange(tokens.shape[1])[None])
        return self.mix(self.tokens(tokens) + positions).tanh()


class TwoHalves(nn.Module):
    """Two halves that hold one embedding, which is tied to the output layer (T5)."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(11, 6)
        self.encoder, self.decoder = _Half(self.shared), _Half(self.shared)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(tokens).mean(1, keepdim=True) + self.decoder(tokens))


class TwoNames(nn.Module):
    """Beside a bare parameter one layer under two names: torch.func takes all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(5))
        self.first = self.second = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh() * self.scale)


class TiedLinears(nn.Module):
    """An autoencoder step whose two layers of one class share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


class Reused(nn.Module):
    """One layer called several times, as in a recurrent network."""

    def __init__(self, layer: nn.Module, times: int = 3) -> None:
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.layer(x).tanh()
        return x


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 5), nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Custom(nn.Module):
    """Bare parameters beside ordinary layers: no rule fits."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 5))
        self.scale = nn.Parameter(torch.randn(5))
        self.temperature = nn.Parameter(torch.tensor(1.3))  # a single number has no axes
        self.inner = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale + self.token).tanh() * self.scale * self.temperature


class CustomInside(nn.Module):
    """A custom module between layers with rules, with dropout switched off by p = 0."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.custom, self.after = nn.Linear(4, 5), Custom(), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.custom(self.before(x)))


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.attention(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    """A head on the outputs and on all last states; the batch may be second, or packed."""

    def __init__(self, rnn: nn.RNNBase, *, packed: bool = False) -> None:
        super().__init__()
        self.rnn, self.packed = rnn, packed
        width = (rnn.proj_size or rnn.hidden_size) * (2 if rnn.bidirectional else 1)
        self.before, self.head = nn.Linear(3, rnn.input_size), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        n, steps = x.shape[:2]
        lengths = 1 + (97 * x[:, 0, 0].abs()).long() % steps  # a sample's own, in no order
        rows: Any = self.before(x)
        if self.packed:
            rows = pack_padded_sequence(rows, lengths.cpu(), batch_first=True, enforce_sorted=False)
        elif not self.rnn.batch_first:
            rows = rows.transpose(0, 1)
        output, states = self.rnn(rows)
        if self.packed:
            output, _ = pad_packed_sequence(output, batch_first=True, total_length=steps)
        elif not self.rnn.batch_first:
            output = output.transpose(0, 1)
        parts = states if isinstance(states, tuple) else (states,)
        last = [part.transpose(0, 1).reshape(n, -1) for part in parts]
        return torch.cat([self.head(output).flatten(1), *last], 1)


class LearnedStart(nn.Module):
    """A bare parameter beside a recurrent layer: torch.func takes both."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(2, 1, 4))
        self.rnn = nn.GRU(3, 4, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x, self.start.expand(-1, len(x), -1).contiguous())[0]


class Residual(nn.Module):
    """In-place activations and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.relu(self.first(x), inplace=True)
        return hidden + self.second(hidden)


class SlowLinear(nn.Linear):
    """A subclass that computes something else: the rule of its base class must not be used."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.square(), self.bias)


def _flat_channel(layer: nn.Conv2d) -> nn.Conv2d:
    nn.init.constant_(layer.weight[0], 0.3)  # nothing is left of it
    return layer


def _freeze(model: nn.Module, *names: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.requires_grad_(False)
    return model


def _tokens(*shape: int) -> Tensor:
    return torch.randint(0, 11, shape)


PROBLEMS: dict[str, Factory] = {
    "linear": lambda: (nn.Linear(5, 7), torch.randn(6, 5)),
    "linear without bias": lambda: (nn.Linear(5, 7, bias=False), torch.randn(6, 5)),
    "linear on long sequences (rows)": lambda: (nn.Linear(5, 4), torch.randn(6, 9, 5)),
    "linear on short sequences (ghost)": lambda: (nn.Linear(15, 17), torch.randn(6, 3, 15)),
    "linear with leading dimensions": lambda: (nn.Linear(15, 17), torch.randn(3, 2, 2, 15)),
    "mlp": lambda: (
        nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 3)),
        torch.randn(6, 5),
    ),
    "residual, in place": lambda: (Residual(), torch.randn(6, 6)),
    "conv1d": lambda: (nn.Conv1d(3, 8, 3, stride=2, padding=1), torch.randn(5, 3, 11)),
    "conv1d deep, short (ghost)": lambda: (nn.Conv1d(16, 40, 3), torch.randn(5, 16, 6)),
    "conv2d thin": lambda: (nn.Conv2d(3, 6, 3, padding=1), torch.randn(4, 3, 7, 6)),
    "conv2d grouped backward": lambda: (nn.Conv2d(9, 6, 3, padding=1), torch.randn(4, 9, 7, 6)),
    "conv2d leftover pixels": lambda: (nn.Conv2d(8, 6, 3, stride=2), torch.randn(4, 8, 8, 8)),
    "conv2d stride dilation groups": lambda: (
        nn.Conv2d(16, 8, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(2, 1), groups=2),
        torch.randn(4, 16, 9, 7),
    ),
    "conv2d depthwise": lambda: (nn.Conv2d(6, 12, 3, groups=6), torch.randn(4, 6, 5, 5)),
    "conv2d grouped, deep (ghost)": lambda: (
        nn.Conv2d(32, 64, 3, groups=2),
        torch.randn(3, 32, 4, 4),
    ),
    "conv2d 1x1": lambda: (nn.Conv2d(6, 5, 1), torch.randn(4, 6, 5, 5)),
    "conv2d same": lambda: (nn.Conv2d(4, 5, 4, padding="same"), torch.randn(4, 4, 6, 6)),
    "conv2d valid": lambda: (nn.Conv2d(4, 5, 3, padding="valid"), torch.randn(4, 4, 6, 6)),
    "conv2d standardised": lambda: (
        StandardisedConv2d(8, 6, 3, padding=1, stride=2),
        torch.randn(5, 8, 7, 6),
    ),
    "conv2d standardised, groups, a channel of equal weights": lambda: (
        _flat_channel(StandardisedConv2d(4, 6, 3, padding="same", groups=2, bias=False)),
        torch.randn(4, 4, 5, 5),
    ),
    "conv3d": lambda: (nn.Conv3d(2, 8, 2, stride=2, padding=1), torch.randn(3, 2, 4, 5, 4)),
    "conv3d deep": lambda: (nn.Conv3d(10, 12, 2), torch.randn(3, 10, 3, 3, 3)),
    **{
        f"conv2d {mode}": lambda mode=mode: (
            nn.Conv2d(8, 5, 3, padding=(1, 2), padding_mode=mode),
            torch.randn(4, 8, 6, 7),
        )
        for mode in ("reflect", "replicate", "circular")
    },
    "embedding": lambda: (nn.Embedding(11, 4), _tokens(6, 5)),
    "embedding padding_idx": lambda: (nn.Embedding(11, 4, padding_idx=3), _tokens(6, 5)),
    "embedding of one index": lambda: (nn.Embedding(11, 4), _tokens(6)),
    "embedding, large table": lambda: (nn.Embedding(99, 4), _tokens(6, 2, 2)),
    "layer norm": lambda: (nn.LayerNorm(5), torch.randn(6, 3, 5)),
    "layer norm over two dimensions": lambda: (nn.LayerNorm((3, 5)), torch.randn(6, 2, 3, 5)),
    "layer norm without bias": lambda: (nn.LayerNorm(5, bias=False), torch.randn(6, 5)),
    "rms norm": lambda: (nn.RMSNorm(5), torch.randn(6, 3, 5)),
    "group norm": lambda: (nn.GroupNorm(2, 6), torch.randn(5, 6, 4, 3)),
    "group norm on features": lambda: (nn.GroupNorm(2, 6), torch.randn(5, 6)),
    "instance norm": lambda: (nn.InstanceNorm2d(4, affine=True), torch.randn(5, 4, 4, 3)),
    "instance norm 1d": lambda: (nn.InstanceNorm1d(4, affine=True), torch.randn(5, 4, 6)),
    "tied embedding": lambda: (Tied(), _tokens(6, 5)),
    "tied linears": lambda: (TiedLinears(), torch.randn(6, 6)),
    "one embedding in two halves": lambda: (TwoHalves(), _tokens(6, 5)),
    "one layer under two names": lambda: (TwoNames(), torch.randn(6, 5)),
    "reused linear": lambda: (Reused(nn.Linear(6, 6)), torch.randn(5, 6)),
    "reused linear on sequences": lambda: (Reused(nn.Linear(6, 6)), torch.randn(5, 7, 6)),
    "reused conv": lambda: (Reused(nn.Conv2d(8, 8, 3, padding=1), 2), torch.randn(3, 8, 4, 4)),
    "reused norm": lambda: (Reused(nn.LayerNorm(6)), torch.randn(5, 6)),
    "unused": lambda: (Unused(), torch.randn(6, 4)),
    "frozen layer": lambda: (
        _freeze(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), "0.weight", "0.bias"),
        torch.randn(6, 4),
    ),
    "frozen weight": lambda: (_freeze(nn.Linear(4, 5), "weight"), torch.randn(6, 4)),
    "frozen bias": lambda: (_freeze(nn.Conv2d(3, 5, 3), "bias"), torch.randn(6, 3, 4, 4)),
    "frozen tied head bias": lambda: (_freeze(TiedLinears(), "second.bias"), torch.randn(6, 6)),
    "custom module": lambda: (Custom(), torch.randn(6, 5)),
    "custom module inside": lambda: (CustomInside(), torch.randn(6, 4)),
    "custom module reused": lambda: (Reused(Custom(), 2), torch.randn(6, 5)),
    "subclass with another forward": lambda: (SlowLinear(4, 5), torch.randn(6, 4)),
    "bilinear": lambda: (_Bilinear(), torch.randn(6, 4)),
    "conv transpose": lambda: (nn.ConvTranspose2d(3, 4, 3, stride=2), torch.randn(3, 3, 4, 4)),
    "prelu": lambda: (nn.Sequential(nn.Linear(4, 5), nn.PReLU(5)), torch.randn(6, 4)),
    "multi-head attention": lambda: (SelfAttention(), torch.randn(4, 3, 8)),
    "transformer layer": lambda: (
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        torch.randn(4, 3, 8),
    ),
    "lstm": lambda: (Recurrent(nn.LSTM(3, 4, batch_first=True)), torch.randn(6, 5, 3)),
    "lstm, two layers both ways": lambda: (
        Recurrent(nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True)),
        torch.randn(6, 5, 3),
    ),
    "lstm with projection": lambda: (
        Recurrent(nn.LSTM(3, 4, proj_size=2, bidirectional=True)),
        torch.randn(6, 5, 3),
    ),
    "gru": lambda: (Recurrent(nn.GRU(3, 4, batch_first=True)), torch.randn(6, 5, 3)),
    "gru, batch second": lambda: (
        Recurrent(nn.GRU(3, 4, num_layers=2, bidirectional=True, bias=False)),
        torch.randn(6, 5, 3),
    ),
    "gru, packed": lambda: (
        Recurrent(nn.GRU(3, 4, num_layers=2, bidirectional=True), packed=True),
        torch.randn(6, 5, 3),
    ),
    "rnn, many steps (rows)": lambda: (
        Recurrent(nn.RNN(3, 4, batch_first=True)),
        torch.randn(5, 9, 3),
    ),
    "rnn with relu, few steps (ghost)": lambda: (
        Recurrent(nn.RNN(13, 14, nonlinearity="relu", batch_first=True)),
        torch.randn(5, 2, 3),
    ),
    "recurrent layer with a learned start": lambda: (LearnedStart(), torch.randn(6, 5, 3)),
    "one sample": lambda: (nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), torch.randn(1, 5)),
}


class _Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Bilinear(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x, x)


def make(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    """The problem, with weights and data of a fixed seed."""
    torch.manual_seed(sum(map(ord, name)))
    model, x = PROBLEMS[name]()
    for parameter in model.parameters():  # norms start at weight 1, bias 0: too special
        with torch.no_grad():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype), x.to(dtype) if x.is_floating_point() else x
