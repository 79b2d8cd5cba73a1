"""`dpspan compare`: several configurations at one price, beside the baselines that cost nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpspan.app.cli.app import Json, Quiet, app, err, out, print_json, say

if TYPE_CHECKING:
    from dpspan.app.comparison import Contender
    from dpspan.app.config import Config
    from dpspan.app.run.run_inputs import Parts

_SHARED = ("data", "features", "model", "trainable", "budget")
_SHARED_TRAINING = ("epochs", "batch_size", "physical_batch_size", "device", "seed")


@app.command(name="compare")
def compare_command(
    configs: Annotated[list[Path], typer.Argument(help="Configurations, one row each.")],
    to: Annotated[Path, typer.Option("--out", help="Folder for all runs.")],
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each row.")] = 3,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train CONFIGS at the same budget, with several seeds each. Every run is a release.

    What is learnt, for how long and at what price must be the same in all of them: data, features,
    model, trainable, budget, epochs, batch size. Their output sections are not used. DP-SGD is
    added if it is not there, and so are public data only and a warm start where there are public
    labels.
    """
    settings = _read(configs)
    from dpspan.app.cli.tasks import contender_of, task_of
    from dpspan.app.comparison import compare, verdicts
    from dpspan.mechanisms import DPSGD
    from dpspan.public.warm_start import WarmStart

    first = next(iter(settings.values()))
    parts = _parts(first, to)
    assert parts.test is not None
    public = dict(parts.public)
    chosen, paid = _choice(settings.values(), parts, to)
    contenders = [
        contender_of(
            name,
            config,
            public,
            records=config.data.records or len(parts.private.dataset),
            chosen=chosen,
            paid=paid,
        )
        for name, config in settings.items()
    ]
    if not any(isinstance(contender.method, DPSGD) for contender in contenders):
        contenders.append(_plain(contenders[0], first))
    labelled = [data for data in public.values() if data.labelled]
    starts = [c.warm_start for c in contenders if c.warm_start is not None]
    start = starts[0] if starts else WarmStart(data=labelled[0]) if labelled else None
    task = task_of(
        first,
        like=parts.private,
        private=parts.private.dataset,
        test=parts.test.dataset,
        warm_start=start,
    )
    seed = first.training.seed
    comparison = compare(
        task,
        contenders,
        out=to,
        seeds=range(seed, seed + seeds),
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
    from dpspan.app.comparison.folder import locked
    from dpspan.app.run.folder import RunFolder, is_comparison
    from dpspan.app.run.run_inputs import make_parts

    if config.features is None:
        return make_parts(config)
    with locked(to):
        folder = RunFolder(to)
        begun = is_comparison(to) or folder.features.exists()
        parts = make_parts(config, features=folder.kept_features(wanted=begun))
        if not begun:
            assert parts.layer is not None
            parts.layer.save(folder.features)
    return parts


def _choice(
    settings: Iterable[Config], parts: Parts, to: Path
) -> tuple[str | None, Mapping[str, Any] | None]:
    """What the rows that choose have chosen, once for the folder, and the record of its price."""
    from dpspan.app.comparison.folder import locked, take_summary_away
    from dpspan.app.run.choice import chosen_public
    from dpspan.app.run.folder import RunFolder, read_json
    from dpspan.app.run.training import run_ledger

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
            take_summary_away(to)
        made = chosen_public(config, parts, folder, run_ledger(config, folder))
    return made["chosen"], read_json(folder.ledger)


def _plain(like: Contender, config: Config) -> Contender:
    from dpspan.app.config.methods import DPSGDSection

    section = DPSGDSection(clip=config.method.clip, clipping=config.method.clipping)
    method = section.build(None, steps=1)
    return dataclasses.replace(like, name="DP-SGD", method=method, warm_start=None, paid=None)
