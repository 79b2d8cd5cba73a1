"""Which method and settings: `dpspan advise` asks public data, `dpspan tune` private, for ε."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from rich.console import Console

import dpspan
from dpspan.app.cli.app import Json, Quiet, answer, app, four_digits
from dpspan.app.cli.comparing import check_compared
from dpspan.support.checks import expect
from dpspan.support.files import replacing

if TYPE_CHECKING:
    from dpspan.app.advice import Advice
    from dpspan.app.config import Config
    from dpspan.app.run.task import Contender, Task

_Range = tuple[float, float]
_SECTIONS = {"DPSGD": "dpsgd", "RGP": "rgp", "PDPSGD": "pdpsgd", "GEP": "gep"}
_SECTIONS |= {"NoisyAdaGrad": "adagrad"}
_KEYS = ("clip", "rank", "residual_clip", "steps")
_WRITTEN = "# What `dpspan advise {0}` recommends: {1}\n"


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
    to: Annotated[
        Path | None, typer.Option("--out", help="What to write; CONFIG-advised.yaml by default.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Replace an existing file.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Rehearse on public data what CONFIG would do, and recommend a method. Costs no privacy.

    The private data are not opened. CONFIG is tried beside other methods, all by its optimizer and
    schedule, with learning rates around its own. What did best is written as a configuration.
    """
    to = to or config.with_name(f"{config.stem}-advised.yaml")
    if to.exists() and not force:
        raise ValueError(f"{to} exists already: pass --force to replace it, or --out.")
    settings, records = _advisable(config, records)
    from dpspan.app.advice import RATES, advise

    data, used, task, own, others = _planned(config.stem, settings, records, public, stand_in)
    rate = own.learning_rate or 1.0
    advice = advise(
        task,
        [own, *others],
        stand_in=None if stand_in is None else data[stand_in],
        rates=[rate * each / RATES[len(RATES) // 2] for each in RATES],
        folds=folds,
        jobs=jobs,
        console=None if as_json or quiet else Console(stderr=True),
    )
    if settings.choose is not None:
        note = f"The private choice may fall on other public data than “{used}”, used here."
        advice = dataclasses.replace(advice, notes=(*advice.notes, note))
    advised = _advised(settings, advice, own, others, used)
    if advised is None:
        note = "No configuration is written, as none of private training is recommended."
    else:
        text = yaml.safe_dump(advised.model_dump(mode="json", exclude_unset=True), sort_keys=False)
        with replacing(to, what="the configuration") as temporary:
            said = advice.sentences()[0]
            temporary.write_text(_WRITTEN.format(config.name, said) + text, encoding="utf-8")
        note = f"Wrote {to}. Next: dpspan train {to}"
    written = {"config": None if advised is None else str(to)}
    answer(dataclasses.asdict(advice) | written, advice, as_json=as_json, quiet=quiet, note=note)


def _advisable(path: Path, records: int | None) -> tuple[Config, int]:
    """The configuration, and about how many records it is for."""
    from dpspan.app.config import load_config

    settings = load_config(path)
    if settings.features is not None:
        without = "leave it out to compare methods on the images themselves"
        raise ValueError(f"`dpspan advise` does not know the `features` section: {without}.")
    records = records or settings.data.records
    if records is None:
        unopened = "the private data are not opened to count them"
        raise ValueError(f"Expected data.records or --records, about how many: {unopened}.")
    if not settings.data.public:
        elsewhere = "docs/which-method.md says what did best elsewhere"
        raise ValueError(f"Expected data.public with labels, to rehearse on; {elsewhere}.")
    check_compared(settings)
    return settings, records


def _planned(
    name: str, settings: Config, records: int, public: str | None, stand_in: str | None
) -> tuple[dict[str, dpspan.PublicData], str, Task, Contender, list[Contender]]:
    """Public data and which of them is used, the task, and its contenders: CONFIG's, and others."""
    from torch.utils.data import Dataset

    from dpspan.accounting.events import pure_event
    from dpspan.app.advice import default_contenders
    from dpspan.app.config.methods import ConvexSection
    from dpspan.app.data import load
    from dpspan.app.run.columns import frozen_columns
    from dpspan.app.run.from_config import contender_of, task_of
    from dpspan.app.run.scene import OnCuts

    columns, classes = frozen_columns(settings), settings.data.labels
    loaded = {
        name: load(each, classes=classes, preprocessing=columns)
        for name, each in settings.data.public.items()
    }
    data = {name: dpspan.PublicData.of(each.tensors, name=name) for name, each in loaded.items()}
    start = None if settings.warm_start is None else settings.warm_start.public
    used = public or getattr(settings.method, "public", None) or start or next(iter(data))
    for each in {used, stand_in} - {None}:
        expect(each in data, f"one of {', '.join(data)} under data.public", each)
    paid = None
    if settings.choose is not None:  # the record of what it will cost
        ledger = dpspan.Ledger()
        ledger.charge(pure_event(settings.choose.epsilon))
        paid = ledger.state_dict()
    none: Dataset[Any] = Dataset()  # in place of private records: neither read nor counted
    task = task_of(settings, loaded[used], none)
    task = dataclasses.replace(task, private=none, records=records, public=data[used])
    own = contender_of(name, settings, data, steps=task.steps, chosen=used, paid=paid)
    task = dataclasses.replace(task, warm_start=own.warm_start)
    same = ("optimizer", "schedule", "low_pass", "average_weights")  # as they will be written
    shared: dict[str, Any] = {each: getattr(own, each) for each in same}
    others = [
        dataclasses.replace(c, **shared, paid=paid if getattr(c.method, "public", None) else None)
        for c in default_contenders(task)
    ]
    if settings.model.name == "logistic":
        adagrad = ConvexSection(name="adagrad").build(None, steps=1)
        plain = dataclasses.replace(own, name="AdaGrad", method=adagrad, warm_start=None)
        others += [plain] if settings.method.name != "adagrad" else []
        if cuts := OnCuts.of(task, data[used]):
            others.append(dataclasses.replace(plain, name="AdaGrad, 4 cuts", model=cuts))
    return data, used, task, own, others


def _advised(
    settings: Config, advice: Advice, own: Contender, others: list[Contender], used: str
) -> Config | None:
    """CONFIG with what did best in place of its own; None where that was no private training."""
    from dpspan.app.run.scene import BehindLayer

    best = {each.name: each for each in (own, *others)}.get(advice.recommended)
    trial = next((each for each in advice.trials if each.name == advice.recommended), None)
    if best is None or trial is None or trial.settings is None:
        return None
    document = settings.model_dump(mode="json", exclude_unset=True)
    document["training"]["optimizer"]["learning_rate"] = trial.learning_rate
    if best is not own:
        public = {} if getattr(best.method, "public", None) is None else {"public": used}
        kept = {key: trial.settings[key] for key in _KEYS if key in trial.settings}
        document["method"] = {"name": _SECTIONS[trial.settings["method"]], **kept, **public}
        for section, is_used in {"warm_start": best.warm_start, "choose": public}.items():
            if not is_used:
                document.pop(section, None)
        if best.warm_start is not None:
            document.setdefault("warm_start", {"public": used})
        if "choose" in document:
            del document["method"]["public"]
    if isinstance(best.model, BehindLayer):  # records are seen through it as they are
        layer = best.model
        document["features"] = {"name": layer.section, "public": used, **layer.settings}
        document["model"] = {"name": "logistic"}
        document.pop("trainable", None)
        for key in ("augment", "views"):
            document["training"].pop(key, None)
    if "steps" in trial.settings:  # all at once, by a rate of the method's own
        document["method"]["learning_rate"] = trial.learning_rate
    return type(settings).model_validate(document)


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
    document = {**dataclasses.asdict(found), "folder": str(found.folder)}
    answer(document, as_json=as_json, quiet=quiet, note=note)
