"""Several trainings: in this process or in processes of their own, beside a progress bar."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn

from dpspan.support.checks import check_count

Work = Callable[..., Any]


@contextmanager
def workers(
    jobs: int, console: Console | None, title: str, *, total: int, done: int = 0
) -> Iterator[Callable[[Work, Sequence[tuple[Any, ...]]], list[Any]]]:
    """A function that calls another with each tuple of arguments, `jobs` at a time, in order."""
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TextColumn("runs"))
    where = console or Console(quiet=True)  # a disabled bar may still end its line
    with ExitStack() as stack:
        pool = None
        if check_count("jobs", jobs) > 1:
            spawn, one_thread = multiprocessing.get_context("spawn"), torch.set_num_threads
            pool = stack.enter_context(ProcessPoolExecutor(jobs, spawn, one_thread, (1,)))
        progress = stack.enter_context(Progress(*columns, console=where, disable=where.quiet))
        bar = progress.add_task(title, total=total, completed=done)

        def run(work: Work, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
            found = []
            columns = [list(column) for column in zip(*arguments, strict=True)] or [[]]
            for result in (map if pool is None else pool.map)(work, *columns):
                found.append(result)
                progress.advance(bar)
            return found

        yield run
