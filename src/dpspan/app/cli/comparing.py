"""Commands about several methods at one price: `dpspan compare` and `demo`."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

import dpspan
from dpspan.app.cli.app import Json, Quiet, answer, app
from dpspan.support.checks import expect

if TYPE_CHECKING:
    from dpspan.app.config import Config
    from dpspan.app.run.task import Contender, Task

# What the rows of a comparison have in common
_SHARED = ("data", "features", "model", "trainable", "budget")
_TRAINING = ("epochs", "batch_size", "physical_batch_size", "cuda_graphs", "device", "seed")


@app.command(name="compare")
def compare_command(
    configs: Annotated[list[Path], typer.Argument(help="Configurations, one row each.")],
    to: Annotated[Path, typer.Option("--out", help="Folder for all runs.")],
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each row.")] = 3,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    search: Annotated[
        int | None,
        typer.Option(min=3, help="Learning rates to try for each row. Outside of ε, and so noted."),
    ] = None,
    on_ray: Annotated[
        bool, typer.Option("--ray", help="On a Ray cluster, which must share --out.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train CONFIGS at the same budget, with several seeds each. Every run is a release.

    What is learnt, for how long and at what price must be the same in all of them: data, features,
    model, trainable, budget, epochs, batch size. Their output sections are not used. DP-SGD is
    added if it is not there, and so are public data only and a warm start where there are public
    labels. Runs that were interrupted go on when the command is given again.

    With --search each row's learning rate is searched first, around its own: short trainings, then
    the two best in full with three seeds, judged by private records that are held out.
    """
    settings = _comparable(configs)
    from dpspan.app.comparison import Search, compare, verdicts
    from dpspan.app.run.on_ray import OnRay

    task, contenders = _task(settings, to)
    seed = next(iter(settings.values())).training.seed
    gpus = float(str(task.device).startswith("cuda"))
    comparison = compare(
        task,
        contenders,
        out=to,
        seeds=range(seed, seed + seeds),
        jobs=jobs,
        search=None if search is None else Search(tries=search),
        console=None if as_json or quiet else Console(stderr=True),
        executor=OnRay(gpus) if on_ray else None,
    )
    comparison.plot(to / "comparison.png")
    said = [f"• {sentence}" for sentence in verdicts(comparison)]
    note = f"Runs, comparison.json and comparison.png are in {to}. Next: dpspan report {to}"
    answer(comparison.to_dict(), comparison, *said, as_json=as_json, quiet=quiet, note=note)


def _comparable(paths: list[Path]) -> dict[str, Config]:
    """The configurations by the names of their rows; refused before anything is opened."""
    from dpspan.app.config import load_config

    names = [path.stem for path in paths]
    one_each = "configurations with different file names, which name the rows"
    expect(len(set(names)) == len(names), one_each, ", ".join(names))
    settings = {path.stem: load_config(path) for path in paths}
    first = next(iter(settings.values()))
    shared = (*_SHARED, *(f"training.{key}" for key in _TRAINING))
    for key, (name, config) in itertools.product(shared, settings.items()):
        value = operator.attrgetter(key)
        if value(config) != value(first):
            raise ValueError(
                f"Expected the same `{key}` in all configurations, got another one in {name}: a "
                "comparison is of methods, at one price."
            )
    if len({c.choose for c in settings.values() if c.choose is not None}) > 1:
        raise ValueError("Expected one `choose` section: rows that choose share what they chose.")
    if first.data.test is None:
        raise ValueError("Expected data.test: a comparison measures models on it.")
    check_compared(first)
    if any(config.evaluate.noise_multiplier is not None for config in settings.values()):
        raise ValueError("Leave evaluate.noise_multiplier out: `dpspan train` alone pays for it.")
    return settings


def check_compared(config: Config) -> None:
    """Refuse what has no one price, or no accuracy."""
    if config.budget.epsilon is None:
        raise ValueError("Expected budget.epsilon: what is compared has one price.")
    if config.data.target is not None:
        raise ValueError("Expected data.classes: accuracies are compared, data.target has none.")


def _task(settings: dict[str, Config], to: Path) -> tuple[Task, list[Contender]]:
    """A frozen layer is learnt, and a choice among public data is made, once for the folder."""
    from dpspan.app.comparison import locked, remove_summary
    from dpspan.app.config.methods import DPSGDSection
    from dpspan.app.run.folder import RunFolder, is_comparison, read_json
    from dpspan.app.run.from_config import chosen_public, contender_of, make_parts, task_of

    folder, first = RunFolder(to), next(iter(settings.values()))
    chooser = next((config for config in settings.values() if config.choose is not None), None)
    chosen, paid = None, None
    with locked(to):
        if folder.choice.exists():
            folder.refuse_lost_ledger()
        begun = is_comparison(to) or folder.features.exists()
        used = {name for config in settings.values() for name in config.used_public}
        parts = make_parts(first, folder, goes_on=begun, used=used)
        if parts.layer is not None and not begun:
            parts.layer.save(folder.features)
        if chooser is not None:
            if not folder.choice.exists():
                remove_summary(to)
            chosen = chosen_public(chooser, parts, folder)["chosen"]
            paid = read_json(folder.ledger)
        folder.write_about(first.report)
    assert parts.test is not None
    task = task_of(first, parts.private, parts.test.dataset, parts)
    contenders = [
        contender_of(name, config, parts.public, steps=task.steps, chosen=chosen, paid=paid)
        for name, config in settings.items()
    ]
    starts = [c.warm_start for c in contenders if c.warm_start is not None]
    starts += [dpspan.WarmStart(data=data) for data in parts.public.values() if data.labelled]
    if not any(isinstance(contender.method, dpspan.DPSGD) for contender in contenders):
        rule: Any = getattr(first.method, "clipping", "flat")
        method = DPSGDSection(clip=first.method.clip, clipping=rule).build(None, steps=1)
        rate = first.training.optimizer.learning_rate
        like = dataclasses.replace(contenders[0], warm_start=None, paid=None, learning_rate=rate)
        contenders.append(dataclasses.replace(like, name="DP-SGD", method=method))
    return dataclasses.replace(task, warm_start=next(iter(starts), None)), contenders


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

    tour = Console(stderr=as_json or quiet, quiet=quiet)
    comparison = run_demo(to, tour, seeds=seeds, jobs=jobs)
    if as_json or quiet:
        answer(comparison.to_dict(), comparison, as_json=as_json)
