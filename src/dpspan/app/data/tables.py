"""Tables: CSV and Parquet, with their columns named."""

from __future__ import annotations

import csv
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from dpspan.app.config.section import Texts
from dpspan.app.data.source import Array, Classes, Raw, Source, unreadable
from dpspan.support.checks import near

Column = Sequence[Any]


class Table(Source):
    """Columns of numbers, and of texts out of a list that is known in advance.

    `categories` gives the possible texts of a column, which becomes one number (0 or 1) for each
    of them; `mean` and `std` then count these.
    """

    inputs: Texts = Field(min_length=1)
    label: str | None = None
    categories: dict[str, Texts] = Field(default_factory=dict)

    def read(self, classes: Classes) -> Raw:
        """The named columns."""
        strange = sorted(set(self.categories) - set(self.inputs))
        if strange:
            raise ValueError(
                f"Expected categories of columns among inputs for {self.path}, got {strange}."
            )
        names = [*self.inputs, *([] if self.label is None else [self.label])]
        columns = dict(zip(names, self.columns(names), strict=True))
        parts = [self._part(name, columns[name]) for name in self.inputs]
        labels = None if self.label is None else np.asarray(columns[self.label])
        return Raw(inputs=np.concatenate(parts, axis=1), labels=labels)

    @abstractmethod
    def columns(self, names: Sequence[str]) -> list[Column]:
        """The values of these columns, texts or numbers."""

    def _part(self, name: str, values: Column) -> Array:
        if name in self.categories:
            return self._indicators(name, values)
        try:
            if None in values:
                raise ValueError  # numpy would take it for NaN
            return np.asarray(values, dtype=np.float32)[:, None]
        except (TypeError, ValueError):
            row = next((row for row, value in enumerate(values) if not _is_number(value)), 0)
            raise ValueError(
                f"Expected numbers in column '{name}' of {self.path}, got something else in row "
                f"{row + 1}. List its possible values under `categories`, fill gaps with a "
                "constant, or leave the column out."
            ) from None

    def _indicators(self, name: str, values: Column) -> Array:
        known = {text: number for number, text in enumerate(self.categories[name])}
        indicators = np.zeros((len(values), len(known)), dtype=np.float32)
        for row, value in enumerate(values):
            if str(value) not in known:
                raise ValueError(
                    f"Expected one of {list(known)} in column '{name}' of {self.path}, got "
                    f"something else in row {row + 1}. Add it to `categories`."
                )
            indicators[row, known[str(value)]] = 1
        return indicators


class Csv(Table):
    """A CSV file whose first line names its columns."""

    format: Literal["csv"] = "csv"
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ","

    def columns(self, names: Sequence[str]) -> list[Column]:
        """Texts."""
        try:
            with self.path.open(newline="", encoding="utf-8-sig") as file:
                rows = csv.reader(file, delimiter=self.delimiter, strict=True)
                header = next(rows, [])
                places = _places(self.path, names, header)
                columns: list[list[str]] = [[] for _ in names]
                for row in rows:
                    if not row:  # an empty line, at the end mostly
                        continue
                    if len(row) != len(header):
                        raise ValueError(
                            f"{self.path} is not a readable CSV file: line {rows.line_num} has "
                            f"{len(row)} values, the header {len(header)}."
                        )
                    for column, place in zip(columns, places, strict=True):
                        column.append(row[place].strip())
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise unreadable(self.path, "CSV file", error) from None
        return list(columns)


class Parquet(Table):
    """A Parquet file (the extra `tables`)."""

    format: Literal["parquet"] = "parquet"

    def columns(self, names: Sequence[str]) -> list[Column]:
        """Texts and numbers; a gap is None."""
        try:
            import pyarrow
            from pyarrow import parquet
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "Parquet files need the package pyarrow: pip install 'dpspan[tables]'."
            ) from error
        try:
            file = parquet.ParquetFile(self.path)
            _places(self.path, names, file.schema_arrow.names)
            table = file.read(columns=list(dict.fromkeys(names)))
        except (pyarrow.ArrowException, OSError) as error:
            raise unreadable(self.path, "Parquet file", error) from None
        return [table.column(name).to_pylist() for name in names]


def _places(path: Path, names: Sequence[str], header: Sequence[str]) -> list[int]:
    """Where the columns are. What they are called is not said: a first line may be a record."""
    for name in names:
        if list(header).count(name) != 1:
            how, hint = ("two columns", "") if name in header else ("no column", near(name, header))
            raise ValueError(f"{path} has {how} '{name}' among its {len(header)}{hint}.")
    return [list(header).index(name) for name in names]


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
