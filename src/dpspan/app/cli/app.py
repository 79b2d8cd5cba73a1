"""What all commands share: where they print, and how they end.

Exit codes: 0 for success, 1 for an error that one sentence explains, 130 after Ctrl-C. Results go
to stdout, as JSON with --json; everything else goes to stderr.

Commands import what they need when they have checked what they were given: help, and a refusal,
wait for no torch.
"""

import codecs
import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

import dpspan
from dpspan.support.errors import DPSpanError
from dpspan.support.strict_json import plain

_OWN = "dpspan: "

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]


def _hush(quiet: bool) -> bool:
    if quiet:
        warnings.simplefilter("ignore")  # `_warnings_as_notes` ends it with the command
    return quiet


_NO_NOTES = "No progress and no notes: results and errors only."
Quiet = Annotated[bool, typer.Option("--quiet", "-q", callback=_hush, help=_NO_NOTES)]


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
        except BrokenPipeError:  # whoever read the output has left: `main` knows what to do
            raise
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
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Differentially private training that uses the low-dimensional span of gradients.",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"dpspan {dpspan.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    ctx: typer.Context,
    debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help=_NO_NOTES)] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it and exit.")
    ] = False,
) -> None:
    """Options of all commands."""
    if quiet:
        invoked, quietly = str(ctx.invoked_subcommand), {"quiet": True}
        command = getattr(ctx.command, "commands", {}).get(invoked)
        below = getattr(command, "commands", ())  # of `dpspan audit`
        ctx.default_map = {invoked: {**quietly, **dict.fromkeys(below, quietly)}}


def say(text: str) -> None:
    """One plain line on stderr, as wide as it is."""
    print(text, file=sys.stderr)


def check_exists(path: Path) -> None:
    """FileNotFoundError, before anything slow is imported."""
    if not path.exists():
        raise FileNotFoundError(f"There is nothing at {path}.")


def four_digits(epsilon: float) -> str:
    """However small it is: no ε above zero looks like none."""
    return f"{epsilon:.4f}" if epsilon >= 0.1 or not epsilon else f"{epsilon:.4g}"


def answer(
    document: Mapping[str, Any], *shown: Any, as_json: bool, quiet: bool = False, note: str = ""
) -> None:
    """The result on stdout, as strict JSON or for people; with a note for those on stderr."""
    if as_json:
        ascii_only = codecs.lookup(sys.stdout.encoding).name != "utf-8"
        print(json.dumps(plain(document), indent=2, ensure_ascii=ascii_only, allow_nan=False))
        return
    for each in shown:
        Console().print(each, soft_wrap=isinstance(each, str))
    if note and not quiet:
        say(note)


def _sentence(error: Exception) -> str:
    """Errors that are meant for users are sentences; of others the kind helps too."""
    text = str(error).strip()
    told = DPSpanError | ValueError | TypeError | OSError | RuntimeError | ImportError
    if text and isinstance(error, told):
        return text
    kind = type(error).__name__
    return f"{kind}: {text or 'no message'}. Run `dpspan --debug …` to see where it comes from."
