"""Several trainings: in this process, in others, or on a cluster, beside a progress bar."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn

from dpspan.support.checks import check_count

Work = Callable[..., Any]
Map = Callable[..., Iterator[Any]]  # as the built-in one is called, results in order
Executor = Callable[[int], AbstractContextManager[Map]]  # so many at a time; an error ends them all


@contextmanager
def workers(
    jobs: int,
    console: Console | None,
    title: str,
    *,
    total: int,
    done: int = 0,
    executor: Executor | None = None,
    shared: Path | None = None,
) -> Iterator[Callable[[Work, Sequence[tuple[Any, ...]]], list[Any]]]:
    """A function that calls another with each tuple of arguments, `jobs` at a time, in order.

    `shared` is the folder that they write to.
    """
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TextColumn("runs"))
    where = console or Console(quiet=True)  # a disabled bar may still end its line
    begin = (executor or processes)(check_count("jobs", jobs))
    with begin as each_of, Progress(*columns, console=where, disable=where.quiet) as progress:
        bar = progress.add_task(title, total=total, completed=done)

        def run(work: Work, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
            found = []
            columns = [list(column) for column in zip(*arguments, strict=True)] or [[]]
            for result in each_of(partial(_seeing, shared, work), *columns):
                found.append(result)
                progress.advance(bar)
            return found

        yield run


@contextmanager
def processes(jobs: int) -> Iterator[Map]:
    """On this machine; one at a time is this process itself."""
    if jobs == 1:
        yield map
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin) as pool:
        try:
            yield pool.map
        except BaseException:  # takes the workers along: none may release what nobody waits for
            running = list(pool._processes.values())
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running:
                process.terminate()  # a run may be ended at any time, and goes on later
            raise


def _seeing(shared: Path | None, work: Work, *arguments: Any) -> Any:
    """Before anything is read: results that another machine keeps would be lost, and paid for."""
    if shared is not None and not shared.exists():
        way = "Choose one that all machines share, under the same path"
        raise FileNotFoundError(f"The folder {shared} is not on this machine. {way}.")
    return work(*arguments)


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
