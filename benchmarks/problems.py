"""The models of the benchmark, each with synthetic data of a fixed seed."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.text_models import TransformerEncoder
from dpspan.model.networks import MLP, PaperCNN, ResNet20, WideResNet

SEED = 0
VOCABULARY = 10_000
LETTERS = 64


def minilm() -> nn.Module:
    """MiniLM-L6, 22.7 M parameters, for two classes; a step takes as long with random weights."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
        num_labels=2,
    )
    return LogitsOnly(BertForSequenceClassification(config))


class LogitsOnly(nn.Module):
    """A Hugging Face classifier that takes token ids and returns a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        # A row of positions and of token types per sample, in memory of its own: the model's own
        # default has one row for all, which Opacus' hooks cannot take.
        positions = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
        return self.model(
            input_ids=tokens, position_ids=positions, token_type_ids=torch.zeros_like(tokens)
        ).logits


class Recurrent(nn.Module):
    """Letters, a recurrent network, and a linear layer on its last state."""

    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(LETTERS, rnn.input_size), rnn
        self.head = nn.Linear(rnn.hidden_size, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        _, states = self.rnn(self.embedding(tokens))
        return self.head((states[0] if isinstance(states, tuple) else states)[-1])


@dataclass(frozen=True)
class Problem:
    """A model, the shape of one sample and the batch size of one step."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    classes: int = 10
    vocabulary: int | None = None  # token ids below it instead of images

    def model(self, device: str) -> nn.Module:
        """The model; every call gives the same initial weights."""
        torch.manual_seed(SEED)
        return self.build().to(device).train()

    def data(self, batch: int, device: str) -> tuple[Tensor, Tensor]:
        """A batch of inputs and labels."""
        generator = torch.Generator().manual_seed(SEED)
        if self.vocabulary is None:
            x = torch.randn(batch, *self.shape, generator=generator)
        else:
            x = torch.randint(self.vocabulary, (batch, *self.shape), generator=generator)
        y = torch.randint(self.classes, (batch,), generator=generator)
        return x.to(device), y.to(device)


PROBLEMS = {
    "mlp": Problem(MLP, (1, 28, 28), batch=256),
    "cnn": Problem(PaperCNN, (1, 28, 28), batch=250),
    "resnet20": Problem(ResNet20, (3, 32, 32), batch=256),
    "wrn28-4": Problem(WideResNet, (3, 32, 32), batch=16),
    "minilm": Problem(minilm, (64,), batch=32, classes=2, vocabulary=30_000),
    "transformer": Problem(
        lambda: TransformerEncoder(VOCABULARY), (64,), batch=64, classes=2, vocabulary=VOCABULARY
    ),
}
# Fully connected networks of one hidden layer, to see how a step grows with the parameters.
WIDTHS = (64, 256, 1024, 4096)
PROBLEMS |= {
    f"mlp-{width}": Problem(partial(MLP, hidden=(width,)), (1, 28, 28), batch=250)
    for width in WIDTHS
}
# Recurrent networks over letters, of the size of Opacus' example for names.
RECURRENT: dict[str, Callable[[], nn.RNNBase]] = {
    "lstm": partial(nn.LSTM, 64, 128, batch_first=True),
    "lstm-2-both-ways": partial(
        nn.LSTM, 64, 128, num_layers=2, bidirectional=True, batch_first=True
    ),
    "gru": partial(nn.GRU, 64, 128, batch_first=True),
    "rnn": partial(nn.RNN, 64, 128, batch_first=True),
}
PROBLEMS |= {
    name: Problem(lambda rnn=rnn: Recurrent(rnn()), (20,), batch=64, vocabulary=LETTERS)
    for name, rnn in RECURRENT.items()
}
