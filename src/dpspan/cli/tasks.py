"""From configurations to what `compare` and `advise` take."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from torch import nn
from torch.utils.data import Dataset

from dpspan.accounting import Budget
from dpspan.comparison import Contender
from dpspan.config import Config
from dpspan.config.training import SgdSection
from dpspan.data import Loaded
from dpspan.public import PublicData
from dpspan.sampling import PoissonDraw
from dpspan.transfer import WarmStart


class Untouched(Dataset[object]):
    """Stands where private records would be, and refuses to be read."""

    def __len__(self) -> int:
        self._refuse()

    def __getitem__(self, index: int) -> object:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RuntimeError("Private records were asked for where none may be used.")


def model_factory(config: Config, like: Loaded) -> Callable[[], nn.Module]:
    """Makes the model with new weights from torch's generator."""

    def make() -> nn.Module:
        return config.model.make(like)

    return make


def budget_of(config: Config) -> Budget:
    """(ε, δ)."""
    if config.budget.epsilon is None:
        raise ValueError("Expected budget.epsilon: what is compared has one price.")
    return Budget(epsilon=config.budget.epsilon, delta=config.budget.delta)


def warm_start_of(config: Config, public: dict[str, PublicData]) -> WarmStart | None:
    """The configuration's, if it has one."""
    section = config.warm_start
    if section is None:
        return None
    return section.build(public[section.public], None, seed=config.training.seed)


def contender_of(
    name: str, config: Config, public: dict[str, PublicData], *, records: int
) -> Contender:
    """A configuration as one row; refused if it has what a comparison does not do."""
    for section in ("trainable", "choose"):
        if getattr(config, section) is not None:
            raise ValueError(f"A comparison has no `{section}`: leave it out of {name}.")
    optimizer = config.training.optimizer
    if not isinstance(optimizer, SgdSection) or config.training.schedule.name != "constant":
        raise ValueError(
            f"A comparison trains by SGD with a constant learning rate: change {name}, or use "
            "`dpspan train` for each configuration."
        )
    rate = min(1.0, config.training.batch_size / records)
    draw = PoissonDraw.one_pass(records=records, sample_rate=rate)
    chosen = getattr(config.method, "public", None)
    return Contender(
        name=name,
        method=config.method.build(
            None if chosen is None else public[chosen],
            steps=config.training.epochs * draw.steps_per_epoch,
        ),
        learning_rate=optimizer.learning_rate,
        momentum=optimizer.momentum,
        warm_start=warm_start_of(config, public),
    )
