"""The formats: npz, IDX, image folders, CSV, Parquet and Hugging Face datasets on disk.

Errors show no value of a file, nor the words of a library that may quote one.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import itertools
import math
from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from PIL import Image, UnidentifiedImageError
from pydantic import Field

from dpspan.app.data.source import Array, Classes, Layout, Raw, Source
from dpspan.app.section import Count, File, Texts
from dpspan.support.checks import near

_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
_MODES = {1: "L", 3: "RGB"}


@contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """Whatever goes wrong, as a sentence about the file."""
    try:
        yield
    except Exception as error:  # of zip files, of numpy, of the many readers behind a format
        if not path.exists():
            raise FileNotFoundError(f"There is nothing at {path}.") from None
        reason = getattr(error, "strerror", None) or type(error).__name__
        if isinstance(error, UnicodeDecodeError):
            reason = "its text is not in UTF-8. Save it in that encoding"
        raise ValueError(f"{path} is not a readable {kind}: {reason}.") from None


def check_names(
    path: Path, kind: str, wanted: Collection[str | None], found: Sequence[str], cure: str = ""
) -> None:
    """Refuse names that are not there. Those that are stay unsaid: a first line may be a record."""
    for name in wanted:
        if name is not None and list(found).count(name) != 1:
            how = f"two {kind}s" if name in found else f"no {kind}"
            hint = "" if name in found else near(name, found)
            raise ValueError(f"{path} has {how} '{name}' among its {len(found)}{hint}.{cure}")


def _imported(module: str, what: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        needed = f"the package {module.partition('.')[0]}: pip install 'dpspan[{extra}]'"
        raise ModuleNotFoundError(f"{what} need {needed}.") from error


class Npz(Source):
    """An npz file; `inputs` and `labels` are the names of its arrays.

    `tokens` keeps whole numbers as they are, for models that begin with an embedding.
    """

    format: Literal["npz"] = "npz"
    inputs: str = "x"
    labels: str | None = "y"
    layout: Layout | None = None
    tokens: bool = False

    @property
    def records(self) -> tuple[object, ...]:
        """Other arrays of the file are other records."""
        return *super().records, self.inputs

    def read(self, classes: Classes) -> Raw:
        names = (self.inputs, self.labels)
        with reading(self.path, "npz file"), np.load(self.path, allow_pickle=False) as file:
            arrays: dict[str | None, Array] = {n: file[n] for n in names if n in file}
            present = file.files
        cure = " Name them as `inputs` and `labels` (labels: null if there are none)."
        check_names(self.path, "array", names, present, cure)
        return arrays[self.inputs], arrays.get(self.labels), self.layout


def array_names(path: Path) -> list[str]:
    """What the arrays of an npz file are called."""
    with reading(path, "npz file"), np.load(path, allow_pickle=False) as file:
        return list(file.files)


class Idx(Source):
    """Images and labels in two IDX files, as MNIST has them, compressed by gzip or not."""

    format: Literal["idx"] = "idx"
    labels: File | None = None

    def read(self, classes: Classes) -> Raw:
        return read_idx(self.path), read_idx(self.labels) if self.labels else None, None


def read_idx(path: Path) -> Array:
    """The array in an IDX file: two zero bytes, a type, the dimensions, the numbers."""
    with reading(path, "IDX file"):
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _IDX_TYPES:
        raise ValueError(f"{path} is not an IDX file: it does not begin as one.")
    kind, dimensions = np.dtype(_IDX_TYPES[content[2]]), content[3]
    start = 4 + 4 * dimensions
    shape = tuple(int(n) for n in np.frombuffer(content[4:start], dtype=">u4"))
    if len(shape) != dimensions or len(content) - start != math.prod(shape) * kind.itemsize:
        raise ValueError(
            f"{path} is not a complete IDX file: what follows its header is not as long as that "
            "says."
        )
    return np.frombuffer(content, kind, offset=start).reshape(shape).astype(kind.newbyteorder("="))


class ImageFolder(Source):
    """Images as `path/class/name.png`, or without `labelled` anywhere below `path`.

    Classes are numbered as they are named in the configuration, or by the alphabet. All images
    must have one size, or are resized to `size` (height, width). All of them are held in memory.
    """

    format: Literal["images"] = "images"
    channels: Literal[1, 3] = 3
    size: Annotated[tuple[Count, Count], Field(strict=False)] | None = None
    labelled: bool = True

    def read(self, classes: Classes) -> Raw:
        """All images, in the order of their paths."""
        if not self.path.is_dir():
            raise ValueError(f"Expected a folder of images at {self.path}, got a file.")
        names = self._class_names(classes) if self.labelled else [""]
        found = [(file, i) for i, name in enumerate(names) for file in _images(self.path / name)]
        if not found:
            raise ValueError(
                f"There are no images in {self.path}. Known endings: {', '.join(sorted(_ENDINGS))}."
            )
        pixels = [self._pixels(number, file) for number, (file, _) in enumerate(found, 1)]
        if len({image.shape for image in pixels}) > 1:
            raise ValueError(
                f"Expected images of one size in {self.path}, got several. Set `size: [height, "
                "width]` to resize them."
            )
        labels = np.array([label for _, label in found]) if self.labelled else None
        return np.stack(pixels), labels, "channels_last"

    def _pixels(self, number: int, file: Path) -> Array:
        try:
            with Image.open(file) as image:
                converted = image.convert(_MODES[self.channels])
        except (OSError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise ValueError(  # its name may be somebody's
                f"Image {number} of {self.path}, in the order of paths, cannot be read "
                f"({type(error).__name__})."
            ) from None
        if self.size is not None:
            converted = converted.resize(self.size[::-1], Image.Resampling.BILINEAR)
        array = np.asarray(converted, dtype=np.uint8)
        return array.reshape(*array.shape[:2], self.channels)

    def _class_names(self, classes: Classes) -> list[str]:
        """The subfolders. Each class must have one, even if it is empty: or numbers shift."""
        folders = [path.name for path in self.path.iterdir() if path.is_dir()]
        found = sorted(name for name in folders if name[0] != ".")
        expected = found if isinstance(classes, int) else list(classes)
        count = classes if isinstance(classes, int) else len(classes)
        if set(found) - set(expected) or len(expected) != count:
            raise ValueError(
                f"Expected one folder for each of the {count} classes in {self.path}, got "
                f"{len(found)}. List the names of the folders in `classes`, in order."
            )
        return expected


def _images(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.suffix.lower() in _ENDINGS)


class Table(Source):
    """Columns of numbers, and of texts out of a list that is known in advance.

    `categories` gives the possible texts of a column, which becomes one number (0 or 1) for each
    of them; `mean` and `std` then count these.
    """

    inputs: Texts = Field(min_length=1)
    label: str | None = None
    categories: dict[str, Texts] = Field(default_factory=dict)

    def read(self, classes: Classes) -> Raw:
        strange = sorted(set(self.categories) - set(self.inputs))
        if strange:
            raise ValueError(
                f"Expected categories of columns among inputs for {self.path}, got {strange}."
            )
        names = [*self.inputs, *([] if self.label is None else [self.label])]
        columns = dict(zip(names, self.columns(names), strict=True))
        parts = [self._part(name, columns[name]) for name in self.inputs]
        labels = None if self.label is None else np.asarray(columns[self.label])
        return np.concatenate(parts, axis=1), labels, None

    @abstractmethod
    def columns(self, names: Sequence[str]) -> list[list[Any]]:
        """The values of these columns, texts or numbers."""

    def _part(self, name: str, values: list[Any]) -> Array:
        if name in self.categories:
            return self._indicators(name, values)
        try:
            if None in values:
                raise ValueError  # numpy would take it for NaN
            return np.asarray(values, dtype=np.float32)[:, None]
        except (TypeError, ValueError):
            row = next((row for row, value in enumerate(values, 1) if not is_number(value)), 1)
            raise ValueError(
                f"Expected numbers in column '{name}' of {self.path}, got something else in row "
                f"{row}. List its possible values under `categories`, fill gaps with a constant, "
                "or leave the column out."
            ) from None

    def _indicators(self, name: str, values: list[Any]) -> Array:
        known = list(self.categories[name])
        for row, value in enumerate(values, 1):
            if str(value) not in known:
                raise ValueError(
                    f"Expected one of {known} in column '{name}' of {self.path}, got "
                    f"something else in row {row}. Add it to `categories`."
                )
        texts = np.array([str(value) for value in values], dtype=str)
        return np.asarray(texts[:, None] == np.array(known, dtype=str), dtype=np.float32)


class Csv(Table):
    """A CSV file whose first line names its columns."""

    format: Literal["csv"] = "csv"
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ","

    def columns(self, names: Sequence[str]) -> list[list[Any]]:
        """Texts."""
        (_, header), *rows = read_csv(self.path, self.delimiter)
        check_names(self.path, "column", names, header)
        for line, row in rows:
            if len(row) != len(header):
                raise ValueError(
                    f"{self.path} is not a readable CSV file: line {line} has {len(row)} values, "
                    f"the header {len(header)}."
                )
        return [[row[place].strip() for _, row in rows] for place in map(header.index, names)]


def read_csv(
    path: Path, delimiter: str = ",", most: int | None = None
) -> list[tuple[int, list[str]]]:
    """Lines with their numbers, at most so many; the header, even an empty one, comes first."""
    with reading(path, "CSV file"), path.open(newline="", encoding="utf-8-sig") as file:
        lines = csv.reader(file, delimiter=delimiter, strict=True)
        numbered = ((lines.line_num, row) for row in lines if row)
        return list(itertools.islice(numbered, most)) or [(1, [])]


class Parquet(Table):
    """A Parquet file (the extra `tables`)."""

    format: Literal["parquet"] = "parquet"

    def columns(self, names: Sequence[str]) -> list[list[Any]]:
        """Texts and numbers; a gap is None."""
        file = open_parquet(self.path)
        check_names(self.path, "column", names, file.schema_arrow.names)
        with reading(self.path, "Parquet file"):
            table = file.read(columns=list(dict.fromkeys(names)))
            return [table.column(name).to_pylist() for name in names]


def open_parquet(path: Path) -> Any:
    """pyarrow's file, of which only the schema has been read."""
    parquet = _imported("pyarrow.parquet", "Parquet files", "tables")
    with reading(path, "Parquet file"):
        return parquet.ParquetFile(path)


class HuggingFace(Source):
    """What `save_to_disk` wrote (the extra `datasets`).

    One column of images, vectors or tokens, or several columns of numbers.
    """

    format: Literal["datasets"] = "datasets"
    inputs: str | Texts = "image"
    label: str | None = "label"
    split: str | None = None
    tokens: bool = False

    @property
    def records(self) -> tuple[object, ...]:
        """Other splits are other records."""
        return *super().records, self.split

    def read(self, classes: Classes) -> Raw:
        """The named columns of the split."""
        datasets = _imported("datasets", "Hugging Face datasets", "datasets")
        with reading(self.path, "dataset of save_to_disk"):
            opened = datasets.load_from_disk(str(self.path))
        if isinstance(opened, datasets.DatasetDict):
            if self.split not in opened:
                raise ValueError(
                    f"Expected split to be one of the {len(opened)} of {self.path}, got "
                    f"{self.split!r}{near(str(self.split), list(opened))}."
                )
            opened = opened[self.split]
        names = [self.inputs] if isinstance(self.inputs, str) else list(self.inputs)
        check_names(self.path, "column", [*names, self.label], opened.column_names)
        with reading(self.path, "dataset"):
            rows = opened.with_format("numpy")[:]
            columns = [np.asarray(rows[name]) for name in names]
            labels = None if self.label is None else np.asarray(rows[self.label])
        inputs = columns[0] if len(columns) == 1 else np.stack(columns, axis=1)
        is_image = isinstance(opened.features[names[0]], datasets.Image)
        if inputs.ndim == 1 and inputs.dtype != object:
            inputs = inputs[:, None]
        return inputs, labels, "channels_last" if is_image and inputs.ndim == 4 else None


def is_number(value: Any) -> bool:
    """Whether a cell of a table can be read as a number."""
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
