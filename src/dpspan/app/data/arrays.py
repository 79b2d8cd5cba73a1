"""Arrays in files: numpy's npz, and the IDX files that MNIST comes in."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Literal

import numpy as np

from dpspan.app.config.section import File
from dpspan.app.data.source import Array, Classes, Layout, Raw, Source, unreadable
from dpspan.support.checks import near


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
        """The two arrays."""
        try:
            with np.load(self.path, allow_pickle=False) as file:
                names = [name for name in (self.inputs, self.labels) if name is not None]
                arrays = {name: file[name] for name in names if name in file}
                missing = [name for name in names if name not in file]
                present = file.files
        except Exception as error:  # of zip files, of numpy's own, or a file of another kind
            raise unreadable(self.path, "npz file", error) from None
        if missing:
            raise ValueError(
                f"{self.path} has no array '{missing[0]}' among its {len(present)}"
                f"{near(missing[0], present)}. Name them as `inputs` and `labels` (labels: null if "
                "there are none)."
            )
        return Raw(
            inputs=arrays[self.inputs],
            labels=None if self.labels is None else arrays[self.labels],
            tokens=self.tokens,
            layout=self.layout,
        )


class Idx(Source):
    """Images and labels in two IDX files, compressed by gzip or not."""

    format: Literal["idx"] = "idx"
    labels: File | None = None

    def read(self, classes: Classes) -> Raw:
        """Both files."""
        return Raw(
            inputs=read_idx(self.path),
            labels=None if self.labels is None else read_idx(self.labels),
        )


_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: Path) -> Array:
    """The array in an IDX file: two zero bytes, a type, the dimensions, the numbers."""
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"There is nothing at {path}.") from error
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, "IDX file", error) from None
    known = len(content) >= 4 and content[:2] == b"\0\0" and content[2] in _TYPES
    if not known:
        raise ValueError(f"{path} is not an IDX file: it does not begin as one.")
    kind, dimensions = np.dtype(_TYPES[content[2]]), content[3]
    start = 4 + 4 * dimensions
    shape = tuple(int(n) for n in np.frombuffer(content[4:start], dtype=">u4"))
    if len(shape) != dimensions or len(content) - start != math.prod(shape) * kind.itemsize:
        raise ValueError(
            f"{path} is not a complete IDX file: what follows its header is not as long as that "
            "says."
        )
    return np.frombuffer(content, kind, offset=start).reshape(shape).astype(kind.newbyteorder("="))
