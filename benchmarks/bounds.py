"""How tight the certified norms are: `python -m benchmarks.bounds --data FOLDER [--device cuda]`.

A clip factor is computed from an upper bound of a norm; what the bound has on top of the exact norm
is clipped away for nothing. For every method, precision and model: the median and the largest ratio
of bound and exact norm, the latter in float64 from the same recorded factors. For GEP also what
rounding costs: directions found, the energy of fresh private gradients that they capture (against
the eigendecomposition of the float64 Gram matrix), and the distance of the summed residual from the
one in float64, of the same gradients and coefficients.

FOLDER holds cifar10.npz and tinyimagenet32.npz: ResNet-20 is trained on them by GEP, and measured
on the way. The other models see random inputs at their first step.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dpspan
from benchmarks import report
from benchmarks.gep_accuracy import images, training_steps
from benchmarks.problems import PROBLEMS
from dpspan.gradients.operator import PerSampleGradients
from dpspan.mechanisms import Setting
from dpspan.mechanisms.carriers import RandomCarriers
from dpspan.model.networks import ResNet20

MODELS = {"mlp": 32, "cnn": 32, "resnet20": 32, "wrn28-4": 8, "transformer": 8, "minilm": 4}
PRECISIONS = {"float32": "highest", "TF32": "high"}


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """One loss per sample."""
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def exact(gradients: PerSampleGradients) -> PerSampleGradients:
    """The same gradients, from the same factors, with everything computed in float64."""
    terms = {name: [term.double()] for name, term in gradients.terms.items()}
    return PerSampleGradients(
        gradients.shapes,
        terms,
        gradients.samples,
        like=gradients.like.double(),
        scale=gradients.scale,
    )


def ratio(bounds: Tensor, norms: Tensor) -> dict[str, float]:
    """How much longer the bounds are."""
    ratios = (bounds / norms)[norms > 0]
    return {"median": float(ratios.median()), "largest": float(ratios.max())}


def plain_methods(model: nn.Module, x: Tensor, y: Tensor) -> Iterator[tuple[str, dict[str, float]]]:
    """DP-SGD (whose norms mirror descent and PDP-SGD have, too), two views, and RGP."""
    J = dpspan.per_sample_gradients(model, losses, x, y)
    yield "DP-SGD", ratio(J.norm_bounds(), exact(J).norms())
    with dpspan.Capture(model) as capture:
        capture.expect(len(x) // 2, views=2)
        losses(model, x, y).sum().backward()
        merged = capture.collect()
    yield "DP-SGD, two views", ratio(merged.norm_bounds(), exact(merged).norms())
    carriers = dpspan.RGP(rank=4, carriers=RandomCarriers()).bind(Setting(model=model)).carriers()
    with dpspan.Capture(model) as capture:
        capture.expect(len(x), carriers=carriers)
        losses(model, x, y).sum().backward()
        small = capture.collect()
    yield "RGP, rank 4", ratio(small.norm_bounds(), exact(small).norms())


def gep(
    model: nn.Module, private: tuple[Tensor, Tensor], public: tuple[Tensor, Tensor], rank: int
) -> dict[str, Any]:
    """The residual's bound and sum, and the directions."""
    H = dpspan.per_sample_gradients(model, losses, *public)
    J = dpspan.per_sample_gradients(model, losses, *private)
    subspace = dpspan.Subspace.from_gradients(H, rank)
    _, residual = subspace.split(J)
    bounds = residual.norm_bounds()
    weights = torch.ones(len(bounds), dtype=torch.float64, device=bounds.device)
    summed = torch.cat([part.flatten() for part in residual.combine(weights).values()])
    energy = subspace.captured_energy(J)
    j, h = exact(J).matrix(), exact(H).matrix()
    C, coordinates = subspace.coefficients, j @ h.T
    r = j - (coordinates @ C.T @ C) @ h
    values, vectors = torch.linalg.eigh(h @ h.T)
    Q = vectors[:, -rank:] * values[-rank:].clamp(min=1e-300).rsqrt()
    best = (coordinates @ Q).square().sum(1) / j.square().sum(1)
    directions = C @ h
    lengths = torch.linalg.vector_norm(directions, dim=1)[: subspace.rank]
    return {
        **ratio(bounds, r.norm(dim=1)),
        "norm": float(r.norm(dim=1).median()),
        "sum_error": float((summed.double() - r.sum(0)).norm() / r.sum(0).norm()),
        "directions": subspace.rank,
        "shortest": float(lengths.min()),
        "longest": float(lengths.max()),
        "smallest_eigenvalue": float(values[-rank] / h.square().sum(1).max()),
        "energy": float(energy.mean()),
        "best_energy": float(best.mean()),
    }


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bounds", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--data", type=Path, help="for GEP on ResNet-20")
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--public", type=int, default=2000)
    parser.add_argument("--rank", type=int, default=1000)
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 40, 1000])
    parser.add_argument("--out", type=Path, default=Path("runs/bounds.json"))
    options = parser.parse_args()
    precisions = PRECISIONS if options.device == "cuda" else {"float32": "highest"}
    results: dict[str, Any] = {"environment": report.environment(options.device), "rows": []}

    def note(**row: Any) -> None:
        results["rows"].append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1))

    for name in options.models:
        problem = PROBLEMS[name]
        for precision, setting in precisions.items():
            torch.set_float32_matmul_precision(setting)
            model = problem.model(options.device)
            x, y = problem.data(MODELS[name], options.device)
            for method, found in plain_methods(model, x, y):
                note(model=name, precision=precision, method=method, step=0, **found)
    if options.data:
        private, public = images(options.data, options.device, options.public)
        torch.set_float32_matmul_precision(precisions[list(precisions)[-1]])
        model = ResNet20().to(options.device)
        steps = training_steps(model, private, public, rank=options.rank, batch=options.batch)
        for step in itertools.chain([0], steps):
            if step in options.steps:
                chosen = torch.randperm(
                    len(private.x), generator=torch.Generator().manual_seed(step)
                )
                batch = private[chosen[: options.batch]]
                for precision, setting in precisions.items():
                    torch.set_float32_matmul_precision(setting)
                    found = gep(model, batch, public, options.rank)
                    note(model="resnet20", precision=precision, method="GEP", step=step, **found)
            if step == max(options.steps):
                break


if __name__ == "__main__":
    main()
