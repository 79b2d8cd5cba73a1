"""What all that the folders hold costs together, every release counted once.

A folder may hold a certificate and a ledger of the same releases, where the ledger can be ahead (a
run that goes on, a choice before it). The certificate of a comparison counts what its runs share,
such as a choice of public data, once. Whatever cannot be known to be shared counts as often as it
is on record: the total may be too large, never too small.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpspan.accounting.epsilon import account
from dpspan.accounting.events import event_from_json, event_to_json

TOGETHER = "a comparison"  # the method that the certificate of several runs names
Releases = Counter[str]  # how many of each event, which is written as JSON


@dataclass(frozen=True, kw_only=True)
class Total:
    """ε at δ of everything; `unfinished` counts folders with releases but without a certificate."""

    epsilon: float
    delta: float
    unfinished: int


def total(
    certificates: Mapping[Path, Mapping[str, Any]], ledgers: Mapping[Path, Mapping[str, Any]]
) -> Total | None:
    """Of the documents by their folders; None where one run is all, or nothing can be added up."""
    known = list(certificates.values())
    if len({document["adjacency"] for document in known}) != 1:
        return None  # prices of different promises
    alone = {
        folder: _most(_releases(d[folder]) for d in (certificates, ledgers) if folder in d)
        for folder in {**certificates, **ledgers}
    }
    spent: Releases = Counter()
    tops = [f for f in alone if not any(_covers(certificates, g, f) for g in certificates)]
    for folder in tops:
        below = [alone[f] for f in alone if _covers(certificates, folder, f)]
        spent += _most([alone[folder], *below])
    # At the smallest δ: so the total is no smaller than what any certificate says.
    delta = min(document["delta"] for document in known)
    whole = certificates.get(tops[0], {}) if len(tops) == 1 else {}
    if whole and spent == _releases(whole) and whole["delta"] == delta:
        if not is_comparison(whole):
            return None
        priced = float(whole["epsilon"])
    else:
        rdp = any(document["accountant"]["used"] == "rdp" for document in known)
        events = [(event_from_json(json.loads(event)), count) for event, count in spent.items()]
        priced = account(events, delta, "rdp" if rdp else "pld").epsilon
    return Total(
        epsilon=max([priced, *(float(document["epsilon"]) for document in known)]),
        delta=delta,
        unfinished=len([f for f in ledgers if f not in certificates and alone[f]]),
    )


def _covers(certificates: Mapping[Path, Mapping[str, Any]], whole: Path, folder: Path) -> bool:
    """Whether a folder holds the certificate of a comparison of which the other is a run."""
    is_whole = whole in certificates and is_comparison(certificates[whole])
    is_run = folder.name.startswith(("seed-", ".seed-"))  # hidden: one that was interrupted
    return is_whole and folder.parent.parent == whole and is_run


def is_comparison(certificate: Mapping[str, Any]) -> bool:
    """Whether it is about several runs, which have certificates of their own."""
    return bool(certificate["training"].get("method") == TOGETHER)


def _releases(document: Mapping[str, Any]) -> Releases:
    spent: Releases = Counter()
    for entry in document["events"]:
        event = event_to_json(event_from_json(entry["event"]))
        spent[json.dumps(event, sort_keys=True)] += entry["count"]
    return spent


def _most(records: Iterable[Releases]) -> Releases:
    """Of each event the most that any of the records has: they tell of the same releases."""
    most: Releases = Counter()
    for record in records:
        most |= record
    return most
