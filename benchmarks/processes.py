"""One model, several processes: `python -m benchmarks.processes [--models …] [--worlds 1 2 4]`.

On a GPU (`--device cuda`) there is one process, alone or as a world of one, and data loading, which
is the same in both, is left out of the time. All are started once and then take steps in turn.

`2 apart` are two processes at once that know of no others, each with half of the batch: what the
machine's cores allow at best, with nothing to agree on.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
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
RECORDS = 20  # expected batches in the dataset
Measure = Callable[[float], dict[str, Any]]


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


class Steps:
    """A run that takes steps for so many seconds whenever it is asked to."""

    def __init__(self, model: str, method: str, case: Case, device: str) -> None:
        problem, self._device = PROBLEMS[model], device
        x, y = problem.data(case.private + case.public, "cpu")
        public = x[case.private :], y[case.private :]
        x, y = x[: case.private], y[: case.private]
        self._module, self._criterion = problem.model(device), nn.CrossEntropyLoss()
        _, self._optimizer, self._loader = PrivacyEngine().make_private(
            module=self._module,
            optimizer=torch.optim.SGD(self._module.parameters(), lr=contenders.LEARNING_RATE),
            data_loader=DataLoader(Repeated(x, y), batch_size=case.private),
            method=METHODS[method](public, case.rank),
            criterion=self._criterion,
            noise_multiplier=contenders.NOISE,
        )
        self._batches = self._endless()

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self._loader

    def take(self, seconds: float) -> tuple[list[float], float]:
        """Milliseconds of each step, and bytes of one."""
        times: list[float] = []
        with counted() as sent:
            start, before = time.perf_counter(), sent[0]
            for images, labels in self._batches:
                if self._device == "cuda":
                    images, labels = images.to(self._device), labels.to(self._device)
                    synchronize(self._device)
                    start = time.perf_counter()
                self._optimizer.zero_grad()
                self._criterion(self._module(images), labels).backward()
                self._optimizer.step()
                synchronize(self._device)
                times.append(1000 * (time.perf_counter() - start))
                start = time.perf_counter()
                bytes_of_one, before = sent[0] - before, sent[0]
                if _any(sum(times) > 1000 * seconds and len(times) >= 3):
                    break
        return times, bytes_of_one


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


@dataclass(frozen=True)
class World:
    """Processes that train one model together, or as many that know of no others."""

    processes: int
    together: bool = True

    def __str__(self) -> str:
        alone = "alone" if self.processes == 1 else f"{self.processes} apart"
        return str(self.processes) if self.together else alone


def child(rank: int, world: World, store: str, pipe: Any, task: tuple[Any, ...]) -> None:
    """One of the processes, which takes steps when told to."""
    torch.set_num_threads(1)
    if world.together:
        found, size = distributed.FileStore(store, world.processes), world.processes
        distributed.init_process_group("gloo", store=found, rank=rank, world_size=size)
    run = Steps(*task)
    run.take(seconds=0)  # the first steps are slower
    messages = None
    if world.together and world.processes > 1:
        messages = {str(size): message(size) for size in (0.001, 1.0, 8.0)}
    while (seconds := pipe.recv()) is not None:
        times, sent = run.take(seconds)
        pipe.send({"milliseconds": times, "bytes": sent, "messages": messages})
    if world.together:
        distributed.destroy_process_group()


@contextmanager
def started(world: World, task: tuple[Any, ...]) -> Iterator[Measure]:
    """What to call for a number of seconds of steps: it returns what the first process found."""
    context = multiprocessing.get_context("spawn")
    if not world.together:  # each has its part of the batch
        model, method, case, device = task
        task = model, method, replace(case, private=case.private // world.processes), device
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(world.processes)]
        processes = [
            context.Process(target=child, args=(rank, world, f"{folder}/store", theirs, task))
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()  # so that a process that dies is noticed

        def measured(seconds: float) -> dict[str, Any]:
            for mine, _ in pipes:
                mine.send(seconds)
            results: list[dict[str, Any]] = [mine.recv() for mine, _ in pipes]
            return results[0]

        yield measured
        for mine, _ in pipes:
            mine.send(None)
        for process in processes:
            process.join()


def in_turn(
    worlds: Sequence[World], task: tuple[Any, ...], rounds: int, seconds: float
) -> dict[str, list[dict[str, Any]]]:
    """What each world found in each round; all stay alive, as a machine changes with time."""
    with ExitStack() as stack:
        running = {str(world): stack.enter_context(started(world, task)) for world in worlds}
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in running}
        for index in range(rounds):
            # Each goes first as often: what comes after a pause may run at other clocks.
            order = list(running) if index % 2 == 0 else list(reversed(running))
            for name in order:
                found[name].append(running[name](seconds))
    return found


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
    numbers = options.worlds or ([1] if options.device == "cuda" else [1, 2, 4])
    worlds = [World(1, together=False), *map(World, numbers)]
    worlds += [World(n, together=False) for n in numbers if n > 1 and options.device == "cpu"]
    results: report.Results = {"environment": report.environment(options.device), "models": {}}
    table = Table(title="One step in several processes of one thread each")
    for heading in ("model", "method", "processes", "ms a step", "× faster", "MB a step"):
        table.add_column(heading)
    for model in options.models:
        case = CASES[options.device][model]
        for method in options.methods:
            task = (model, method, case, options.device)
            rounds = in_turn(worlds, task, options.rounds, options.seconds)
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
                    "messages": found[0]["messages"],
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
