"""What experiments share: where they run, results on disk, and runs that skip what is there."""

from __future__ import annotations

import json
import multiprocessing
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

VERSIONS = ("torch", "dp-accounting", "numpy")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an experiment runs: the data folder, the device, and how much at a time."""

    data: Path
    device: str = "cpu"
    tf32: bool = False
    bf16: bool = False  # forward and backward passes under autocast
    physical: int | None = None  # most samples in memory at once
    graphs: bool = False  # CUDA graphs, for private runs
    jobs: int = 1
    commit: str = ""
    checkpoints: Path | None = None  # a folder for those of long runs

    def configure(self) -> None:
        """Settings of a process that makes runs."""
        torch.set_num_threads(1)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self.tf32

    def precision(self) -> AbstractContextManager[Any]:
        """For forward passes of training."""
        return torch.autocast(self.device.split(":")[0], torch.bfloat16, enabled=self.bf16)

    def provenance(self) -> dict[str, Any]:
        """What a result was made with."""
        import dpspan

        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": self.commit,
            "hardware": torch.cuda.get_device_name(self.device)
            if self.device.startswith("cuda")
            else _cpu(),
            "tf32": self.tf32,
            **({"bf16": True} if self.bf16 else {}),
            "versions": {
                "python": platform.python_version(),
                "dpspan": dpspan.__version__,
                **{name: _version(name) for name in VERSIONS},
            },
        }


def current_commit() -> str:
    """Of the working tree, marked where it has changes; empty outside a repository."""
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    return done.stdout.strip()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return str(getattr(torch, "__version__", "")) if package == "torch" else "not installed"


@lru_cache(maxsize=1)
def _cpu() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


class Results:
    """The lines of a results file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self._found: dict[tuple[str, ...], dict[tuple[Any, ...], dict[str, Any]]] = {}

    def add(self, row: dict[str, Any]) -> None:
        """Keep a result, on disk too."""
        self.rows.append(row)
        self._found.clear()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")

    def of(self, run: Any) -> dict[str, Any] | None:
        """The result of a run, if it is there."""
        names = tuple(field.name for field in fields(run))
        if names not in self._found:
            self._found[names] = {tuple(r.get(n) for n in names): r for r in reversed(self.rows)}
        return self._found[names].get(tuple(getattr(run, name) for name in names))


def spread(shares: Iterable[float]) -> str:
    """Mean ± standard deviation, in per cent."""
    percent = [100 * share for share in shares]
    if not percent:
        return "—"
    deviation = f" ± {statistics.stdev(percent):.1f}" if len(percent) > 1 else ""
    return f"{statistics.mean(percent):.1f}{deviation}"


def execute(
    runs: Sequence[Any],
    results: Results,
    work: Callable[[Any], dict[str, Any]],
    jobs: int,
    title: str,
) -> None:
    """Whatever is missing, `jobs` runs at a time, each in a process of its own."""
    missing = [run for run in dict.fromkeys(runs) if results.of(run) is None]
    if not missing:
        return
    context = multiprocessing.get_context("spawn")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    progress = Progress(*columns, TimeRemainingColumn())
    with progress, ProcessPoolExecutor(jobs, mp_context=context) as pool:
        task = progress.add_task(title, total=len(missing))
        failed = []
        for done in as_completed([pool.submit(work, run) for run in missing]):
            error = done.exception()
            if error is None:
                results.add(done.result())
            else:  # the others go on, and what they find is kept
                failed.append(error)
            progress.advance(task)
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(missing)} runs failed") from failed[0]
