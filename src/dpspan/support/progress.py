"""A bar for what takes a while, in a terminal and nowhere else."""

import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

Item = TypeVar("Item")
_PATIENCE = 2.0  # seconds without a bar


def watched(
    steps: Iterable[Item], title: str, *, shown: bool, total: int | None = None
) -> Iterator[Item]:
    """The steps, with a bar on the standard error stream that goes away at the end.

    `total` says how many they are, where they have no length.
    """
    console = Console(stderr=True)
    bar = Progress(console=console, transient=True, disable=not (shown and console.is_terminal))
    count = len(steps) if isinstance(steps, Sized) else total
    task = bar.add_task(title, total=count)
    began = time.monotonic()
    try:
        for step in steps:
            yield step
            bar.advance(task)
            if time.monotonic() - began > _PATIENCE:
                bar.start()  # does nothing to one that has started
    finally:
        if bar.live.is_started:
            bar.stop()
