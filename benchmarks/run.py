"""What the benchmarks share: who runs, whether it is right, how fast, how much memory."""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks import contenders, measure, report
from benchmarks.problems import PROBLEMS, SEED


@dataclass(frozen=True)
class Race:
    """One model and one batch, and everyone who runs a step on it."""

    problem: str
    batch: int
    factories: Mapping[str, contenders.Factory]
    label: str
    check: bool  # whether the steps are DP-SGD and must equal clipping in a loop


def run(race: Race, options: argparse.Namespace) -> report.Results:
    """Time all contenders in turn, then measure the memory of each."""
    problem, device = PROBLEMS[race.problem], options.device
    entries: dict[str, report.Results] = {}
    steps, taken = {}, {}
    for name, factory in race.factories.items():
        if options.contenders and name not in options.contenders:
            continue
        entry = entries[name] = {}
        try:
            if race.check and name not in (contenders.PLAIN, contenders.COMPILED):
                entry["error"] = measure.disagreement(factory, problem, race.batch, device)
            ready = measure.prepare(factory, problem, race.batch, device, contenders.NOISE)
            ready.step()
        except Exception as error:  # a contender that cannot run is a result, not a failure
            entry["reason"] = measure.reason(error)
            continue
        entry["note"] = ready.note
        steps[name], taken[name] = ready.step, ready.steps
    bystanders = measure.Bystanders()
    times = measure.interleave(steps, device, options.seconds, options.repeats)
    disturbance = bystanders.share()
    steps.clear()

    def memory(name: str) -> report.Results:
        factory = race.factories[name]
        return measure.peak_memory(race.problem, factory, race.batch, device, options.tf32)

    # Each in a process of its own, whose start takes the time: a GPU has room for some at once.
    with ThreadPoolExecutor(4 if device == "cuda" else 1) as pool:
        for name, peak in zip(times, pool.map(memory, times), strict=True):
            entries[name]["milliseconds"] = [value / taken[name] for value in times[name]]
            entries[name]["memory"] = peak
    return {
        "batch": race.label,
        "parameters": sum(p.numel() for p in problem.model("cpu").parameters()),
        "rounds": len(next(iter(times.values()), [])),
        "disturbance": disturbance,
        "contenders": entries,
    }


def parser(module: str, about: str | None, models: Sequence[str]) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    result = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    result.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    result.add_argument("--models", nargs="+", choices=list(models))
    result.add_argument("--contenders", nargs="+", help="only these")
    result.add_argument("--repeats", type=int, help="rounds; default: what fits into --seconds")
    result.add_argument("--seconds", type=float, default=25, help="timed seconds per model")
    result.add_argument("--threads", type=int, help="torch's threads; default: torch's choice")
    result.add_argument("--tf32", action="store_true", help="instead of float32, on a GPU")
    result.add_argument("--out", type=Path, default=Path("runs") / module.split(".")[-1])
    return result


def publish(names: Sequence[str], race: Callable[[str], Race], options: argparse.Namespace) -> None:
    """Run all races, save after each, and show the table."""
    measure.configure(options.threads, options.tf32)
    start = time.perf_counter()
    results: report.Results = {
        "environment": report.environment(options.device),
        "settings": {
            "device": options.device,
            "tf32": options.tf32,
            "clip": contenders.CLIP,
            "noise_multiplier": contenders.NOISE,
            "learning_rate": contenders.LEARNING_RATE,
            "seed": SEED,
            "warmup_rounds": measure.WARMUP,
            "memory_steps": measure.MEMORY_STEPS,
        },
        "method": report.CAPTION,
        "models": {},
    }
    for name in names:
        print(f"{name} …", file=sys.stderr, flush=True)
        results["models"][name] = run(race(name), options)
        results["seconds"] = time.perf_counter() - start
        report.save(results, options.out)  # a run that is cut short keeps what it has
    report.show(results)
