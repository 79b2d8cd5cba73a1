"""Tables read whole, as lists of Python values: slow, large, and easy to see right."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Columns = dict[str, list[Any]]


def csv_columns(path: Path, delimiter: str = ",") -> Columns:
    with path.open(newline="", encoding="utf-8-sig") as file:
        header, *rows = (row for row in csv.reader(file, delimiter=delimiter, strict=True) if row)
    return {name: [row[place].strip() for row in rows] for place, name in enumerate(header)}


def parquet_columns(path: Path) -> Columns:
    from pyarrow import parquet

    return dict(parquet.read_table(path).to_pydict())


def read(
    columns: Columns, inputs: Sequence[str], categories: dict[str, Sequence[str]]
) -> np.ndarray[Any, Any] | tuple[str, int]:
    """The inputs, or the first column that cannot be read and its first row that cannot."""
    parts = []
    for name in inputs:
        values, known = columns[name], categories.get(name)
        if known is None and isinstance(values[0], list):
            if len({np.shape(value) for value in values}) > 1 or not is_array(values):
                return name, 1  # the first row, since it is not a number
            parts.append(np.array(values, dtype=np.float32)[:, None])
            continue
        for row, value in enumerate(values, 1):
            if not (str(value) in known if known else is_number(value)):
                return name, row
        if known is None:
            doubles = np.array([[float(value)] for value in values])
            with np.errstate(over="ignore"):
                parts.append(doubles.astype(np.float32))
        else:
            indicators = [[float(str(value) == each) for each in known] for value in values]
            parts.append(np.array(indicators, dtype=np.float32))
    return np.concatenate(parts, axis=1)


def is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def is_array(values: list[Any]) -> bool:
    try:
        np.array(values, dtype=np.float32)
    except (TypeError, ValueError):
        return False
    return True
