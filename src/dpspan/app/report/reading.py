"""What runs left in their folders, without anything that is not private unless it is asked for."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpspan.accounting.certificate import FORMAT, VERSION
from dpspan.app.report.total import Total, is_comparison, total

UNPRIVATE = "unprivate_"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run: its certificate, a line of metrics per epoch or so, its settings."""

    name: str
    method: str  # what runs from scratch and after a warm start have in common
    warm: bool  # whether private steps came after a warm start
    seed: int | None
    certificate: dict[str, Any]
    metrics: list[dict[str, Any]]
    diagnostics: list[dict[str, Any]]
    settings: str  # as they were written down
    audit: dict[str, Any]  # what an attack found, which is never private

    @property
    def epsilon(self) -> float:
        """What it spent."""
        return float(self.certificate["epsilon"])

    @property
    def private_steps(self) -> bool:
        """Whether it released anything about private records."""
        return bool(self.certificate["events"])

    @property
    def not_private_because(self) -> list[str]:
        """Why there is no guarantee; nothing where there is one."""
        return [] if self.certificate["private"] else self.certificate["not_private_because"]

    def curve(self, key: str) -> list[tuple[dict[str, Any], float]]:
        """The lines that have this metric, with its value."""
        return [(line, line[key]) for line in self.metrics if line.get(key) is not None]


@dataclass(frozen=True, kw_only=True)
class Found:
    """Everything in the folders that a report can tell about."""

    runs: list[Run]
    together: Total | None  # of all runs, and of whatever else was released; None if unknown
    comparison: dict[str, Any] | None
    candidates: dict[str, Any] | None
    choice: dict[str, Any] | None

    @property
    def groups(self) -> dict[str, list[Run]]:
        """Runs that differ in their seed only."""
        grouped: dict[str, list[Run]] = {}
        for run in self.runs:
            grouped.setdefault(run.name, []).append(run)
        return grouped


def read(folders: Sequence[Path], *, include_unprivate: bool) -> Found:
    """Read every run in the folders and below; ValueError with the path if something is amiss."""
    runs: list[Run] = []
    extras: dict[str, Any] = {}
    certificates: dict[Path, dict[str, Any]] = {}
    ledgers: dict[Path, dict[str, Any]] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"Expected a folder with a run, but {folder} is not a folder.")
        found = sorted(path.parent for path in folder.rglob("certificate.json"))
        if all(path.name.startswith(".") for path in found):
            raise ValueError(
                f"Expected a folder with a run, got {folder}, which has no certificate.json in it "
                "or below it. Is the run finished?"
            )
        for path in found:
            if path.resolve() in certificates:  # a folder that was named twice
                continue
            certificate = certificates[path.resolve()] = _certificate(path / "certificate.json")
            if not is_comparison(certificate) and not path.name.startswith("."):
                runs.append(_run(path, certificate, include_unprivate))
        for file in folder.rglob("ledger.json"):
            ledgers[file.parent.resolve()] = _ledger(file)
        for name in ("comparison", "candidates", "choice"):
            if name not in extras and (folder / f"{name}.json").exists():
                extras[name] = _json(folder / f"{name}.json", include_unprivate)
    comparison = extras.get("comparison")
    order = [row["name"] for row in comparison["rows"]] if comparison else []
    runs.sort(key=lambda run: order.index(run.name) if run.name in order else len(order))
    return Found(
        runs=runs,
        together=total(certificates, ledgers),
        comparison=comparison if len(folders) == 1 else None,
        candidates=extras.get("candidates"),
        choice=extras.get("choice"),
    )


def without_unprivate(value: Any) -> Any:
    """The value without any entry whose name says that it is not private."""
    if isinstance(value, dict):
        return {
            key: without_unprivate(item)
            for key, item in value.items()
            if not str(key).startswith(UNPRIVATE)
        }
    return [without_unprivate(item) for item in value] if isinstance(value, list) else value


def _run(path: Path, certificate: dict[str, Any], include_unprivate: bool) -> Run:
    about = _json(path / "run.json")["settings"] if (path / "run.json").exists() else {}
    name = about.get("name", path.resolve().name)
    text = json.dumps(about or certificate["training"], indent=2, ensure_ascii=False)
    if (path / "config.yaml").exists():
        text = (path / "config.yaml").read_text(encoding="utf-8")
    audited = include_unprivate and (path / "audit.json").exists()
    return Run(
        name=name,
        method=json.dumps(about.get("method", name)),
        warm=bool(certificate["events"] and about.get("warm_start")),
        seed=about.get("seed"),
        certificate=certificate,
        metrics=_lines(path / "metrics.jsonl", include_unprivate),
        diagnostics=_lines(path / "diagnostics.jsonl", include_unprivate),
        settings=text,
        audit=_json(path / "audit.json") if audited else {},
    )


def _certificate(path: Path) -> dict[str, Any]:
    content = _json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"Expected a certificate of dpspan in {path}, got something else.")
    if content.get("version") != VERSION:
        raise ValueError(
            f"Expected a certificate of version {VERSION} in {path}, got "
            f"{content.get('version')!r}: read it with the dpspan that wrote it, or a newer one."
        )
    return content


def _ledger(path: Path) -> dict[str, Any]:
    content = _json(path)
    if not isinstance(content, dict) or not isinstance(content.get("events"), list):
        raise ValueError(f"Expected the ledger of a run in {path}, got something else.")
    return content


def _json(path: Path, include_unprivate: bool = True) -> Any:
    return _parsed(path, path.read_bytes(), include_unprivate)


def _lines(path: Path, include_unprivate: bool) -> list[Any]:
    """Lines of JSON, without a last one that a killed run left unfinished."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    parsed = [_parsed(path, line, include_unprivate) for line in lines[:-1]]
    with contextlib.suppress(ValueError):
        parsed += [_parsed(path, line, include_unprivate) for line in lines[-1:]]
    return parsed


def _parsed(path: Path, text: bytes, include_unprivate: bool) -> Any:
    try:
        content = json.loads(text)
    except ValueError:
        raise ValueError(f"Cannot read {path}: it is not valid JSON.") from None
    return content if include_unprivate else without_unprivate(content)
