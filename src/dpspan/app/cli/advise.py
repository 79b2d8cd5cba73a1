"""`dpspan advise`: what to do with a private dataset, asked of public data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpspan.app.cli.app import Json, Quiet, app, err, out, print_json

if TYPE_CHECKING:
    from dpspan.app.config import Config


@app.command(name="advise")
def advise_command(
    config: Annotated[Path, typer.Argument(help="The configuration of the run to be.")],
    records: Annotated[
        int | None, typer.Option(help="Number of private records, if data.records does not say it.")
    ] = None,
    public: Annotated[
        str | None, typer.Option(help="Which of data.public the run would use, if not CONFIG's.")
    ] = None,
    stand_in: Annotated[
        str | None, typer.Option(help="Which of data.public plays the private data.")
    ] = None,
    folds: Annotated[int, typer.Option(min=3, help="Ways to cut the stand-in.")] = 4,
    jobs: Annotated[int, typer.Option(min=1, help="Trainings at a time.")] = 1,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Rehearse on public data what CONFIG would do, and recommend a method. Costs no privacy.

    The private data are not opened. CONFIG is tried beside other methods, all by its optimizer and
    schedule, with learning rates around its own.
    """
    settings, records = _read(config, records)
    from torch.utils.data import Dataset

    from dpspan.app.advice import RATES, advise, default_contenders
    from dpspan.app.data import load
    from dpspan.app.run.from_config import contender_of, task_of
    from dpspan.public.data import PublicData

    classes = settings.data.classes
    loaded = {name: load(each, classes=classes) for name, each in settings.data.public.items()}
    data = {name: PublicData.of(each.tensors, name=name) for name, each in loaded.items()}
    start = None if settings.warm_start is None else settings.warm_start.public
    used = public or getattr(settings.method, "public", None) or start or next(iter(data))
    for name in (used, *([] if stand_in is None else [stand_in])):
        if name not in data:
            raise ValueError(f"Expected one of {', '.join(data)} under data.public, got '{name}'.")
    paid = _planned_choice(settings)
    own = contender_of(config.stem, settings, data, records=records, chosen=used, paid=paid)
    none: Dataset[Any] = Dataset()  # in place of private records: neither read nor counted
    warm: dict[str, Any] = {"public": data[used], "warm_start": own.warm_start}
    task = task_of(settings, loaded[used], none, none, **warm)
    others = [
        dataclasses.replace(
            c,
            optimizer=own.optimizer,
            schedule=own.schedule,
            paid=paid if getattr(c.method, "public", None) else None,
        )
        for c in default_contenders(task)
    ]
    assert own.learning_rate is not None
    advice = advise(
        task,
        [own, *others],
        records=records,
        stand_in=None if stand_in is None else data[stand_in],
        rates=[own.learning_rate * rate / RATES[len(RATES) // 2] for rate in RATES],
        folds=folds,
        jobs=jobs,
        console=None if as_json or quiet else err(),
    )
    if settings.choose is not None:
        note = f"The private choice may fall on other public data than “{used}”, used here."
        advice = dataclasses.replace(advice, notes=(*advice.notes, note))
    if as_json:
        print_json(advice.to_dict())
    else:
        out().print(advice)


def _read(path: Path, records: int | None) -> tuple[Config, int]:
    """The configuration, and about how many records it is for."""
    from dpspan.app.config import load_config

    settings = load_config(path)
    if settings.features is not None:
        raise ValueError(
            "`dpspan advise` does not know the `features` section. Leave it out to compare methods "
            "on the images themselves."
        )
    records = records or settings.data.records
    if records is None:
        raise ValueError(
            "Expected data.records or --records, about how many private records there are: the "
            "private data are not opened to count them."
        )
    if not settings.data.public:
        raise ValueError("Expected data.public: advice is found on labelled public data.")
    if settings.budget.epsilon is None:
        raise ValueError("Expected budget.epsilon: what is compared has one price.")
    return settings, records


def _planned_choice(config: Config) -> Mapping[str, Any] | None:
    """The record of what the `choose` section will cost; None without one."""
    from dpspan.accounting.events import pure_event
    from dpspan.accounting.ledger import Ledger

    if config.choose is None:
        return None
    ledger = Ledger()
    ledger.charge(pure_event(config.choose.epsilon))
    return ledger.state_dict()
