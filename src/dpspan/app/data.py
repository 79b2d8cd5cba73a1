"""Data from files: npz, IDX, image folders and Hugging Face datasets on disk; tables beside.

Nothing is learnt from the data on the way in: pixels are divided by 255, and whatever else inputs
are shifted and scaled by is a constant that the user gives. A mean of private data is not public.
Errors show no value of a file, nor the words of a library that may quote one.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib
import math
from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
from PIL import Image, UnidentifiedImageError
from pydantic import Field, model_validator

from dpspan.app.preprocessing import numbers
from dpspan.app.section import Count, File, Numbers, Positive, Section, Texts, refuse
from dpspan.support.checks import check_count, expect, spelt_otherwise
from dpspan.support.units import Units

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import TensorDataset

    from dpspan.app.preprocessing import Preprocessing

Array = np.ndarray[Any, Any]
Classes = int | tuple[str, ...]  # how many, or their names in order
Layout = Literal["as_is", "add_channel", "channels_last"]
Raw = tuple[Array, Array | None, Layout | None]  # inputs, labels (numbers or texts), and layout

_PIECE = 1024  # samples compared at a time
_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}


class Target(Section):
    """The range of labels that are numbers, known in advance: what is beyond a bound counts as it.

    Models are trained on numbers between −1 and 1.
    """

    low: float
    high: float

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.low >= self.high or math.isinf(self.high - self.low):
            refuse("", "Expected `low` below `high`, and a range that a number can hold.")
        return self

    def scaled(self, numbers: Array) -> Array:
        return np.clip((numbers - (self.low + self.high) / 2) * 2 / (self.high - self.low), -1, 1)

    def unscaled(self, outputs: Array) -> Array:
        """What a model's outputs mean: nothing beyond the bounds."""
        return (self.low + self.high) / 2 + np.clip(outputs, -1, 1) * (self.high - self.low) / 2


class Source(Section):
    """A file or folder of samples.

    Inputs become (x / scale − mean) / std, of constants given here: numbers, or one per channel or
    column. Without `scale`, pixels (whole numbers of 8 bits) are divided by 255, all else by 1;
    where some data of a run are pixels and others are not, all of them have to state it.
    """

    path: File
    scale: Positive | None = None
    mean: float | Numbers = 0.0
    std: float | Numbers = 1.0

    @model_validator(mode="after")
    def _labels_are_no_inputs(self) -> Self:
        inputs, label = getattr(self, "inputs", ()), getattr(self, "label", None)
        if getattr(self, "labels", label) in ([inputs] if isinstance(inputs, str) else inputs):
            refuse("inputs", "Expected no label among the inputs: take it out there.")
        return self

    @property
    def scaled(self) -> bool:
        """Whether it says by what."""
        return (self.scale, self.mean, self.std) != (None, 0.0, 1.0)

    @property
    def records(self) -> tuple[object, ...]:
        """Where the records are: sources that agree in this read the same ones."""
        return (self.path.resolve(),)

    def ids(self, name: str) -> Sequence[Any] | Array | None:
        """A column with one id a record; None if there is none of that name."""
        return None

    @abstractmethod
    def read(self, classes: Classes) -> Raw:
        """The arrays; without a layout, images without channels get one, all else stays."""

    def prepared(self, preprocessing: Preprocessing) -> Raw:
        """The arrays, as a description of columns makes them."""
        raise ValueError(f"{self.path} is no table: data.preprocessing is about columns.")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What was read: the samples, and what a model has to know to take them."""

    dataset: TensorDataset = field(repr=False)  # inputs, or inputs and labels
    outputs: int  # of a model for a sample: one a class, or the one number that is predicted
    raw: Array = field(repr=False)  # fingerprints of the inputs before scaling
    scale: float  # what inputs were divided by
    units: Units | None = None  # whose they are, if not each somebody else's

    @property
    def count(self) -> int:
        """How many samples there are, or units of them."""
        return len(self.dataset if self.units is None else self.units)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.dataset.tensors

    @property
    def labelled(self) -> bool:
        return len(self.tensors) > 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample's inputs."""
        return tuple(self.tensors[0].shape[1:])

    def copies_of(self, other: Loaded) -> list[int]:
        """Which samples copy one of the other's, whatever their labels, in the files or scaled.

        Sources of one file may be scaled differently, and a file may hold another one scaled.
        """
        from dpspan.public.fingerprints import Sieve

        sieve = Sieve(lambda: _pieces(self.tensors[0]))
        scaled = (each for x in _pieces(other.tensors[0]) for each in sieve.among(x).values())
        known = self.raw.tolist()
        raw = set(known).intersection(other.raw.tolist())
        in_files = (place for place, each in enumerate(known) if each in raw)
        return sorted({*in_files, *sieve.places(scaled)})


def _pieces(inputs: Tensor) -> Iterator[Tensor]:
    """Whole numbers and floats of the same value are the same."""
    return (piece.float() for piece in inputs.split(_PIECE))


def load(
    source: Source, *, classes: Classes | Target, preprocessing: Preprocessing | None = None
) -> Loaded:
    """Read a source; its labels are classes 0, 1, …, texts out of `classes`, or numbers.

    The number of classes is given, not counted: which labels occur is private. Errors show no value
    of the file. They say which sample is the first bad one, and are for the operator's eyes only.
    """
    import torch
    from torch.utils.data import TensorDataset

    from dpspan.public.fingerprints import fingerprints, packed

    target, names = (classes, 1) if isinstance(classes, Target) else (None, classes)
    count = check_count("classes", names if isinstance(names, int) else len(names))
    if not source.path.exists():
        here = f"Paths are relative to the folder that dpspan is started in, {Path.cwd()}"
        raise FileNotFoundError(f"There is nothing at {source.path}. {here}.")
    inputs, labels, layout = (
        source.read(names) if preprocessing is None else source.prepared(preprocessing)
    )
    if inputs.dtype == object or inputs.ndim < 2 or not len(inputs):
        raise ValueError(
            f"Expected inputs of shape (samples, …) in {source.path}, all samples of one shape and "
            f"at least one sample, got shape {inputs.shape} of {inputs.dtype}."
        )
    tokens, kind = getattr(source, "tokens", False), inputs.dtype.kind
    if kind not in ("iu" if tokens else "buif"):
        wanted = "whole numbers as tokens" if tokens else "numbers as inputs"
        raise ValueError(f"Expected {wanted} in {source.path}, got {inputs.dtype}.")
    arrays = [inputs.astype(np.int64) if tokens else _arranged(source.path, inputs, layout)]
    # Now, as what follows writes to it
    raw = packed(map(fingerprints, _pieces(torch.from_numpy(arrays[0]))))
    usual = 255.0 if inputs.dtype == np.uint8 and not tokens else 1.0
    if not tokens:
        _scale(source, arrays[0], usual)
    if labels is not None:
        if labels.shape != (len(inputs),):
            one_each = f"one label for each of the {len(inputs)} samples in {source.path}"
            raise ValueError(f"Expected {one_each}, got labels of shape {labels.shape}.")
        arrays.append(
            _class_numbers(source.path, labels, names, count)
            if target is None
            else target.scaled(_measured(source.path, labels))[:, None].astype(np.float32)
        )
    dataset = TensorDataset(*map(torch.from_numpy, arrays))
    return Loaded(dataset=dataset, outputs=count, raw=raw, scale=source.scale or usual)


def _arranged(path: Path, inputs: Array, layout: Layout | None) -> Array:
    if layout == "channels_last":
        inputs = np.moveaxis(inputs, -1, 1)
    elif layout == "add_channel" or (not layout and inputs.dtype == np.uint8 and inputs.ndim == 3):
        inputs = inputs[:, None]
    arranged = np.require(inputs, np.float32, ["C", "W"])  # a copy only where it must be one
    bad = np.flatnonzero(~np.isfinite(arranged).reshape(len(arranged), -1).all(1))
    if len(bad):
        raise ValueError(
            f"{len(bad)} samples in {path} hold NaN or infinity (the first is sample {bad[0]}). "
            "Leave them out, or fill the gaps with a constant that does not depend on the data."
        )
    return arranged


def _scale(source: Source, inputs: Array, usual: float) -> None:
    """In place."""
    inputs /= source.scale or usual
    for name, apply in (("mean", np.subtract), ("std", np.divide)):
        given = np.asarray(getattr(source, name), dtype=np.float32)
        if given.ndim and len(given) != inputs.shape[1]:
            raise ValueError(
                f"Expected {name} to be one number, or {inputs.shape[1]} for the channels or "
                f"columns of {source.path}, got {len(given)}."
            )
        positive = name == "mean" or bool((given > 0).all())
        expect(positive, f"std > 0 for {source.path}", source.std)
        apply(inputs, given.reshape(-1, *[1] * (inputs.ndim - 2)), out=inputs)


def _measured(path: Path, labels: Array) -> Array:
    """Labels as numbers; ValueError with the first that is none."""
    found = numbers(labels)
    wrong = np.flatnonzero(~np.isfinite(found))
    if len(wrong):
        cure = "Correct it or leave the sample out, or give `classes` in place of `target`"
        here = f"Expected numbers as labels in {path}, got something else at sample {wrong[0]}"
        raise ValueError(f"{here}. {cure}.")
    return found


def _class_numbers(path: Path, labels: Array, classes: Classes, count: int) -> Array:
    expected, cure = f"from 0 to {count - 1}", "Correct `classes`, or renumber the labels"
    kind = labels.dtype.kind
    known = {} if isinstance(classes, int) else {name: code for code, name in enumerate(classes)}
    # 1.0 is whole: tables with gaps have it.
    if kind in "biu" or (kind == "f" and np.array_equal(labels, np.floor(labels))):
        codes = labels.astype(np.int64)
        if known and all(name.lstrip("-").isdecimal() for name in known):
            codes = np.array([known.get(str(code), -1) for code in codes])
            expected = f"out of {[*known]}"
        truths = {name.casefold(): code for name, code in known.items()}
        if kind == "b" and truths.keys() == {"false", "true"}:
            codes = np.where(labels, truths["true"], truths["false"])
    elif isinstance(classes, int):  # texts that spell numbers
        texts = (str(label).strip() for label in labels)
        codes = np.array([int(text) if text.isdecimal() else -1 for text in texts])
        if -1 in codes:
            cure = "List the names of the classes in `classes`"
    else:
        codes = np.array([known.get(str(label), -1) for label in labels])
        expected, cure = f"out of {[*known]}", "Add it to `classes`, or correct the label"
    wrong = np.flatnonzero((codes < 0) | (codes >= count))
    if len(wrong):
        raise ValueError(
            f"Expected labels {expected} in {path}, got another at sample {wrong[0]}. {cure}."
        )
    return codes


@contextlib.contextmanager
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
    wrong = [name for name in wanted if name is not None and list(found).count(name) != 1]
    if wrong:
        how = f"two {kind}s" if wrong[0] in found else f"no {kind}"
        hint = "" if wrong[0] in found or wrong[1:] else spelt_otherwise(wrong[0], found)
        names = ", ".join(map(repr, wrong))
        raise ValueError(f"{path} has {how} {names} among its {len(found)}{hint}.{cure}")


def optional(module: str, what: str, extra: str) -> Any:
    """The module, or ModuleNotFoundError that says what to install."""
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
        return *super().records, self.inputs  # other arrays of the file are other records

    def ids(self, name: str) -> Array | None:
        with reading(self.path, "npz file"), np.load(self.path, allow_pickle=False) as file:
            found: Array | None = file[name] if name in file.files else None
        return found

    def read(self, classes: Classes) -> Raw:
        cure = " Name them as `inputs` and `labels` (labels: null if there are none)."
        there = array_names(self.path)
        check_names(self.path, "array", (self.inputs, self.labels), there, cure)
        with reading(self.path, "npz file"), np.load(self.path, allow_pickle=False) as file:
            labels = None if self.labels is None else file[self.labels]
            return file[self.inputs], labels, self.layout


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
        raise ValueError(f"{path} is not a complete IDX file: its length is not its header's.")
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
        if not self.path.is_dir():
            raise ValueError(f"Expected a folder of images at {self.path}, got a file.")
        found = [
            (file, number)
            for number, name in enumerate(self.class_names(classes) if self.labelled else [""])
            for file in sorted((self.path / name).rglob("*"))
            if file.suffix.lower() in _ENDINGS
        ]
        if not found:
            known = ", ".join(sorted(_ENDINGS))
            raise ValueError(f"There are no images in {self.path}. Known endings: {known}.")
        pixels = [self._pixels(number, file) for number, (file, _) in enumerate(found, 1)]
        if len({image.shape for image in pixels}) > 1:
            cure = "Set `size: [height, width]` to resize them"
            raise ValueError(f"Expected images of one size in {self.path}, got several. {cure}.")
        labels = np.array([label for _, label in found]) if self.labelled else None
        return np.stack(pixels), labels, "channels_last"

    def _pixels(self, number: int, file: Path) -> Array:
        try:
            with Image.open(file) as image:
                deep = image.mode[0] in "IF"
                converted = image.convert("L" if self.channels == 1 else "RGB")
        except (OSError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise ValueError(  # its name may be somebody's
                f"Image {number} of {self.path}, in the order of paths, cannot be read "
                f"({type(error).__name__})."
            ) from None
        if deep:  # all values from 255 on have become white
            raise ValueError(
                f"Image {number} of {self.path}, in the order of paths, has more than 8 bits a "
                "pixel. Save all images with 8, or give arrays of them (npz), with `scale: 65535`."
            )
        if self.size is not None:
            converted = converted.resize(self.size[::-1], Image.Resampling.BILINEAR)
        array = np.asarray(converted, dtype=np.uint8)
        return array.reshape(*array.shape[:2], self.channels)

    def class_names(self, classes: Classes) -> list[str]:
        """The subfolders. Each class must have one, even if it is empty: or numbers shift."""
        found = sorted(path.name for path in self.path.glob("[!.]*") if path.is_dir())
        expected = found if isinstance(classes, int) else list(classes)
        count = classes if isinstance(classes, int) else len(classes)
        if set(found) - set(expected) or len(expected) != count:
            raise ValueError(
                f"Expected one folder for each of the {count} classes in {self.path}, got "
                f"{len(found)}. List the names of the folders in `classes`, in order."
            )
        return expected


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
        return *super().records, self.split  # other splits are other records

    def ids(self, name: str) -> Sequence[Any] | None:
        opened = self._opened()
        with reading(self.path, "dataset"):
            return list(opened[name]) if name in opened.column_names else None

    def _opened(self) -> Any:
        datasets = optional("datasets", "Hugging Face datasets", "datasets")
        with reading(self.path, "dataset of save_to_disk"):
            opened = datasets.load_from_disk(str(self.path))
        if isinstance(opened, datasets.DatasetDict):
            if self.split is None:
                raise ValueError(f"{self.path} has {len(opened)} splits. Name one as `split`.")
            check_names(self.path, "split", [self.split], list(opened), " Name one as `split`.")
            opened = opened[self.split]
        return opened

    def read(self, classes: Classes) -> Raw:
        opened = self._opened()
        names = [self.inputs] if isinstance(self.inputs, str) else list(self.inputs)
        check_names(self.path, "column", [*names, self.label], opened.column_names)
        with reading(self.path, "dataset"):
            rows = opened.with_format("numpy")[:]
            columns = [np.asarray(rows[name]) for name in names]
            labels = None if self.label is None else np.asarray(rows[self.label])
        inputs = columns[0]
        if len(columns) > 1 or (inputs.ndim == 1 and inputs.dtype != object):
            inputs = np.stack(columns, axis=1)
        is_image = type(opened.features[names[0]]).__name__ == "Image"
        return inputs, labels, "channels_last" if is_image and inputs.ndim == 4 else None
