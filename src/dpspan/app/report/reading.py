"""What runs left in their folders, without anything that is not private unless it is asked for."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpspan.accounting.certificate import FORMAT, VERSION
from dpspan.accounting.epsilon import account
from dpspan.accounting.ledger import ADJACENCY, ZERO_OUT
from dpspan.accounting.releases import added, releases_from_json, united
from dpspan.app.comparison.results import ending
from dpspan.app.run.folder import RunFolder, read_json, read_lines

UNPRIVATE = "unprivate_"
TOGETHER = "a comparison"  # the method of a certificate of several runs, which was all in 0.1
Documents = Mapping[Path, Mapping[str, Any]]  # by their folders


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run: its certificate, a line of metrics per epoch or so, its settings."""

    name: str
    folder: str
    same: str  # settings but the seed: what runs with the same have in common
    method: str  # what runs from scratch and after a warm start have in common
    warm: bool  # whether private steps came after a warm start
    seed: int | None
    status: str
    certificate: dict[str, Any]
    metrics: list[dict[str, Any]]
    diagnostics: list[dict[str, Any]]
    settings: str  # as they were written down
    audit: dict[str, Any]  # what an attack found, which is never private
    results: dict[str, dict[str, Any]]  # on test data, of all records and of groups

    @property
    def epsilon(self) -> float:
        return float(self.certificate["epsilon"])

    @property
    def audit_bound(self) -> float | None:
        """What ε is at least, if an audit has measured it."""
        return (self.certificate.get("audit") or {}).get("epsilon_at_least")

    @property
    def private_steps(self) -> bool:
        """Whether it released anything about private records."""
        return bool(self.certificate["events"])

    @property
    def unprivate(self) -> dict[str, Any]:
        """The last value of everything that is not private, and what an audit found."""
        last = {**(self.metrics[-1] if self.metrics else {}), **self.audit}
        return {key: value for key, value in last.items() if key.startswith(UNPRIVATE)}

    @property
    def noise(self) -> dict[str, float]:
        """√ of the expected noise energy of a step, from the method's notes or its settings."""
        noted = [note["noise_energy"] for note in self.diagnostics if note.get("noise_energy")]
        if noted:
            return {f"{kind} noise": math.sqrt(energy) for kind, energy in noted[-1].items()}
        training = self.certificate["training"]
        if training.get("method") != "DPSGD" or training["clipping"].startswith("Adaptive"):
            return {}
        p, z = training["trainable_parameters"], training["noise_multiplier"]
        return {"gradient noise": math.sqrt(p) * z * training["clip"]}

    def curve(self, key: str) -> list[tuple[dict[str, Any], float]]:
        """The lines that have this metric, with its value."""
        return [(line, line[key]) for line in self.metrics if line.get(key) is not None]


@dataclass(frozen=True, kw_only=True)
class Total:
    """ε at δ of everything; `unfinished` counts folders with releases but without a certificate."""

    epsilon: float
    delta: float
    unfinished: int


@dataclass(frozen=True, kw_only=True)
class Found:
    """Everything in the folders that a report can tell about."""

    runs: list[Run]
    together: Total | None  # of all runs, and of whatever else was released; None if unknown
    comparison: dict[str, Any] | None
    candidates: dict[str, Any] | None
    choice: dict[str, Any] | None
    about: dict[str, str] | None  # the section `report` of the configuration

    @property
    def groups(self) -> dict[str, list[Run]]:
        """Runs that differ in their seed only, by name; with a folder where names are the same."""
        grouped: dict[tuple[str, str], list[Run]] = {}
        for run in self.runs:
            grouped.setdefault((run.name, run.same), []).append(run)
        names = Counter(name for name, _ in grouped)
        return {
            name if names[name] == 1 else f"{name} ({runs[0].folder})": runs
            for (name, _), runs in grouped.items()
        }


def read(folders: Sequence[Path], *, include_unprivate: bool) -> Found:
    """Read every run in the folders and below; ValueError with the path if something is amiss."""

    def shown(value: Any) -> Any:
        return value if include_unprivate else without_unprivate(value)

    runs: list[Run] = []
    extras: dict[str, Any] = dict.fromkeys(("comparison", "candidates", "choice", "about"))
    certificates: dict[Path, dict[str, Any]] = {}
    ledgers: dict[Path, dict[str, Any]] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"Expected a folder with a run, but {folder} is not a folder.")
        found = sorted(path.parent for path in folder.rglob("certificate.json"))
        if all(path.name.startswith(".") for path in found):
            without = f"{folder}, which has no certificate.json in it or below it"
            raise ValueError(f"Expected a folder with a run, got {without}. Is the run finished?")
        for path in found:
            if path.resolve() in certificates:  # a folder that was named twice
                continue
            certificate = certificates[path.resolve()] = _certificate(path / "certificate.json")
            if not is_comparison(certificate) and not path.name.startswith("."):
                runs.append(_run(RunFolder(path), certificate, shown))
        for file in folder.rglob("ledger.json"):
            ledgers[file.parent.resolve()] = _ledger(file)
        for name, known in extras.items():
            if known is None and (folder / f"{name}.json").exists():
                extras[name] = shown(read_json(folder / f"{name}.json"))
    order = [row["name"] for row in (extras["comparison"] or {"rows": []})["rows"]]
    runs.sort(key=lambda run: order.index(run.name) if run.name in order else len(order))
    if len(folders) > 1:  # it is about some of the runs only
        extras["comparison"] = None
    return Found(runs=runs, together=total(certificates, ledgers), **extras)


def without_unprivate(value: Any) -> Any:
    """The value without any entry whose name says that it is not private."""
    if isinstance(value, dict):
        return {
            key: without_unprivate(item)
            for key, item in value.items()
            if not str(key).startswith(UNPRIVATE)
        }
    return [without_unprivate(item) for item in value] if isinstance(value, list) else value


def _run(folder: RunFolder, certificate: dict[str, Any], shown: Callable[[Any], Any]) -> Run:
    facts = read_json(folder.run, {})
    found = shown(read_json(folder.evaluation, {}))
    about = facts.get("settings", {})
    name = about.get("name", folder.path.resolve().name)
    text = json.dumps(about or certificate["training"], indent=2, ensure_ascii=False)
    if folder.config.exists():
        text = folder.config.read_text(encoding="utf-8")
    return Run(
        name=name,
        folder=str(folder.path),
        same=json.dumps(_but_seed(about), sort_keys=True),
        method=json.dumps(about.get("method", name)),
        warm=bool(certificate["events"] and about.get("warm_start")),
        seed=about.get("seed"),
        status=ending(facts),
        certificate=certificate,
        metrics=shown(_lines(folder.metrics)),
        diagnostics=shown(_lines(folder.diagnostics)),
        settings=text,
        audit=shown(read_json(folder.audit, {})),
        results=next((groups for key, groups in found.items() if key.endswith("results")), {}),
    )


def _but_seed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of a row of a comparison, or of a configuration."""
    same = {name: value for name, value in settings.items() if name != "seed"}
    if isinstance(training := same.get("training"), dict):
        same["training"] = _but_seed(training)
    return same


def _certificate(path: Path) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"Expected a certificate of dpspan in {path}, got something else.")
    if content.get("version") != VERSION:
        raise ValueError(
            f"Expected a certificate of version {VERSION} in {path}, got "
            f"{content.get('version')!r}: read it with the dpspan that wrote it, or a newer one."
        )
    return content


def _ledger(path: Path) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("events"), list):
        raise ValueError(f"Expected the ledger of a run in {path}, got something else.")
    return content


def _lines(path: Path) -> list[dict[str, Any]]:
    """Lines of JSON; only the last one may be unfinished, by a run that was killed."""
    lines = read_lines(path)
    if path.exists() and len(lines) < len(path.read_bytes().splitlines()) - 1:
        raise ValueError(f"{path} is damaged: a line is not JSON. Restore it from a copy.")
    return lines


# -- what everything costs together ---------------------------------------------------------------
#
# A folder may hold a certificate and a ledger of the same releases, where the ledger can be ahead
# (a run that goes on, a choice before it). The certificate of a comparison counts what its runs
# share, such as a choice of public data, once. Whatever cannot be known to be shared counts as
# often as it is on record: the total may be too large, never too small.


def total(certificates: Documents, ledgers: Documents) -> Total | None:
    """What all documents cost; None where one run is all, or nothing can be added up."""
    known = list(certificates.values())
    # What a record costs that is added or removed, it costs where it counts as zero.
    least = {said: ZERO_OUT.format(unit) for unit, said in ADJACENCY.items()}
    if len({least.get(said := document["adjacency"], said) for document in known}) != 1:
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
