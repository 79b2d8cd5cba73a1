"""How it is measured: steps in turn within one process, peak memory in a process of its own."""

import gc
import random
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

from benchmarks.contenders import NOISE, Contender, Factory, naive_gradient
from benchmarks.problems import PROBLEMS, SEED, Problem

Step = Callable[[], None]
WARMUP = 1  # rounds, after the first step that shows whether a contender runs
BURST = 5  # steps of a GPU between two looks at the clock
MEMORY_STEPS = 5  # a graph is recorded at the fourth
WARMUP_BATCH = 16  # enough for private and public samples in any proportion that is measured
CHECK_BATCH = 32
PRELOAD = ["benchmarks.measure", "opacus", "torch._dynamo"]


def configure(threads: int | None, tf32: bool) -> None:
    """The same arithmetic for all: float32, or TF32 in every product of a GPU."""
    warnings.simplefilter("ignore")  # Opacus and torch warn on every start
    if threads:
        torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32


def synchronize(device: str) -> None:
    """Wait for a GPU's queue to empty."""
    if device == "cuda":
        torch.cuda.synchronize()


def prepare(factory: Factory, problem: Problem, batch: int, device: str, noise: float) -> Contender:
    """A contender on a fresh model and the fixed batch."""
    return factory(problem.model(device), *problem.data(batch, device), noise)


def reason(error: BaseException) -> str:
    """Why a contender does not run, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def disagreement(factory: Factory, problem: Problem, batch: int, device: str) -> float:
    """Relative distance of a noiseless step from the naive one, on a part of the batch."""
    batch = min(batch, CHECK_BATCH)
    model, (x, y) = problem.model(device), problem.data(batch, device)
    expected = naive_gradient(model, x, y)
    factory(model, x, y, 0.0).step()
    named = sorted(model.named_parameters())  # Opacus' layers have their own order
    actual = torch.cat([p.grad.flatten() for _, p in named if p.grad is not None])
    return float((actual - expected).norm() / expected.norm())


class Bystanders:
    """The share of the processors used by others meanwhile: processes, or a host (steal)."""

    def __init__(self) -> None:
        self._start = self._read()

    @staticmethod
    def _read() -> tuple[float, float]:
        all_times, own = psutil.cpu_times(), psutil.Process().cpu_times()
        idle = all_times.idle + getattr(all_times, "iowait", 0.0)
        extra = (getattr(all_times, kind, 0.0) for kind in ("nice", "steal"))
        busy = all_times.user + all_times.system + sum(extra)
        return busy - own.user - own.system, busy + idle

    def share(self) -> float:
        """Between 0 and 1, since this object was made."""
        others, total = (b - a for a, b in zip(self._start, self._read(), strict=True))
        return max(0.0, others / total) if total > 0 else 0.0


def interleave(
    steps: dict[str, Step], device: str, seconds: float, repeats: int | None
) -> dict[str, list[float]]:
    """Milliseconds of every step, round by round; each round runs all steps in a shuffled order.

    The machine's moods thus fall on all contenders alike. Without `repeats`, as many rounds as
    fit into `seconds`, but 5 to 50. On a GPU several steps follow one another, as in training: the
    host hands over a step while the GPU works on the one before.
    """
    if not steps:
        return {}
    order = list(steps)
    shuffle = random.Random(SEED).shuffle
    burst = BURST if device == "cuda" else 1  # calls; of several steps each in some

    def run_round() -> dict[str, float]:
        shuffle(order)
        taken = {}
        for name in order:
            synchronize(device)
            start = time.perf_counter()
            for _ in range(burst):
                steps[name]()
            synchronize(device)
            taken[name] = 1e3 * (time.perf_counter() - start) / burst
        return taken

    for _ in range(WARMUP):
        last = run_round()
    rounds = repeats or min(50, max(5, int(1e3 * seconds / (burst * sum(last.values())))))
    results = [run_round() for _ in range(rounds)]
    return {name: [taken[name] for taken in results] for name in steps}


def peak_memory(
    model: str, contender: Factory, batch: int, device: str, tf32: bool
) -> dict[str, Any]:
    """Peak bytes of a contender's first steps, measured in a fresh process.

    The process is forked from one that has imported everything and run nothing.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    arguments = (model, contender, batch, device, torch.get_num_threads(), tf32)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(_measure_memory, *arguments).result()
        except Exception as error:  # out of memory, for example: a result like any other
            return {"reason": reason(error)}


def _sampled_peak(run: Step) -> int:
    """Largest resident size seen by a thread that looks every millisecond."""
    process, done, peak = psutil.Process(), threading.Event(), 0

    def look() -> None:
        nonlocal peak
        while not done.wait(1e-3):
            peak = max(peak, int(process.memory_info().rss))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        run()
    finally:
        done.set()
        watcher.join()
    return max(peak, int(process.memory_info().rss))


def _peak_of(run: Step, device: str) -> dict[str, Any]:
    """Bytes in use before `run` and at its peak, and where the numbers come from."""
    gc.collect()
    if device == "cuda":
        synchronize(device)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        synchronize(device)
        peak, source = torch.cuda.max_memory_allocated(), "torch.cuda.max_memory_allocated"
    else:
        before = psutil.Process().memory_info().rss
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        except OSError:
            peak, source = _sampled_peak(run), "resident size sampled every millisecond"
        else:
            run()
            status = Path("/proc/self/status").read_text()
            peak = 1024 * int(status.split("VmHWM:")[1].split()[0])
            source = "VmHWM, reset before the first step"
    return {"before": before, "peak": peak, "above": peak - before, "source": source}


def _measure_memory(
    model: str, contender: Factory, batch: int, device: str, threads: int, tf32: bool
) -> dict[str, Any]:
    """The memory of one contender's first steps; runs in the fresh process."""
    configure(threads, tf32)
    problem = PROBLEMS[model]
    # A step of a few samples first, so that loading code does not count as the step's memory.
    prepare(contender, problem, WARMUP_BATCH, device, NOISE).step()
    network, data = problem.model(device), problem.data(batch, device)

    def run() -> None:
        step = contender(network, *data, NOISE).step
        for _ in range(MEMORY_STEPS):
            step()

    return _peak_of(run, device)
