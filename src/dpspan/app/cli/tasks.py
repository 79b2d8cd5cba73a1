"""From configurations to what `compare` and `advise` take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import nn
from torch.utils.data import Dataset

from dpspan.accounting.epsilon import Budget
from dpspan.accounting.events import pure_event
from dpspan.accounting.ledger import Ledger
from dpspan.app.comparison import Contender, Task
from dpspan.app.config import Config
from dpspan.app.data import Loaded
from dpspan.app.run.run_inputs import device_of, new_model, trainable_of
from dpspan.engine.sampling import PoissonDraw
from dpspan.public.data import PublicData
from dpspan.public.warm_start import WarmStart


class Untouched(Dataset[object]):
    """Stands where private records would be, and refuses to be read."""

    def __len__(self) -> int:
        self._refuse()

    def __getitem__(self, index: int) -> object:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RuntimeError("Private records were asked for where none may be used.")


def task_of(
    config: Config,
    *,
    like: Loaded,
    private: Dataset[Any],
    test: Dataset[Any],
    public: PublicData | None = None,
    warm_start: WarmStart | None = None,
) -> Task:
    """What is learnt, from samples like these."""
    if config.budget.epsilon is None:
        raise ValueError("Expected budget.epsilon: what is compared has one price.")

    def model() -> nn.Module:
        return new_model(config, like)

    return Task(
        model=model,
        private=private,
        test=test,
        batch_size=config.training.batch_size,
        epochs=config.training.epochs,
        budget=Budget(epsilon=config.budget.epsilon, delta=config.budget.delta),
        public=public,
        warm_start=warm_start,
        test_is_public=config.data.test_is_public,
        records=config.data.records,
        accountant=config.budget.accountant,
        physical_batch_size=config.training.physical_batch_size,
        device=device_of(config),
        about=_about(config),
    )


def _about(config: Config) -> dict[str, Any]:
    """What all rows share; without a section that older folders do not know, if it is not used."""
    shared = {"data", "model", "trainable"} | ({"features"} if config.features else set())
    return config.model_dump(mode="json", include=shared)


def warm_start_of(config: Config, public: Mapping[str, PublicData]) -> WarmStart | None:
    """The configuration's, if it has one; each run has a seed of its own."""
    section = config.warm_start
    if section is None:
        return None
    seed = config.training.seed
    return section.build(public[section.public], trainable_of(config), seed=seed)


def planned_choice(config: Config) -> Mapping[str, Any] | None:
    """The record of what the `choose` section will cost; None without one."""
    if config.choose is None:
        return None
    ledger = Ledger()
    ledger.charge(pure_event(config.choose.epsilon))
    return ledger.state_dict()


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
    rate = min(1.0, config.training.batch_size / records)
    draw = PoissonDraw.one_pass(records=records, sample_rate=rate)
    named = getattr(config.method, "public", None) if config.choose is None else chosen
    training = config.training
    return Contender(
        name=name,
        method=config.method.build(
            None if named is None else public[named], steps=training.epochs * draw.steps_per_epoch
        ),
        learning_rate=training.optimizer.learning_rate,
        optimizer=training.optimizer.build,
        schedule=training.schedule.factor,
        warm_start=warm_start_of(config, public),
        paid=None if config.choose is None else paid,
    )
