"""Two tables, from file to accuracy: `python -m benchmarks.real_tables [--adult FILE]`.

Each run is `dpspan init --dictionary`, then `dpspan train`, with nothing edited in between but
the method (and, of Adult, `equal_rows_allowed`: a fifth of its records equal others); the peer is
scikit-learn's logistic regression, without privacy, on the same features and records, at the best
of three regularisations on the test data.

hospital  scikit-learn's breast cancer with an id, a day, a ward, a note and 5 % gaps; other 455
          records to train on, and others to measure on, in each of 20 splits; bounds are those of
          a data dictionary; ε = 3, δ = 1e-4.
adult     FILE is an npz file of Adult with `x_train`, `y_train`, `x_test`, `y_test` and `columns`;
          its numbers have wide bounds (a million of capital gain), and the 5 %, 50 % and 95 %
          quantiles inside of them are released for ε = 0.02 a column, out of ε = 3 for everything.

The results are those of docs/columns.md.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression

from benchmarks import report
from dpspan.app.data import load
from dpspan.app.preprocessing import Preprocessing
from dpspan.app.tables import Csv

RESULTS = Path(__file__).parent / "results" / "real-tables.json"
PRIVATE = 455  # records of the hospital to train on
# Of each group of ten measurements, and of their standard errors: what a textbook would say
BOUNDS = {
    "radius": ((5, 40), (0, 3)),
    "texture": ((5, 50), (0, 5)),
    "perimeter": ((40, 260), (0, 22)),
    "area": ((100, 4300), (0, 550)),
    "smoothness": ((0, 0.25), (0, 0.032)),
    "compactness": ((0, 1.1), (0, 0.14)),
    "concavity": ((0, 1.3), (0, 0.4)),
    "concave points": ((0, 0.3), (0, 0.053)),
    "symmetry": ((0.1, 0.7), (0, 0.08)),
    "fractal dimension": ((0.04, 0.21), (0, 0.03)),
}
ADULT = {  # far more than anybody would guess
    "age": (0, 150),
    "education_num": (0, 100),
    "capital_gain": (0, 1_000_000),
    "capital_loss": (0, 1_000_000),
    "hours": (0, 168),
}
A_COLUMN = 0.02  # ε of its quantiles
METHODS = {
    "as `init` writes it": None,
    "dpsgd": "{name: dpsgd, clip: 1.0}",
}


def bounds(name: str) -> tuple[float, float]:
    """Of a column of the hospital's."""
    group = name.removeprefix("mean ").removeprefix("worst ").removesuffix(" error")
    return BOUNDS[group][name.endswith("error")]


def write_hospital(folder: Path, delimiter: str = ",", seed: int = 0) -> None:
    """569 tumours with an id, a day, a ward, a note and 5 % gaps; 114 of them to measure on."""
    data, draw = load_breast_cancer(), np.random.default_rng(seed)
    names = list(data.feature_names)
    order = draw.permutation(len(data.data))
    columns = ["patient_id", "admitted", *names, "ward", "note", "diagnosis"]
    for file, part in (("patients.csv", order[:PRIVATE]), ("test.csv", order[PRIVATE:])):
        with (folder / file).open("w", newline="") as stream:
            writer = csv.writer(stream, delimiter=delimiter)
            writer.writerow(columns)
            for row in part:
                gaps = draw.random(len(names)) < 0.05
                day = datetime.date(2024, 1, 1) + datetime.timedelta(int(draw.integers(365)))
                cells = ["" if gap else x for x, gap in zip(data.data[row], gaps, strict=True)]
                ward = draw.choice(["north", "south", "SECRET ward"], p=[0.6, 0.35, 0.05])
                label = "benign" if data.target[row] else "malignant"
                writer.writerow([f"P{row:05}", day, *cells, ward, f"SECRET {row}", label])
    with (folder / "dictionary.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["name", "type", "low", "high", "values", "unit"])
        writer.writerow(["patient_id", "id", "", "", "", ""])
        writer.writerow(["admitted", "date", "2024-01-01", "2024-12-31", "", ""])
        for name in names:
            writer.writerow([name, "numeric", *bounds(name), "", "mm"])
        writer.writerow(["ward", "categorical", "", "", "north|south", ""])
        writer.writerow(["note", "drop", "", "", "", ""])
        writer.writerow(["diagnosis", "drop", "", "", "", ""])


def write_adult(folder: Path, file: Path) -> None:
    """Numbers as they are, and of each group of 0/1 columns one column with the names."""
    with np.load(file) as arrays:
        found = {name: arrays[name] for name in arrays.files}
    names, groups = [str(name) for name in found["columns"]], dict[str, list[str]]()
    for name in names[len(ADULT) :]:
        group, _, value = name.partition("_")
        groups.setdefault(group, []).append(value)
    for part in ("train", "test"):
        x, y = found[f"x_{part}"], found[f"y_{part}"]
        columns, first = [x[:, i] for i in range(len(ADULT))], len(ADULT)
        for values in groups.values():
            columns.append(np.array(values)[x[:, first : first + len(values)].argmax(1)])
            first += len(values)
        with (folder / f"{part}.csv").open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow([*ADULT, *groups, "income"])
            writer.writerows(zip(*columns, y, strict=True))
    with (folder / "dictionary.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["name", "type", "low", "high", "values", "epsilon"])
        for name, (low, high) in ADULT.items():
            writer.writerow([name, "numeric", low, high, "", A_COLUMN])
        for group, values in groups.items():
            writer.writerow([group, "categorical", "", "", "|".join(values), ""])


def dpspan(folder: Path, *arguments: object) -> str:
    """What a command prints; an error if it fails."""
    command = [sys.executable, "-m", "dpspan", *map(str, arguments)]
    root = str(Path(__file__).parents[1])
    places = os.pathsep.join([f"{root}/src", os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": places}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def trained(folder: Path, method: str | None) -> dict[str, Any]:
    """What `train` says of config.yaml in the folder, with this method or the one that is there."""
    text = (folder / "config.yaml").read_text()
    lines = [
        f"method: {method}" if method and x.startswith("method:") else x for x in text.split("\n")
    ]
    (folder / "config.yaml").write_text("\n".join(lines))
    found: dict[str, Any] = json.loads(dpspan(folder, "train", "config.yaml", "--json"))
    return found


def without_privacy(folder: Path, private: str, test: str, label: str, classes: Any) -> float:
    """scikit-learn's accuracy in %, on the very features that the private model had."""
    document = json.loads((folder / "runs/first/preprocessing.json").read_text())
    columns = Preprocessing.of_document(document)
    arrays = []
    for file in (private, test):
        loaded = load(Csv(path=folder / file, label=label), classes=classes, preprocessing=columns)
        arrays.append([each.numpy() for each in loaded.tensors])
    (x, y), (x_test, y_test) = arrays
    scores = [
        LogisticRegression(C=c, max_iter=5000).fit(x, y).score(x_test, y_test) for c in (0.1, 1, 10)
    ]
    return 100 * max(scores)  # the best on the test data: the stronger peer


def hospital(folder: Path, seed: int, method: str | None) -> dict[str, float]:
    """One split."""
    write_hospital(folder, seed=seed)
    dpspan(
        folder, "init", "--data", "patients.csv", "--classes", "malignant,benign",
        "--label", "diagnosis", "--dictionary", "dictionary.csv", "--test", "test.csv",
        "--test-is-public", "--model", "logistic", "--records", PRIVATE, "--delta", 1e-4,
    )  # fmt: skip
    done = trained(folder, method)
    names = ("malignant", "benign")
    plain = without_privacy(folder, "patients.csv", "test.csv", "diagnosis", names)
    return {"private": 100 * done["metrics"]["test_accuracy"], "plain": plain, "ε": done["epsilon"]}


def adult(folder: Path, file: Path, method: str | None) -> dict[str, float]:
    """One fit."""
    write_adult(folder, file)
    dpspan(
        folder, "init", "--data", "train.csv", "--classes", 2, "--label", "income",
        "--dictionary", "dictionary.csv", "--test", "test.csv", "--test-is-public",
        "--model", "logistic", "--records", 32_500, "--batch-size", 2048,
    )  # fmt: skip
    text = (folder / "config.yaml").read_text()  # 3,456 test records equal others by chance
    text = text.replace("  test_is_public:", "  equal_rows_allowed: true\n  test_is_public:")
    (folder / "config.yaml").write_text(text)
    done = trained(folder, method)
    plain = without_privacy(folder, "train.csv", "test.csv", "income", 2)
    return {"private": 100 * done["metrics"]["test_accuracy"], "plain": plain, "ε": done["epsilon"]}


def main() -> None:
    """Measure, store and show."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.real_tables")
    parser.add_argument("--splits", type=int, default=20, help="of the hospital's table")
    parser.add_argument("--adult", type=Path, help="npz file of Adult")
    parser.add_argument("--seeds", type=int, default=5, help="fits of Adult")
    options = parser.parse_args()
    tasks: dict[str, tuple[int, Callable[..., dict[str, float]]]] = {
        "hospital": (options.splits, hospital)
    }
    if options.adult is not None:
        file = options.adult.resolve()
        tasks["adult"] = (options.seeds, lambda folder, _, method: adult(folder, file, method))
    results: dict[str, Any] = {"environment": report.environment("cpu"), "tables": {}}
    if RESULTS.exists():
        results["tables"] = json.loads(RESULTS.read_text())["tables"]
    table = Table("table", "method", "accuracy in %", "without privacy", "ε", title="Real tables")
    for name, (count, measure) in tasks.items():
        for method, section in METHODS.items():
            found = []
            for seed in range(count):
                with tempfile.TemporaryDirectory() as folder:
                    found.append(measure(Path(folder), seed, section))
            results["tables"].setdefault(name, {})[method] = found
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            cells = []
            for key in ("private", "plain"):
                values = [each[key] for each in found]
                cells.append(f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}")
            table.add_row(name, method, *cells, f"{max(each['ε'] for each in found):.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
