"""Handwritten digits with accelerate, privately: plain.py is the plain loop.

python examples/with_accelerate/private.py runs/digits
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from dpspan.frameworks.accelerate import Privacy, prepare


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args(arguments)

    pixels, digits = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    data = TensorDataset(pixels.float() / 16, digits)
    train, test = torch.utils.data.Subset(data, range(1500)), data[1500:]
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    loader = DataLoader(train, batch_size=150, shuffle=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, gamma=0.5)
    criterion = nn.CrossEntropyLoss()

    accelerator = Accelerator(project_dir=options.folder)
    parts = (model, optimizer, loader, scheduler)
    promise = {"privacy": Privacy(epsilon=3.0, delta=1e-5), "epochs": options.epochs}
    model, optimizer, loader, scheduler = prepare(accelerator, *parts, **promise)
    for _ in range(options.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(criterion(model(x), y))
            optimizer.step()
            scheduler.step()

    model.eval()
    x, y = (part.to(accelerator.device) for part in test)
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


if __name__ == "__main__":
    print(f"accuracy {100 * main():.1f} %")
