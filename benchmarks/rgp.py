"""The cost of one RGP step: `python -m benchmarks.rgp [--device cuda]`.

MiniLM-L6 (22.7 M parameters, all trained; the extra `text`), sequences of 64 tokens: RGP against
the non-private step, DP-SGD, and Opacus.
"""

from functools import partial

from torch import Tensor, nn

from benchmarks import contenders
from benchmarks.run import Race, parser, publish
from dpspan import RGP

BATCH = 64
RANKS = (1, 8)


def rgp_step(
    model: nn.Module, x: Tensor, y: Tensor, noise: float, *, rank: int
) -> contenders.Contender:
    """RGP of dpspan."""
    return contenders.method_step(model, x, y, noise, RGP(rank=rank, clip=contenders.CLIP))


def race(batch: int) -> Race:
    """Everyone on MiniLM."""
    factories: dict[str, contenders.Factory] = {
        contenders.PLAIN: contenders.plain_step,
        "opacus hooks": partial(contenders.opacus_step, mode="hooks"),
        "opacus ghost": partial(contenders.opacus_step, mode="ghost"),
        "DP-SGD": contenders.dpspan_step,
        **{f"RGP, rank {rank}": partial(rgp_step, rank=rank) for rank in RANKS},
    }
    return Race("minilm", batch, factories, label=str(batch), check=False)


def main() -> None:
    """Measure and publish."""
    arguments = parser("benchmarks.rgp", __doc__, ("minilm",))
    arguments.add_argument("--batch", type=int, default=BATCH)
    options = arguments.parse_args()
    publish(("minilm",), lambda _: race(options.batch), options)


if __name__ == "__main__":
    main()
