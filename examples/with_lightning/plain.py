"""Handwritten digits with Lightning: private.py is the private training.

python examples/with_lightning/plain.py runs/digits
"""

import argparse

import torch
from pytorch_lightning import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))

    def training_step(self, batch):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args(arguments)

    pixels, digits = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    data = TensorDataset(pixels.float() / 16, digits)
    trainer = Trainer(
        default_root_dir=options.folder,
        max_epochs=options.epochs,
        logger=False,
    )
    train = DataLoader(Subset(data, range(1500)), batch_size=150, shuffle=True)
    trainer.fit(Classifier(), train, DataLoader(Subset(data, range(1500, 1797)), batch_size=297))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


if __name__ == "__main__":
    print(main())
