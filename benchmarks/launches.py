"""Where a step's time goes, phase by phase: `python -m benchmarks.launches [--device cuda]`.

A GPU works off a queue, and a step of many small operators is as slow as the host that fills it.
For each phase of a step: how many operators it runs (views aside, each is a launch or more), and
how long the host takes to hand them over; beside it the time that the GPU itself is busy. Where the
host takes longer, fewer operators are what makes a step faster.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import contenders, measure, report
from benchmarks.floors import moves_nothing
from benchmarks.methods import CASES, METHODS
from benchmarks.problems import PROBLEMS
from benchmarks.run import parser
from dpspan.gradients.capture import Capture
from dpspan.gradients.graphs import Graphs
from dpspan.mechanisms import Method, Setting
from dpspan.mechanisms.noise import Noise

ROUNDS = 12
Phase = tuple[str, Callable[[], None]]


def plain_phases(model: nn.Module, x: Tensor, y: Tensor) -> list[Phase]:
    """A step without privacy."""
    optimizer = torch.optim.SGD(model.parameters(), lr=contenders.LEARNING_RATE)
    criterion = nn.CrossEntropyLoss()
    kept: dict[str, Any] = {}

    def forward() -> None:
        optimizer.zero_grad()
        kept["loss"] = criterion(model(x), y)

    return [
        ("forward", forward),
        ("backward", lambda: kept.pop("loss").backward()),
        ("optimizer", lambda: optimizer.step()),
    ]


def private_phases(
    model: nn.Module, x: Tensor, y: Tensor, method: Method, *, graphs: bool
) -> list[Phase]:
    """A step of a method, as `contenders.method_step` has it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=contenders.LEARNING_RATE)
    criterion, parameters = nn.CrossEntropyLoss(), dict(model.named_parameters())
    mechanism = method.bind(Setting(model=model, criterion=criterion))
    capture, noise = Capture(model), Noise()
    kept: dict[str, Any] = {}
    live, replayed = None, None
    if graphs:
        live, x, y = len(x), contenders.filled_up(x), contenders.filled_up(y)
        summed = mechanism.clipped_sum if mechanism.stays_in_place else None
        replayed = Graphs(summed)

    def forward() -> None:
        optimizer.zero_grad()
        how = {"live": live, "carriers": mechanism.carriers(), "graphs": replayed}
        capture.expect(len(x), scale=len(x), **how)
        kept["loss"] = criterion(model(x), y)

    def collect() -> None:
        kept["gradients"] = capture.collect()

    def clipped_sum() -> None:
        gradients = kept.pop("gradients")
        sums = None if replayed is None else replayed.take(copied=False)
        kept["sums"] = mechanism.clipped_sum(gradients) if sums is None else sums

    def release() -> None:
        kept["released"] = mechanism.release(kept.pop("sums"), noise, contenders.NOISE)

    def gradient() -> None:
        made = mechanism.gradient(kept.pop("released"))
        torch._foreach_div_(list(made.values()), len(x))
        for name, value in made.items():
            parameters[name].grad = value.to(parameters[name].dtype)

    return [
        ("forward", forward),
        ("backward", lambda: kept.pop("loss").backward()),
        ("collect", torch.no_grad()(collect)),
        ("prepare", torch.no_grad()(lambda: mechanism.prepare(capture))),
        ("clipped sum", torch.no_grad()(clipped_sum)),
        ("release", torch.no_grad()(release)),
        ("gradient", torch.no_grad()(gradient)),
        ("optimizer", lambda: optimizer.step()),
    ]


class Operators(TorchDispatchMode):
    """Counts what is handed to a device; views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not moves_nothing(func):
            self.counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def profile(phases: list[Phase], device: str) -> report.Results:
    """Operators and host milliseconds by phase, and the milliseconds of kernels in a step."""
    operators: dict[str, Counter[str]] = {}
    times: dict[str, list[float]] = {name: [] for name, _ in phases}
    whole = []
    for _ in range(6):  # graphs are recorded at the fourth
        for _, run in phases:
            run()
    for name, run in phases:
        with Operators() as count:
            run()
        operators[name] = count.counts
    for _ in range(ROUNDS):
        measure.synchronize(device)
        began = time.perf_counter()
        for name, run in phases:
            start = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - start))
        measure.synchronize(device)
        whole.append(1e3 * (time.perf_counter() - began))
    busy, launches, longest = None, None, {}
    if device == "cuda":
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as profiler:
            for _, run in phases:
                run()
            measure.synchronize(device)
        events = profiler.key_averages()
        kernels = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
        busy = sum(event.self_device_time_total for event in kernels) / 1e3
        kernels.sort(key=lambda event: -event.self_device_time_total)
        longest = {e.key[:400]: (e.count, e.self_device_time_total / 1e3) for e in kernels[:25]}
        launches = sum(e.count for e in events if "Launch" in e.key)
    return {
        "phases": {
            name: {
                "operators": sum(operators[name].values()),
                "host_milliseconds": median(times[name]),
                "most": dict(operators[name].most_common(8)),
            }
            for name, _ in phases
        },
        "milliseconds": median(whole),
        "gpu_milliseconds": busy,
        "launches": launches,
        "kernels": longest,  # how often, and milliseconds
    }


def main() -> None:
    """Profile and show; with --out FOLDER also save."""
    arguments = parser("benchmarks.launches", __doc__, list(CASES["cpu"]))
    options = arguments.parse_args()
    measure.configure(options.threads, options.tf32)
    results: report.Results = {"environment": report.environment(options.device), "models": {}}
    for model in options.models or CASES[options.device]:
        case, problem = CASES[options.device][model], PROBLEMS[model]
        x, y = problem.data(case.private + case.public, options.device)
        private, public = x[: case.private], (x[case.private :].cpu(), y[case.private :].cpu())
        entry = results["models"][model] = {}
        entry["non-private"] = profile(
            plain_phases(problem.model(options.device), private, y[: case.private]), options.device
        )
        for name, make in METHODS.items():
            if not options.contenders or name in options.contenders:
                for graphs in (False, True) if options.device == "cuda" else (False,):
                    network, labels = problem.model(options.device), y[: case.private]
                    made = make(public, case.rank)
                    phases = private_phases(network, private, labels, made, graphs=graphs)
                    label = f"{name}, graphs" if graphs else name
                    entry[label] = profile(phases, options.device)
        show(model, entry)
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"{options.device}.json"
        path.write_text(json.dumps(results, indent=1) + "\n")


def show(model: str, entry: report.Results) -> None:
    """A table: a row a step, a column a phase."""
    names = list(dict.fromkeys(name for each in entry.values() for name in each["phases"]))
    table = Table(title=f"{model}: operators / host ms")
    for column in ("step", *names, "all", "ms", "GPU ms", "launches"):
        table.add_column(column)
    for step, each in entry.items():
        cells = []
        for name in names:
            phase = each["phases"].get(name)
            cells.append(
                f"{phase['operators']} / {phase['host_milliseconds']:.2f}" if phase else ""
            )
        total = sum(phase["operators"] for phase in each["phases"].values())
        busy = "" if each["gpu_milliseconds"] is None else f"{each['gpu_milliseconds']:.2f}"
        row = (str(total), f"{each['milliseconds']:.2f}", busy, str(each["launches"] or ""))
        table.add_row(step, *cells, *row)
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
