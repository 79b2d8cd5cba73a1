"""`dpspan demo`: the tour on embedded data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpspan.app.cli.app import Json, Quiet, app, err, out, print_json


@app.command(name="demo")
def demo_command(
    to: Annotated[Path, typer.Option("--out", help="Folder to write to.")] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(help="Runs of each method.")] = 3,
    jobs: Annotated[int | None, typer.Option(help="Runs at a time.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """What public data is worth, on real digits, in a few minutes. Nothing is downloaded."""
    from dpspan.app.demo import run as run_demo

    tour = err(quiet=quiet) if as_json or quiet else out()
    comparison = run_demo(to, tour, seeds=seeds, jobs=jobs)
    if as_json:
        print_json(comparison.to_dict())
    elif quiet:
        out().print(comparison)
