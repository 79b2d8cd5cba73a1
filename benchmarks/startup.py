"""Everything before the first step: `python -m benchmarks.startup [--sizes 10000 100000]`.

Records of 50 numbers and a label, random, as CSV, as Parquet and as memory-mapped Arrow files of
the library `datasets`; 2,000 public ones; GEP on a small network. Each file is read in a fresh
process, and each phase has its time and the largest resident size that it reached, which includes
the libraries and everything that was read before. Files are written without a clock.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

import dpspan
from benchmarks import measure, report
from dpspan.app.data import load
from dpspan.app.tables import Csv, Parquet
from dpspan.public.data import PublicData

COLUMNS, PUBLIC, BATCH, RANK = 50, 2000, 1000, 20
SIZES = (10**4, 10**5, 10**6)
NAMES = tuple(f"c{i}" for i in range(COLUMNS))

Phases = Iterator[tuple[str, Callable[[], Any]]]


def write(path: Path, records: int, seed: int) -> None:
    """A file, or a folder, of the format that the name ends with."""
    import pyarrow
    from pyarrow import csv, parquet

    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((records, COLUMNS)).round(4), rng.integers(2, size=records)
    table = pyarrow.table({**dict(zip(NAMES, x.T, strict=True)), "label": y})
    if path.suffix == ".csv":
        csv.write_csv(table, path)
    elif path.suffix == ".parquet":
        parquet.write_table(table, path)
    else:
        import datasets

        datasets.disable_progress_bars()
        values = pyarrow.array(x.astype(np.float32).ravel())
        vectors = pyarrow.FixedSizeListArray.from_arrays(values, COLUMNS)
        mapped = datasets.Dataset(pyarrow.table({"x": vectors, "label": y}))
        mapped.save_to_disk(path)


def first_step(private: Any, public: PublicData) -> Phases:
    """`make_private`, with its search for public samples among the records, and a step."""
    made: list[Any] = []

    def make_private() -> None:
        torch.manual_seed(measure.SEED)
        model = nn.Sequential(nn.Linear(COLUMNS, 64), nn.ReLU(), nn.Linear(64, 2))
        made[:] = dpspan.PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(private, batch_size=BATCH),
            criterion=nn.CrossEntropyLoss(),
            method=dpspan.GEP(public=public, rank=RANK, clip=1.0, residual_clip=1.0),
            noise_multiplier=1.0,
        )

    def step() -> None:
        model, optimizer, loader = made
        for batch in loader:
            x, y = batch.values() if isinstance(batch, dict) else batch
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            break

    yield "make_private", make_private
    yield "first step", step
    yield "make_private again", make_private


def from_table(folder: Path, kind: str) -> Phases:
    """As the command line does it."""
    source = {"csv": Csv, "parquet": Parquet}[kind]
    read: list[Any] = []

    def reading(name: str) -> Callable[[], None]:
        file = source(path=folder / f"{name}.{kind}", inputs=NAMES, label="label")
        return lambda: read.append(load(file, classes=2))

    yield "read private", reading("private")
    yield "read public", reading("public")
    private, public = read
    yield "copies", lambda: public.copies_of(private)
    yield from first_step(private.dataset, PublicData.of(public.tensors))


def from_arrow(folder: Path, _kind: str) -> Phases:
    """Mapped, and read when needed."""
    import datasets

    opened: list[Any] = []

    def reading(name: str) -> Callable[[], None]:
        path = folder / f"{name}.arrow"
        return lambda: opened.append(datasets.load_from_disk(path).with_format("torch"))

    yield "read private", reading("private")
    yield "read public", reading("public")
    private, public = opened
    yield from first_step(private, PublicData.of((public[:]["x"], public[:]["label"])))


FORMATS: dict[str, Callable[[Path, str], Phases]] = {
    "csv": from_table,
    "parquet": from_table,
    "arrow": from_arrow,
}


def phases(folder: Path, kind: str, threads: int) -> dict[str, Any]:
    """Seconds, those of the processor, and peak bytes of each; runs in a fresh process."""
    measure.configure(threads, tf32=False)
    found: dict[str, dict[str, float]] = {}
    others = measure.Bystanders()
    for name, run in FORMATS[kind](folder, kind):
        phase = found[name] = {}

        def timed(run: Callable[[], Any] = run, phase: dict[str, float] = phase) -> None:
            wall, processor = time.perf_counter(), time.process_time()
            run()
            phase["seconds"] = time.perf_counter() - wall
            phase["processor_seconds"] = time.process_time() - processor

        phase["peak"] = measure._peak_of(timed, "cpu")["peak"]
    return {"phases": found, "disturbance": others.share()}


def measured(kind: str, records: int, threads: int) -> dict[str, Any]:
    """One format and one size, in a folder that is deleted and a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder, context = Path(name), get_context("spawn")
        for seed, (part, count) in enumerate((("private", records), ("public", PUBLIC))):
            write(folder / f"{part}.{kind}", count, seed)
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            return pool.submit(phases, folder, kind, threads).result()


def main() -> None:
    """Measure, save and show."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES))
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--out", type=Path, default=Path("runs/startup"))
    options = parser.parse_args()
    settings = {"columns": COLUMNS, "public": PUBLIC, "batch": BATCH, "rank": RANK}
    results: dict[str, Any] = {
        "environment": {**report.environment("cpu"), "threads": options.threads},
        "settings": settings,
        "formats": {},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    for kind in options.formats:
        for size in options.sizes:
            found = measured(kind, size, options.threads)
            results["formats"].setdefault(kind, {})[str(size)] = found
            (options.out / "cpu.json").write_text(json.dumps(results, indent=1) + "\n")
            for name, phase in found["phases"].items():
                times = (
                    f"{phase['seconds']:7.2f} s ({phase['processor_seconds']:.2f} of the processor)"
                )
                print(f"{kind:8} {size:9,} {name:20} {times}, {phase['peak'] / 1e6:6,.0f} MB")


if __name__ == "__main__":
    main()
