"""`dpspan choose`: public data by private records, with privacy or (--unprivate-rank) without."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpspan.app.cli.app import Json, Quiet, app, out, print_json, say

if TYPE_CHECKING:
    from dpspan.app.config import Config


@app.command(name="choose")
def choose_command(
    config: Annotated[Path, typer.Argument(help="A configuration with data.public.")],
    unprivate_rank: Annotated[
        bool,
        typer.Option("--unprivate-rank", help="Show a table instead. It is NOT private."),
    ] = False,
    rank: Annotated[int, typer.Option(help="Directions to compare in the table.")] = 16,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Choose among the public data of CONFIG, privately, as its `choose` section says.

    The choice is kept in the output folder, and the run that trains there pays for it. That a table
    was looked at instead is kept there too: the certificate and the report will say so.
    """
    from dpspan.app.config import load_config

    settings = load_config(config)
    if unprivate_rank:
        _rank(settings, rank, as_json)
        return
    if settings.choose is None:
        raise ValueError(
            f"{config} has no `choose` section. Add one, such as `choose: {{epsilon: 0.1}}`, or "
            "look at a table by --unprivate-rank, which is not private."
        )
    from dpspan.app.run.folder import RunFolder
    from dpspan.app.run.from_config import chosen_public, make_parts

    folder = RunFolder(settings.output.folder)
    with folder.locked():
        folder.refuse_lost_ledger()
        choice = chosen_public(settings, make_parts(settings), folder)
    if as_json:
        print_json(choice)
        return
    out().print(f"Chosen with ε = {choice['epsilon']:g}: {choice['chosen']}")
    if not quiet:
        say(f"{choice['note']} `dpspan train {config}` uses it, and pays for it.")


def _rank(settings: Config, rank: int, as_json: bool) -> None:
    from torch import nn

    from dpspan.app.run.folder import RunFolder
    from dpspan.app.run.from_config import make_parts
    from dpspan.choose import rank_public
    from dpspan.choose.gsd import LOOKED_AT

    if not settings.data.public:
        raise ValueError("There is nothing to rank: name datasets under data.public.")
    parts = make_parts(settings)
    folder = RunFolder(settings.output.folder)
    with folder.locked():
        folder.warn(LOOKED_AT)  # on record before anybody sees the table
    ranking = rank_public(
        parts.model,
        nn.CrossEntropyLoss(),
        parts.private.tensors,
        parts.public,
        rank=rank,
        seed=settings.training.seed,
    )
    if as_json:
        print_json(ranking.to_dict())
    else:
        out().print(ranking)
