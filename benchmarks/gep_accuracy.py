"""GEP's accuracy on CIFAR-10: `python -m benchmarks.gep_accuracy --data FOLDER [--tf32]`.

To compare with any plain implementation at the same noise: exact directions at every step, no
groups, clips 5 and 2, SGD with momentum, the learning rate divided by ten at half and at three
quarters of the run. FOLDER holds cifar10.npz and tinyimagenet32.npz. One JSON line per seed.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from experiments.images import Images, collate
from torch import Tensor, nn
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import DataLoader

import dpspan
from benchmarks import report
from dpspan.model.networks import ResNet20

MEAN, SPREAD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # of CIFAR-10, the usual ones


def images(folder: Path, device: str, public: int) -> tuple[Images, tuple[Tensor, Tensor]]:
    """CIFAR-10, and so many Tiny-ImageNet images with random labels."""
    cifar, other = np.load(folder / "cifar10.npz"), np.load(folder / "tinyimagenet32.npz")
    private = Images(_scaled(cifar["x_train"], device), _labels(cifar["y_train"], device))
    labels = torch.randint(10, (public,), generator=torch.Generator().manual_seed(0))
    return private, (_scaled(other["x_train"][:public], device), labels.to(device))


def _scaled(x: np.ndarray, device: str) -> Tensor:
    mean, spread = (torch.tensor(each, device=device).view(3, 1, 1) for each in (MEAN, SPREAD))
    return (torch.as_tensor(x, device=device).permute(0, 3, 1, 2).float() / 255 - mean) / spread


def _labels(y: np.ndarray, device: str) -> Tensor:
    return torch.as_tensor(y, device=device).long()


def training_steps(
    model: nn.Module,
    private: Images,
    public: tuple[Tensor, Tensor],
    *,
    rank: int = 1000,
    batch: int = 1000,
    noise: float = 1.452,
    rate: float = 0.1,
    epochs: int = 1000,
) -> Iterator[int]:
    """Train, and tell the number of each step that is done."""
    engine, criterion = dpspan.PrivacyEngine(accountant="rdp"), nn.CrossEntropyLoss()
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=2e-4),
        data_loader=DataLoader(private, batch_size=batch, collate_fn=collate),
        criterion=criterion,
        noise_multiplier=noise,
        method=dpspan.GEP(public=public, rank=rank, clip=5.0, residual_clip=2.0),
    )
    steps = epochs * len(loader)
    schedule = MultiStepLR(optimizer, [steps // 2, steps * 3 // 4], gamma=0.1)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            schedule.step()
            yield engine.ledger.steps
    engine.detach()


def main() -> None:
    """Train with each seed and print the accuracy on the test images."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gep_accuracy", description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--noise", type=float, default=1.452, help="noise multiplier")
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate")
    parser.add_argument("--tf32", action="store_true")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = options.tf32
    private, public = images(options.data, options.device, 2000)
    cifar = np.load(options.data / "cifar10.npz")
    x, y = _scaled(cifar["x_test"], options.device), _labels(cifar["y_test"], options.device)
    for seed in options.seeds:
        torch.manual_seed(seed)
        model, start = ResNet20().to(options.device), time.perf_counter()
        how = {"noise": options.noise, "rate": options.rate, "epochs": options.epochs}
        for step in training_steps(model, private, public, **how):  # type: ignore[arg-type]
            if step % 100 == 0:
                print(f"seed {seed}, step {step}", file=sys.stderr, flush=True)
        with torch.no_grad():
            guesses = torch.cat([model(part).argmax(1) for part in x.split(2000)])
        row = {
            "seed": seed,
            "accuracy": 100 * float((guesses == y).float().mean()),
            **how,
            "tf32": options.tf32,
            "seconds": time.perf_counter() - start,
            "environment": report.environment(options.device)["gpu"],
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
