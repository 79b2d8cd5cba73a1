"""Checks of arguments: a refusal says what was expected and what came, and never shows data."""

import dataclasses
import difflib
import math
from collections.abc import Collection, Iterable
from html import escape
from numbers import Integral, Real
from typing import Any

_LONGEST = 60  # of a text that may be shown


def expect(holds: bool, what: str, value: Any, cure: str = "") -> None:
    """ValueError naming `what` was expected, and what to do, unless it holds."""
    if not holds:
        raise ValueError(f"Expected {what}, got {shown(value)}. {cure}".rstrip())


def shown(value: Any) -> str:
    """What a message may say of a value: a setting itself, of all that may be data its kind."""
    short = isinstance(value, str) and len(value) <= _LONGEST and value.isprintable()
    if value is None or short or isinstance(value, Real | type):
        return repr(value)
    size = f" of {len(value)}" if isinstance(value, list | tuple | str | dict | set) else ""
    return f"a {type(value).__name__}{size}"


def html_table(rows: Iterable[tuple[Any, Any]]) -> str:
    """Names and values, for a notebook."""
    cells = ((escape(str(name)), escape(str(value))) for name, value in rows)
    return f"<table>{''.join(f'<tr><th>{n}</th><td>{v}</td></tr>' for n, v in cells)}</table>"


def near(name: str, known: Collection[str]) -> str:
    """A hint for whoever misspelt one of the names, which may be data and are not listed."""
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def spelt_otherwise(name: str, found: Collection[str]) -> str:
    """The same for names in a file: only one of the same letters, as others may be data."""
    letters = {"".join(filter(str.isalnum, each)).casefold(): each for each in found}
    same = letters.get("".join(filter(str.isalnum, name)).casefold())
    return "" if same is None else f" (did you mean {same!r}?)"


def check_number(name: str, value: Any) -> float | int:
    """The value as a plain number; neither a truth value nor NaN is one."""
    a_number = not isinstance(value, bool) and isinstance(value, Real) and not math.isnan(value)
    expect(a_number, f"{name} to be a number", value)
    return int(value) if isinstance(value, Integral) else float(value)


def check_positive(name: str, value: Any) -> float:
    """The value as a finite number above 0."""
    expect(0 < check_number(name, value) < math.inf, f"{name} > 0 and finite", value)
    return float(value)


def check_count(name: str, value: Any, least: int = 1) -> int:
    """The value as a plain int of at least `least`; a numpy integer is one, a bool is not."""
    integer = isinstance(value, Integral) and not isinstance(value, bool)
    expect(integer and value >= least, f"{name} to be an integer of at least {least}", value)
    return int(value)


def check_seed(value: Any) -> int:
    """The value as a seed that every generator takes."""
    expect(check_count("seed", value, least=0) < 2**63, "seed to be below 2**63", value)
    return int(value)


def check_share(name: str, value: Any) -> float:
    """The value as a share, above 0 and at most 1."""
    expect(0 < check_number(name, value) <= 1, f"0 < {name} <= 1", value)
    return float(value)


def check_fraction(name: str, value: Any) -> float:
    """The value as a number strictly between 0 and 1, as a δ is."""
    expect(0 < check_number(name, value) < 1, f"0 < {name} < 1", value)
    return float(value)


def describe(rule: object) -> str:
    """A rule's (or function's) name and public configuration, the same in every process."""
    if dataclasses.is_dataclass(rule):
        return repr(rule)
    return getattr(rule, "__qualname__", type(rule).__qualname__)
