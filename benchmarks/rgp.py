"""The cost of one RGP step: `python -m benchmarks.rgp [--device cuda]`.

MiniLM-L6 (22.7 M parameters, all trained; the extra `text`) with sequences of 64 tokens, ResNet-20
and WRN-28-4: RGP against the non-private step, DP-SGD, and Opacus.
"""

from functools import partial

from torch import Tensor, nn

from benchmarks import contenders
from benchmarks.run import Race, parser, publish
from dpspan import RGP

BATCHES = {
    "cpu": {"minilm": 64, "resnet20": 64, "wrn28-4": 16},
    "cuda": {"minilm": 64, "resnet20": 1000, "wrn28-4": 500},
}
RANKS = (1, 8)


def rgp_step(
    model: nn.Module, x: Tensor, y: Tensor, noise: float, *, rank: int
) -> contenders.Contender:
    """RGP of dpspan."""
    return contenders.method_step(model, x, y, noise, RGP(rank=rank, clip=contenders.CLIP))


def race(model: str, batch: int) -> Race:
    """Everyone on one model."""
    factories: dict[str, contenders.Factory] = {
        contenders.PLAIN: contenders.plain_step,
        "opacus hooks": partial(contenders.opacus_step, mode="hooks"),
        "opacus ghost": partial(contenders.opacus_step, mode="ghost"),
        "DP-SGD": contenders.dpspan_step,
        **{f"RGP, rank {rank}": partial(rgp_step, rank=rank) for rank in RANKS},
    }
    return Race(model, batch, factories, label=str(batch), check=False)


def main() -> None:
    """Measure and publish."""
    arguments = parser("benchmarks.rgp", __doc__, tuple(BATCHES["cpu"]))
    arguments.add_argument("--batch", type=int, help="instead of each model's own")
    options = arguments.parse_args()
    batches = BATCHES[options.device]
    models = options.models or tuple(batches)
    publish(models, lambda model: race(model, options.batch or batches[model]), options)


if __name__ == "__main__":
    main()
