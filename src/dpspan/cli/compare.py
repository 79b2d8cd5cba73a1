"""`dpspan compare`: several configurations at one price, beside the baselines that cost nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpspan.cli.app import Json, app, err, out, print_json, say

if TYPE_CHECKING:
    from dpspan.comparison import Contender
    from dpspan.config import Config

_SHARED = ("data", "model", "budget")


@app.command(name="compare")
def compare_command(
    configs: Annotated[list[Path], typer.Argument(help="Configurations, one row each.")],
    to: Annotated[Path, typer.Option("--out", help="Folder for all runs.")],
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each row.")] = 3,
    as_json: Json = False,
) -> None:
    """Train CONFIGS at the same budget, with several seeds each. Every run is a release.

    Data, model, budget, epochs and batch size must be the same in all of them. DP-SGD is added if
    it is not there, and so are public data only and a warm start where there are public labels.
    """
    from dpspan.cli.tasks import budget_of, contender_of, model_factory
    from dpspan.comparison import Task, compare, verdicts
    from dpspan.config import load_config
    from dpspan.mechanisms import DPSGD
    from dpspan.run.parts import make_parts
    from dpspan.transfer import WarmStart

    settings = {path.stem: load_config(path) for path in configs}
    first = _common(settings)
    parts = make_parts(first)
    if parts.test is None:
        raise ValueError("Expected data.test: a comparison measures models on it.")
    public, records = dict(parts.public), len(parts.private.dataset)
    contenders = [
        contender_of(name, config, public, records=records) for name, config in settings.items()
    ]
    if not any(isinstance(contender.method, DPSGD) for contender in contenders):
        contenders.append(_plain(contenders[0], first))
    labelled = [data for data in public.values() if data.labelled]
    starts = [c.warm_start for c in contenders if c.warm_start is not None]
    start = starts[0] if starts else WarmStart(data=labelled[0]) if labelled else None
    task = Task(
        model=model_factory(first, parts.private),
        private=parts.private.dataset,
        test=parts.test.dataset,
        batch_size=first.training.batch_size,
        epochs=first.training.epochs,
        budget=budget_of(first),
        warm_start=start,
        test_is_public=first.data.test_is_public,
    )
    comparison = compare(
        task, contenders, out=to, seeds=range(seeds), console=None if as_json else err()
    )
    comparison.plot(to / "comparison.png")
    if as_json:
        print_json(comparison.to_dict())
        return
    out().print(comparison)
    for sentence in verdicts(comparison):
        out().print(f"• {sentence}")
    say(f"Runs, comparison.json and comparison.png are in {to}. Next: dpspan report {to}")


def _common(settings: dict[str, Config]) -> Config:
    (_, first), *others = settings.items()
    for name, config in others:
        different = [s for s in _SHARED if getattr(config, s) != getattr(first, s)]
        different += [
            f"training.{key}"
            for key in ("epochs", "batch_size")
            if getattr(config.training, key) != getattr(first.training, key)
        ]
        if different:
            raise ValueError(
                f"Expected the same `{different[0]}` in all configurations, got another one in "
                f"{name}: a comparison is of methods, at one price."
            )
    return first


def _plain(like: Contender, config: Config) -> Contender:
    from dpspan.mechanisms import DPSGD

    method = DPSGD(clip=config.method.clip)
    return dataclasses.replace(like, name="DP-SGD", method=method, warm_start=None)
