"""Is the audit right, and does it find bugs? `python -m benchmarks.audit [calibration power bugs]`.

calibration: how often a bound is above the truth. power: its mean beside the published bounds, on
the same scores. bugs: what the audits say of sound steps and of planted bugs, on the demo's model
and scikit-learn's digits. Prints tables in Markdown, and stores them with --json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import expit, ndtr, ndtri
from scipy.stats import binom
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpspan
from benchmarks import report
from dpspan.app.demo import network
from dpspan.audit import audit_canaries, audit_step, epsilon_lower_bound
from dpspan.audit.lower_bound import epsilon_of_shift
from dpspan.engine.sampling import PoissonDraw
from dpspan.mechanisms import dpsgd, gep, rgp, subspace_method
from dpspan.mechanisms.noise import Noise

DELTA, TAIL = 1e-5, 0.05
SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0)  # of guesses, for the published bounds
Rows = list[dict[str, Any]]


# -- the published bounds, for many counts of right guesses at once -------------------------------


def ends(refuted: Callable[[np.ndarray], np.ndarray], count: int, most: float = 12.0) -> np.ndarray:
    """Where what is refuted ends, for each of so many cases."""
    low, high = np.zeros(count), np.full(count, most)
    while (high - low).max() > 2e-3:
        middle = (low + high) / 2
        gone = refuted(middle)
        low, high = np.where(gone, middle, low), np.where(gone, high, middle)
    return low


def steinke(n: int, guesses: int, right: np.ndarray) -> np.ndarray:
    """P(W ≥ v) ≤ P(B ≥ v) + 2nδ·max_i P(v > B ≥ v - i)/i (Steinke, Nasr, Jagielski 2023)."""

    def refuted(epsilon: np.ndarray) -> np.ndarray:
        gone = []
        for v, e in zip(right, epsilon, strict=True):
            law = binom(guesses, expit(e))
            short = np.cumsum(law.pmf(np.arange(v - 1, max(v - 400, -1), -1)))
            alpha = (short / np.arange(1, len(short) + 1)).max() if len(short) else 0.0
            alpha = max(alpha, 1 / 400)
            gone.append(law.sf(v - 1) + 2 * n * DELTA * alpha <= TAIL)
        return np.array(gone)

    return ends(refuted, len(right))


Inverse = Callable[[np.ndarray, np.ndarray], np.ndarray]


def mahloujifar(n: int, guesses: int, right: np.ndarray, inverse: Inverse) -> np.ndarray:
    """The recursion of Mahloujifar, Melis, Chaudhuri 2024 for a family of trade-off curves."""

    def refuted(parameter: np.ndarray) -> np.ndarray:
        above, below = TAIL * right / n, TAIL * (guesses - right) / n
        gone = np.zeros(len(right), dtype=bool)
        for i in range(int(right.max()) - 1, -1, -1):
            least = np.maximum(below, inverse(above, parameter))
            least = np.where((i < right) & ~gone, least, below)
            above, below = above + i / (guesses - i) * (least - below), least
            gone |= above + below > guesses / n
            if gone.all():
                break
        return gone

    return ends(refuted, len(right))


def of_approximate(y: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
    """Where 1 - f of (ε, δ)-DP reaches y."""
    steep = (y - DELTA) * np.exp(-epsilon)
    return np.maximum(0.0, np.maximum(steep, 1 - DELTA - (1 - y) * np.exp(epsilon)))


def of_gaussian(y: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """Where 1 - f of N(0, 1) against N(μ, 1) reaches y."""
    return ndtr(ndtri(np.minimum(y, 1.0)) - shift)


# -- tables ---------------------------------------------------------------------------------------


def calibration(simulations: int = 1000) -> Rows:
    """At ε = 0, and under randomized response, the worst mechanism of its ε."""
    rows = []
    for n, epsilon in ((100, 0.0), (1000, 0.0), (5000, 0.0), (1000, 0.5), (1000, 2.0)):
        rng = np.random.default_rng(n)
        names = ("any mechanism", "if Gaussian", "published, best of all counts")
        above: dict[str, Any] = dict.fromkeys(names, 0)
        for _ in range(simulations):
            coins = rng.random(n) < 0.5
            scores = rng.normal(size=n)
            if epsilon:
                told = np.where(rng.random(n) < expit(epsilon), coins, ~coins)
                scores = told + 1e-3 * scores
            above["any mechanism"] += epsilon_lower_bound(scores, coins, delta=DELTA) > epsilon
            if not epsilon:
                bound = epsilon_lower_bound(scores, coins, delta=DELTA, gaussian=True)
                above["if Gaussian"] += bound > 0
            right = np.cumsum(_right(scores, coins))
            r = np.unique(np.linspace(4, n, 200).astype(int))
            picked = binom.sf(right[r - 1] - 1, r, expit(epsilon)) <= TAIL
            above["published, best of all counts"] += bool(picked.any())
        if epsilon:  # which is no Gaussian mechanism
            above["if Gaussian"] = "–"
        rows.append({"canaries": n, "true ε": epsilon, "simulations": simulations, **above})
    return rows


def _right(scores: np.ndarray, coins: np.ndarray) -> np.ndarray:
    """Whether guesses are right, highest and lowest scores in turn."""
    order = np.argsort(scores)
    taken = np.stack([order[::-1], order]).T.reshape(-1)[: len(order)]
    heads = np.tile([True, False], len(order) // 2 + 1)[: len(order)]
    return coins[taken] == heads


def power(simulations: int = 200) -> Rows:
    """The mean of the bounds; the published ones at their best count in hindsight."""
    rows = []
    for n in (1000, 5000):
        for shift in (0.3, 1.0, 2.0, 4.0):
            rng = np.random.default_rng(round(10 * shift))
            ours, gaussian, rights = [], [], []
            for _ in range(simulations):
                coins = rng.random(n) < 0.5
                scores = rng.normal(size=n) + shift * coins
                ours.append(epsilon_lower_bound(scores, coins, delta=DELTA))
                bound = epsilon_lower_bound(scores, coins, delta=DELTA, gaussian=True)
                gaussian.append(bound)
                rights.append(np.cumsum(_right(scores, coins)))
            theirs: dict[str, list[np.ndarray]] = {"Steinke": [], "Mahloujifar": [], "Gaussian": []}
            for guesses in (int(share * n) for share in SHARES):
                found, places = np.unique([r[guesses - 1] for r in rights], return_inverse=True)
                theirs["Steinke"].append(steinke(n, guesses, found)[places])
                theirs["Mahloujifar"].append(mahloujifar(n, guesses, found, of_approximate)[places])
                shifts = mahloujifar(n, guesses, found, of_gaussian)
                as_epsilon = np.array([epsilon_of_shift(each, DELTA) for each in shifts])
                theirs["Gaussian"].append(as_epsilon[places])
            best = {name: max(each.mean() for each in values) for name, values in theirs.items()}
            rows.append(
                {
                    "canaries": n,
                    "μ": shift,
                    "true ε": epsilon_of_shift(shift, DELTA),
                    "this": np.mean(ours),
                    "Steinke 2023": best["Steinke"],
                    "Mahloujifar 2024, (ε, δ)": best["Mahloujifar"],
                    "count picked per run (invalid)": np.max(theirs["Steinke"], axis=0).mean(),
                    "this, if Gaussian": np.mean(gaussian),
                    "Mahloujifar 2024, Gaussian": best["Gaussian"],
                }
            )
            _say(rows[-1:])
    return rows


# -- planted bugs ---------------------------------------------------------------------------------


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """(owner, name, value) in place of what is there, for a while."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def shuffled(self: Any, generator: np.random.Generator) -> Any:
    """Batches of one size, in which every record is once an epoch."""
    yield from torch.from_numpy(generator.permutation(self.records)).chunk(self.steps_per_epoch)


def clips(factor: Callable[[Any], Any]) -> list[tuple[Any, str, Any]]:
    """Other clip factors, in all methods."""
    modules = (dpsgd, gep, rgp, subspace_method)
    return [
        (m, "clip_factors", lambda *a, f=m.clip_factors: factor(f(*a))) for m in modules
    ]  # fmt: skip


_normal = Noise.normal
BUGS: dict[str, list[tuple[Any, str, Any]]] = {
    "none": [],
    "noise 10 % too small": [(Noise, "normal", lambda s, x, std: 0.9 * _normal(s, x, std))],
    "replayed noise": [
        (Noise, "_on_cpu", lambda s, count: np.random.default_rng(1).standard_normal(count))
    ],
    "shuffled batches": [(PoissonDraw, "epoch", shuffled)],
    "clip × 1.1": clips(lambda factors: 1.1 * factors),
}
GROSS = {
    "none": [],
    "clip off": clips(torch.ones_like),
    "noise off": [(Noise, "normal", lambda s, x, std: torch.zeros_like(x).double())],
}


def bugs() -> Rows:
    """On the demo's model: z = 6, q = 0.15, 140 steps for canaries."""
    x, y = load_digits(return_X_y=True)
    inputs = torch.tensor(x / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    labels, public = torch.tensor(y), inputs[:100]
    records, criterion = TensorDataset(inputs[100:], labels[100:]), nn.CrossEntropyLoss()
    methods = {
        "DP-SGD": dpspan.DPSGD(clip=1.0),
        "PDP-SGD": dpspan.PDPSGD(public=public, rank=40, clip=1.0),
        "GEP": dpspan.GEP(public=public, rank=40, clip=1.0, residual_clip=0.2),
        "RGP": dpspan.RGP(rank=2, clip=1.0),
    }

    def run(method: dpspan.Method) -> Any:
        model, engine = network(), dpspan.PrivacyEngine(accountant="rdp")
        return engine, *engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(records, batch_size=256),
            criterion=criterion,
            method=method,
            noise_multiplier=6.0,
            sample_rate=0.15,
            expected_batch_size=256.0,
        )

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return criterion(model(batch[0]), batch[1])

    rows = []
    for name, method in methods.items():
        for bug, changes in BUGS.items():
            begun = time.perf_counter()
            with replaced(*changes):
                audit = audit_step(lambda method=method: run(method), loss)
            found = ", ".join(sorted({check.part for check in audit.findings})) or "nothing"
            seconds = time.perf_counter() - begun
            rows.append(
                {"audit": "step", "method": name, "planted": bug, "found": found, "s": seconds}
            )
            _say(rows[-1:])
        for bug, changes in GROSS.items():
            begun = time.perf_counter()
            with replaced(*changes):
                result = audit_canaries(
                    lambda _, method=method: run(method), loss, steps=140, delta=DELTA
                )
            found = f"ε ≥ {result.epsilon:.2f} (declared {result.declared:.2f})"
            seconds = time.perf_counter() - begun
            rows.append(
                {"audit": "canaries", "method": name, "planted": bug, "found": found, "s": seconds}
            )
            _say(rows[-1:])
    return rows


PARTS = {"calibration": calibration, "power": power, "bugs": bugs}


def _say(rows: Rows) -> None:
    for row in rows:
        cells = (f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values())
        print(f"| {' | '.join(cells)} |", flush=True)


def table(rows: Rows) -> str:
    """In Markdown."""
    lines = [f"| {' | '.join(rows[0])} |", "|" + "---|" * len(rows[0])]
    for row in rows:
        cells = (f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values())
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Make the tables that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--json", type=Path, help="also store the rows here")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"environment": report.environment("cpu")}
    for part in arguments.parts:
        results[part] = PARTS[part]()
        print(f"\n{part}\n\n{table(results[part])}\n", flush=True)
    if arguments.json:
        kept = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
        text = json.dumps({**kept, **results}, indent=1, ensure_ascii=False, default=float)
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
