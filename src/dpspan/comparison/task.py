"""What is compared: one task, several contenders, and the baselines that are always among them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from dpspan.accounting import Budget
from dpspan.checks import check_count, check_number, expect
from dpspan.mechanisms import DPSGD, Method
from dpspan.public import PublicData
from dpspan.transfer import WarmStart

PUBLIC_ONLY = "public only"
WARM = "warm start + "


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """What is learnt, from which data, for how long and at what price; the same for everybody.

    Args:
        model: makes a model with new weights; called once a run, under the run's seed.
        private: the private records.
        test: what models are measured on. Unless `test_is_public`, every number measured on it is
            called `unprivate_…` and left out of reports.
        batch_size: expected batch size.
        epochs: of private training.
        budget: ε and δ of each run.
        public: labelled public data, if there are any.
        warm_start: how to train on them first; `WarmStart(data=public)` by default.
        criterion: the loss.
        test_is_public: whether the test records are nobody's secret.
    """

    model: Callable[[], nn.Module]
    private: Dataset[Any]
    test: Dataset[Any]
    batch_size: int
    epochs: int
    budget: Budget
    public: object = field(default=None, repr=False)
    warm_start: WarmStart | None = None
    criterion: nn.Module = field(default_factory=nn.CrossEntropyLoss)
    test_is_public: bool = True

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs"):
            check_count(name, getattr(self, name))
        expect(callable(self.model), "model to be a function that makes a model", self.model)

    @property
    def start(self) -> WarmStart | None:
        """The warm start that the public labels allow; None without such labels."""
        if self.warm_start is not None:
            return self.warm_start
        if self.public is None:
            return None
        data = PublicData.of(self.public)
        return WarmStart(data=data) if data.labelled else None


@dataclass(frozen=True, kw_only=True, eq=False)
class Contender:
    """One row of a comparison: a method with its learning rate, from scratch or warm-started.

    Args:
        name: in tables, and the name of the folder with its runs.
        method: None trains on public data only.
        learning_rate: of SGD, for the private steps.
        momentum: of SGD.
        warm_start: training on labelled public data before the first private step.
        paid: `ledger.state_dict()` of what was released to set this contender up (a private choice
            of public data); each run's ε includes it. Contenders that share one such release get
            the same object.
    """

    name: str
    method: Method | None = None
    learning_rate: float | None = None
    momentum: float = 0.0
    warm_start: WarmStart | None = None
    paid: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        expect(isinstance(self.name, str) and bool(self.name), "name to be a text", self.name)
        momentum = check_number("momentum", self.momentum)
        expect(0 <= momentum < 1, "0 <= momentum < 1", self.momentum)
        if self.method is None:
            expect(
                self.warm_start is not None,
                f"a method or a warm_start for '{self.name}'",
                None,
            )
            return
        if self.learning_rate is None:
            raise ValueError(f"Expected a learning_rate for '{self.name}': pass learning_rate=.")
        rate = check_number("learning_rate", self.learning_rate)
        expect(0 < rate < math.inf, "learning_rate > 0", self.learning_rate)

    def describe(self) -> dict[str, Any]:
        """The configuration as plain values; data by their digests."""
        start, public = self.warm_start, getattr(self.method, "public", None)
        warm = None
        if start is not None:
            digest = PublicData.of(start.data).digest
            warm = {**start.describe(), "seed": "the run's", "data": digest}
        paid = self.paid
        return {
            "name": self.name,
            "method": None if self.method is None else self.method.describe(),
            "public": None if public is None else PublicData.of(public).digest,
            "learning_rate": self.learning_rate,
            "momentum": self.momentum,
            "warm_start": warm,
            "paid": None if paid is None else {key: paid[key] for key in ("saved_by", "events")},
        }


def with_baselines(task: Task, contenders: Sequence[Contender]) -> tuple[Contender, ...]:
    """The contenders, and what a user with labelled public data would try first.

    Those are training on the public data alone, which is free, and DP-SGD after it. Papers leave
    them out; a comparison must not.
    """
    names = [contender.name for contender in contenders]
    repeated = sorted({name for name in names if names.count(name) > 1})
    expect(not repeated, "every contender to have a name of its own", repeated)
    plain = [c for c in contenders if isinstance(c.method, DPSGD)]
    if not plain:
        raise ValueError(
            "Expected DP-SGD among the contenders: without it nobody could tell what the others "
            "are worth. Add Contender(name='DP-SGD', method=DPSGD(clip=1.0), learning_rate=...)."
        )
    start = task.start
    if start is None:
        return tuple(contenders)
    added = []
    if not any(c.method is None for c in contenders):
        added.append(Contender(name=PUBLIC_ONLY, warm_start=start))
    if not any(c.warm_start is not None for c in plain):
        warm = dataclasses.replace(plain[0], name=WARM + plain[0].name, warm_start=start)
        added.append(warm)
    return (*added, *contenders)
