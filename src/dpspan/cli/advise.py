"""`dpspan advise`: what to do with a private dataset, asked of public data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpspan.cli.app import Json, app, err, out, print_json


@app.command(name="advise")
def advise_command(
    config: Annotated[Path, typer.Argument(help="The configuration of the run to be.")],
    records: Annotated[
        int | None, typer.Option(help="Number of private records, if data.records does not say it.")
    ] = None,
    public: Annotated[
        str | None, typer.Option(help="Which of data.public the run would use; the first one.")
    ] = None,
    stand_in: Annotated[
        str | None, typer.Option(help="Which of data.public plays the private data.")
    ] = None,
    folds: Annotated[int, typer.Option(min=3, help="Ways to cut the stand-in.")] = 4,
    as_json: Json = False,
) -> None:
    """Rehearse on public data what CONFIG would do, and recommend a method. Costs no privacy.

    The private data are not opened.
    """
    from dpspan.advice import advise
    from dpspan.cli.tasks import Untouched, budget_of, model_factory, warm_start_of
    from dpspan.comparison import Task
    from dpspan.config import load_config
    from dpspan.data import load
    from dpspan.public import PublicData

    settings = load_config(config)
    records = records or settings.data.records
    if records is None:
        raise ValueError(
            "Expected data.records or --records, about how many private records there are: the "
            "private data are not opened to count them."
        )
    classes = settings.data.classes
    loaded = {name: load(each, classes=classes) for name, each in settings.data.public.items()}
    if not loaded:
        raise ValueError("Expected data.public: advice is found on labelled public data.")
    data = {name: PublicData.of(each.tensors, name=name) for name, each in loaded.items()}
    used = next(iter(data)) if public is None else public
    for name in (used, *([] if stand_in is None else [stand_in])):
        if name not in data:
            raise ValueError(f"Expected one of {', '.join(data)} under data.public, got '{name}'.")
    task = Task(
        model=model_factory(settings, loaded[used]),
        private=Untouched(),
        test=Untouched(),
        batch_size=settings.training.batch_size,
        epochs=settings.training.epochs,
        budget=budget_of(settings),
        public=data[used],
        warm_start=warm_start_of(settings, data),
    )
    advice = advise(
        task,
        records=records,
        stand_in=None if stand_in is None else data[stand_in],
        folds=folds,
        console=None if as_json else err(),
    )
    if as_json:
        print_json(advice.to_dict())
    else:
        out().print(advice)
