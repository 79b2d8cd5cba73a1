"""One private fit of a linear model, from settings and records to weights and a certificate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from dp_accounting import GaussianDpEvent
from rich.progress import track

from dpspan.accounting.calibration import calibrate_event
from dpspan.accounting.certificate import ADD_OR_REMOVE, certificate
from dpspan.accounting.epsilon import Budget
from dpspan.accounting.ledger import RECORDS_TOLD, Ledger
from dpspan.accounting.promises import check_promised_delta, warn_of_weaknesses, weaknesses
from dpspan.convex.arrays import Array, Features
from dpspan.convex.fitting import Fit, GaussianNoise, PrivateRecords
from dpspan.convex.losses import Loss
from dpspan.convex.methods import Method
from dpspan.convex.oracles import PublicSide, public_start
from dpspan.convex.public_rows import digest, refuse_overlap
from dpspan.convex.rows import Rows
from dpspan.convex.scaling import Preparation, Scaling
from dpspan.convex.schedules import ClipSchedule
from dpspan.support.checks import check_count, check_number, expect
from dpspan.support.processes import refuse_several_processes

_ZERO_OUT = "one record counted or not (then zero in every sum), the number of records being fixed"
STARTS = {"zero": lambda public: np.zeros(public.size), "public": public_start}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The public configuration of a fit."""

    epsilon: float
    delta: float
    method: Method
    clip: ClipSchedule
    loss: Loss
    outputs: int
    scaling: Scaling
    row_norm: float | None
    start: str
    records: int | None
    intercept: bool
    accountant: str | None
    seed: int | None
    verbose: bool

    def __post_init__(self) -> None:
        expect(0 < check_number("epsilon", self.epsilon) < np.inf, "0 < epsilon", self.epsilon)
        check_promised_delta("delta", self.delta)
        expect(self.start in STARTS, f"start to be one of {list(STARTS)}", self.start)
        if self.row_norm is not None:
            expect(check_number("row_norm", self.row_norm) > 0, "row_norm > 0", self.row_norm)

    def describe(self, divisor: int) -> dict[str, Any]:
        """What the certificate says about training."""
        return {
            "kind": "convex, full batch",
            "method": self.method.describe(),
            "loss": repr(self.loss),
            "clip": self.clip.describe(),
            "scaling": self.scaling.describe(),
            "row_norm": self.row_norm,
            "intercept": self.intercept,
            "start": self.start,
            "divisor": divisor,
        }


@dataclass(frozen=True, kw_only=True)
class Table:
    """Features, targets (n, c) if there are any, and what the certificate should say of them."""

    x: Features
    targets: Array | None
    name: str = ""
    detail: str = ""
    equal_rows_allowed: bool = False


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What a fit releases."""

    weights: Array  # (c, features)
    intercepts: Array  # (c,)
    preparation: Preparation
    epsilon: float
    certificate: dict[str, Any]


def learn(
    settings: Settings, private: Table, public: Table | None, ledger: Ledger | None
) -> Learned:
    """Fit privately; everything is checked before the first release."""
    refuse_several_processes()
    if private.targets is None:
        raise ValueError("Expected targets for the private records, got none.")
    count = int(private.x.shape[0])
    divisor = count if settings.records is None else check_count("records", settings.records)
    warn_of_weaknesses(settings.epsilon, settings.delta, divisor)
    if public is not None and not public.equal_rows_allowed:
        refuse_overlap(public.x, private.x, public.name)

    open_x = None if public is None else public.x
    preparation = replace(settings.scaling.prepare(open_x), row_norm=settings.row_norm)
    rows = Rows(preparation.apply(private.x), intercept=settings.intercept)
    open_rows = None if open_x is None else _public_rows(preparation.apply(open_x), settings)
    side = PublicSide(
        outputs=settings.outputs,
        width=rows.width,
        loss=settings.loss,
        rows=open_rows,
        targets=None if public is None else public.targets,
    )

    steps = settings.method.steps
    ledger = _opened(settings, ledger)
    z = _calibrated(settings.epsilon, settings.delta, steps, ledger.accountant)
    ledger.reserve(GaussianDpEvent(z), steps)
    if settings.seed is not None:
        ledger.invalidate("noise was drawn from a fixed random_state")
    if settings.records is None:  # on the ledger too, which other certificates may be made from
        ledger.warn(
            f"{RECORDS_TOLD}: a fit divides by it, {count}, and its guarantee is for {_ZERO_OUT}. "
            "Give a public number by records= if it is a secret"
        )
    for sentence in weaknesses(None, settings.delta, divisor):
        ledger.warn(sentence)
    if private.detail:
        ledger.warn(private.detail)
    if public is not None:
        ledger.declare_public(
            public.name, digest(public.x, public.targets), public.x.shape[0], public.detail
        )
    theta = settings.method.minimise(
        Fit(
            records=PrivateRecords(
                rows=rows, targets=private.targets, loss=settings.loss, divisor=divisor
            ),
            public=side,
            clip=settings.clip,
            noise_multiplier=z,
            ledger=ledger,
            noise=GaussianNoise(settings.seed),
            start=STARTS[settings.start](side),
            watch=_shown if settings.verbose else None,
        )
    )
    weights = theta.reshape(settings.outputs, rows.width)
    features = int(private.x.shape[1])
    return Learned(
        weights=weights[:, :features],
        intercepts=weights[:, features] if settings.intercept else np.zeros(settings.outputs),
        preparation=preparation,
        epsilon=ledger.epsilon(settings.delta),
        certificate=certificate(
            ledger,
            delta=settings.delta,
            training={**settings.describe(divisor), "noise_multiplier": z},
            adjacency=ADD_OR_REMOVE if settings.records is not None else _ZERO_OUT,
        ),
    )


def _opened(settings: Settings, ledger: Ledger | None) -> Ledger:
    if ledger is not None:
        if settings.accountant not in (None, ledger.accountant):
            raise ValueError(
                f"Expected accountant {ledger.accountant!r}, as the ledger has it, got "
                f"{settings.accountant!r}: leave it out where you give a ledger."
            )
        return ledger
    budget = Budget(epsilon=settings.epsilon, delta=settings.delta)
    return Ledger(accountant=settings.accountant or "pld", budget=budget)


def _public_rows(x: Features, settings: Settings) -> Rows:
    rows = Rows(x, intercept=settings.intercept)
    endless = int((~np.isfinite(rows.norm_bounds)).sum())
    if endless:
        raise ValueError(
            f"Expected public rows of finite length, as they are scaled, got {endless} without: "
            "take them out of public, or bound the features by scaling=FeatureBounds(...)."
        )
    return rows


@lru_cache(maxsize=256)  # a function of four numbers that takes half a second
def _calibrated(epsilon: float, delta: float, steps: int, accountant: str) -> float:
    budget = Budget(epsilon=epsilon, delta=delta)
    return calibrate_event(GaussianDpEvent, steps, budget, accountant=accountant)


def _shown(steps: Iterable[int]) -> Iterable[int]:
    return track(steps, description="private steps")
