"""The command line: `dpspan train config.yaml`, and `dpspan --help` for the rest."""

import io
import os
import sys

from dpspan.app.cli import account as account
from dpspan.app.cli import advising as advising
from dpspan.app.cli import auditing as auditing
from dpspan.app.cli import comparing as comparing
from dpspan.app.cli import init as init
from dpspan.app.cli import runs as runs
from dpspan.app.cli.app import app as app


def main() -> None:
    """Entry point. A reader that leaves early (`dpspan … | head`) ends it without a word."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not every code page knows ε
            stream.reconfigure(errors="replace")
    try:
        try:
            app(prog_name="dpspan")
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more
        sys.exit(1)
