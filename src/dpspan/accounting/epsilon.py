"""The price of releases: ε by dp_accounting's PLD accountant, or its RDP one where PLD cannot."""

import contextlib
import functools
import logging
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from dp_accounting import pld, rdp
from dp_accounting.dp_event import DiscreteLaplaceDpEvent, DpEvent
from dp_accounting.privacy_accountant import NeighboringRelation

from dpspan.accounting.releases import Releases, added
from dpspan.support.checks import expect

# Whole orders only: quick, quiet, and close enough to start a search or to size a grid.
ROUGH_ORDERS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


@dataclass(frozen=True, kw_only=True)
class Spending:
    """ε at one δ, the accountant that gave it and, if it was not the chosen one, why."""

    epsilon: float
    delta: float
    accountant: str
    warning: str | None = None


def account(releases: Releases, delta: float, accountant: str) -> Spending:
    """ε by the chosen accountant, or by another if it cannot, or infinity: never an exception."""
    if not releases:
        return Spending(epsilon=0.0, delta=delta, accountant=accountant)
    used, epsilon, problems = accountant, math.inf, []
    for name in sorted(_ACCOUNTANTS, key=lambda name: name != accountant):
        try:
            answer = _ACCOUNTANTS[name](releases, delta)
        except Exception as error:  # refused, or numerical trouble of any kind
            problems.append(textwrap.shorten(f"{name}: {error}", 200))
            continue
        if math.isfinite(answer):
            used, epsilon = name, answer
            break
        if math.isnan(answer):
            problems.append(f"{name}: ε is not a number")
    warning = None
    if problems or used != accountant:
        how = "reported as infinite" if epsilon == math.inf else f"by the {used} accountant"
        why = "; ".join(problems) or f"{accountant} gives no finite ε"
        warning = f"ε at δ = {delta:g} is {how} ({why})."
    return Spending(epsilon=epsilon, delta=delta, accountant=used, warning=warning)


def check_accountant(name: str) -> str:
    """The name, if it is one of an accountant."""
    allowed = ", ".join(repr(known) for known in _ACCOUNTANTS)
    expect(name in _ACCOUNTANTS, f"accountant to be one of {allowed}", name)
    return name


def pld_epsilon(
    releases: Releases,
    delta: float,
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
) -> float:
    """ε by privacy loss distributions: tight, but not for every event."""
    accountant = pld.PLDAccountant(relation, pld_interval(releases))
    return float(_composed(accountant, releases).get_epsilon(delta))


def pld_interval(releases: Releases) -> float:
    """The grid on which PLD rounds privacy losses up: as fine as the losses need.

    dp-accounting's fixed 1e-4 doubles ε where steps cost less than that, and exhausts the memory
    where they cost hundreds. Grids are nested, so that ε still grows with every event.
    """
    loss = rough_epsilon(releases, 1e-22)
    if loss == math.inf:  # not private, or known to PLD alone
        return 1e-4
    if loss > 1e5:
        raise OverflowError(f"privacy losses of up to {loss:.3g} are too large for a grid")
    return math.ldexp(1e-4, math.floor(math.log2(max(loss, 1e-2) / 4)))


def rough_epsilon(releases: Releases, delta: float) -> float:
    """A quick bound of ε, some per cent off; infinite where Rényi accounting knows no event."""
    try:
        spent = sum(count * _rough(event) for event, count in releases)
        return float(rdp.compute_epsilon(ROUGH_ORDERS, spent, delta)[0]) if releases else 0.0
    except Exception:
        return math.inf


@functools.lru_cache(maxsize=256)  # a run asks after each of its steps
def _rough(event: DpEvent) -> Any:
    return renyi([(event, 1)], ROUGH_ORDERS)[1]


_ACCOUNTANTS: Mapping[str, Callable[[Releases, float], float]] = {
    "pld": pld_epsilon,
    "rdp": lambda releases, delta: float(rdp.compute_epsilon(*renyi(releases), delta)[0]),
}


def renyi(releases: Releases, orders: Sequence[float] | None = None) -> tuple[Any, Any]:
    """The orders and the Rényi divergences at them.

    dp-accounting's RDP does not know what is ε-DP (see `pure_event`). Randomised response has the
    largest divergence of all that is: log((exp(αε) + exp((1 − α)ε)) / (1 + exp(ε))) / (α − 1).
    """
    pure = [
        (event, count)
        for event, count in releases  # dp-accounting refuses an ε of 0
        if isinstance(event, DiscreteLaplaceDpEvent) and event.noise_parameter > 0
    ]
    with _quiet_absl():
        others = [entry for entry in releases if entry not in pure]
        accountant = _composed(rdp.RdpAccountant(orders), others)
    # A negative divergence is a rounding error; dp-accounting would take it for ε = 0.
    divergences, alpha = np.abs(accountant.rdp), accountant.orders
    for event, count in pure:
        epsilon = event.noise_parameter * event.sensitivity
        total = np.logaddexp(alpha * epsilon, (1 - alpha) * epsilon) - np.logaddexp(0.0, epsilon)
        # That rounds to nothing where ε is tiny; α·ε²/2 bounds all that is ε-DP, and is as good.
        total = np.where(alpha * epsilon < 1e-3, alpha * (alpha - 1) * epsilon**2 / 2, total)
        divergences = divergences + count * total / (alpha - 1)
    return alpha, np.where(np.isnan(divergences), np.inf, divergences)


@contextlib.contextmanager
def _quiet_absl() -> Iterator[None]:
    """RDP logs each order that it leaves out, on every call; leaving one out is sound."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _composed(accountant: Any, releases: Releases) -> Any:
    for event, count in added(releases):
        accountant.compose(event, count)
    return accountant
