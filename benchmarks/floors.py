"""How far a step is from what the machine allows: `python -m benchmarks.floors [--device cuda]`.

Counts the floating-point operations of products and convolutions in a step, and the bytes that its
kernels read and write; and measures how fast this machine multiplies large matrices and copies
memory. A step takes about the longer of the two at least: its floor, an estimate, as what stays in
a cache counts as memory here. The work of a method beyond that of the non-private step is what
privacy costs in this implementation; the time beyond its own floor is small kernels, launches and
Python.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import contenders, measure, report
from benchmarks.methods import CASES, race
from benchmarks.problems import PROBLEMS

Step = Callable[[], None]
SIDE = {"cpu": 1536, "cuda": 8192}  # of the matrices that are multiplied
COPIED = {"cpu": 2**25, "cuda": 2**28}  # numbers
TRIES = 5


class Traffic(TorchDispatchMode):
    """Adds up the bytes of what every operator reads and writes; views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not moves_nothing(func):
            written = sum(map(_size, _tensors(result)))
            read = [_size(tensor) for tensor in _tensors((args, kwargs))]
            name = func._schema.name
            if name in OVERWRITING:
                read = read[1:]  # the first one is what is written
            elif name in PICKING:
                read = [min(size, written) for size in read]
            self.bytes += written + sum(read)
        return result


OVERWRITING = {"aten::fill_", "aten::zero_", "aten::copy_", "aten::normal_", "aten::uniform_"}
PICKING = {"aten::index", "aten::index_select", "aten::gather", "aten::embedding"}
NOTHING = ("aten::empty", "aten::new_empty", "aten::_unsafe_view")


def moves_nothing(func: Any) -> bool:
    """Views and uninitialised memory."""
    schema = func._schema
    aliases = [r.alias_info for r in schema.returns if r.alias_info is not None]
    views = bool(aliases) and not any(alias.is_write for alias in aliases)
    return views or schema.name.startswith(NOTHING)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _size(tensor: Tensor) -> int:
    """Of an expanded tensor only what is there."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def convolution_backward_flops(
    grad: Tensor, x: Tensor, weight: Tensor, *rest: Any, out_val: Any = None
) -> int:
    """As many as forward, for each gradient that is wanted. torch's own count forgets groups."""
    forward = 2 * len(grad) * grad.shape[2:].numel() * weight.numel()
    return forward * sum(rest[-1][:2])


convolution_backward_flops._get_raw = True  # type: ignore[attr-defined]  # tensors, not shapes
COUNTS = {torch.ops.aten.convolution_backward: convolution_backward_flops}


def work(step: Step) -> tuple[int, int]:
    """Floating-point operations and bytes of one step."""
    with FlopCounterMode(display=False, custom_mapping=COUNTS) as flops, Traffic() as traffic:
        step()
    return flops.get_total_flops(), traffic.bytes


def peaks(device: str) -> dict[str, float]:
    """Operations and bytes in a second, the best of some tries."""
    side, count = SIDE[device], COPIED[device]
    a, b = torch.randn(2, side, side, device=device)
    source, target = torch.randn(2, count, device=device)
    multiply = _fastest(lambda: torch.mm(a, b), device)
    copy = _fastest(lambda: target.copy_(source), device)
    return {"flops": 2 * side**3 / multiply, "bytes": 2 * 4 * count / copy}


def _fastest(run: Callable[[], Any], device: str) -> float:
    taken = []
    for _ in range(TRIES):
        measure.synchronize(device)
        start = time.perf_counter()
        run()
        measure.synchronize(device)
        taken.append(time.perf_counter() - start)
    return min(taken)


def of_model(name: str, options: argparse.Namespace, best: dict[str, float]) -> dict[str, Any]:
    """Work, floor and time of every method on one model."""
    made = race(name, options.device)
    ready = {}
    for contender, factory in made.factories.items():
        if not contender.startswith("opacus"):
            ready[contender] = measure.prepare(
                factory, PROBLEMS[name], made.batch, options.device, contenders.NOISE
            )
            ready[contender].step()
    steps = {contender: each.step for contender, each in ready.items()}
    times = measure.interleave(steps, options.device, options.seconds, None)
    found = {}
    for contender, each in ready.items():
        flops, moved = (count / each.steps for count in work(each.step))
        found[contender] = {
            "gigaflops": flops / 1e9,
            "gigabytes": moved / 1e9,
            "products_ms": 1e3 * flops / best["flops"],
            "memory_ms": 1e3 * moved / best["bytes"],
            "milliseconds": statistics.median(times[contender]) / each.steps,
        }
    return {"batch": made.label, "contenders": found}


def main() -> None:
    """Measure, show and save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.floors", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--models", nargs="+", choices=list(CASES["cpu"]))
    parser.add_argument("--seconds", type=float, default=10, help="timed seconds per model")
    parser.add_argument("--threads", type=int, help="torch's threads; default: torch's choice")
    parser.add_argument("--tf32", action="store_true", help="instead of float32, on a GPU")
    parser.add_argument("--out", type=Path, default=Path("runs/floors"))
    options = parser.parse_args()
    measure.configure(options.threads, options.tf32)
    best = peaks(options.device)
    results: dict[str, Any] = {
        "environment": report.environment(options.device),
        "settings": {"device": options.device, "tf32": options.tf32},
        "peaks": best,
        "models": {},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.models or CASES[options.device]:
        results["models"][name] = of_model(name, options, best)
        path = options.out / f"floors-{options.device}.json"
        path.write_text(json.dumps(results, indent=1) + "\n")
        _show(name, results["models"][name]["contenders"])


def _show(name: str, found: dict[str, dict[str, float]]) -> None:
    table = Table(title=name)
    for head in ("", "GFLOP", "GB", "floor, ms", "measured, ms", "× floor"):
        table.add_column(head, justify="left" if not head else "right")
    for contender, each in found.items():
        floor = max(each["products_ms"], each["memory_ms"])
        table.add_row(
            contender,
            f"{each['gigaflops']:,.1f}",
            f"{each['gigabytes']:,.2f}",
            f"{floor:,.2f}",
            f"{each['milliseconds']:,.2f}",
            f"{each['milliseconds'] / floor:,.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
