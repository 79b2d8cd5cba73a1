"""Tables: CSV and Parquet files, read column by column, a few thousand rows at a time."""

from __future__ import annotations

import csv
import itertools
import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
_Piece = dict[str, list[Any] | Array]


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

        def made(values: _Piece, before: int) -> Array:
            return np.concatenate([self._numbers(n, values[n], before) for n in self.inputs], 1)

        return self._whole(self.inputs, made)

    def _whole(self, inputs: Sequence[str], made: Callable[[_Piece, int], Array]) -> Raw:
        """What is made of pieces, with the rows before them; and the labels."""
        rows, labels = _Rows(self.path), list[Array]()
        own = [] if self.label is None else [self.label]
        for values in self.pieces(list(dict.fromkeys([*inputs, *own]))):
            rows.append(made(values, rows.count))
            labels += [np.asarray(values[name]) for name in own]
        return rows.whole(), np.concatenate(labels) if labels else None, None

    def _numbers(self, name: str, values: list[Any] | Array, before: int) -> Array:
        """Of shape (rows, width, …); ValueError with the first row that holds something else."""
        known = self.categories.get(name)
        try:
            if known is not None:
                codes = {text: np.float32(np.array(known) == text) for text in known}
                return np.array([codes[str(each)] for each in values])
            if isinstance(values, list):
                vectors = isinstance(values[0], list)
                values = np.array(values if vectors else [*map(float, values)], dtype=np.float64)
            with np.errstate(over="ignore"):  # infinity is refused later
                return values.astype(np.float64).astype(np.float32)[:, None]
        except (TypeError, ValueError, LookupError):
            fits = [is_number(each) if known is None else str(each) in known for each in values]
            expected, cure = f"one of {list(known or ())}", "Add it to `categories`"
            if known is None:
                expected, cure = "numbers", "Describe the column in data.preprocessing"
            raise ValueError(
                f"Expected {expected} in column '{name}' of {self.path}, got something else in row "
                f"{before + fits.index(False) + 1}. {cure}."
            ) from None

    def prepared(self, preprocessing: Preprocessing) -> Raw:
        """The features that a description makes of the columns, and the labels.

        A column of which nothing can be read would make a model that learns nothing: an error,
        and without labels a warning.
        """
        preprocessing.check_names(self.columns, str(self.path))
        strange = Counter[str]()

        def made(values: _Piece, before: int) -> Array:
            rows, found = preprocessing.encoded(values)
            strange.update(found)
            return rows

        read = self._whole(preprocessing.used, made)
        lost = [f"'{name}'" for name, count in strange.items() if count == len(read[0]) > _A_FEW]
        found = (
            f"Nothing in columns {', '.join(lost)} of {self.path} is what data.preprocessing "
            "describes. Look at the delimiter, the decimal sign, the format of dates and the "
            "spelling of values, or drop them. This message depends on private data."
        )
        if lost and self.label is not None:
            raise ValueError(found)
        if lost:  # what is predicted on may well be of another kind
            warnings.warn(f"dpspan: {found}", stacklevel=2)
        return read

    def ids(self, name: str) -> list[Any] | None:
        if name not in self.columns:
            return None
        return [each for values in self.pieces([name]) for each in values[name]]

    @property
    @abstractmethod
    def columns(self) -> list[str]:
        """Their names."""

    @abstractmethod
    def pieces(self, names: Sequence[str]) -> Iterator[_Piece]:
        """The values of these columns, a few rows at a time, texts or numbers; None for a gap."""


class _Rows:
    """An array that grows in its place: joining its parts would take their memory once more."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._array, self.count = np.empty((0, 0), np.float32), 0

    def append(self, rows: Array) -> None:
        if self.count and rows.shape[1:] != self._array.shape[1:]:
            raise ValueError(f"Expected vectors of one length in {self._path}.")
        first, self.count = self.count, self.count + len(rows)
        if self.count > len(self._array):
            room = max(self.count, len(self._array) * 9 // 8)
            self._array.resize((room, *rows.shape[1:]), refcheck=False)
        self._array[first : self.count] = rows

    def whole(self) -> Array:
        self._array.resize((self.count, *self._array.shape[1:]), refcheck=False)
        return self._array


class Csv(Table):
    """A CSV file whose first line names its columns."""

    format: Literal["csv"] = "csv"
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ","

    @property
    def columns(self) -> list[str]:
        return next(read_csv(self.path, self.delimiter))[1]

    def pieces(self, names: Sequence[str]) -> Iterator[_Piece]:
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

    def pieces(self, names: Sequence[str]) -> Iterator[_Piece]:
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
