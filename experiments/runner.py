"""What experiments share: results on disk, and runs in processes that skip what is there."""

from __future__ import annotations

import json
import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import Progress


class Results:
    """The lines of results.jsonl."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows = [json.loads(line) for line in lines]

    def add(self, row: dict[str, Any]) -> None:
        """Keep a result, on disk too."""
        self.rows.append(row)
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def of(self, run: Any) -> dict[str, Any] | None:
        """The result of a run, if it is there."""
        fields = asdict(run)
        return next((r for r in self.rows if all(r[k] == v for k, v in fields.items())), None)


def best_of(search: Sequence[Any], results: Results) -> float:
    """The learning rate of the most accurate run of a search."""

    def reached(run: Any) -> float:
        row = results.of(run)
        return row["accuracy"] if row else 0.0

    rate: float = max(search, key=reached).rate
    return rate


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
    missing = [run for run in runs if results.of(run) is None]
    context = multiprocessing.get_context("spawn")
    with Progress() as progress, ProcessPoolExecutor(jobs, mp_context=context) as pool:
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
