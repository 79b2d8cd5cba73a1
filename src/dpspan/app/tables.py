"""Tables: CSV and Parquet files, read column by column, a few thousand rows at a time."""

from __future__ import annotations

import csv
import itertools
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from dpspan.app.data import Array, Classes, Raw, Source, check_names, optional, reading
from dpspan.app.preprocessing import Preprocessing
from dpspan.app.section import Texts
from dpspan.support.checks import expect

_LINES = 1024  # of a CSV file read at a time
_BATCH = 8192  # rows of a Parquet file read at a time
_A_FEW = 20  # rows, which may all lack a value by chance


class Table(Source):
    """Columns of numbers, and of texts out of a list that is known in advance.

    `categories` gives the possible texts of a column, which becomes one number (0 or 1) for each
    of them; `mean` and `std` then count these. With data.preprocessing, which says more about every
    column, all of these are left out but the label.
    """

    inputs: Texts = ()
    label: str | None = None
    categories: dict[str, Texts] = Field(default_factory=dict)

    def read(self, classes: Classes) -> Raw:
        expect(bool(self.inputs), f"inputs for {self.path}, or data.preprocessing", None)
        strange = ", ".join(sorted(set(self.categories) - set(self.inputs)))
        expect(not strange, f"categories of columns among inputs for {self.path}", strange)
        names = [*self.inputs, *([] if self.label is None else [self.label])]
        columns = {name: _Column(self.categories.get(name)) for name in self.inputs}
        inputs, labels = _Rows(), []
        for values in self.pieces(list(dict.fromkeys(names))):
            parts = {name: column.numbers(values[name]) for name, column in columns.items()}
            if all(column.wrong is None for column in columns.values()):
                inputs.append(np.concatenate([parts[name] for name in self.inputs], axis=1))
            if self.label is not None:
                labels.append(np.asarray(values[self.label]))
        for name, column in columns.items():
            if column.wrong is not None:
                raise ValueError(
                    f"Expected {column.expected} in column '{name}' of {self.path}, got something "
                    f"else in row {column.wrong + 1}. {column.cure}."
                )
        return inputs.whole(), np.concatenate(labels) if labels else None, None

    def prepared(self, preprocessing: Preprocessing) -> Raw:
        """The features that a description makes of the columns, and the labels.

        A column of which nothing can be read would make a model that learns nothing: an error.
        """
        preprocessing.check_names(self.columns, str(self.path))
        inputs, labels, strange = _Rows(), list[Array](), Counter[str]()
        names = [*preprocessing.used, *([] if self.label is None else [self.label])]
        for values in self.pieces(names):
            rows, found = preprocessing.encoded(values)
            inputs.append(rows)
            strange.update(found)
            if self.label is not None:
                labels.append(np.asarray(values[self.label]))
        read = inputs.whole()
        lost = [f"'{name}'" for name, count in strange.items() if count == len(read) > _A_FEW]
        if lost:
            raise ValueError(
                f"Nothing in these columns of {self.path} is what data.preprocessing describes: "
                f"{', '.join(lost)}. Look at the delimiter, the decimal sign, the format of dates, "
                "the spelling of values, or drop them. This message depends on private data."
            )
        return read, np.concatenate(labels) if labels else None, None

    def ids(self, name: str) -> list[Any] | None:
        if name not in self.columns:
            return None
        return [each for values in self.pieces([name]) for each in values[name]]

    @property
    @abstractmethod
    def columns(self) -> list[str]:
        """Their names."""

    @abstractmethod
    def pieces(self, names: Sequence[str]) -> Iterator[dict[str, list[Any] | Array]]:
        """The values of these columns, a few rows at a time, texts or numbers; None for a gap."""


class _Rows:
    """An array that grows in its place: joining its parts would take their memory once more."""

    def __init__(self) -> None:
        self._array, self._count = np.empty((0, 0), np.float32), 0

    def append(self, rows: Array) -> None:
        first, self._count = self._count, self._count + len(rows)
        if self._count > len(self._array):
            room = max(self._count, len(self._array) * 9 // 8)
            self._array.resize((room, *rows.shape[1:]), refcheck=False)
        self._array[first : self._count] = rows

    def whole(self) -> Array:
        self._array.resize((self._count, *self._array.shape[1:]), refcheck=False)
        return self._array


class _Column:
    """A column made numbers, piece by piece; `wrong` is the first row that cannot be."""

    expected = "numbers"
    cure = "List its possible values under `categories`, fill gaps with a constant, or leave the "
    cure += "column out"

    def __init__(self, categories: Sequence[str] | None) -> None:
        self.wrong: int | None = None
        self._rows, self._shape = 0, ()
        self._vectors, self._codes = False, None
        if categories is not None:
            self.expected, self.cure = f"one of {list(categories)}", "Add it to `categories`"
            self._codes = {text: code for code, text in enumerate(categories)}
            texts = np.array(categories, dtype=str)
            self._indicators = np.asarray(texts[:, None] == texts, dtype=np.float32)

    def numbers(self, values: list[Any] | Array) -> Array:
        """Of shape (rows, width, …); without a meaning once something was wrong."""
        if not self._rows:
            self._vectors = self._codes is None and isinstance(values[0], list)
        try:
            made = self._made(values)
            if self._rows and made.shape[1:] != self._shape:
                raise ValueError("vectors of several lengths")
        except (TypeError, ValueError, LookupError):
            made = np.empty(0)
            if self.wrong is None:
                fits = [self._fits(value) for value in values]
                self.wrong = 0 if self._vectors else self._rows + fits.index(False)
        self._rows, self._shape = self._rows + len(values), made.shape[1:]
        return made

    def _made(self, values: list[Any] | Array) -> Array:
        if self._vectors:
            return np.asarray(values, dtype=np.float32)[:, None]
        if isinstance(values, list):
            if self._codes is not None:
                return self._indicators[[self._codes[str(value)] for value in values]]
            values = np.array(list(map(float, values)))
        with np.errstate(over="ignore"):  # infinity is refused later
            return values.astype(np.float64).astype(np.float32)[:, None]

    def _fits(self, value: Any) -> bool:
        return is_number(value) if self._codes is None else str(value) in self._codes


class Csv(Table):
    """A CSV file whose first line names its columns."""

    format: Literal["csv"] = "csv"
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ","

    @property
    def columns(self) -> list[str]:
        return next(read_csv(self.path, self.delimiter))[1]

    def pieces(self, names: Sequence[str]) -> Iterator[dict[str, list[Any] | Array]]:
        lines = read_csv(self.path, self.delimiter)
        _, header = next(lines)
        check_names(self.path, "column", names, header)
        places = {name: header.index(name) for name in names}
        while numbered := list(itertools.islice(lines, _LINES)):
            for line, row in numbered:
                if len(row) != len(header):
                    lengths = f"line {line} has {len(row)} values, the header {len(header)}"
                    raise ValueError(f"{self.path} is not a readable CSV file: {lengths}.")
            columns = list(zip(*(row for _, row in numbered), strict=True))
            yield {name: list(map(str.strip, columns[place])) for name, place in places.items()}


def read_csv(path: Path, delimiter: str = ",") -> Iterator[tuple[int, list[str]]]:
    """Lines with their numbers; the header, even an empty one, comes first."""
    with reading(path, "CSV file"), path.open(newline="", encoding="utf-8-sig") as file:
        lines = csv.reader(file, delimiter=delimiter, strict=True)
        rows = (row for row in lines if row)
        for row in itertools.chain([next(rows, [])], rows):
            yield lines.line_num, row


def delimiter_of(path: Path) -> str:
    """What stands most often between the names in the first line."""
    with reading(path, "CSV file"), path.open(encoding="utf-8-sig") as file:
        first = file.readline()
    return max(",;\t|", key=first.count)


class Parquet(Table):
    """A Parquet file (the extra `tables`)."""

    format: Literal["parquet"] = "parquet"

    @property
    def columns(self) -> list[str]:
        return list(open_parquet(self.path).schema_arrow.names)

    def pieces(self, names: Sequence[str]) -> Iterator[dict[str, list[Any] | Array]]:
        file = open_parquet(self.path)
        check_names(self.path, "column", names, file.schema_arrow.names)
        with reading(self.path, "Parquet file"):
            for batch in file.iter_batches(_BATCH, columns=list(names)):
                if batch.num_rows:
                    yield {name: self._values(name, batch.column(name)) for name in names}

    def _values(self, name: str, column: Any) -> list[Any] | Array:
        """An array of numbers where there are nothing but numbers; else Python's own values."""
        from pyarrow import types

        kinds = (types.is_integer, types.is_floating, types.is_boolean)
        plain = not column.null_count and any(is_kind(column.type) for is_kind in kinds)
        if plain and name not in self.categories:
            return np.asarray(column.to_numpy(zero_copy_only=False))
        return list(column.to_pylist())


def open_parquet(path: Path) -> Any:
    """pyarrow's file, of which only the schema has been read."""
    parquet = optional("pyarrow.parquet", "Parquet files", "tables")
    with reading(path, "Parquet file"):
        return parquet.ParquetFile(path)


def is_number(value: Any) -> bool:
    """Whether a cell of a table can be read as a number."""
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
