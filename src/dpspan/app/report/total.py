"""What everything in the folders costs together, every release counted once.

A folder may hold a certificate and a ledger of the same releases, where the ledger can be ahead (a
run that goes on, a choice before it). The certificate of a comparison counts what its runs share,
such as a choice of public data, once. Whatever cannot be known to be shared counts as often as it
is on record: the total may be too large, never too small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpspan.accounting.epsilon import account
from dpspan.accounting.releases import added, releases_from_json, united

TOGETHER = "a comparison"  # the method of a certificate of several runs, which was all in 0.1
Documents = Mapping[Path, Mapping[str, Any]]  # by their folders


@dataclass(frozen=True, kw_only=True)
class Total:
    """ε at δ of everything; `unfinished` counts folders with releases but without a certificate."""

    epsilon: float
    delta: float
    unfinished: int


def total(certificates: Documents, ledgers: Documents) -> Total | None:
    """What all documents cost; None where one run is all, or nothing can be added up."""
    known = list(certificates.values())
    if len({document["adjacency"] for document in known}) != 1:
        return None  # prices of different promises
    documents = (certificates, ledgers)
    alone = {
        folder: united(*(releases_from_json(d[folder]["events"]) for d in documents if folder in d))
        for folder in {**certificates, **ledgers}
    }
    wholes = [folder for folder in certificates if is_comparison(certificates[folder])]
    tops = [f for f in alone if not any(_is_run_of(whole, f) for whole in wholes)]
    spent = added(
        *(
            united(alone[top], *(alone[f] for f in alone if top in wholes and _is_run_of(top, f)))
            for top in tops
        )
    )
    # At the smallest δ: so the total is no smaller than what any certificate says.
    delta = min(document["delta"] for document in known)
    priced = 0.0
    only = certificates.get(tops[0]) if len(tops) == 1 else None
    if only and only["delta"] == delta and spent == added(releases_from_json(only["events"])):
        if not is_comparison(only):
            return None
    else:
        rdp = any(document["accountant"]["used"] == "rdp" for document in known)
        priced = account(spent, delta, "rdp" if rdp else "pld").epsilon
    return Total(
        epsilon=max([priced, *(float(document["epsilon"]) for document in known)]),
        delta=delta,
        unfinished=len([f for f in ledgers if f not in certificates and alone[f]]),
    )


def is_comparison(certificate: Mapping[str, Any]) -> bool:
    """Whether it is about several runs, which have certificates of their own."""
    training = certificate["training"]
    return bool(training.get("kind") == "comparison" or training.get("method") == TOGETHER)


def _is_run_of(comparison: Path, folder: Path) -> bool:
    named = folder.name.startswith(("seed-", ".seed-"))  # hidden: one that was interrupted
    return named and folder.parent.parent == comparison
