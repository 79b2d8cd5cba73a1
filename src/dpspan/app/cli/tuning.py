"""`dpspan tune`: hyperparameters searched on the private records, within one ε."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dpspan.app.cli.app import Json, Quiet, answer, app, four_digits

_Range = tuple[float, float]


@app.command(name="tune")
def tune_command(
    config: Annotated[Path, typer.Argument(help="A configuration; `dpspan init` writes one.")],
    epsilon: Annotated[
        float | None, typer.Option(help="ε of the whole search, if not CONFIG's.")
    ] = None,
    tries: Annotated[int, typer.Option(min=2, help="Trainings on average; drawn at random.")] = 5,
    learning_rate: Annotated[
        _Range | None, typer.Option(metavar="LOW HIGH", help="To draw from; CONFIG's by 10.")
    ] = None,
    clip: Annotated[
        _Range | None, typer.Option(metavar="LOW HIGH", help="To draw from; CONFIG's if left out.")
    ] = None,
    score_on: Annotated[
        str | None, typer.Option(help="Which of data.public scores models, for nothing.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Search hyperparameters on the private records; search and model cost ε together.

    How many tries there are is drawn at random, and only the best is ever shown: that is what makes
    the price. Interrupted, it goes on when the command is given again. `dpspan advise` searches on
    public data instead, and costs nothing.
    """
    from dpspan.app.config import load_config

    load_config(config)  # what is wrong with it is said before anything slow is imported
    from dpspan.app.tune import tune

    with Console(stderr=True, quiet=as_json or quiet).status("Searching …"):
        found = tune(
            config,
            epsilon=epsilon,
            tries=tries,
            learning_rate=learning_rate,
            clip=clip,
            score_on=score_on,
        )
    settings = ", ".join(f"{name} = {value:g}" for name, value in found.found.items())
    accuracy = found.metrics.get("test_accuracy")
    reached = "" if accuracy is None else f", test accuracy {accuracy:.1%}"
    note = (
        f"Done: ε = {four_digits(found.epsilon)} at δ = {found.delta:g} for search and model: "
        f"{settings}{reached}. Model and certificate are in {found.folder}."
    )
    document = {**asdict(found), "folder": str(found.folder)}
    answer(document, as_json=as_json, quiet=quiet, note=note)
