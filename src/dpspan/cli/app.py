"""What all commands share: where they print, and how they end.

Exit codes: 0 for success, 1 for an error that one sentence explains, 130 after Ctrl-C. Results go
to stdout, as JSON with --json; everything else goes to stderr.

Commands import what they need when they are called: `dpspan account` waits for no torch.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from dpspan.strict_json import plain

_OWN = "dpspan: "

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]


@contextmanager
def _warnings_as_notes() -> Iterator[None]:
    """dpspan's own warnings as sentences, each once; others as Python shows them."""
    said: set[str] = set()
    with warnings.catch_warnings():
        python_shows = warnings.showwarning

        def show(message: Any, *where: Any, **more: Any) -> None:
            text = str(message)
            if not text.startswith(_OWN):
                python_shows(message, *where, **more)
            elif text not in said:
                said.add(text)
                say(f"Note: {text.removeprefix(_OWN)}")

        warnings.showwarning = show
        yield


class _Group(TyperGroup):
    """Turns errors into sentences."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with _warnings_as_notes():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            say("Interrupted.")
            raise typer.Exit(130) from None
        except Exception as error:
            if hasattr(error, "exit_code"):  # typer's own: an exit, or a wrong argument
                if not isinstance(error, typer.Exit):
                    error.exit_code = 1
                raise
            if ctx.params.get("debug"):
                raise
            say(f"Error: {_sentence(error)}")
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=_Group,
    name="dpspan",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Differentially private training that uses the low-dimensional span of gradients.",
)


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False,
) -> None:
    """Options of all commands."""


def say(text: str) -> None:
    """One plain line on stderr, as wide as it is."""
    print(text, file=sys.stderr)


def out() -> Console:
    """Where results go, made anew: a test may have put another stream in its place."""
    return Console(file=sys.stdout)


def err() -> Console:
    """Where everything else goes."""
    return Console(file=sys.stderr)


def print_json(document: Mapping[str, Any] | list[Any]) -> None:
    """Strict JSON: what is not finite is null."""
    print(json.dumps(plain(document), indent=2, ensure_ascii=False, allow_nan=False))


def _sentence(error: Exception) -> str:
    """Errors that are meant for users are sentences; of others the kind helps too."""
    expected = isinstance(error, ValueError | TypeError | OSError | RuntimeError | ImportError)
    text = str(error).strip()
    if expected and text:
        return text
    kind = type(error).__name__
    return f"{kind}: {text or 'no message'}. Run `dpspan --debug …` to see where it comes from."
