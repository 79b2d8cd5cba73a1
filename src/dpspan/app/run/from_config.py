"""From a configuration to its data and model, a task and a contender, the choice, and `train`."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from torch.utils.data import Dataset

from dpspan.accounting.promises import Budget, warn_of_weaknesses
from dpspan.app.config import Config, parse_config
from dpspan.app.config.methods import ConvexSection
from dpspan.app.data import ImageFolder, Loaded, Source, load
from dpspan.app.preprocessing import Preprocessing, spelt
from dpspan.app.run.columns import budget_of, frozen_columns
from dpspan.app.run.evaluation import Evaluation, groups_of
from dpspan.app.run.folder import RunFolder, read_json
from dpspan.app.run.models import _rehearse, device_of, new_model
from dpspan.app.run.prospects import rehearsed
from dpspan.app.run.resumable import Progress, Result, Run
from dpspan.app.run.task import Contender, FixedNoise, Preparation, Task, in_batches
from dpspan.app.section import read_text
from dpspan.choose import Choice, choose_public
from dpspan.convex.thermometer import ThermometerFeatures
from dpspan.public.data import PublicData
from dpspan.public.patches import PatchFeatures, encode, encode_public
from dpspan.public.pretrained import PretrainedFeatures
from dpspan.support.distributed import Processes
from dpspan.support.randomness import seeded
from dpspan.support.units import Units

FEATURES: Mapping[str, Any] = {
    "patches": PatchFeatures,
    "pretrained": PretrainedFeatures,
    "thermometer": ThermometerFeatures,
}
_SECRET = "This message depends on private data: do not publish it."
_EQUAL = "test records that equal private or public ones are declared to be other people's"
_GO_BACK = "Go back to those, or choose another output folder."


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

    Under torchrun all processes train one model together, and the first one writes.
    """
    processes = Processes.of_torchrun()
    if isinstance(config, Config):
        text = str(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    else:
        text = read_text(config)
        config = parse_config(text, name=str(config))
    folder = RunFolder(config.output.folder, writes=processes.is_first)
    with ExitStack() as stack:
        with processes.together():
            stack.enter_context(folder.locked())
            if processes.is_first and folder.checkpoint.exists() and not resume:
                folder.begin_anew()
            spent = isinstance(config.method, ConvexSection) or config.budget.epsilon is not None
            if folder.finished and not folder.checkpoint.exists() and spent:  # too little is left
                held = f"{folder.path} holds a run already"
                raise ValueError(f"{held}. Choose another output folder.")
        with processes.together():
            run = _prepared(config, folder, processes)
        run.start()
        folder.write_text(folder.config, text)
        folder.write_about(config.report)
        return run.go(watch, stop)


def _prepared(config: Config, folder: RunFolder, processes: Processes) -> Run:
    """Read the data, and choose among public ones if that was not done; here ε may be spent."""
    if processes.world > 1 and (
        config.features is not None
        or (config.choose is not None and not folder.choice.exists())
        or (config.data.releases and not folder.preprocessing.exists())
    ):
        raise RuntimeError(
            "One process learns `features`, makes the choice of `choose` and releases bounds of "
            "columns: run `dpspan choose` first, and train with `features` or such bounds without "
            "torchrun."
        )
    folder.refuse_lost_ledger()
    goes_on = folder.checkpoint.exists()
    parts = make_parts(config, folder, goes_on=goes_on, pays=True)
    chosen = None if config.choose is None else chosen_public(config, parts, folder)["chosen"]
    if (facts := folder.facts) is not None and (goes_on or folder.finished):
        folder.refuse_other_settings(config.fixed(), facts["settings"])
    folder.keep_columns(parts.columns)  # not before: they are a part of the model that is there
    if not goes_on:
        folder.remove(folder.features)  # of a run that never came to a step
        if parts.layer is not None:
            parts.layer.save(folder.features)
    shown = config.data.test_is_public or config.output.unprivate_metrics
    test = parts.test.dataset if parts.test is not None and shown else None
    task, name = task_of(config, parts.private, test, parts), folder.path.resolve().name
    contender = contender_of(name, config, parts.public, steps=task.steps, chosen=chosen)
    notes: list[str] = []
    if not goes_on and processes.world == 1:
        known = list(parts.public.values())
        if test is not None and task.test_is_public:
            known.append(PublicData.of(test, name="test"))
        notes += rehearsed(task, contender, known)
    return Run(
        task=replace(task, model=lambda: parts.model),
        contender=contender,
        seed=config.training.seed,
        folder=folder,
        settings=config.fixed(),
        scale=parts.private.scale,
        features=None if parts.layer is None else parts.layer.digest,
        output=config.output,
        processes=processes,
        notes=notes,
        evaluation=evaluation_of(config, parts),
    )


def evaluation_of(config: Config, parts: Parts) -> Evaluation:
    """What is measured at the end; test data that are not public only if noise pays for it."""
    judge, tested, groups = config.evaluate, config.data.test, None
    if judge.by is not None and tested is not None and parts.test is not None:
        groups = groups_of(judge.by, tested.ids(judge.by), len(parts.test.dataset))
    unseen = parts.test.dataset if parts.test is not None and judge.noise_multiplier else None
    return Evaluation(section=judge, target=config.data.target, groups=groups, unseen=unseen)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run is made of. The model is at the weights that it starts from."""

    private: Loaded
    public: Mapping[str, PublicData]
    test: Loaded | None
    model: nn.Module
    layer: PatchFeatures | None  # what all of these data have been through
    columns: Preprocessing | None  # what became of those of tables
    notes: Sequence[str]  # what the certificate has to say of test data


def make_parts(
    config: Config,
    folder: RunFolder | None = None,
    *,
    goes_on: bool = False,
    pays: bool = False,
    used: Collection[str] | None = None,
) -> Parts:
    """Read the data and build the model; refuse what would make the guarantee an empty one.

    A frozen layer is learnt, or that of the folder if its run `goes_on`. What becomes of columns is
    found unless the folder keeps it; bounds of them are released if the run `pays` for that. What
    is `used` of data.public, by default by this configuration, can be no test data.
    """
    kept = folder.kept_features if folder and goes_on and config.features else None
    data, device = config.data, device_of(config)
    columns = frozen_columns(config, folder, pays=pays)
    private, public = _load("data.private", data.private, config, columns), {}
    if data.unit is not None:
        private = replace(private, units=_units(config, len(private.dataset)))
    test = None if data.test is None else _load("data.test", data.test, config, columns, private)
    notes = [_EQUAL] * data.equal_rows_allowed
    for name, source in data.public.items():
        read = _load(f"data.public.{name}", source, config, columns, private, public=True)
        public[name] = PublicData.of(read.tensors, name=name)
        if test is not None and name in (config.used_public if used is None else used):
            notes += _shared(config, name, read, test)
    count = data.records or private.count  # stated, or told by the sampling rate
    what = "record" if private.units is None else "unit"
    warn_of_weaknesses(config.budget.epsilon, config.budget.delta, count, unit=what)
    layer = _layer(config, public, device, kept)
    if layer is not None:
        private = replace(private, dataset=encode(layer, private.dataset))
        public = {name: encode_public(layer, each) for name, each in public.items()}
        test = None if test is None else replace(test, dataset=encode(layer, test.dataset))
    with seeded(config.training.seed):
        model = new_model(config, private).to(device)
        _rehearse(model, private, device)
    read_in: Any = {"private": private, "public": public, "test": test, "columns": columns}
    return Parts(**read_in, model=model, layer=layer, notes=notes)


def _load(
    where: str,
    source: Source,
    config: Config,
    columns: Preprocessing | None,
    private: Loaded | None = None,
    public: bool = False,
) -> Loaded:
    """Read a source; beside the private data, refuse what does not fit them or copies them."""
    loaded = load(source, classes=config.data.labels, preprocessing=columns)
    if not loaded.labelled and not public:
        raise ValueError(f"Expected labels in {where}, got inputs only: name where its labels are.")
    if private is None:
        return loaded
    _check_alike(where, source, loaded, config, private)
    if copies := loaded.copies_of(private):
        count = f"{len(copies)} of the {len(loaded.dataset)} samples"
        found = f"{count} of {where} also occur in the private data"
        how = "exact copies" if columns is None else "equal as data.preprocessing makes them"
        example = f"{how}, e.g. sample {copies[0]}"
        if public:
            raise ValueError(
                f"{found} ({example}), however the two are scaled. If private records got into the "
                "public data, give other public data. If these records really are public, remove "
                f"them from the private data. {_SECRET}"
            )
        if config.data.equal_rows_allowed:
            return loaded
        if config.data.test_is_public:  # what is measured on private records is not
            raise ValueError(
                f"{found} ({example}), so results on them are not public. If private records got "
                "into the test data, take them out there. If these records really are public, take "
                "them out of the private data; if they are other people's, of the same values, say "
                "`equal_rows_allowed: true` under data. Or leave test_is_public out: results are "
                f"then not shown. {_SECRET}"
            )
        cure = "they say nothing about new records, and an audit must not use them"
        warnings.warn(f"dpspan: {found}: {cure}. {_SECRET}", stacklevel=2)
    return loaded


def _check_alike(
    where: str, source: Source, loaded: Loaded, config: Config, private: Loaded
) -> None:
    """Refuse what means something else than in the private data."""
    own = config.data.private
    if loaded.shape != private.shape:
        wanted = f"samples of shape {private.shape}, that of the private data"
        raise ValueError(f"Expected {wanted}, in {where}, got {loaded.shape}.")
    if loaded.scale != private.scale and None in (source.scale, own.scale):
        by = f"divided by {private.scale:g} in data.private, and in {where} by {loaded.scale:g}"
        raise ValueError(
            f"Inputs are {by}: only whole numbers of 8 bits are taken for pixels. Look at what "
            "both files hold, and write `scale` in both, the same if they are of one kind."
        )
    if (loaded.scale, source.mean, source.std) != (private.scale, own.mean, own.std):
        warnings.warn(
            f"dpspan: {where} and data.private differ in scale, mean or std. If both files hold "
            "the same kind of numbers, write the same constants in both.",
            stacklevel=3,
        )
    if isinstance(source, ImageFolder) and isinstance(own, ImageFolder) and source.labelled:
        classes: Any = config.data.labels  # numbers go with no folders
        if source.class_names(classes) != own.class_names(classes):
            raise ValueError(
                f"The folders of {where} have other names than those of data.private, so that "
                "their numbers differ in meaning. List the names of all classes in `classes`."
            )


def _shared(config: Config, name: str, public: Loaded, test: Loaded) -> list[str]:
    """Refuse test data that the model learns from; a few equal rows are for the certificate."""
    copies = [] if config.data.equal_rows_allowed else test.copies_of(public)
    if not copies:
        return []
    count = f"{len(copies)} of the {len(test.dataset)} samples of data.test"
    found = f"{count} also occur in data.public.{name}, which the model learns from"
    shown = config.data.test_is_public
    whole = len(copies) == len(test.dataset)
    if whole or len(public.copies_of(test)) == len(public.dataset):
        raise ValueError(
            f"{found}: results on them say nothing about new records. Give other test data, or "
            "other public data. If they are other people's, of the same values, say "
            f"`equal_rows_allowed: true` under data. {'' if shown else _SECRET}".rstrip()
        )
    told = f"{found}: they say nothing about new records. {'' if shown else _SECRET}"
    warnings.warn(f"dpspan: {told}".rstrip(), stacklevel=3)
    return [found] * shown


def _units(config: Config, records: int) -> Units:
    """Whose the private records are; refuses those whose other records are public."""
    data, unit = config.data, str(config.data.unit)
    ids = data.private.ids(unit)
    if ids is None:
        where = f"{data.private.path}, which has none '{unit}'"
        raise ValueError(f"Expected data.unit to be a column (or array) of {where}.")
    units = Units.of(ids, data.records_per_unit, records=records, name="data.unit")
    private, tests = set(map(_who, ids)), {} if data.test is None else {"data.test": data.test}
    others = {f"data.public.{name}": source for name, source in data.public.items()} | tests
    for where, source in others.items():
        theirs = source.ids(unit)
        known = private.intersection(() if theirs is None else map(_who, theirs))
        found = f"{len(known)} units of {where} also occur in the private data, by {unit}"
        if known and (where not in tests or data.test_is_public):
            raise ValueError(
                f"{found}: what is public of them cannot be private. Take their records out of one "
                f"of the two. {_SECRET}"
            )
        if known:
            new = "they say nothing about new units"
            warnings.warn(f"dpspan: {found}: {new}. {_SECRET}", stacklevel=2)
    return units


def _who(unit: Any) -> str:
    """An id as text, the same in a file where a gap has made fractions of all ids."""
    return spelt(unit).removesuffix(".0")


def _layer(
    config: Config, public: Mapping[str, PublicData], device: torch.device, kept: Path | None
) -> Any:
    """The frozen layer, if any: kept, or learnt now. Elsewhere its last digits would be others."""
    section, seed = config.features, config.training.seed
    if section is None:
        return None
    data = public[section.public]
    kind = FEATURES[section.name]
    if kept is None:
        return kind.learn(data, **section.settings, seed=seed, device=device)
    layer = kind.load(kept, data)
    if layer.settings != {**section.settings, "seed": seed}:
        before = "other settings than the section `features`, or another seed"
        raise ValueError(f"{kept} was learnt with {before}. {_GO_BACK}")
    return layer.to(device)


def preparation_of(config: Config, parts: Parts) -> Preparation:
    """What became of the data before anything is trained."""
    planned = config.data.preprocessing.values()
    bounded = any(column.origin == "public rows" for column in planned)
    return Preparation(
        notes=tuple(parts.notes),
        described=tuple(parts.public.values()) if bounded else (),
        columns=parts.columns,
    )


def task_of(
    config: Config, private: Loaded, test: Dataset[Any] | None, parts: Parts | None = None
) -> Task:
    """What is learnt from the private samples; with all `parts`, what became of those before."""
    # Without a section that older folders do not know, if it is not used.
    shared = {"data", "model", "trainable"} | ({"features"} if config.features else set())
    return Task(
        model=functools.partial(new_model, config, private),
        private=private.dataset,
        test=test,
        batch_size=config.training.batch_size,
        epochs=config.training.epochs,
        budget=budget_of(config),
        criterion=nn.CrossEntropyLoss() if config.data.target is None else nn.MSELoss(),
        numeric=config.data.target is not None,
        test_is_public=config.data.test_is_public,
        records=config.data.records,
        unit=private.units,
        records_per_unit=config.data.records_per_unit,
        accountant=config.budget.accountant,
        secure_mode=config.budget.secure_mode,
        physical_batch_size=config.training.physical_batch_size,
        cuda_graphs=config.training.cuda_graphs,
        device=device_of(config),
        sample_shape=private.shape,
        about=config.model_dump(mode="json", include=shared),
        preparation=Preparation() if parts is None else preparation_of(config, parts),
    )


def contender_of(
    name: str,
    config: Config,
    public: Mapping[str, PublicData],
    *,
    steps: int,
    chosen: str | None = None,
    paid: Mapping[str, Any] | None = None,
) -> Contender:
    """A configuration as one row, for so many steps; `chosen` and `paid` are of its `choose`."""
    training = config.training
    named = getattr(config.method, "public", None) if config.choose is None else chosen
    start = None
    if (section := config.warm_start) is not None:
        start = section.build(public[section.public], config.trainable, seed=training.seed)
    method = config.method.build(None if named is None else public[named], steps=steps)
    convex = getattr(method, "method", None)
    return Contender(
        name=name,
        method=method,
        learning_rate=(convex or training.optimizer).learning_rate,
        optimizer=training.optimizer.build,
        schedule=training.schedule.factor,
        warm_start=start,
        low_pass=training.low_pass,
        average_weights=training.average_weights,
        augment=None if training.augment is None else training.augment.built(),
        views=training.views,
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

    choose = functools.partial(
        choose_public,
        parts.model,
        nn.CrossEntropyLoss(),
        in_batches(parts.private.dataset, config.training.batch_size),
        parts.public,
        **settings.model_dump(),
        records=config.data.records,
        unit=parts.private.units,
        seed=config.training.seed,
    )
    accountant = config.budget.accountant
    return choose_once(folder, asked, choose, accountant=accountant, budget=budget_of(config))


def choose_once(
    folder: RunFolder,
    asked: Mapping[str, Any],
    choose: Callable[..., Choice],  # of a ledger
    *,
    accountant: str = "pld",
    budget: Budget | FixedNoise | None = None,
) -> dict[str, Any]:
    """What was chosen in this folder; to choose again would be one more release.

    The ledger is on the disk before the choice is. A run that has begun chooses no more: what it
    has certified would leave the choice out.
    """
    if folder.choice.exists():
        made: dict[str, Any] = read_json(folder.choice)
        if made.get("asked") != asked:
            before = "other settings or other candidates, and has been paid for"
            raise ValueError(f"{folder.choice} was chosen with {before}. {_GO_BACK}")
        return made
    if folder.certified:
        raise ValueError(
            f"{folder.path} holds a run that was made without {folder.choice.name}, and a choice "
            "made now would be missing from its certificate. Restore that file if it was lost, or "
            "choose another output folder."
        )
    ledger = folder.open_ledger(accountant, budget)
    choice = choose(ledger=ledger)
    folder.write_ledger(ledger)
    made = {"chosen": choice.name, "epsilon": choice.epsilon, "note": choice.note, "asked": asked}
    folder.write_json(folder.choice, made)
    return made
