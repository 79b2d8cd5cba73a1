"""A small private training run, for the tests of the engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpspan import DPSGD, PrivacyEngine

N = 40


def data(n: int = N) -> TensorDataset:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 6, generator=g)
    return TensorDataset(x, (x.sum(1) > 0).long())


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def setup(engine: PrivacyEngine | None = None, **changes: Any) -> tuple[Any, ...]:
    engine = engine or PrivacyEngine(debug_seed=0)
    model = changes.pop("module", None)
    model = network() if model is None else model
    optimizer = changes.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.5)
    loader = changes.pop("data_loader", DataLoader(data(), batch_size=10, shuffle=True))
    arguments = {"noise_multiplier": 1.0, "method": DPSGD(clip=1.0), **changes}
    return engine, *engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, **arguments
    )


def train(model: Any, optimizer: Any, loader: Any, epochs: int = 1) -> list[int]:
    sizes = []
    criterion = nn.CrossEntropyLoss()
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            sizes.append(len(x))
    return sizes


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def private_with_epsilon(engine: PrivacyEngine, epochs: int = 2, **changes: Any) -> tuple[Any, ...]:
    model = network()
    arguments = {"target_epsilon": 3.0, "target_delta": 1e-5, "epochs": epochs, **changes}
    return engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data(), batch_size=10),
        **arguments,
    )
