"""One model, several processes: `python -m benchmarks.processes [--models …] [--worlds 1 2 4]`.

On a GPU (`--device cuda`) there is one process, alone or as a world of one, and data loading, which
is the same in both, is left out of the time.

Each process has one thread and its part of every batch; all of it goes through the engine: loader,
checks between processes, sums, noise, the optimizer. `alone` is a process that knows of no others,
and a world of one the same with torch.distributed initialised. Bytes are those that the first
process hands to torch.distributed for sums and results in a step; how long a message takes is
measured beside it, so that docs/scale.md can compare its model with what was measured.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks import contenders, report
from benchmarks.measure import synchronize
from benchmarks.methods import CASES, METHODS, Case
from benchmarks.problems import PROBLEMS
from dpspan import PrivacyEngine
from dpspan.support.distributed import Processes

CHOSEN = ("DP-SGD", "RGP, rank 8", "GEP")
WARM_UP = 3
RECORDS = 20  # expected batches in the dataset


class Repeated(Dataset[tuple[Tensor, Tensor]]):
    """As many records as a run needs, in the memory of one batch."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self._x, self._y = x, y

    def __len__(self) -> int:
        return RECORDS * len(self._x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._x[index % len(self._x)], self._y[index % len(self._x)]


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes of tensors that travel between processes, flags aside."""
    sent = [0]
    plain = Processes._travel

    def travel(self: Processes, values: Any, send: Any) -> Any:
        sent[0] += sum(x.nbytes for x in values.values()) if self.world > 1 else 0
        return plain(self, values, send)

    Processes._travel = travel  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        Processes._travel = plain  # type: ignore[method-assign]


def steps(
    model: str, method: str, case: Case, seconds: float, device: str
) -> tuple[list[float], float]:
    """Milliseconds of each step, and bytes of one."""
    problem = PROBLEMS[model]
    x, y = problem.data(case.private + case.public, "cpu")
    public = x[case.private :], y[case.private :]
    x, y = x[: case.private], y[: case.private]
    module = problem.model(device)
    _, optimizer, loader = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=contenders.LEARNING_RATE),
        data_loader=DataLoader(Repeated(x, y), batch_size=case.private),
        method=METHODS[method](public, case.rank),
        criterion=(criterion := nn.CrossEntropyLoss()),
        noise_multiplier=contenders.NOISE,
    )
    times: list[float] = []
    with counted() as sent:
        while sum(times) < 1000 * seconds or len(times) < WARM_UP + 3:
            start, before = time.perf_counter(), sent[0]
            for images, labels in loader:
                if device == "cuda":
                    images, labels = images.to(device), labels.to(device)
                    synchronize(device)
                    start = time.perf_counter()
                optimizer.zero_grad()
                criterion(module(images), labels).backward()
                optimizer.step()
                synchronize(device)
                times.append(1000 * (time.perf_counter() - start))
                start = time.perf_counter()
                bytes_of_one, before = sent[0] - before, sent[0]
                if _any(sum(times) > 1000 * seconds and len(times) >= WARM_UP + 3):
                    break
    return times[WARM_UP:], bytes_of_one


def _any(fact: bool) -> bool:
    return Processes.of_this_run().any(fact)


def message(megabytes: float) -> float:
    """Milliseconds of a sum to the first process and its way back."""
    x = torch.zeros(int(megabytes * 250_000))
    times = []
    for _ in range(12):
        distributed.barrier()
        start = time.perf_counter()
        distributed.reduce(x, 0)
        distributed.broadcast(x, 0)
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def child(rank: int, world: int | None, store: str, pipe: Any, task: tuple[Any, ...]) -> None:
    """One of the processes; None is a process that knows of no others."""
    torch.set_num_threads(1)
    if world is not None:
        found = distributed.FileStore(store, world)
        distributed.init_process_group("gloo", store=found, rank=rank, world_size=world)
    result: dict[str, Any] = {}
    result["milliseconds"], result["bytes"] = steps(*task)
    if world is not None and world > 1:
        result["messages"] = {str(size): message(size) for size in (0.001, 1.0, 8.0)}
    if rank == 0:
        pipe.send(result)
    pipe.close()
    if world is not None:
        distributed.destroy_process_group()


def measured(world: int | None, *task: Any) -> dict[str, Any]:
    """What the first of so many processes found."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        mine, theirs = context.Pipe(duplex=False)
        started = [
            context.Process(target=child, args=(rank, world, f"{folder}/store", theirs, task))
            for rank in range(world or 1)
        ]
        for process in started:
            process.start()
        theirs.close()
        result: dict[str, Any] = mine.recv()
        for process in started:
            process.join()
    return result


def main() -> None:
    """Measure, store and show."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.processes")
    parser.add_argument("--device", default="cpu", choices=list(CASES))
    parser.add_argument("--models", nargs="+", default=["resnet20"], choices=list(CASES["cpu"]))
    parser.add_argument("--methods", nargs="+", default=list(CHOSEN), choices=list(METHODS))
    parser.add_argument("--worlds", nargs="+", type=int, help="1 2 4; on a GPU 1")
    parser.add_argument("--rounds", type=int, default=3, help="of all worlds in turn")
    parser.add_argument("--seconds", type=float, default=10, help="timed, a world and round")
    parser.add_argument("--out", type=Path, default=Path("runs/processes"))
    options = parser.parse_args()
    worlds = options.worlds or ([1] if options.device == "cuda" else [1, 2, 4])
    results: report.Results = {"environment": report.environment(options.device), "models": {}}
    table = Table(title="One step in several processes of one thread each")
    for heading in ("model", "method", "processes", "ms a step", "× faster", "MB a step"):
        table.add_column(heading)
    for model in options.models:
        case = CASES[options.device][model]
        for method in options.methods:
            rounds: dict[str, list[dict[str, Any]]] = {}
            for _ in range(options.rounds):  # in turn: a machine is not the same all the time
                for world in (None, *worlds):
                    name = "alone" if world is None else str(world)
                    found = measured(world, model, method, case, options.seconds, options.device)
                    rounds.setdefault(name, []).append(found)
            medians = {
                name: [statistics.median(each["milliseconds"]) for each in found]
                for name, found in rounds.items()
            }
            about = results["models"].setdefault(model, {"batch": case.private, "methods": {}})
            about["methods"][method] = {
                name: {
                    "milliseconds": medians[name],
                    "faster": statistics.median(
                        a / b for a, b in zip(medians["alone"], medians[name], strict=True)
                    ),
                    "bytes": found[0]["bytes"],
                    "messages": found[0].get("messages"),
                }
                for name, found in rounds.items()
            }
            for name, entry in about["methods"][method].items():
                middle = f"{statistics.median(entry['milliseconds']):.1f}"
                faster, sent = f"{entry['faster']:.2f}", f"{entry['bytes'] / 1e6:.2f}"
                table.add_row(model, method, name, middle, faster, sent)
            options.out.mkdir(parents=True, exist_ok=True)
            path = options.out / "results.json"
            path.write_text(json.dumps(results, indent=1) + "\n")
    Console().print(table)


if __name__ == "__main__":
    main()
