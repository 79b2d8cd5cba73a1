"""The cost of one DP-SGD step: `python -m benchmarks.dpsgd [--device cuda] [--models cnn mlp]`."""

import argparse
import sys
import time
from pathlib import Path

from benchmarks import contenders, measure, report
from benchmarks.problems import PROBLEMS, SEED


def run_model(name: str, options: argparse.Namespace) -> report.Results:
    """Everything about one model: who runs, whether it is right, how fast, how much memory."""
    problem, device = PROBLEMS[name], options.device
    batch = options.batch or problem.batch
    entries: dict[str, report.Results] = {}
    steps = {}
    for contender in options.contenders:
        entry = entries[contender] = {}
        try:
            if contender != contenders.PLAIN:
                entry["error"] = measure.disagreement(contender, problem, batch, device)
            ready = measure.prepare(contender, problem, batch, device, contenders.NOISE)
            ready.step()
        except Exception as error:  # a contender that cannot run is a result, not a failure
            entry["reason"] = measure.reason(error)
            continue
        entry["note"] = ready.note
        steps[contender] = ready.step
    bystanders = measure.Bystanders()
    times = measure.interleave(steps, device, options.seconds, options.repeats)
    disturbance = bystanders.share()
    steps.clear()
    for contender, milliseconds in times.items():
        entry = entries[contender]
        entry["milliseconds"] = milliseconds
        entry["memory"] = measure.peak_memory(name, contender, batch, device, options.tf32)
    return {
        "batch": batch,
        "parameters": sum(p.numel() for p in problem.model("cpu").parameters()),
        "rounds": len(next(iter(times.values()), [])),
        "disturbance": disturbance,
        "contenders": entries,
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dpsgd", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--models", nargs="+", choices=list(PROBLEMS), default=list(PROBLEMS))
    everyone = list(contenders.CONTENDERS)
    parser.add_argument("--contenders", nargs="+", choices=everyone, default=everyone)
    parser.add_argument("--batch", type=int, help="instead of each model's own batch size")
    parser.add_argument("--repeats", type=int, help="rounds; default: what fits into --seconds")
    parser.add_argument("--seconds", type=float, default=25, help="timed seconds per model")
    parser.add_argument("--threads", type=int, help="torch's threads; default: torch's choice")
    parser.add_argument("--tf32", action="store_true", help="instead of float32, on a GPU")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    return parser.parse_args()


def main() -> None:
    """Measure all models and publish."""
    options = parse()
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
    for name in options.models:
        print(f"{name} …", file=sys.stderr, flush=True)
        results["models"][name] = run_model(name, options)
        results["seconds"] = time.perf_counter() - start
        report.save(results, options.out)  # a run that is cut short keeps what it has
    report.show(results)


if __name__ == "__main__":
    main()
