"""What is trained: a task, its contenders, and the baselines of every comparison."""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from dp_accounting.dp_event import DpEvent
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from dpspan.accounting.epsilon import check_accountant
from dpspan.accounting.ledger import Ledger
from dpspan.accounting.promises import Budget
from dpspan.app.preprocessing import Preprocessing
from dpspan.app.run.full_batch import FullBatch
from dpspan.engine.plan import units_of
from dpspan.engine.sampling import PoissonDraw
from dpspan.mechanisms import DPSGD, Method
from dpspan.public.data import PublicData
from dpspan.public.overlap import Encoded
from dpspan.public.warm_start import WarmStart
from dpspan.support.checks import (
    check_count,
    check_fraction,
    check_number,
    check_positive,
    expect,
)
from dpspan.support.randomness import seeded
from dpspan.support.strict_json import plain
from dpspan.support.units import RECORDS_PER_UNIT, Ids, Units

Spent = tuple[tuple[DpEvent, int], ...]

PUBLIC_ONLY = "public only"
_STEPS = 1000  # at which a schedule is sampled to describe it
_HOW_IT_RUNS = {"params", "foreach", "fused", "capturable", "differentiable"}  # and changes nothing


@dataclass(frozen=True, kw_only=True)
class FixedNoise:
    """In place of a budget: the noise multiplier is given, and ε at δ is what comes out."""

    noise_multiplier: float
    delta: float


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What became of the data before a run, and has to be on its certificate."""

    notes: tuple[str, ...] = ()
    described: tuple[PublicData, ...] = ()  # public rows in which bounds of columns were found
    columns: Preprocessing | None = None  # what became of those of tables

    def put_on(self, ledger: Ledger) -> None:
        """The notes, and what is declared to be public."""
        ledger.warn(*self.notes)
        for data in self.described:
            detail = "bounds and values of columns"
            ledger.declare_public(data.name, data.digest, data.count, detail=detail)

    def summary(self) -> dict[str, Any]:
        """For the certificate's `training`."""
        return {} if self.columns is None else {"preprocessing": self.columns.summary()}


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
        numeric: whether labels are numbers, of which only the loss is measured, not classes.
        test_is_public: declares that the test records are nobody's secret.
        records: about how many private records there are, as a public number: the sampling rate is
            batch_size / records. Without it the exact number is used, and certificates tell it.
            With `unit`, about how many units.
        unit: as for `make_private`: one id a record, if a person may have several.
        records_per_unit: most records of one unit in a step.
        accountant: "pld" or "rdp".
        secure_mode: as for `PrivacyEngine`.
        physical_batch_size: most samples to process at once.
        cuda_graphs: as for `make_private`.
        device: where models are trained.
        sample_shape: of one sample, which is public; kept with runs for whoever loads a model.
        about: public facts about data and model, as plain values: they are kept with every run,
            and a folder takes no runs of which they differ.
        preparation: what became of the data before.
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
    numeric: bool = False
    test_is_public: bool = False
    records: int | None = None
    unit: Ids | Units | None = field(default=None, repr=False)
    records_per_unit: int = RECORDS_PER_UNIT
    accountant: str = "pld"
    secure_mode: bool = False
    physical_batch_size: int | None = None
    cuda_graphs: bool = False
    device: str | torch.device = "cpu"
    sample_shape: tuple[int, ...] | None = None
    about: Mapping[str, Any] | None = None
    preparation: Preparation = Preparation()

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "records", "physical_batch_size"):
            if getattr(self, name) is not None or name in ("batch_size", "epochs"):
                check_count(name, getattr(self, name))
        check_accountant(self.accountant)
        expect(callable(self.model), "model to be a function that makes a model", self.model)

    @property
    def count(self) -> int:
        """About how many private records, or units: as stated, or what the sampling rate tells."""
        records = self.records or self.drawn
        expect(records > 0, "at least 1 private record", records)
        return records

    @functools.cached_property
    def units(self) -> Units | None:
        """Whose records they are."""
        return units_of(self.unit, self.records_per_unit, in_batches(self.private, self.batch_size))

    @property
    def protects(self) -> str:
        """One "record", or one "unit" of them."""
        return "record" if self.unit is None else "unit"

    @property
    def drawn(self) -> int:
        """How many records, or units, batches are drawn from."""
        return len(self.private if self.units is None else self.units)  # type: ignore[arg-type]

    @property
    def sample_rate(self) -> float:
        """q; counts the private records unless `records` does."""
        return min(1.0, self.batch_size / self.count)

    @property
    def steps(self) -> int:
        """Of all epochs of private training together."""
        draw = PoissonDraw.one_pass(records=self.count, sample_rate=self.sample_rate)
        return self.epochs * draw.steps_per_epoch

    @property
    def start(self) -> WarmStart | None:
        """The warm start that the public labels allow; None without such labels."""
        if self.warm_start is not None or self.public is None:
            return self.warm_start
        data = PublicData.of(self.public)
        return WarmStart(data=data) if data.labelled else None

    def metric(self, name: str) -> str:
        return f"test_{name}" if self.test_is_public else f"unprivate_test_{name}"

    def new_model(self, seed: int, make: Callable[[], nn.Module] | None = None) -> nn.Module:
        torch.empty(0, device=self.device)  # a GPU's generator is seeded once the GPU is in use
        with seeded(seed):
            return (make or self.model)().to(self.device)


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
        model: makes a model of its own in place of the task's, such as a linear layer on frozen
            `PatchFeatures`.
        paid: `ledger.state_dict()` of what was released to set this contender up (a private choice
            of public data); each run's ε includes it. Contenders that share one such release get
            the same record.
        low_pass, average_weights: as for `make_private`; averaged ones are measured and kept.
        augment, views: so many copies of each input, changed at random (`RandomAffine()`).
    """

    name: str
    method: Method | FullBatch | None = None
    learning_rate: float | None = None
    momentum: float = 0.0
    optimizer: Callable[..., Optimizer] | None = None
    schedule: Callable[[int, int], float] | None = None
    warm_start: WarmStart | None = None
    model: Callable[[], nn.Module] | None = None
    paid: Mapping[str, Any] | None = None
    low_pass: float | None = None
    average_weights: float | None = None
    augment: Callable[[Tensor], Tensor] | None = None
    views: int = 1

    def __post_init__(self) -> None:
        expect(isinstance(self.name, str) and bool(self.name), "name to be a text", self.name)
        momentum = check_number("momentum", self.momentum)
        expect(0 <= momentum < 1, "0 <= momentum < 1", self.momentum)
        for name in ("low_pass", "average_weights"):
            if getattr(self, name) is not None:
                check_fraction(name, getattr(self, name))
        views = check_count("views", self.views)
        expect(views == 1 or self.augment is not None, "augment= beside views=", self.views)
        if self.method is None:
            expect(self.warm_start is not None, f"a method or a warm_start for '{self.name}'", None)
            return
        if self.learning_rate is None:
            raise ValueError(f"Expected a learning_rate for '{self.name}': pass learning_rate=.")
        check_positive("learning_rate", self.learning_rate)
        if self.optimizer is not None and momentum:
            both = f"got both for '{self.name}': give the momentum to the optimizer"
            raise ValueError(f"Expected momentum without an optimizer, {both}.")
        self.describe_steps()  # whatever is wrong with them is said now

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        factory = self.optimizer or functools.partial(SGD, momentum=self.momentum)
        return factory(parameters, lr=self.learning_rate)

    def warmed(self, start: WarmStart) -> Self:
        return dataclasses.replace(self, name=f"warm start + {self.name}", warm_start=start)

    @property
    def spent(self) -> Spent:
        """What was released before the first step of its runs."""
        return () if self.paid is None else Ledger.from_state(self.paid).events

    def seeded_start(self, seed: int) -> WarmStart | None:
        return self.warm_start and dataclasses.replace(self.warm_start, seed=seed)

    def describe(self) -> dict[str, Any]:
        """The configuration as plain values; data by their digests."""
        method, start, paid = self.method, self.warm_start, self.paid
        public, warm = getattr(method, "public", None), None
        if start is not None:
            digest = PublicData.of(start.data).digest
            warm = {**start.describe(), "seed": "the run's", "data": digest}
        return {
            "name": self.name,
            "method": None if method is None else method.describe(),
            "public": None if public is None else PublicData.of(public).digest,
            "learning_rate": self.learning_rate,
            **self.describe_steps(),
            **self._describe_model(),
            "warm_start": warm,
            "paid": None if paid is None else {key: paid[key] for key in ("saved_by", "events")},
            **({"low_pass": self.low_pass} if self.low_pass else {}),  # if it is used
            **({"average_weights": self.average_weights} if self.average_weights else {}),
            **({"augment": repr(self.augment), "views": self.views} if self.augment else {}),
        }

    def _describe_model(self) -> dict[str, Any]:
        """What it is made of, and what is frozen in it; nothing where the model is the task's."""
        if self.model is None:
            return {}
        with seeded(0):
            made = self.model()
        frozen = hashlib.sha256()
        for name, numbers in sorted(made.named_buffers()):
            frozen.update(name.encode() + numbers.cpu().contiguous().numpy().tobytes())
        return {"model": str(made), "frozen": frozen.hexdigest()}

    def describe_steps(self) -> dict[str, Any]:
        """Optimizer and schedule, known by what they do: two lambdas have the same name."""
        optimizer = schedule = None
        if self.learning_rate is not None:
            made = self.build_optimizer([nn.Parameter(torch.zeros(s)) for s in ((2, 2), (2,))])
            expect(isinstance(made, Optimizer), "optimizer to make a torch optimizer", made)
            groups = [{k: g[k] for k in g if k not in _HOW_IT_RUNS} for g in made.param_groups]
            known = json.loads(json.dumps(groups, default=repr))
            optimizer = {"name": type(made).__name__, "groups": known}
        if self.schedule is not None:
            factors = [float(self.schedule(step, _STEPS)) for step in range(_STEPS)]
            wrong = [factor for factor in factors if not 0 <= factor < math.inf]
            expect(not wrong, "a schedule of finite factors >= 0", next(iter(wrong), None))
            text = ",".join(f"{factor:.9g}" for factor in factors)
            digest = hashlib.sha256(text.encode()).hexdigest()
            schedule = {"first": factors[0], "last": factors[-1], "sha256": digest}
        return {"optimizer": optimizer, "schedule": schedule}


def with_baselines(task: Task, contenders: Sequence[Contender]) -> tuple[Contender, ...]:
    """The contenders, and what a user with labelled public data would try first.

    Those are training on the public data alone, which is free, and DP-SGD after it. Papers leave
    them out; a comparison must not.
    """
    names = [contender.name for contender in contenders]
    repeated = sorted({name for name in names if names.count(name) > 1})
    expect(not repeated, "every contender to have a name of its own", ", ".join(repeated))
    plain = [c for c in contenders if isinstance(c.method, DPSGD) and c.model is None]
    if not plain:
        raise ValueError(
            "Expected DP-SGD among the contenders: without it nobody could tell what the others "
            "are worth. Add Contender(name='DP-SGD', method=DPSGD(clip=1.0), learning_rate=...)."
        )
    start, added = task.start, []
    if start is not None and all(c.method is not None for c in contenders):
        added.append(Contender(name=PUBLIC_ONLY, warm_start=start))
    if start is not None and all(c.warm_start is None for c in plain):
        added.append(plain[0].warmed(start))
    return (*added, *contenders)


def settings_of(task: Task, contender: Contender, seed: int) -> dict[str, Any]:
    """What makes two runs the same, as it looks after a way through JSON; public things only."""
    shared = ("epochs", "batch_size", "records", "accountant", "about")
    settings = {
        **contender.describe(),
        "seed": seed,
        **dataclasses.asdict(task.budget),
        **{name: getattr(task, name) for name in shared},
        **({} if task.unit is None else {"records_per_unit": task.records_per_unit}),
        **({"secure_mode": True} if task.secure_mode else {}),
        "criterion": str(task.criterion),
        "metric": task.metric("accuracy"),
    }
    return dict(plain(settings))


class _Records(TensorDataset):
    """Samples in memory, a batch read at once: one at a time would take most of a step."""

    def __init__(self, dataset: Dataset[Any], tensors: Iterable[Tensor]) -> None:
        super().__init__(*tensors)
        self.dataset = dataset  # which may be an encoded one, or a part of one

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        chosen = torch.as_tensor(indices)
        return tuple(tensor[chosen] for tensor in self.tensors)


def _collate(batch: Any) -> Any:
    """A batch that was read at once is one already."""
    return batch if isinstance(batch, tuple) else tuple(default_collate(batch))


def in_batches(dataset: Dataset[Any], batch_size: int) -> DataLoader[Any]:
    """A loader over the samples."""
    whole: Any = dataset.dataset if type(dataset) is Subset else dataset
    # A subclass of somebody else's may have another length, and give samples in another form.
    if type(whole) in (TensorDataset, Encoded):
        rows = dataset.indices if isinstance(dataset, Subset) else slice(None)
        records = _Records(dataset, (tensor[rows] for tensor in whole.tensors))
        return DataLoader(records, batch_size=batch_size, collate_fn=_collate)
    return DataLoader(dataset, batch_size=batch_size)
