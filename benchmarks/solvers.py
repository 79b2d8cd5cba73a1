"""How long each solver takes for k of m directions: `python -m benchmarks.solvers`.

Gram matrices of m random gradients with a decaying spectrum, on a CPU; the least of three times.
Power iteration starts at the exact directions, as it does from one step to the next.
"""

from __future__ import annotations

import time

import torch

import dpspan

CASES = ((500, 10), (2000, 10), (2000, 50))
WIDTH, TRIES, FLOOR = 4000, 3, 1e-9


def main() -> None:
    """Measure and print."""
    generator = torch.Generator().manual_seed(0)
    for m, k in CASES:
        rows = torch.randn(m, WIDTH, generator=generator, dtype=torch.float64)
        rows *= torch.arange(1, WIDTH + 1) ** -0.7
        gram = rows @ rows.T
        exact = dpspan.Eigh()(gram, k, floor=FLOOR).coefficients
        for solver in (dpspan.Eigh(), dpspan.Lanczos(), dpspan.PowerIteration()):
            taken = []
            for _ in range(TRIES):
                start = time.perf_counter()
                solver(gram, k, floor=FLOOR, previous=exact)
                taken.append(1e3 * (time.perf_counter() - start))
            print(f"{k:3} of {m:,}: {type(solver).__name__:15} {min(taken):7.1f} ms")


if __name__ == "__main__":
    main()
