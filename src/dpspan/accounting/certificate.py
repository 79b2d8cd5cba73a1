"""The certificate: what a run guarantees and how it was spent, as one strict JSON document."""

import datetime
import hashlib
import importlib.metadata
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from dp_accounting.dp_event import RepeatAndSelectDpEvent

from dpspan.accounting.epsilon import account, pld_interval
from dpspan.accounting.events import event_to_json
from dpspan.accounting.ledger import SEARCHED, SETTINGS_SEARCHED, Ledger
from dpspan.accounting.promises import check_promised_delta, weaknesses
from dpspan.accounting.releases import releases_to_json
from dpspan.support.checks import shown
from dpspan.support.files import replacing

FORMAT = "dpspan.certificate"
VERSION = 1
_PACKAGES = ("dpspan", "torch", "dp-accounting", "numpy", "scipy", "scikit-learn")


def certificate(
    ledger: Ledger,
    *,
    delta: float | None = None,
    training: Mapping[str, Any],
    adjacency: str | None = None,
) -> dict[str, Any]:
    """The document for what `ledger` holds, at δ (by default its budget's).

    `training` describes method and sampling: public configuration, as plain values. `adjacency`
    says between which datasets the guarantee holds, if not between those that the ledger says.
    """
    spending = ledger.spending(delta)  # first: it may add a warning
    check_promised_delta("delta", spending.delta)
    weak = weaknesses(spending.epsilon, spending.delta, unit=ledger.unit)
    finite = math.isfinite(spending.epsilon)
    reasons = [] if finite else ["no finite ε covers what was released"]
    on_grid = finite and spending.accountant == "pld"
    document = {
        "format": FORMAT,
        "version": VERSION,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "private": finite and not ledger.invalid,
        "not_private_because": [*reasons, *ledger.invalid],
        "epsilon": spending.epsilon,
        "delta": spending.delta,
        "adjacency": adjacency or ledger.adjacency,
        "discloses_number_of_records": ledger.discloses_records,
        "search": what_a_search_cost(ledger, spending.delta),
        "budget": None if ledger.budget is None else asdict(ledger.budget),
        "accountant": {
            "chosen": ledger.accountant,
            "used": spending.accountant,
            "fallback": spending.accountant != ledger.accountant,
            "value_discretization_interval": pld_interval(ledger.events) if on_grid else None,
        },
        "training": dict(training),
        "steps": ledger.steps,
        "events": [
            {"count": n, "text": f"{n} × {e}", "event": event_to_json(e)} for e, n in ledger.events
        ],
        "public": [
            {"name": r.name, "count": r.count, "sha256": r.digest, "detail": r.detail}
            for r in ledger.public
        ],
        "warnings": list(dict.fromkeys([*ledger.warnings, *weak])),
        "versions": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            **{package: _version(package) for package in _PACKAGES},
        },
        "digests": {"ledger": sha256_of(releases_to_json(ledger.events))},
    }
    return {key: _plain(key, value) for key, value in document.items()}


def what_a_search_cost(ledger: Ledger, delta: float) -> str:
    """In words; of a search that is paid for, what its model would have cost without it."""
    paid = [event for event, _ in ledger.events if isinstance(event, RepeatAndSelectDpEvent)]
    if paid:
        alone = account([(event.event, 1) for event in paid], delta, "rdp").epsilon
        best = f"the best of a random number of tries ({paid[0].mean:g} on average) was released"
        return f"ε pays for the search too: {best}; a single try would have cost ε = {alone:.3g}"
    if any(warning.startswith((SEARCHED, SETTINGS_SEARCHED)) for warning in ledger.warnings):
        return "nothing was paid for the search, although there was one: see the warnings"
    return "nothing was paid for the search"


def weights_sha256(weights: Mapping[str, Any]) -> str:
    """SHA-256 over a state_dict: name, dtype, shape and bytes of each tensor, sorted by name.

    A sharded tensor counts as the whole one, for which all processes must ask together.
    """
    import torch  # here: a fit of a table needs none

    from dpspan.support.sharded import whole

    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        if isinstance(tensor, torch.Tensor):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            raw = whole(tensor.detach()).cpu().contiguous().flatten().view(torch.uint8)
            digest.update(raw.numpy().tobytes())
    return digest.hexdigest()


def sha256_of(document: Any) -> str:
    """SHA-256 of plain JSON values, however they were written: keys sorted, no spaces."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def write_certificate(path: str | Path, document: Mapping[str, Any]) -> Path:
    """Write the document whole or not at all; OSError with the path if that is impossible."""
    path = Path(path)
    text = json.dumps(_plain("document", document), indent=2, ensure_ascii=False, allow_nan=False)
    with replacing(path, what="the certificate") as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    return path


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _plain(where: str, value: Any) -> Any:
    """The value in strict JSON; infinity, which JSON lacks, as a word."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Mapping):
        unprivate = [key for key in value if str(key).startswith("unprivate")]
        if unprivate:
            raise ValueError(
                f"Cannot put {where}.{unprivate[0]} into the certificate: it was computed from "
                "private data without noise."
            )
        return {str(key): _plain(f"{where}.{key}", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{where}[{index}]", item) for index, item in enumerate(value)]
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real) and not math.isnan(value):
        number = float(value)
        return number if math.isfinite(number) else "infinity" if number > 0 else "-infinity"
    raise ValueError(
        f"Cannot put {where} into the certificate: expected text, numbers, lists and mappings, "
        f"got {shown(value)}."
    )
