"""Tables: CSV and Parquet, with their columns named."""

from __future__ import annotations

import csv
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from dpspan.data.source import Array, Classes, Raw, Source
from dpspan.section import Texts

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
            row, value = next(item for item in enumerate(values) if not _is_number(item[1]))
            raise ValueError(
                f"Expected numbers in column '{name}' of {self.path}, got {value!r} in row "
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
                    f"{value!r} in row {row + 1}. Add it to `categories`."
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
                            f"line {rows.line_num} has {len(row)} values, the header {len(header)}"
                        )
                    for column, place in zip(columns, places, strict=True):
                        column.append(row[place].strip())
        except (OSError, UnicodeDecodeError, csv.Error, ValueError) as error:
            raise unreadable_csv(self.path, error) from error
        return list(columns)


def unreadable_csv(path: Path, error: Exception) -> ValueError:
    """What to say of a file that cannot be read."""
    reason = str(getattr(error, "strerror", None) or error).removesuffix(".")
    if isinstance(error, UnicodeDecodeError):
        reason = f"its text is not in UTF-8 ({reason}). Save it in that encoding"
    return ValueError(f"{path} is not a readable CSV file: {reason}.")


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
            raise ValueError(f"{self.path} is not a readable Parquet file: {error}.") from error
        return [table.column(name).to_pylist() for name in names]


def _places(path: Path, names: Sequence[str], header: Sequence[str]) -> list[int]:
    """Where the columns are."""
    for name in names:
        if list(header).count(name) != 1:
            listed = ", ".join(header[:20]) + (", …" if len(header) > 20 else "")
            how = "two columns" if name in header else "no column"
            raise ValueError(f"{path} has {how} '{name}': it has {listed or 'none'}.")
    return [list(header).index(name) for name in names]


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
