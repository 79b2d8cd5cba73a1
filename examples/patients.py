"""Patients with 1 to 50 rows each: what a certificate by rows promises them, and one by patients.

The tables of docs/units.md. Run it with `python examples/patients.py`; it takes a minute or two.
"""

import statistics

import numpy as np
import torch
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent
from dp_accounting.pld import PLDAccountant
from scipy.stats import binom
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpspan

PATIENTS, TESTED, FEATURES, EPOCHS, SHARE = 1000, 300, 20, 20, 0.05
EPSILON, DELTA = 3.0, 1e-5


def visits(patients, seed):
    """Rows, labels, and whose they are; every patient has something of their own in all rows."""
    draw = np.random.default_rng(seed)
    sizes = np.exp(draw.uniform(0, np.log(51), patients)).astype(int)  # 1 to 50, most of them few
    owner = np.repeat(np.arange(patients), sizes)
    direction = np.random.default_rng(0).normal(size=FEATURES) / FEATURES**0.5
    own = draw.normal(size=(patients, FEATURES))
    x = own[owner] + draw.normal(size=(len(owner), FEATURES))
    y = x @ direction + 0.5 * draw.normal(size=len(owner)) > 0
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y).long(), owner


def run(x, y, unit, epochs=EPOCHS):
    """Train with the same ε and δ; the engine, and the accuracy on other patients' rows."""
    torch.manual_seed(0)
    model, criterion = nn.Linear(FEATURES, 2), nn.CrossEntropyLoss()
    drawn = len(y) if unit is None else len(set(unit))
    engine = dpspan.PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=round(SHARE * drawn)),
        criterion=criterion,
        method=dpspan.DPSGD(clip=1.0),
        unit=unit,
        target_epsilon=EPSILON,
        target_delta=DELTA,
        epochs=epochs,
    )
    for _ in range(epochs):
        for rows, labels in loader:
            optimizer.zero_grad()
            criterion(model(rows), labels).backward()
            optimizer.step()
    others, truth, _ = visits(TESTED, seed=2)
    with torch.no_grad():
        return engine, float((model(others).argmax(1) == truth).float().mean())


def of_all_rows(engine, rows):
    """ε of the run by rows for a patient with so many: each of them is drawn on its own.

    Exact where all rows of the patient have the same long gradient: their sum is then 0, 1, 2, …
    clips long, as often as a binomial says.
    """
    plan, counts = engine.plan, np.arange(rows + 1)
    chances = binom.pmf(counts, rows, plan.sampling.sample_rate).tolist()
    event = MixtureOfGaussiansDpEvent(plan.noise_multiplier, counts.tolist(), chances)
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    return accountant.compose(event, engine.ledger.steps).get_epsilon(DELTA)


def main(repeats=5, sizes=(1, 2, 5, 10, 20, 50), epochs=EPOCHS):
    x, y, owner = visits(PATIENTS, seed=1)
    print(f"{PATIENTS:,} patients, {len(y):,} rows.\n")
    print("| what is drawn and clipped | adjacency on the certificate | q | z | ε | accuracy |")
    print("|---|---|---|---|---|---|")
    engines = {}
    for name, unit in (("rows", None), ("patients", owner.tolist())):
        found = [run(x, y, unit, epochs) for _ in range(repeats)]
        engine = engines[name] = found[0][0]
        right = [100 * accuracy for _, accuracy in found]
        plan, spread = engine.plan, statistics.stdev(right) if repeats > 1 else 0.0
        print(
            f"| {name} | {engine.certificate()['adjacency']} | {plan.sampling.sample_rate:.3f} | "
            f"{plan.noise_multiplier:.3f} | {engine.get_epsilon():.2f} | "
            f"{statistics.mean(right):.1f} ± {spread:.1f} |"
        )
    print("\n| rows of a patient | ε by rows | ε by patients |")
    print("|---|---|---|")
    promised = engines["patients"].get_epsilon()
    for rows in sizes:
        print(f"| {rows} | {of_all_rows(engines['rows'], rows):.2f} | {promised:.2f} |")
    return engines


if __name__ == "__main__":
    main()
