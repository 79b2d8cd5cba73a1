"""A bar for what takes a while, in a terminal and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import track

Item_co = TypeVar("Item_co", covariant=True)


class Steps(Sized, Protocol[Item_co]):
    """Something to go through, of known length."""

    def __iter__(self) -> Iterator[Item_co]: ...


def watched(steps: Steps[Item_co], title: str, *, shown: bool) -> Iterator[Item_co]:
    """The steps, with a bar on the standard error stream that goes away at the end."""
    console = Console(stderr=True)
    hidden = not (shown and console.is_terminal)
    yield from track(
        steps, title, total=len(steps), console=console, disable=hidden, transient=True
    )
