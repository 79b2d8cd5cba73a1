"""What a run trains: a task, a contender, and the baselines that belong to every comparison."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from dp_accounting.dp_event import DpEvent
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset

from dpspan.accounting.epsilon import Budget, check_accountant
from dpspan.accounting.ledger import Ledger
from dpspan.mechanisms import DPSGD, Method
from dpspan.public.data import PublicData
from dpspan.public.warm_start import WarmStart
from dpspan.support.checks import check_count, check_number, check_positive, expect
from dpspan.support.randomness import seeded

PUBLIC_ONLY = "public only"

# factory(parameters, lr=rate), as torch.optim.Adam is called
OptimizerFactory = Callable[..., Optimizer]
# schedule(step, steps): what the learning rate is multiplied by
Schedule = Callable[[int, int], float]

_STEPS = 1000  # at which a schedule is sampled to describe it
_HOW_IT_RUNS = {"params", "foreach", "fused", "capturable", "differentiable"}  # and changes nothing


@dataclass(frozen=True, kw_only=True)
class FixedNoise:
    """In place of a budget: the noise multiplier is given, and ε at δ is what comes out."""

    noise_multiplier: float
    delta: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """What is learnt, from which data, for how long and at what price; the same for everybody.

    Args:
        model: makes a model with new weights; called once a run, under the run's seed.
        private: the private records.
        test: what models are measured on; None for nothing. Unless `test_is_public`, every number
            measured on it is called `unprivate_…` and left out of reports.
        batch_size: expected batch size.
        epochs: of private training.
        budget: ε and δ of each run.
        public: labelled public data, if there are any.
        warm_start: how to train on them first; `WarmStart(data=public)` by default.
        criterion: the loss.
        test_is_public: declares that the test records are nobody's secret.
        records: about how many private records there are, as a public number: the sampling rate is
            batch_size / records. Without it the exact number is used, and certificates tell it.
        accountant: "pld" or "rdp".
        physical_batch_size: most samples to process at once.
        device: where models are trained.
        about: public facts about data and model, as plain values: they are kept with every run,
            and a folder takes no runs of which they differ.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from torch.utils.data import TensorDataset
        >>> import dpspan
        >>> x, y = torch.randn(300, 4), torch.arange(300) % 2
        >>> task = dpspan.Task(
        ...     model=lambda: nn.Linear(4, 2),
        ...     private=TensorDataset(x[:200], y[:200]),
        ...     test=TensorDataset(x[200:], y[200:]),
        ...     batch_size=50,
        ...     epochs=2,
        ...     budget=dpspan.Budget(epsilon=3.0, delta=1e-4),
        ... )
    """

    model: Callable[[], nn.Module]
    private: Dataset[Any]
    test: Dataset[Any] | None
    batch_size: int
    epochs: int
    budget: Budget | FixedNoise
    public: object = field(default=None, repr=False)
    warm_start: WarmStart | None = None
    criterion: nn.Module = field(default_factory=nn.CrossEntropyLoss)
    test_is_public: bool = False
    records: int | None = None
    accountant: str = "pld"
    physical_batch_size: int | None = None
    device: str | torch.device = "cpu"
    about: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "records", "physical_batch_size"):
            if getattr(self, name) is not None or name in ("batch_size", "epochs"):
                check_count(name, getattr(self, name))
        check_accountant(self.accountant)
        expect(callable(self.model), "model to be a function that makes a model", self.model)

    @property
    def count(self) -> int:
        """About how many private records there are: as stated, or what the sampling rate tells."""
        records = self.records or len(self.private)  # type: ignore[arg-type]
        expect(records > 0, "at least 1 private record", records)
        return records

    @property
    def sample_rate(self) -> float:
        """q; counts the private records unless `records` does."""
        return min(1.0, self.batch_size / self.count)

    @property
    def start(self) -> WarmStart | None:
        """The warm start that the public labels allow; None without such labels."""
        if self.warm_start is not None or self.public is None:
            return self.warm_start
        data = PublicData.of(self.public)
        return WarmStart(data=data) if data.labelled else None

    def metric(self, name: str) -> str:
        """What a number measured on the test records is called."""
        return f"test_{name}" if self.test_is_public else f"unprivate_test_{name}"

    def new_model(self, seed: int) -> nn.Module:
        """A model with the weights of that seed."""
        torch.empty(0, device=self.device)  # a GPU's generator is seeded once the GPU is in use
        with seeded(seed):
            return self.model().to(self.device)


@dataclass(frozen=True, kw_only=True, eq=False)
class Contender:
    """One row of a comparison: a method with its learning rate, from scratch or warm-started.

    Args:
        name: in tables, and the name of the folder with its runs.
        method: None trains on public data only.
        learning_rate: of the private steps.
        momentum: of SGD, which is the optimizer if none is given.
        optimizer: makes any other one, called like torch's: `torch.optim.Adam`, or
            `functools.partial(torch.optim.AdamW, weight_decay=0.1)`.
        schedule: schedule(step, steps) is what the learning rate is multiplied by at a step.
        warm_start: training on labelled public data before the first private step.
        paid: `ledger.state_dict()` of what was released to set this contender up (a private choice
            of public data); each run's ε includes it. Contenders that share one such release get
            the same record.

    Examples:
        >>> import dpspan
        >>> contender = dpspan.Contender(
        ...     name="DP-SGD", method=dpspan.DPSGD(clip=1.0), learning_rate=0.5
        ... )
    """

    name: str
    method: Method | None = None
    learning_rate: float | None = None
    momentum: float = 0.0
    optimizer: OptimizerFactory | None = None
    schedule: Schedule | None = None
    warm_start: WarmStart | None = None
    paid: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        expect(isinstance(self.name, str) and bool(self.name), "name to be a text", self.name)
        momentum = check_number("momentum", self.momentum)
        expect(0 <= momentum < 1, "0 <= momentum < 1", self.momentum)
        if self.method is None:
            needed = f"a method or a warm_start for '{self.name}'"
            expect(self.warm_start is not None, needed, None)
            return
        if self.learning_rate is None:
            raise ValueError(f"Expected a learning_rate for '{self.name}': pass learning_rate=.")
        check_positive("learning_rate", self.learning_rate)
        if self.optimizer is not None and momentum:
            raise ValueError(
                f"Expected momentum without an optimizer, got both for '{self.name}': give the "
                "momentum to the optimizer."
            )
        self.describe_steps()  # whatever is wrong with them is said now

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """The optimizer of the private steps."""
        return self._factory(parameters, lr=self.learning_rate)

    def warmed(self, start: WarmStart) -> Contender:
        """The same after a warm start."""
        return dataclasses.replace(self, name=f"warm start + {self.name}", warm_start=start)

    @property
    def spent(self) -> tuple[tuple[DpEvent, int], ...]:
        """What was released before the first step of its runs."""
        return () if self.paid is None else Ledger.from_state(self.paid).events

    def seeded_start(self, seed: int) -> WarmStart | None:
        """The warm start of the run with that seed."""
        start = self.warm_start
        return None if start is None else dataclasses.replace(start, seed=seed)

    def describe_steps(self) -> dict[str, Any]:
        """Optimizer and schedule as plain values."""
        rate, schedule = self.learning_rate, self.schedule
        return {
            "optimizer": None if rate is None else _describe_optimizer(self._factory, rate),
            "schedule": None if schedule is None else _describe_schedule(schedule),
        }

    @property
    def _factory(self) -> OptimizerFactory:
        return self.optimizer or functools.partial(SGD, momentum=self.momentum)

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
            **self.describe_steps(),
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
    expect(not repeated, "every contender to have a name of its own", ", ".join(repeated))
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
        added.append(plain[0].warmed(start))
    return (*added, *contenders)


# An optimizer and a schedule are known by what they do, not by their names: two lambdas have the
# same name.
def _describe_optimizer(factory: OptimizerFactory, learning_rate: float) -> dict[str, Any]:
    """The class that it makes for a small model, and its settings."""
    parameters = [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))]
    made = factory(parameters, lr=learning_rate)
    expect(isinstance(made, Optimizer), "optimizer to make a torch optimizer", made)
    groups = [
        {key: _plain(value) for key, value in group.items() if key not in _HOW_IT_RUNS}
        for group in made.param_groups
    ]
    return {"name": type(made).__name__, "groups": groups}


def _describe_schedule(schedule: Schedule) -> dict[str, Any]:
    """Its factors over 1,000 steps: the first, the last, and a digest of them all."""
    factors = [float(schedule(step, _STEPS)) for step in range(_STEPS)]
    wrong = [factor for factor in factors if not 0 <= factor < math.inf]
    expect(not wrong, "a schedule of finite factors >= 0", next(iter(wrong), None))
    text = ",".join(f"{factor:.9g}" for factor in factors)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"first": factors[0], "last": factors[-1], "sha256": digest}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | bool | int | float | None) else repr(value)
