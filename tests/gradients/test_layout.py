"""Which tensors have the batch in front: what looks like a batch and is none, and the reverse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset

import dpspan
from dpspan import CaptureError, per_sample_gradients
from helpers.oracle import clip_rows, per_sample_matrix
from helpers.problems import loss_per_sample


def check(model: nn.Module, x: Tensor) -> None:
    model, x = model.double(), x.double() if x.is_floating_point() else x
    rows = per_sample_matrix(model, loss_per_sample, x)
    found = per_sample_gradients(model, loss_per_sample, x).matrix()
    assert float((found - rows).norm()) < 1e-9 * float(rows.norm())


class Biased(nn.Module):
    """No rule: a table that all samples share is one of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return x.tanh() * self.scale + table * self.scale


class WithTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.biased = nn.Linear(3, 3), Biased()

    def forward(self, x: Tensor) -> Tensor:
        table = torch.linspace(0, 1, x.shape[1] * 3, dtype=x.dtype).view(-1, 3)
        return self.biased(self.layer(x), table)


class Ids(nn.Module):
    """Positions as ids of shape (T,): as many as there are samples, where n = T."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.layer = nn.Embedding(8, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.layer(self.positions(torch.arange(x.shape[1]))))


class RelativeBias(nn.Module):
    """A bias looked up for every pair of positions and turned around, as in T5."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.layer = nn.Embedding(16, 2), nn.Linear(3, 8)

    def forward(self, x: Tensor) -> Tensor:
        where = torch.arange(x.shape[1])
        bias = self.bias((where[None] - where[:, None]).abs()).permute(2, 0, 1).unsqueeze(0)
        q, k = (y.unflatten(2, (-1, 2)).movedim(3, 1) for y in self.layer(x).chunk(2, dim=2))
        return (q @ k.mT + bias).softmax(-1) @ x.unsqueeze(1)


class Repeated(nn.Module):
    """Positions of shape (1, T, d), repeated by the model itself."""

    def __init__(self, use: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.embed, self.use = nn.Embedding(8, 3), use

    def forward(self, x: Tensor) -> Tensor:
        return x + self.use(self.embed(torch.arange(x.shape[1])[None]), len(x))


class Folded(nn.Module):
    """Tokens of all samples in one row, sample by sample or position by position."""

    def __init__(self, *, sample_by_sample: bool, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.sample_by_sample = layer, sample_by_sample

    def forward(self, x: Tensor) -> Tensor:
        order = x if self.sample_by_sample else x.transpose(0, 1)
        y = self.layer(order.flatten(0, 1)).unflatten(0, order.shape[:2])
        return x + (y if self.sample_by_sample else y.transpose(0, 1))


class InPlace(nn.Module):
    """Works in place on a linear layer's output, which is a view where sequences come in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(x).tanh())
        hidden /= 2.0
        return nn.functional.relu(hidden, inplace=True)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "table beside the batch": WithTable,
    "ids": Ids,
    "relative bias": RelativeBias,
    "shared, repeated": lambda: Repeated(lambda p, n: p.repeat(n, 1, 1)),
    "shared, in place": lambda: Repeated(lambda p, n: p.mul_(2.0)),
    "shared, reduced": lambda: Repeated(lambda p, n: p[0]),
    "folded": lambda: Folded(sample_by_sample=True, layer=nn.Linear(3, 3)),
    "folded the other way": lambda: Folded(sample_by_sample=False, layer=nn.Linear(3, 3)),
    "folded norm": lambda: Folded(sample_by_sample=True, layer=nn.LayerNorm(3)),
    "in place": InPlace,
    "parametrized": lambda: nn.Sequential(weight_norm(nn.Linear(3, 3)), nn.Tanh()),
    "parametrized, no bias": lambda: nn.Sequential(weight_norm(nn.Linear(3, 3, bias=False))),
    "layers of torch": lambda: nn.TransformerEncoderLayer(3, 1, 6, dropout=0.0, batch_first=True),
}


@pytest.mark.parametrize("samples", [1, 2, 3, 5])
@pytest.mark.parametrize("name", MODELS)
def test_rows_are_exact_whatever_has_as_many_entries_as_the_batch(name: str, samples: int) -> None:
    torch.manual_seed(0)
    check(MODELS[name](), torch.randn(samples, 5, 3))


@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_the_engine_is_exact_too(name: str) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name]().double(), torch.randn(5, 5, 3).double()
    expected = clip_rows(per_sample_matrix(model, loss_per_sample, x), 0.5).sum(0)
    engine = dpspan.PrivacyEngine(accountant="rdp", debug_seed=0)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(x), batch_size=5),
        noise_multiplier=0.0,
        non_private=True,
        sample_rate=1.0,
        expected_batch_size=1.0,
        max_grad_norm=0.5,
    )
    for (batch,) in loader:
        losses = loss_per_sample(model, batch)
        with torch.no_grad():  # the model that is trained is the model that was given
            assert torch.allclose(losses, loss_per_sample(model, batch))
        losses.mean().backward()
        optimizer.step()
    released = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.allclose(released, expected)


class TableOutside(nn.Module):
    """A module without a rule whose caller passes the table."""

    def __init__(self) -> None:
        super().__init__()
        self.biased = Biased()

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.biased(x, table)


@pytest.mark.parametrize("model", [Biased(), TableOutside()])
def test_a_table_given_to_the_model_itself(model: nn.Module) -> None:
    """With n = T at the first call, when nothing is known, and later, when it is."""
    torch.manual_seed(0)
    model = model.double()
    table = torch.randn(5, 3).double()

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return loss_per_sample(lambda y: m(y, table), x)

    batches = [torch.randn(samples, 5, 3).double() for samples in (5, 4, 5)]
    for given in (batches[:1], batches[1:]):
        with dpspan.Capture(model) as capture:
            found = []
            for x in given:
                capture.expect(len(x))
                loss(model, x).sum().backward()
                found.append(capture.collect().matrix())
        for x, rows in zip(given, found, strict=True):
            assert torch.allclose(rows, per_sample_matrix(model, loss, x))


class Normalised(nn.Module):
    """Lets samples see each other, and has parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) * self.scale


def test_a_module_without_a_rule_that_mixes_samples_is_refused_by_name() -> None:
    """torch.func would give it one sample at a time: another model than the one that was given."""
    model = nn.Sequential(nn.Linear(3, 3), Normalised())
    with pytest.raises(CaptureError, match=r"'1' \(Normalised\).*depends on the other samples"):
        per_sample_gradients(model, loss_per_sample, torch.randn(4, 3))


class Experts(nn.Module):
    """A mixture of experts: each sees the tokens that the gate gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(3, 2)
        self.experts = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x: Tensor) -> Tensor:
        chosen, y = self.gate(x).argmax(-1), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            if (chosen == index).any():
                y[chosen == index] = expert(x[chosen == index])
        return y


def test_a_mixture_of_experts_is_refused_by_name() -> None:
    torch.manual_seed(0)
    model, x = Experts(), torch.randn(4, 7, 3)
    with torch.no_grad():
        model.gate.bias.zero_()
    with pytest.raises(
        CaptureError, match=r"experts\.\d.*which token it sees depends on the batch"
    ):
        per_sample_gradients(model, loss_per_sample, x)


def test_an_expert_that_wakes_up_later_is_refused_by_name() -> None:
    """At first one expert sees all tokens of all samples, in order, which is no routing at all."""
    torch.manual_seed(0)
    model, x = Experts(), torch.randn(4, 7, 3)
    with torch.no_grad():
        model.gate.bias.copy_(torch.tensor([99.0, 0.0]))
    with dpspan.Capture(model) as capture:
        capture.expect(4)
        loss_per_sample(model, x).sum().backward()
        capture.collect()
        model.gate.bias.data.zero_()
        capture.expect(4)
        with pytest.raises(CaptureError, match=r"'experts\.\d'"):
            loss_per_sample(model, x).sum().backward()


class Padded(nn.Embedding):
    """Scales what it looks up, as Gemma does: no rule, so torch.func takes it."""

    def forward(self, index: Tensor) -> Tensor:
        return super().forward(index) * 2.0


def test_padding_gets_no_gradient_from_any_sample() -> None:
    torch.manual_seed(0)
    tokens = torch.tensor([[1, 0, 2], [0, 0, 3], [4, 0, 0]])
    check(nn.Sequential(Padded(5, 3, padding_idx=0)), tokens)
    check(nn.Sequential(Padded(5, 3, padding_idx=-1)), tokens)


def test_an_argument_that_comes_later_is_looked_at_then() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(3).double())

        def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
            return x * self.scale if mask is None else mask @ (x * self.scale)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.masked, self.causal = Masked(), False

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ones(5, 5).double().tril() / 3
            return self.masked(x, mask if self.causal else None)

    torch.manual_seed(0)
    model, x = Model(), torch.randn(5, 5, 3).double()
    with dpspan.Capture(model) as capture:
        for model.causal in (False, True):
            capture.expect(5)
            loss_per_sample(model, x).sum().backward()
            found = capture.collect().matrix()
    assert torch.allclose(found, per_sample_matrix(model, loss_per_sample, x))


def test_looking_leaves_no_trace() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return nn.functional.dropout(x) * self.scale

    model = nn.Sequential(nn.Linear(3, 3), Counting())
    x, version = torch.randn(4, 3), model[1].calls._version
    torch.manual_seed(0)
    per_sample_gradients(model, loss_per_sample, x, check=False)
    after = torch.rand(())
    assert int(model[1].calls) == 1
    assert model[1].calls._version == version + 1  # and nothing was written back
    torch.manual_seed(0)
    per_sample_gradients(model, loss_per_sample, x, check=False)
    assert torch.equal(torch.rand(()), after)
    assert all(part.training for part in model.modules())


def test_the_look_is_taken_once() -> None:
    calls = []
    model = nn.Sequential(nn.Linear(3, 3), nn.PReLU())
    model[0].register_forward_hook(lambda *_: calls.append(1))
    with dpspan.Capture(model) as capture:
        for samples in (4, 6, 3, 5):
            capture.expect(samples)
            before = len(calls)
            loss_per_sample(model, torch.randn(samples, 3)).sum().backward()
            capture.collect()
            assert samples == 4 or len(calls) == before + 1


# -- torch's own layers ---------------------------------------------------------------------------


class Decoder(nn.Module):
    def __init__(self, *, batch_first: bool = True) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(4, 2, 6, dropout=0.0, batch_first=batch_first)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=x.dtype)
        if self.batch_first:
            return self.layer(x, x.tanh(), tgt_mask=mask)
        x = x.transpose(0, 1)
        return self.layer(x, x.tanh(), tgt_mask=mask).transpose(0, 1)


class Encoder(nn.Module):
    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=batch_first)
        self.encoder, self.batch_first = nn.TransformerEncoder(layer, 2), batch_first

    def forward(self, x: Tensor) -> Tensor:
        if self.batch_first:
            return self.encoder(x)
        return self.encoder(x.transpose(0, 1)).transpose(0, 1)


class SequenceFirstAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return self.attention(x, x, x)[0].transpose(0, 1)


class VisionTransformer(nn.Module):
    """A class token that is expanded over the batch, and torch's encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.positions = nn.Parameter(torch.randn(1, 6, 4))
        self.encoder = Encoder(batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.encoder(x)[:, 0])


class Bags(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(11, 3, mode=mode)

    def forward(self, x: Tensor) -> Tensor:
        return self.bag(((x.abs() * 5).long() % 11).flatten(1))


TORCH: dict[str, Callable[[], nn.Module]] = {
    "decoder layer": Decoder,
    "decoder layer, batch second": lambda: Decoder(batch_first=False),
    "encoder": lambda: Encoder(batch_first=True),
    "encoder, batch second": lambda: Encoder(batch_first=False),
    "attention, batch second": SequenceFirstAttention,
    "vision transformer": VisionTransformer,
    "prelu": lambda: nn.Sequential(nn.Linear(4, 4), nn.PReLU(5)),
    "conv transpose": lambda: nn.Sequential(nn.ConvTranspose1d(5, 3, 2, stride=2)),
    "bag, sum": lambda: Bags("sum"),
    "bag, mean": lambda: Bags("mean"),
    "bag, max": lambda: Bags("max"),
}


@pytest.mark.filterwarnings("ignore")  # torch.func on layers for which it has no fast way
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", TORCH)
def test_layers_of_torch(name: str, training: bool) -> None:
    for samples in (1, 3, 5):
        torch.manual_seed(0)
        check(TORCH[name]().train(training), torch.randn(samples, 5, 4))


def test_an_embedding_bag_with_offsets() -> None:
    """Exact where the model makes the offsets; refused where they come with the batch."""

    class Offsets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(11, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            offsets = torch.arange(0, tokens.numel(), tokens.shape[1])
            return self.bag(tokens.flatten(), offsets)

    check(Offsets(), torch.randint(11, (4, 3)))
    with pytest.raises(CaptureError, match=r"EmbeddingBag.*depends on the other samples"):
        per_sample_gradients(
            nn.EmbeddingBag(11, 3),
            lambda m, at: m(torch.arange(9), at).sum(1),
            torch.arange(0, 9, 3),
        )


@pytest.mark.parametrize("name", [*MODELS, "vision transformer"])
def test_an_empty_batch(name: str) -> None:
    model = {**MODELS, **TORCH}[name]()
    width = 4 if name == "vision transformer" else 3
    J = per_sample_gradients(model, loss_per_sample, torch.randn(0, 5, width))
    assert J.samples == 0
    assert all(not v.any() for v in J.combine(torch.zeros(0)).values())
