"""Several trainings: in this process or in processes of their own, beside a progress bar."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
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
    pool = None
    if check_count("jobs", jobs) > 1:
        pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin)
    with pool or nullcontext(), Progress(*columns, console=where, disable=where.quiet) as progress:
        bar = progress.add_task(title, total=total, completed=done)

        def run(work: Work, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
            found = []
            columns = [list(column) for column in zip(*arguments, strict=True)] or [[]]
            for result in (map if pool is None else pool.map)(work, *columns):
                found.append(result)
                progress.advance(bar)
            return found

        try:
            yield run
        except BaseException:  # takes the workers along: none may release what nobody waits for
            if pool is not None:
                processes = list(pool._processes.values())
                pool.shutdown(wait=False, cancel_futures=True)
                for process in processes:
                    process.terminate()  # a run may be ended at any time, and goes on later
            raise


def _begin() -> None:
    """A worker has one thread, leaves Ctrl-C to its parent, and does not outlive it."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
