"""Is a certificate true to its events, and to the folder that it lies in?

Who made a certificate can make another: this finds mistakes and what was changed or mixed up later,
and shows that ε is what the events cost. That a run did what its events say, nobody can see here.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors

from dpspan.accounting.certificate import sha256_of, weights_sha256
from dpspan.accounting.epsilon import account
from dpspan.accounting.events import pure_event
from dpspan.accounting.ledger import RECORDS_TOLD, UNITS_TOLD, Ledger
from dpspan.accounting.promises import LARGEST_DELTA
from dpspan.accounting.releases import releases_from_json
from dpspan.accounting.schema import Certificate, parse_certificate
from dpspan.app.config import load_config
from dpspan.app.run.folder import RunFolder, read_json

_TOLERANCE = 1e-6  # of ε, relative above 1


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison; `holds` is None where there was nothing to compare."""

    name: str
    holds: bool | None
    detail: str


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What `verify` found; `holds` if nothing contradicts the certificate."""

    path: str
    private: bool
    checks: tuple[Check, ...]

    @property
    def holds(self) -> bool:
        return all(check.holds is not False for check in self.checks)


def verify(path: str | Path) -> Verification:
    """Compute ε of a certificate again, and compare it with the run that it lies in.

    Args:
        path: the folder of a run (or of a comparison), or a certificate alone.
    """
    path = Path(path)
    folder = RunFolder(path) if path.is_dir() else None
    file = path if folder is None else folder.certificate
    if not file.exists():
        raise FileNotFoundError(f"There is no certificate at {file}.")
    raw = read_json(file)
    found = parse_certificate(raw)
    checks = [*_document(raw, found), *(() if folder is None else _folder(folder, raw, found))]
    return Verification(path=str(path), private=found.private, checks=tuple(checks))


def _document(raw: Any, found: Certificate) -> Iterator[Check]:
    """What the document says of itself."""
    releases, by = releases_from_json(raw["events"]), found.accountant.chosen
    spending = account(releases, found.delta, by)
    stated, again = float(found.epsilon), spending.epsilon
    close = stated == again or abs(stated - again) <= _TOLERANCE * max(1.0, again)
    said = f"{stated:.6g} is stated, {again:.6g} is what the events cost at δ = {found.delta:g}"
    yield Check(name="ε", holds=close, detail=f"{said} ({spending.accountant})")
    steps, budget, audit = sum(count for _, count in releases), found.budget, found.audit
    bought = "paid release" in found.training.get("preprocessing", {}).get("origins", {})
    pure = type(pure_event(1.0))
    told = any(each.startswith((RECORDS_TOLD, UNITS_TOLD)) for each in found.warnings)
    wrong = {
        f"steps is {found.steps}, and the events are {steps}": found.steps != steps,
        "it is called private, and says why it is not": found.private
        == bool(found.not_private_because),
        "it is called private without a finite ε": found.private and stated == math.inf,
        "bounds of columns were bought, and no event is their price": bought
        and not any(isinstance(event, pure) for event, _ in releases),
        "an audit measured more than ε": bool(audit and audit.epsilon_at_least > stated),
        "ε is above the budget": budget is not None
        and account(releases, budget.delta, by).epsilon > budget.epsilon * (1 + _TOLERANCE),
        f"δ is {found.delta:g}, which is no promise": found.delta >= LARGEST_DELTA,
        "a warning tells the number of records, and it is called undisclosed": told
        and not raw.get("discloses_number_of_records", True),
        "the text of an event is not that of its numbers": any(
            each.text != f"{count} × {event}"
            for each, (event, count) in zip(found.events, releases, strict=True)
        ),
    }
    problems = [problem for problem, there in wrong.items() if there]
    yield Check(name="statements", holds=not problems, detail="; ".join(problems) or "consistent")
    if found.digests is not None:
        same = found.digests.ledger == sha256_of(_events(raw))
        yield _compared("events", same, "the digest of the events")


def _folder(folder: RunFolder, raw: Any, found: Certificate) -> Iterator[Check]:
    """What lies beside it: the ledger, the weights and the settings."""
    if folder.ledger.exists() and found.training.get("kind") != "comparison":
        state = read_json(folder.ledger)
        same = _events(state) == _events(raw) and _told(Ledger.from_state(state), found)
        yield _compared("ledger", same, "ledger.json")
    else:
        yield Check(name="ledger", holds=None, detail="there is no ledger.json of one run here")
    weights = found.training.get("weights_sha256")
    if weights is None or not folder.model.exists():
        missing = "no weights are named" if weights is None else "there is no model.safetensors"
        yield Check(name="weights", holds=None, detail=missing)
    else:
        same = weights_sha256(_weights(folder.model)) == weights
        yield _compared("weights", same, "model.safetensors")
    if (columns := found.training.get("preprocessing")) is not None:
        same = sha256_of(read_json(folder.preprocessing, None)) == columns["sha256"]
        yield _compared("columns", same, folder.preprocessing.name)
    digest = None if found.digests is None else found.digests.configuration
    given = {}
    if folder.run.exists():
        given["run.json"] = (folder.facts or {}).get("settings")
    if folder.config.exists():
        given["config.yaml"] = load_config(folder.config).fixed()
    if digest is None or not given:
        yield Check(name="configuration", holds=None, detail="no configuration is named, or here")
        return
    for name, settings in given.items():
        yield _compared("configuration", sha256_of(settings) == digest, name)


def _told(ledger: Ledger, found: Certificate) -> bool:
    """Whether a certificate leaves out nothing that a ledger has noted."""
    public = {(each.name, each.sha256, each.count, each.detail) for each in found.public}
    return (
        ledger.adjacency == found.adjacency
        and {*ledger.warnings} <= {*found.warnings}
        and {*ledger.invalid} <= {*found.not_private_because}
        and {(x.name, x.digest, x.count, x.detail) for x in ledger.public} <= public
    )


def _compared(name: str, same: bool, what: str) -> Check:
    said = "agrees" if same else "does not belong to this certificate"
    return Check(name=name, holds=same, detail=f"{what} {said}")


def _events(document: Any) -> list[dict[str, Any]]:
    return [{"event": each["event"], "count": each["count"]} for each in document["events"]]


def _weights(path: Path) -> dict[str, Any]:
    """The state_dict in a file, with the names of tied weights, of which it keeps one."""
    with safetensors.safe_open(path, framework="pt") as file:
        kept = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        tied = {k: v for k, v in (file.metadata() or {}).items() if v in kept}
    return {**kept, **{name: kept[same] for name, same in tied.items()}}
