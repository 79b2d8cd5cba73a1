"""Several trainings: in this process or in processes of their own, beside a progress bar."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from dpspan.support.checks import check_count

Work = Callable[..., Any]


@contextmanager
def workers(
    jobs: int, console: Console | None, title: str, *, total: int, done: int = 0
) -> Iterator[Callable[[Work, Sequence[tuple[Any, ...]]], list[Any]]]:
    """A function that calls another with each tuple of arguments, `jobs` at a time, in order."""
    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(),
               TextColumn("runs"), TimeElapsedColumn(), TimeRemainingColumn())  # fmt: skip
    where = console or Console(quiet=True)  # a disabled bar may still end its line
    with ExitStack() as stack:
        pool = None
        if check_count("jobs", jobs) > 1:
            pool = stack.enter_context(
                ProcessPoolExecutor(
                    jobs,
                    mp_context=multiprocessing.get_context("spawn"),
                    initializer=torch.set_num_threads,
                    initargs=(1,),
                )
            )
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
