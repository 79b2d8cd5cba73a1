"""Every method on every model: `python -m benchmarks.methods [--device cuda] [--tf32]`.

One step of each method against one non-private step of the same private samples. Methods with
public data run the model on those too: the non-private step of all samples stands beside them.
MiniLM needs the extra `text`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from benchmarks import contenders
from benchmarks.run import Race, parser, publish
from dpspan import DPSGD, GEP, PDPSGD, RGP, ConstantMixing, MirrorDescent, PowerIteration
from dpspan.mechanisms import Method

CLIP = contenders.CLIP
Public = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """n private samples, m public ones, k directions; RGP's rank is always 8."""

    private: int
    public: int
    rank: int


CASES = {
    "cpu": {
        "cnn": Case(250, 100, 50),
        "resnet20": Case(100, 200, 100),
        "wrn28-4": Case(16, 16, 16),
        "minilm": Case(32, 32, 32),
    },
    "cuda": {
        "cnn": Case(250, 100, 50),
        "resnet20": Case(1000, 2000, 1000),
        "wrn28-4": Case(500, 500, 250),
        "minilm": Case(256, 256, 128),
    },
}

METHODS: dict[str, Callable[[Public, int], Method]] = {
    "DP-SGD": lambda public, k: DPSGD(clip=CLIP),
    "RGP, rank 8": lambda public, k: RGP(rank=8, clip=CLIP),
    "mirror descent": lambda public, k: MirrorDescent(
        public=public, mixing=ConstantMixing(share=0.5), public_samples=len(public[0]), clip=CLIP
    ),
    "PDP-SGD": lambda public, k: PDPSGD(public=public, rank=k, clip=CLIP, solver=PowerIteration()),
    "GEP": lambda public, k: GEP(public=public, rank=k, clip=CLIP, solver=PowerIteration()),
    "GEP, subspace kept for 10 steps": lambda public, k: GEP(
        public=public, rank=k, clip=CLIP, solver=PowerIteration(), refresh=10
    ),
}


GRAPHS = ", CUDA graphs"


def step_of(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    noise: float,
    *,
    case: Case,
    method: str,
    graphs: bool = False,
) -> contenders.Contender:
    """A method of dpspan: the first samples are private, the others public."""
    private = len(x) * case.private // (case.private + case.public)
    public = x[private:].cpu(), y[private:].cpu()
    made = METHODS[method](public, min(case.rank, len(x) - private))
    one = contenders.method_step(model, x[:private], y[:private], noise, made, graphs=graphs)
    cycle = getattr(made, "refresh", 1)

    def steps() -> None:
        for _ in range(cycle):
            one.step()

    return contenders.Contender(steps, steps=cycle)


def on_private(
    model: nn.Module, x: Tensor, y: Tensor, noise: float, *, case: Case, of: contenders.Factory
) -> contenders.Contender:
    """Somebody who gets the private samples alone."""
    private = len(x) * case.private // (case.private + case.public)
    return of(model, x[:private], y[:private], noise)


def race(name: str, device: str) -> Race:
    """Everyone on one model."""
    case = CASES[device][name]
    alone: dict[str, contenders.Factory] = {
        contenders.PLAIN: contenders.plain_step,
        contenders.COMPILED: contenders.compiled_step,
        "opacus hooks": partial(contenders.opacus_step, mode="hooks"),
        "opacus ghost": partial(contenders.opacus_step, mode="ghost"),
    }
    factories: dict[str, contenders.Factory] = {
        **{each: partial(on_private, case=case, of=of) for each, of in alone.items()},
        "non-private, all samples": contenders.plain_step,
        **{
            method + (GRAPHS if graphs else ""): partial(
                step_of, case=case, method=method, graphs=graphs
            )
            for graphs in ((False, True) if device == "cuda" else (False,))
            for method in METHODS
        },
    }
    label = f"{case.private} + {case.public} public, k = {case.rank}"
    return Race(name, case.private + case.public, factories, label=label, check=False)


def main() -> None:
    """Measure all models and publish."""
    options = parser("benchmarks.methods", __doc__, tuple(CASES["cpu"])).parse_args()
    names = options.models or tuple(CASES[options.device])
    publish(names, lambda name: race(name, options.device), options)


if __name__ == "__main__":
    main()
