"""`dpspan compare`: several configurations at one price, beside the baselines that cost nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpspan.app.cli.app import Json, Quiet, app, err, out, print_json, say

if TYPE_CHECKING:
    from dpspan.app.config import Config
    from dpspan.app.run.from_config import Parts
    from dpspan.app.run.training import Contender, Task

_SHARED = ("data", "features", "model", "trainable", "budget")
_SHARED_TRAINING = ("epochs", "batch_size", "physical_batch_size", "device", "seed")


@app.command(name="compare")
def compare_command(
    configs: Annotated[list[Path], typer.Argument(help="Configurations, one row each.")],
    to: Annotated[Path, typer.Option("--out", help="Folder for all runs.")],
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each row.")] = 3,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train CONFIGS at the same budget, with several seeds each. Every run is a release.

    What is learnt, for how long and at what price must be the same in all of them: data, features,
    model, trainable, budget, epochs, batch size. Their output sections are not used. DP-SGD is
    added if it is not there, and so are public data only and a warm start where there are public
    labels. Runs that were interrupted go on when the command is given again.
    """
    settings = _read(configs)
    from dpspan.app.comparison import compare, verdicts

    first = next(iter(settings.values()))
    task, contenders = _task(settings, _parts(first, to), to)
    seed = first.training.seed
    comparison = compare(
        task,
        contenders,
        out=to,
        seeds=range(seed, seed + seeds),
        jobs=jobs,
        console=None if as_json or quiet else err(),
    )
    comparison.plot(to / "comparison.png")
    if as_json:
        print_json(comparison.to_dict())
        return
    out().print(comparison)
    for sentence in verdicts(comparison):
        out().print(f"• {sentence}")
    if not quiet:
        say(f"Runs, comparison.json and comparison.png are in {to}. Next: dpspan report {to}")


def _task(settings: dict[str, Config], parts: Parts, to: Path) -> tuple[Task, list[Contender]]:
    from dpspan.app.config.sections import DPSGDSection
    from dpspan.app.run.from_config import contender_of, task_of
    from dpspan.mechanisms import DPSGD
    from dpspan.public.warm_start import WarmStart

    first, public = next(iter(settings.values())), dict(parts.public)
    chosen, paid = _choice(settings.values(), parts, to)
    records = first.data.records or len(parts.private.dataset)
    contenders = [
        contender_of(name, config, public, records=records, chosen=chosen, paid=paid)
        for name, config in settings.items()
    ]
    starts = [c.warm_start for c in contenders if c.warm_start is not None]
    starts += [WarmStart(data=data) for data in public.values() if data.labelled]
    if not any(isinstance(contender.method, DPSGD) for contender in contenders):
        section = DPSGDSection(clip=first.method.clip, clipping=first.method.clipping)
        method = section.build(None, steps=1)
        like = dataclasses.replace(contenders[0], warm_start=None, paid=None)
        contenders.append(dataclasses.replace(like, name="DP-SGD", method=method))
    assert parts.test is not None
    private, start = parts.private, next(iter(starts), None)
    task = task_of(first, private, private.dataset, parts.test.dataset, warm_start=start)
    return task, contenders


def _read(paths: list[Path]) -> dict[str, Config]:
    """The configurations by the names of their rows; refused before anything is opened."""
    from dpspan.app.config import load_config

    names = [path.stem for path in paths]
    if len(set(names)) < len(names):
        raise ValueError(
            f"Expected configurations with different file names, which are the names of the rows, "
            f"got {', '.join(names)}: rename one."
        )
    settings = {path.stem: load_config(path) for path in paths}
    first = next(iter(settings.values()))
    for name, config in settings.items():
        different = [s for s in _SHARED if getattr(config, s) != getattr(first, s)]
        different += [
            f"training.{key}"
            for key in _SHARED_TRAINING
            if getattr(config.training, key) != getattr(first.training, key)
        ]
        if different:
            raise ValueError(
                f"Expected the same `{different[0]}` in all configurations, got another one in "
                f"{name}: a comparison is of methods, at one price."
            )
    if len({c.choose for c in settings.values() if c.choose is not None}) > 1:
        raise ValueError("Expected one `choose` section: rows that choose share what they chose.")
    if first.data.test is None:
        raise ValueError("Expected data.test: a comparison measures models on it.")
    if first.budget.epsilon is None:
        raise ValueError("Expected budget.epsilon: what is compared has one price.")
    return settings


def _parts(config: Config, to: Path) -> Parts:
    """What all rows share; a frozen layer is learnt once for the folder."""
    from dpspan.app.comparison.compare import locked
    from dpspan.app.run.folder import RunFolder, is_comparison
    from dpspan.app.run.from_config import make_parts

    if config.features is None:
        return make_parts(config)
    with locked(to):
        folder = RunFolder(to)
        begun = is_comparison(to) or folder.features.exists()
        parts = make_parts(config, features=folder.kept_features(wanted=begun))
        if parts.layer is not None and not begun:
            parts.layer.save(folder.features)
    return parts


def _choice(
    settings: Iterable[Config], parts: Parts, to: Path
) -> tuple[str | None, Mapping[str, Any] | None]:
    """What the rows that choose have chosen, once for the folder, and the record of its price."""
    from dpspan.app.comparison.compare import locked, remove_summary
    from dpspan.app.run.folder import RunFolder, read_json
    from dpspan.app.run.from_config import chosen_public

    folder = RunFolder(to)
    if folder.choice.exists() and not folder.ledger.exists():
        raise ValueError(
            f"{folder.ledger} is missing, so nobody knows what {folder.choice.name} has cost. "
            "Restore it, or compare in another folder."
        )
    config = next((config for config in settings if config.choose is not None), None)
    if config is None:
        return None, None
    with locked(to):
        if not folder.choice.exists():
            remove_summary(to)
        made = chosen_public(config, parts, folder)
    return made["chosen"], read_json(folder.ledger)
