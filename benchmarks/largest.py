"""The largest batch of which one step fits into a GPU: `python -m benchmarks.largest [--gib 16]`.

MiniLM-L6 (the extra `text`), sequences of 64 tokens, all 22.7 M parameters trained. Each contender
has a process of its own; batches double until one does not fit, then the gap is halved until it
is a tenth. GEP has 64 public sequences and 32 directions besides.
"""

import argparse
import gc
import json
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks import contenders, measure, report
from benchmarks.problems import PROBLEMS
from benchmarks.rgp import rgp_step
from dpspan import GEP

PUBLIC, DIRECTIONS = 64, 32
START, CLOSE = 256, 1.1


def gep_step(model: nn.Module, x: Tensor, y: Tensor, noise: float) -> contenders.Contender:
    """GEP of dpspan; the private batch is whole, the public one fixed."""
    public = (x[:PUBLIC].cpu(), y[:PUBLIC].cpu())
    method = GEP(public=public, rank=DIRECTIONS, clip=contenders.CLIP)
    return contenders.method_step(model, x, y, noise, method)


FACTORIES: dict[str, contenders.Factory] = {
    contenders.PLAIN: contenders.plain_step,
    "opacus hooks": partial(contenders.opacus_step, mode="hooks"),
    "opacus ghost": partial(contenders.opacus_step, mode="ghost"),
    "DP-SGD": contenders.dpspan_step,
    "GEP": gep_step,
    "RGP, rank 8": partial(rgp_step, rank=8),
}


def fits(factory: contenders.Factory, batch: int) -> bool:
    """Whether two steps of a fresh model go through."""
    gc.collect()
    torch.cuda.empty_cache()
    try:
        step = measure.prepare(factory, PROBLEMS["minilm"], batch, "cuda", contenders.NOISE).step
        for _ in range(2):
            step()
        torch.cuda.synchronize()
    except torch.cuda.OutOfMemoryError:
        return False
    return True


def largest(name: str, gib: float | None, tf32: bool) -> dict[str, object]:
    """The largest batch found for a contender, and the smallest that did not fit."""
    measure.configure(None, tf32)
    if gib is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(gib * 2**30 / total)
    low, high = 0, START
    try:
        while fits(FACTORIES[name], high):
            low, high = high, 2 * high
        while high > CLOSE * max(low, 1):
            middle = (low + high) // 2
            low, high = (middle, high) if fits(FACTORIES[name], middle) else (low, middle)
    except Exception as error:  # not memory: a result like any other
        return {"largest": low, "reason": measure.reason(error)}
    return {"largest": low, "too large": high}


def main() -> None:
    """Search for every contender, keep the results and show them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.largest", description=__doc__)
    parser.add_argument("--gib", type=float, help="as on a card with so much memory")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--contenders", nargs="+", choices=list(FACTORIES), default=list(FACTORIES))
    parser.add_argument("--out", type=Path, default=Path("runs/largest"))
    options = parser.parse_args()
    found = {}
    for name in options.contenders:  # one at a time: each may take the whole card
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found[name] = pool.submit(largest, name, options.gib, options.tf32).result()
    options.out.mkdir(parents=True, exist_ok=True)
    record = {
        "environment": report.environment("cuda"),
        "gib": options.gib,
        "tf32": options.tf32,
        "largest": found,
    }
    (options.out / "largest.json").write_text(json.dumps(record, indent=2))
    shown = Table(
        title="largest batch, MiniLM-L6, 64 tokens", caption=str(options.gib or "whole card")
    )
    for heading in ("contender", "fits", "does not fit"):
        shown.add_column(heading)
    for name, entry in found.items():
        shown.add_row(name, *(str(v) for v in entry.values()))
    Console(width=110).print(shown)


if __name__ == "__main__":
    main()
