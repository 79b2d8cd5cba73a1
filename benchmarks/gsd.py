"""The cost of one GSD: `python -m benchmarks.gsd [--device cuda]`.

ResNet-20, 2,000 private and 2,000 public images, k = 16: the paper reports 12 seconds on an A100.
Random images, as the cost does not depend on what they show. One run, after a small one that loads
everything; time and peak memory are those of the same run.
"""

import argparse
import json
import time
from pathlib import Path

from torch import nn

from benchmarks import measure, report
from benchmarks.problems import PROBLEMS
from dpspan.choose import gsd

WARM_UP = 32


def main() -> None:
    """Measure, show and save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gsd", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", choices=["cnn", "resnet20"], default="resnet20")
    parser.add_argument("--samples", type=int, default=2000, help="of each dataset")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, help="torch's threads; default: torch's choice")
    parser.add_argument("--out", type=Path, default=Path("runs/gsd"))
    options = parser.parse_args()
    measure.configure(options.threads, tf32=False)
    problem, device = PROBLEMS[options.model], options.device
    model = problem.model(device)
    # On the CPU: datasets are held there, whatever the model is on.
    images, _ = problem.data(2 * options.samples, "cpu")
    private, public = images.split(options.samples)
    criterion = nn.CrossEntropyLoss()
    gsd(model, criterion, private[:WARM_UP], public[:WARM_UP], options.rank)
    seconds, bystanders = [], measure.Bystanders()

    def run() -> None:
        measure.synchronize(device)
        start = time.perf_counter()
        gsd(model, criterion, private, public, options.rank)
        measure.synchronize(device)
        seconds.append(time.perf_counter() - start)

    memory = measure._peak_of(run, device)
    result = {
        "environment": report.environment(device),
        "settings": {key: str(value) for key, value in vars(options).items() if key != "out"},
        "seconds": seconds[0],
        "memory": memory,
        "disturbance": bystanders.share(),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{options.model}-{device}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"GSD of {options.samples:,} + {options.samples:,} samples, {options.model}, "
        f"k = {options.rank}, {device}: {seconds[0]:.1f} s, peak {memory['peak'] / 1e9:.2f} GB "
        f"({memory['above'] / 1e9:.2f} GB above the level before); other processes used "
        f"{result['disturbance']:.0%} of the processors"
    )


if __name__ == "__main__":
    main()
