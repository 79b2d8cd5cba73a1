"""What is known about columns in advance: a data dictionary, or public rows to tell types by.

A dictionary is a CSV file with a line for each column of the data: its `name`, its `type` (numeric,
categorical, date, id, drop) and, as far as they apply, `low`, `high`, `fill`, `values` (a|b|c),
`format` (of dates), `indicator` (yes) and `epsilon` (of a paid release). No error shows a cell.
"""

from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from dpspan.app.preprocessing import GAPS, MOST, AnyColumn, Date, Values, numbers
from dpspan.app.section import sentence
from dpspan.app.tables import delimiter_of, read_csv

_KINDS = {
    **dict.fromkeys(("number", "integer", "float", "continuous"), "numeric"),
    **dict.fromkeys(("category", "nominal", "ordinal", "binary"), "categorical"),
    **dict.fromkeys(("text", "string", "label", "ignore"), "drop"),
    **dict.fromkeys(("identifier", "key"), "id"),
}
_KEYS = ("low", "high", "fill", "values", "format", "indicator", "epsilon")


def read_dictionary(path: Path) -> dict[str, dict[str, Any]]:
    """The columns as keys of a configuration; ValueError with one line for each problem."""
    lines = read_csv(path, delimiter_of(path))
    header = [name.strip().lower() for name in next(lines)[1]]
    if not {"name", "type"} <= {*header}:
        raise ValueError(f"Expected columns `name` and `type` in the dictionary {path}.")
    found, problems = {}, []
    for line, row in lines:
        entry = {key: cell.strip() for key, cell in zip(header, row, strict=False) if cell.strip()}
        try:
            found[entry["name"]] = _column(entry)
        except ValidationError as error:
            problems.append(f"{path}:{line}: {sentence(error.errors()[0])}")
        except KeyError:
            problems.append(f"{path}:{line}: Expected a name and a type.")
    if problems:
        raise ValueError("\n".join(problems))
    return found


def _column(entry: dict[str, str]) -> dict[str, Any]:
    """Checked, and as short as it can be written."""
    kind = _KINDS.get(entry["type"].lower(), entry["type"].lower())
    keys: dict[str, Any] = {key: _value(key, entry[key]) for key in _KEYS if key in entry}
    if kind in ("drop", "id"):
        keys = {}
    else:
        keys["origin"] = "paid release" if "epsilon" in entry else "data dictionary"
    made: Any = TypeAdapter(AnyColumn).validate_python({"kind": kind, **keys})
    return {"kind": kind, **made.model_dump(mode="json", exclude_defaults=True)}


def _value(key: str, text: str) -> Any:
    if key == "values":
        return [each.strip() for each in text.split("|")]
    number = numbers([text])[0]
    known = {"yes": True, "true": True, "no": False, "false": False}
    return known.get(text.lower(), text) if np.isnan(number) else float(number)


def told_by(values: Values) -> dict[str, Any]:
    """The kind of a column by its values in public rows; one that is none of them is dropped."""
    known = {str(each).strip() for each in values} - GAPS
    kinds = {
        "numeric": not np.isnan(numbers([*known])).any(),
        "date": not np.isnan(Date(origin="public rows").read([*known])).any(),
        "categorical": len(known) <= MOST,
    }
    kind = next((kind for kind, fits in kinds.items() if fits and len(known) > 1), None)
    return {"kind": "drop"} if kind is None else {"kind": kind, "origin": "public rows"}
