"""The plan of a private run: all that decides what it costs, before a private record is read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dp_accounting import DpEvent
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpspan.accounting.calibration import calibrate_event
from dpspan.accounting.epsilon import account
from dpspan.accounting.ledger import RECORDS_TOLD, UNITS_TOLD, Ledger
from dpspan.accounting.promises import Budget
from dpspan.engine.sampling import Draw, PartitionDraw, PoissonDraw, records_of
from dpspan.mechanisms.base import Method
from dpspan.public.warm_start import WarmStart
from dpspan.support.checks import (
    check_count,
    check_fraction,
    check_positive,
    expect,
    html_table,
)
from dpspan.support.moved import without_retired_options
from dpspan.support.randomness import fresh_seed, seeded
from dpspan.support.secure import SECURE
from dpspan.support.sharded import name_of
from dpspan.support.units import Ids, Units

_SPREAD = 2.33  # standard deviations of a Poisson draw: the normal's 99th percentile
_WHY_TOLD = (
    "it follows from the sampling rate, which was taken from the dataset's length. If it is a "
    "secret, give sample_rate= and expected_batch_size= (data.records in a configuration)"
)
_UNIT = "all records of one id"
_PARTITION = (
    "batches were a partition of the data, not Poisson samples: each epoch is accounted as one "
    "Gaussian mechanism without amplification"
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one run will do with private data; `print(engine.plan)` shows it."""

    method: Method
    sampling: Draw
    noise_multiplier: float  # z, of each event
    expected_batch_size: float  # L, by which a released sum is divided
    loss_reduction: str  # 'mean' or 'sum', of the loss that `backward()` is called on
    views: int  # rows that the model sees of each record
    model: str
    trainable_parameters: int
    accountant: str
    tells_records: bool  # the number of records, or of units, follows from `sampling`
    records_per_unit: int | None = None  # most of one unit in a step; None: each is its own unit
    secure_mode: bool = False  # whether noise and batches come from a cryptographic generator
    epochs: int | None = None  # how many were asked for, and what they may cost
    budget: Budget | None = None
    post_processing: Mapping[str, float] = field(default_factory=dict)  # of what is released
    public: tuple[str, ...] = field(default=(), compare=False)  # what is used, in words

    @property
    def unit(self) -> str:
        """What the guarantee is about: one "record", or one "unit" of them."""
        return "record" if self.records_per_unit is None else "unit"

    @property
    def event(self) -> DpEvent:
        """What is charged before a release: one step, or an epoch of a partition."""
        return self.sampling.event(self.noise_multiplier)

    def most_at_once(self, processes: int = 1) -> int:
        """Size of padded pieces, by public numbers: for one draw of a hundred it takes two."""
        expected = self.expected_batch_size
        return math.ceil((expected + _SPREAD * math.sqrt(expected)) / processes / 8) * 8

    def epsilon(self, epochs: int | None = None, delta: float | None = None) -> float:
        """ε of so many epochs alone, by default those asked for; the ledger may hold more."""
        epochs = check_count("epochs", self.epochs if epochs is None else epochs)
        if delta is None:
            expect(self.budget is not None, "delta=, as the run has no budget", delta)
            assert self.budget is not None
            delta = self.budget.delta
        events = [(self.event, epochs * self.sampling.events_per_epoch)]
        return account(events, delta, self.accountant).epsilon

    @property
    def warnings(self) -> list[str]:
        """What the certificate has to say of the way batches are drawn."""
        partition = isinstance(self.sampling, PartitionDraw)
        told = RECORDS_TOLD if self.unit == "record" else UNITS_TOLD
        return [f"{told}: {_WHY_TOLD}"] * self.tells_records + [_PARTITION] * partition

    def describe(self) -> dict[str, Any]:
        """As the certificate shows it, and as a checkpoint is recognised by."""
        most = self.records_per_unit
        return {
            **({} if most is None else {"unit": _UNIT, "records_per_unit": most}),
            **({"noise": SECURE} if self.secure_mode else {}),
            **self.method.describe(),
            "noise_multiplier": self.noise_multiplier,
            "sampling": repr(self.sampling),
            "expected_batch_size": self.expected_batch_size,
            "loss_reduction": self.loss_reduction,
            "views": self.views,
            "model": self.model,
            "trainable_parameters": self.trainable_parameters,
            **({"post_processing": self.post_processing} if self.post_processing else {}),
        }

    def check_described(self, described: dict[str, Any]) -> None:
        """ValueError if a saved description is another plan's."""
        mine, theirs = self.describe(), without_retired_options(described)
        different = [
            f"{key} is {theirs.get(key)!r} there, {mine.get(key)!r} here"
            for key in {**mine, **theirs}
            if theirs.get(key) != mine.get(key)
        ]
        if different:
            raise ValueError(
                f"The state does not fit this run: {'; '.join(different)}. Set the engine up as it "
                "was when the state was saved."
            )

    def __str__(self) -> str:
        how = {k: v for k, v in self.method.describe().items() if k != "method" and v is not None}
        how |= self.post_processing
        settings = ", ".join(f"{name}={value}" for name, value in how.items())
        per_epoch, most = self.sampling.events_per_epoch, self.records_per_unit
        steps = f"{per_epoch} to an epoch" + (f", {self.epochs} epochs" if self.epochs else "")
        lines = {
            "model": f"{self.model}, {self.trainable_parameters:,} trainable parameters",
            "method": f"{type(self.method).__name__}({settings})",
            "sampling": f"{self.sampling!r}, divided by L = {self.expected_batch_size:g}",
            "event": f"{self.event}; {steps}",
            "unit": "" if most is None else f"{_UNIT}, of which a step uses at most {most}",
            "noise": f"z = {self.noise_multiplier:g}" + f", {SECURE}" * self.secure_mode,
            "expected ε": self._expected(),
            "public": "; ".join(self.public) or "nothing",
        }
        return "\n".join(f"{name:<11} {value}" for name, value in lines.items() if value)

    def _repr_html_(self) -> str:
        return html_table((line[:11], line[12:]) for line in str(self).splitlines())

    def _expected(self) -> str:
        if self.noise_multiplier == 0:
            return "none: without noise nothing is private"
        if self.budget is None:
            return "see plan.epsilon(epochs, delta)"
        return f"{self.epsilon():.3g} at δ = {self.budget.delta:g} for {self.epochs} epochs"


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a run is asked for: the arguments of `make_private`, and of the engine."""

    module: nn.Module
    optimizer: Optimizer
    data_loader: DataLoader[Any]
    noise_multiplier: float
    method: Method
    criterion: nn.Module | None
    loss_reduction: str
    poisson_sampling: bool
    sample_rate: float | None
    expected_batch_size: float | None
    max_physical_batch_size: int | None
    views: int
    low_pass: float | None
    average_weights: float | None
    units: Units | None
    warm_start: WarmStart | None
    cuda_graphs: bool
    non_private: bool
    secure_mode: bool
    seed: int | None  # for debugging: such a run is not private


def calibrated(sampling: Draw, epochs: int, budget: Budget, ledger: Ledger) -> tuple[float, int]:
    """The least noise multiplier for so many epochs beside the ledger's; and their events."""
    events = check_count("epochs", epochs) * sampling.events_per_epoch
    z = calibrate_event(
        sampling.event, events, budget, accountant=ledger.accountant, spent=ledger.events
    )
    return z, events


def units_of(unit: Ids | Units | None, most: int, loader: DataLoader[Any]) -> Units | None:
    """Whose records they are, by one id each or by a function, which is given all of them."""
    if unit is None:
        return None
    records, dataset = records_of(loader), loader.dataset
    if callable(unit):
        with seeded(fresh_seed()):  # a dataset may draw random numbers for every record
            unit = [unit(dataset[place]) for place in range(records)]
    return Units.of(unit, most, records=records)


def plan_sampling(
    loader: DataLoader[Any],
    poisson_sampling: bool,
    sample_rate: float | None,
    units: Units | None = None,
) -> Draw:
    """How batches are drawn: at a given rate, or as large as the loader's on average."""
    records = records_of(loader) if units is None else len(units)
    if sample_rate is None:
        sample_rate = min(1.0, (loader.batch_size or 0) / records)  # the 0 is for mypy
    poisson = PoissonDraw.one_pass(records=records, sample_rate=sample_rate)
    if poisson_sampling:
        return poisson
    return PartitionDraw(records=records, batches=poisson.steps_per_epoch)


def plan_run(given: Given, accountant: str) -> Plan:
    """The plan of a run with these settings; whatever cannot be planned is refused."""
    if given.noise_multiplier == 0 and (given.secure_mode or not given.non_private):
        raise ValueError(
            "noise_multiplier = 0 gives no privacy. To train without noise on purpose, pass "
            "non_private=True, and no secure_mode; the certificate will say so."
        )
    module, loader, rate, units = given.module, given.data_loader, given.sample_rate, given.units
    sampling = plan_sampling(loader, given.poisson_sampling, rate, units)
    sampling.event(given.noise_multiplier)  # which refuses what is no noise multiplier
    size = given.expected_batch_size
    if size is None:
        size = loader.batch_size or 0
        if rate is None:  # both from the data, and the certificate says so
            size = min(size, sampling.records)
    smoothing = {"low_pass": given.low_pass, "average_weights": given.average_weights}
    smoothed = {name: share for name, share in smoothing.items() if share is not None}
    for name, share in smoothed.items():
        check_fraction(name, share)
    return Plan(
        method=given.method,
        sampling=sampling,
        noise_multiplier=given.noise_multiplier,
        expected_batch_size=check_positive("expected_batch_size", size),
        loss_reduction=given.loss_reduction,
        views=check_count("views", given.views),
        model=name_of(module),
        trainable_parameters=sum(p.numel() for p in module.parameters() if p.requires_grad),
        accountant=accountant,
        tells_records=rate is None,
        records_per_unit=None if units is None else units.most,
        secure_mode=given.secure_mode,
        post_processing=smoothed,
    )
