"""Private training in the span of public gradients, on scikit-learn's digits.

The public digits are used without their labels: they only tell in which directions gradients point.
With a model of 4,810 parameters that buys little, and plain DP-SGD is hard to beat; what the
methods do, and what they note, is the same for larger ones (docs/public-data.md has those). Run it
with `python examples/with_public_data.py`; it takes about half a minute.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpspan

digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
y = torch.tensor(digits.target)
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
x, y = x[order], y[order]
public, private, test = x[:100], slice(100, 1400), slice(1400, None)


def run(method):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    criterion = nn.CrossEntropyLoss()
    engine = dpspan.PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(TensorDataset(x[private], y[private]), batch_size=130),
        criterion=criterion,
        method=method,
        target_epsilon=1.0,
        target_delta=1e-4,
        epochs=20,
    )
    for _ in range(20):
        for images, labels in loader:
            optimizer.zero_grad()
            criterion(model(images), labels).backward()
            optimizer.step()
    with torch.no_grad():
        right = (model(x[test]).argmax(1) == y[test]).float().mean()
    print(
        f"{type(method).__name__:10s} ε = {engine.get_epsilon():.3f}  accuracy {100 * right:.1f} %"
    )
    return engine


def main():
    run(dpspan.DPSGD(clip=1.0))
    run(dpspan.BiasedGEP(public=public, rank=50, clip=1.0))
    engine = run(dpspan.GEP(public=public, rank=50, clip=1.0, residual_clip=0.3, diagnose=50))
    for note in engine.diagnostics():
        print(
            f"step {note['step']:3d}: rank {note['rank'][0]}, "
            f"stable rank {note['stable_rank'][0]:.1f}, noise energy {note['noise_energy']}"
        )
    print(engine.certificate()["public"])


if __name__ == "__main__":
    main()
