"""The cost of one DP-SGD step: `python -m benchmarks.dpsgd [--device cuda] [--models cnn mlp]`."""

import argparse

from benchmarks.contenders import CONTENDERS
from benchmarks.problems import PROBLEMS
from benchmarks.run import Race, parser, publish

MODELS = ("mlp", "cnn", "resnet20", "transformer")


def race(name: str, options: argparse.Namespace) -> Race:
    """One model; every private step is checked against clipping in a loop."""
    batch = options.batch or PROBLEMS[name].batch
    return Race(name, batch, CONTENDERS, label=str(batch), check=True)


def main() -> None:
    """Measure all models and publish."""
    arguments = parser("benchmarks.dpsgd", __doc__, MODELS)
    arguments.add_argument("--batch", type=int, help="instead of each model's own batch size")
    options = arguments.parse_args()
    publish(options.models or MODELS, lambda name: race(name, options), options)


if __name__ == "__main__":
    main()
