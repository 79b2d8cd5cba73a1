"""`dpspan report`: one HTML page about runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpspan.app.cli.app import Json, Quiet, app, check_exists, print_json, say


@app.command(name="report")
def report_command(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    to: Annotated[
        Path | None, typer.Option("--out", help="The page; report.html in the first folder.")
    ] = None,
    include_unprivate: Annotated[
        bool,
        typer.Option("--include-unprivate", help="Show what is not private; never publish it."),
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a page about RUNS, to show to others."""
    for run in runs:
        check_exists(run)
    from dpspan.app.report import render

    path = render(runs, to or runs[0] / "report.html", include_unprivate)
    if as_json:
        print_json({"report": str(path)})
    elif not quiet:
        say(f"Wrote {path}.")
