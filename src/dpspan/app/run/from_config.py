"""A configuration as a task and a contender, the private choice it asks for, and `train`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml
from torch import nn
from torch.utils.data import Dataset

from dpspan.accounting.epsilon import Budget
from dpspan.accounting.ledger import Ledger
from dpspan.app.config import Config, parse_config
from dpspan.app.config.yaml_file import read_text
from dpspan.app.data import Loaded
from dpspan.app.run.folder import RunFolder, read_json
from dpspan.app.run.resumable import Progress, Result, Run
from dpspan.app.run.run_inputs import Parts, device_of, make_parts, new_model, trainable_of
from dpspan.app.run.task import Contender, FixedNoise, Task
from dpspan.app.run.training import in_batches
from dpspan.choose import Choice, choose_public
from dpspan.engine.sampling import PoissonDraw
from dpspan.public.data import PublicData
from dpspan.public.warm_start import WarmStart
from dpspan.support.processes import refuse_several_processes


def train(
    config: Config | str | Path,
    *,
    resume: bool = False,
    watch: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Result:
    """Train as a configuration (or its file) says, and leave everything in its output folder.

    Args:
        config: what to do.
        resume: go on from the folder's checkpoint; from the beginning if there is none. Without it
            a folder that holds private steps is refused.
        watch: called before the first step and after every step.
        stop: asked after every step; True saves a checkpoint and ends the run, to be resumed.
    """
    refuse_several_processes()
    if isinstance(config, Config):
        text = str(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    else:
        text = read_text(config)
        config = parse_config(text, name=str(config))
    folder = RunFolder(config.output.folder)
    with folder.locked():
        if folder.checkpoint.exists() and not resume:
            folder.begin_anew()
        run = _prepared(config, folder)
        run.start()
        folder.write_text(folder.config, text)
        return run.go(watch, stop)


def _prepared(config: Config, folder: RunFolder) -> Run:
    """Read the data, and choose among public ones if that was not done; here ε may be spent."""
    folder.refuse_lost_ledger()
    goes_on = folder.checkpoint.exists()
    kept = folder.kept_features(wanted=goes_on and config.features is not None)
    parts = make_parts(config, features=kept)
    chosen = None
    if config.choose is not None:
        chosen = chosen_public(config, parts, folder)["chosen"]
    if not goes_on:
        folder.features.unlink(missing_ok=True)  # of a run that never came to a step
        if parts.layer is not None:
            parts.layer.save(folder.features)
    shown = config.data.test_is_public or config.output.unprivate_metrics
    test = parts.test.dataset if parts.test is not None and shown else None
    private, name = parts.private.dataset, folder.path.resolve().name
    records = config.data.records or len(private)
    return Run(
        task=task_of(config, parts.private, private, test, model=lambda: parts.model),
        contender=contender_of(name, config, parts.public, records=records, chosen=chosen),
        seed=config.training.seed,
        folder=folder,
        settings=config.fixed(),
        features=None if parts.layer is None else parts.layer.digest,
        output=config.output,
    )


class Untouched(Dataset[object]):
    """Stands where private records would be, and refuses to be read."""

    def __getitem__(self, index: int) -> NoReturn:
        raise RuntimeError("Private records were asked for where none may be used.")

    def __len__(self) -> int:
        raise RuntimeError("The number of private records was asked for where it may not be used.")


def task_of(
    config: Config,
    like: Loaded,
    private: Dataset[Any],
    test: Dataset[Any] | None,
    *,
    model: Callable[[], nn.Module] | None = None,
    public: PublicData | None = None,
    warm_start: WarmStart | None = None,
) -> Task:
    """What is learnt, from samples like these; the model is the configuration's by default."""
    z = config.budget.noise_multiplier
    fixed = None if z is None else FixedNoise(noise_multiplier=z, delta=config.budget.delta)
    budget = _budget(config) or fixed
    assert budget is not None
    # Without a section that older folders do not know, if it is not used.
    shared = {"data", "model", "trainable"} | ({"features"} if config.features else set())
    return Task(
        model=model or functools.partial(new_model, config, like),
        private=private,
        test=test,
        batch_size=config.training.batch_size,
        epochs=config.training.epochs,
        budget=budget,
        public=public,
        warm_start=warm_start,
        test_is_public=config.data.test_is_public,
        records=config.data.records,
        accountant=config.budget.accountant,
        physical_batch_size=config.training.physical_batch_size,
        device=device_of(config),
        about=config.model_dump(mode="json", include=shared),
    )


def warm_start_of(config: Config, public: Mapping[str, PublicData]) -> WarmStart | None:
    """The configuration's, if it has one; each run has a seed of its own."""
    if (section := config.warm_start) is None:
        return None
    data, seed = public[section.public], config.training.seed
    return section.build(data, trainable_of(config), seed=seed)


def contender_of(
    name: str,
    config: Config,
    public: Mapping[str, PublicData],
    *,
    records: int,
    chosen: str | None = None,
    paid: Mapping[str, Any] | None = None,
) -> Contender:
    """A configuration as one row; `chosen` and `paid` are of its `choose` section."""
    training = config.training
    rate = min(1.0, training.batch_size / records)
    draw = PoissonDraw.one_pass(records=records, sample_rate=rate)
    steps = training.epochs * draw.steps_per_epoch
    named = getattr(config.method, "public", None) if config.choose is None else chosen
    return Contender(
        name=name,
        method=config.method.build(None if named is None else public[named], steps=steps),
        learning_rate=training.optimizer.learning_rate,
        optimizer=training.optimizer.build,
        schedule=training.schedule.factor,
        warm_start=warm_start_of(config, public),
        paid=None if config.choose is None else paid,
    )


def chosen_public(config: Config, parts: Parts, folder: RunFolder) -> dict[str, Any]:
    """What the `choose` section has chosen, as in `choice.json`; chosen now if it is not there."""
    settings = config.choose
    assert settings is not None
    asked = {
        "settings": settings.model_dump(mode="json"),
        "candidates": {name: data.digest for name, data in parts.public.items()},
    }
    if config.features is not None:
        asked["features"] = config.features.model_dump(mode="json")

    def choose(ledger: Ledger) -> Choice:
        return choose_public(
            parts.model,
            nn.CrossEntropyLoss(),
            in_batches(parts.private.dataset, config.training.batch_size),
            parts.public,
            ledger=ledger,
            **settings.model_dump(),
            records=config.data.records,
            seed=config.training.seed,
        )

    return choose_once(
        folder, asked, choose, accountant=config.budget.accountant, budget=_budget(config)
    )


def _budget(config: Config) -> Budget | None:
    epsilon, delta = config.budget.epsilon, config.budget.delta
    return None if epsilon is None else Budget(epsilon=epsilon, delta=delta)


def choose_once(
    folder: RunFolder,
    asked: Mapping[str, Any],
    choose: Callable[[Ledger], Choice],
    *,
    accountant: str = "pld",
    budget: Budget | None = None,
) -> dict[str, Any]:
    """What was chosen in this folder; to choose again would be one more release.

    The ledger is on the disk before the choice is. A run that has begun chooses no more: what it
    has certified would leave the choice out.
    """
    if folder.choice.exists():
        made: dict[str, Any] = read_json(folder.choice)
        if made.get("asked") != asked:
            raise ValueError(
                f"{folder.choice} was chosen with other settings or other candidates, and has been "
                "paid for. Go back to those, or choose another output folder."
            )
        return made
    if folder.certified:
        raise ValueError(
            f"{folder.path} holds a run that was made without {folder.choice.name}, and a choice "
            "made now would be missing from its certificate. Restore that file if it was lost, or "
            "choose another output folder."
        )
    ledger = folder.open_ledger(accountant, budget)
    choice = choose(ledger)
    folder.write_ledger(ledger)
    made = {"chosen": choice.name, "epsilon": choice.epsilon, "note": choice.note, "asked": asked}
    folder.write_json(folder.choice, made)
    return made
