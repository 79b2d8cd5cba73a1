"""A bar for what takes a while, in a terminal and nowhere else."""

from collections.abc import Iterable
from typing import TypeVar

from rich.console import Console
from rich.progress import track

Item = TypeVar("Item")


def watched(steps: Iterable[Item], title: str, *, shown: bool) -> Iterable[Item]:
    """The steps, with a bar on the standard error stream that goes away at the end."""
    console = Console(stderr=True)
    hidden = not (shown and console.is_terminal)
    return track(steps, title, console=console, disable=hidden, transient=True)
