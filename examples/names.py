"""A name's language from its letters, by a recurrent network.

The script is written as for Opacus: with Opacus' PrivacyEngine and ModuleValidator.fix in place of
the first import it runs as it is.
"""

import argparse
import random

from dpspan import PrivacyEngine, fix
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LETTERS = " abcdefghijklmnopqrstuvwxyz"  # the first is padding
LENGTH = 10
STEMS = {
    "Italian": (
        ["ros", "bian", "ferr", "mar", "gal", "con"],
        ["etti", "ini", "ari", "ello", "one"],
    ),
    "Polish": (
        ["kow", "wis", "zie", "maz", "szy", "woj"],
        ["alski", "czyk", "owicz", "ewska", "ak"],
    ),
    "Japanese": (
        ["yama", "taka", "mori", "kawa", "naka", "fuji"],
        ["moto", "shi", "da", "mura", "no"],
    ),
    "Scottish": (
        ["mac", "camp", "stew", "fer", "gil", "dun"],
        ["bell", "art", "guson", "donald", "lie"],
    ),
}


def make_names(n, seed):
    """Random names as letters' numbers, padded in front, and the numbers of their languages."""
    rng = random.Random(seed)
    rows, labels = [], []
    for _ in range(n):
        label = rng.randrange(len(STEMS))
        first, second = list(STEMS.values())[label]
        name = list(rng.choice(first) + rng.choice(second))
        name[rng.randrange(len(name))] = rng.choice(LETTERS[1:])  # one slip of the pen
        rows.append([LETTERS.index(letter) for letter in "".join(name).rjust(LENGTH)[-LENGTH:]])
        labels.append(label)
    return TensorDataset(torch.tensor(rows), torch.tensor(labels))


class NameClassifier(nn.Module):
    def __init__(self, kind, layers, both, hidden=32):
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS), 16)
        self.rnn = kind(16, hidden, num_layers=layers, bidirectional=both, batch_first=True)
        self.fc = nn.Linear(2 * hidden if both else hidden, len(STEMS))
        self.both = both

    def forward(self, letters):
        _, states = self.rnn(self.embedding(letters))
        h = states[0] if isinstance(states, tuple) else states  # an LSTM has cells, too
        return self.fc(torch.cat([h[-2], h[-1]], dim=1) if self.both else h[-1])


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=["LSTM", "GRU", "RNN"], default="LSTM")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--both-ways", action="store_true")
    parser.add_argument("--names", type=int, default=4000)
    parser.add_argument("--batch-size", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    args = parser.parse_args(argv)

    model = fix(NameClassifier(getattr(nn, args.kind), args.layers, args.both_ways))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    criterion = nn.CrossEntropyLoss()
    privacy_engine = PrivacyEngine()
    model, optimizer, loader = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(make_names(args.names, seed=0), batch_size=args.batch_size),
        noise_multiplier=args.sigma,
        max_grad_norm=1.0,
    )
    for epoch in range(1, args.epochs + 1):
        model.train()
        for letters, language in loader:
            optimizer.zero_grad()
            criterion(model(letters), language).backward()
            optimizer.step()
        epsilon = privacy_engine.get_epsilon(delta=args.delta)
        print(f"Epoch {epoch}  (ε = {epsilon:.2f}, δ = {args.delta})")

    model.eval()
    letters, language = make_names(1000, seed=1).tensors
    with torch.no_grad():
        accuracy = (model(letters).argmax(dim=1) == language).float().mean().item()
    print(f"Accuracy on new names: {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
