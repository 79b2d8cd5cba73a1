"""The cost of one step in a public subspace: `python -m benchmarks.gep [--device cuda] [--tf32]`.

The measure is one non-private step of the same samples, private and public together: every method
here has to run the model forward and backward on all of them. Opacus' DP-SGD on as many samples
stands beside it. The MiniLM case needs the extra `text`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from benchmarks import contenders
from benchmarks.run import Race, parser, publish
from dpspan import DPSGD, GEP, PDPSGD, BiasedGEP, PowerIteration
from dpspan.mechanisms import Method


@dataclass(frozen=True)
class Case:
    """A model, n private and m public samples, k directions."""

    problem: str
    private: int
    public: int
    rank: int


CASES = {
    "cnn": Case("cnn", 250, 100, 50),
    "resnet20": Case("resnet20", 100, 200, 100),
    "resnet20-large": Case("resnet20", 1000, 2000, 1000),
    "minilm": Case("minilm", 32, 64, 32),
}
DEFAULTS = {"cpu": ("cnn", "resnet20", "minilm"), "cuda": ("cnn", "resnet20-large", "minilm")}

METHODS: dict[str, Callable[[tuple[Tensor, Tensor], int], Method]] = {
    "GEP": lambda public, k: GEP(public=public, rank=k, clip=contenders.CLIP),
    "GEP, power iteration": lambda public, k: GEP(
        public=public, rank=k, clip=contenders.CLIP, solver=PowerIteration()
    ),
    "biased GEP": lambda public, k: BiasedGEP(public=public, rank=k, clip=contenders.CLIP),
    "PDP-SGD": lambda public, k: PDPSGD(public=public, rank=k, clip=contenders.CLIP),
    "DP-SGD, private samples only": lambda public, k: DPSGD(clip=contenders.CLIP),
}


def subspace_step(
    model: nn.Module, x: Tensor, y: Tensor, noise: float, *, case: Case, method: str
) -> contenders.Contender:
    """A method of dpspan: the first samples are private, the others public."""
    private = len(x) * case.private // (case.private + case.public)
    public = x[private:].cpu(), y[private:].cpu()
    made = METHODS[method](public, case.rank)
    return contenders.method_step(model, x[:private], y[:private], noise, made)


def race(name: str) -> Race:
    """Everyone on one case; the non-private step of all samples is the measure."""
    case = CASES[name]
    factories: dict[str, contenders.Factory] = {
        contenders.PLAIN: contenders.plain_step,
        "opacus hooks, all samples": partial(contenders.opacus_step, mode="hooks"),
        **{method: partial(subspace_step, case=case, method=method) for method in METHODS},
    }
    label = f"{case.private} + {case.public}, k = {case.rank}"
    return Race(case.problem, case.private + case.public, factories, label=label, check=False)


def main() -> None:
    """Measure all cases and publish."""
    options = parser("benchmarks.gep", __doc__, tuple(CASES)).parse_args()
    publish(options.models or DEFAULTS[options.device], race, options)


if __name__ == "__main__":
    main()
