"""A data dictionary: what is known about the columns of a table without a look at its rows.

It is a CSV file with a line for each column: its `name`, its `type` (numeric, categorical, date,
id, drop) and, as far as they apply, `low`, `high`, `fill`, `values` (a|b|c), `format` (of dates),
`indicator` and `epsilon` (of a paid release). What is not there is found in public rows.
"""

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dpspan.app.preprocessing import AnyColumn
from dpspan.app.section import sentence
from dpspan.app.tables import delimiter_of, read_csv

_KEYS = ("low", "high", "fill", "values", "format", "indicator", "epsilon")


def read_dictionary(path: Path) -> dict[str, dict[str, Any]]:
    """The columns as keys of a configuration; ValueError, without a cell, with all problems."""
    lines = read_csv(path, delimiter_of(path))
    header = [name.strip().lower() for name in next(lines)[1]]
    if not {"name", "type"} <= {*header}:
        raise ValueError(f"Expected columns `name` and `type` in the dictionary {path}.")
    found, problems = {}, []
    for line, row in lines:
        entry: dict[str, Any] = {k: v.strip() for k, v in zip(header, row, strict=False)}
        try:
            found[entry.get("name", "")] = _column(entry)
        except ValidationError as error:
            problems.append(f"{path}:{line}: {sentence(error.errors()[0])}")
    if problems:
        raise ValueError("\n".join(problems))
    return found


def _column(entry: dict[str, Any]) -> dict[str, Any]:
    """Checked, and as short as it can be written."""
    given = {key: cell for key, cell in entry.items() if cell and key in _KEYS}
    keys = {"kind": entry.get("type", "").lower()}
    if keys["kind"] not in ("drop", "id"):
        stated = "data dictionary" if {"low", "high", "values"} & {*given} else "public rows"
        keys |= given | {"origin": "paid release" if "epsilon" in given else stated}
        values = [each.strip() for each in given.get("values", "").split("|")]
        keys |= {"values": values} if "values" in given else {}
    made: Any = TypeAdapter(AnyColumn).validate_python(keys, strict=False)
    return {"kind": made.kind, **made.model_dump(mode="json", exclude_defaults=True)}
