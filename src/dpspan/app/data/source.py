"""What all sources have in common: from the arrays in a file to checked tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dpspan.app.config.section import File, Numbers, Positive, Section
from dpspan.app.data.records import Loaded, fingerprinted
from dpspan.support.checks import check_count

if TYPE_CHECKING:
    from torch import Tensor

Array = np.ndarray[Any, Any]
Classes = int | tuple[str, ...]  # how many, or their names in order
Layout = Literal["as_is", "add_channel", "channels_last"]

PIXEL = 255.0

_LAYOUTS: Mapping[str, Callable[[Array], Array]] = {
    "as_is": lambda x: x,
    "add_channel": lambda x: x[:, None],
    "channels_last": lambda x: np.moveaxis(x, -1, 1),
}


@dataclass(frozen=True, kw_only=True)
class Raw:
    """Arrays as a file holds them; labels are numbers, texts, or None."""

    inputs: Array
    labels: Array | None
    tokens: bool = False
    layout: Layout | None = None  # None: images without channels get one, all else stays


class Source(Section):
    """A file or folder of samples.

    Inputs become (x / scale − mean) / std, of constants given here: numbers, or one per channel or
    column. Without `scale`, pixels (whole numbers of 8 bits) are divided by 255, all else by 1.
    """

    path: File
    scale: Positive | None = None
    mean: float | Numbers = 0.0
    std: float | Numbers = 1.0

    @property
    def records(self) -> tuple[object, ...]:
        """Where the records are: sources that agree in this read the same ones."""
        return (self.path.resolve(),)

    @property
    def scaling(self) -> tuple[object, ...]:
        """By what inputs are shifted and scaled."""
        return self.scale, self.mean, self.std

    @abstractmethod
    def read(self, classes: Classes) -> Raw:
        """The arrays; OSError or ValueError, with the path, if that is impossible."""


def load(source: Source, *, classes: Classes) -> Loaded:
    """Read a source; its labels are classes 0, 1, …, or texts out of the names in `classes`.

    The number of classes is given, not counted: which labels occur is private. Errors show no value
    of the file. They say which sample is the first bad one, and are for the operator's eyes only.
    """
    from torch.utils.data import TensorDataset

    if isinstance(classes, int):
        check_count("classes", classes)
    count = classes if isinstance(classes, int) else len(classes)
    if not source.path.exists():
        raise FileNotFoundError(
            f"There is nothing at {source.path}. Paths are relative to the folder that dpspan is "
            f"started in, {Path.cwd()}."
        )
    raw = source.read(classes)
    if raw.inputs.dtype == object or raw.inputs.ndim < 2 or not len(raw.inputs):
        raise ValueError(
            f"Expected inputs of shape (samples, …) in {source.path}, all samples of one shape and "
            f"at least one sample, got shape {raw.inputs.shape} of {raw.inputs.dtype}."
        )
    arranged = _tokens(source, raw) if raw.tokens else _arranged(source, raw)
    prints = fingerprinted(arranged)  # now, as what follows writes to it
    inputs = arranged if raw.tokens else _scaled(source, raw, arranged)
    tensors = [inputs]
    if raw.labels is not None:
        if raw.labels.shape != (len(inputs),):
            raise ValueError(
                f"Expected one label for each of the {len(inputs)} samples in {source.path}, got "
                f"labels of shape {raw.labels.shape}."
            )
        tensors.append(_class_numbers(source.path, raw.labels, classes))
    return Loaded(
        dataset=TensorDataset(*tensors),
        classes=count,
        shape=tuple(inputs.shape[1:]),
        labelled=raw.labels is not None,
        raw=prints,
    )


def unreadable(path: Path, kind: str, error: Exception) -> ValueError:
    """What to say of a file that cannot be read: not the reader's own words, which may quote it."""
    reason = getattr(error, "strerror", None) or type(error).__name__
    if isinstance(error, UnicodeDecodeError):
        reason = "its text is not in UTF-8. Save it in that encoding"
    return ValueError(f"{path} is not a readable {kind}: {reason}.")


def _tokens(source: Source, raw: Raw) -> Tensor:
    import torch

    if not np.issubdtype(raw.inputs.dtype, np.integer):
        raise ValueError(
            f"Expected whole numbers as tokens in {source.path}, got {raw.inputs.dtype}."
        )
    return torch.from_numpy(raw.inputs.astype(np.int64))


def _arranged(source: Source, raw: Raw) -> Tensor:
    """The values as they are, in a tensor of its own."""
    import torch

    kind = raw.inputs.dtype
    if kind.kind not in "buif":
        raise ValueError(f"Expected numbers as inputs in {source.path}, got {kind}.")
    pixels = kind == np.uint8
    layout = raw.layout or ("add_channel" if pixels and raw.inputs.ndim == 3 else "as_is")
    arranged = np.ascontiguousarray(_LAYOUTS[layout](raw.inputs), dtype=np.float32)
    if arranged.ndim < 2:
        raise ValueError(f"Expected layout: as_is for the inputs of shape {raw.inputs.shape}.")
    inputs = torch.from_numpy(arranged)
    if inputs.data_ptr() == raw.inputs.ctypes.data:  # it may not be written to
        inputs = inputs.clone()
    bad = (~inputs.isfinite().flatten(1).all(1)).nonzero()
    if len(bad):
        raise ValueError(
            f"{len(bad)} samples in {source.path} hold NaN or infinity (the first is sample "
            f"{int(bad[0])}). Fill the gaps with a constant that does not depend on the data, or "
            "leave these samples out."
        )
    return inputs


def _scaled(source: Source, raw: Raw, inputs: Tensor) -> Tensor:
    """In place."""
    inputs /= source.scale or (PIXEL if raw.inputs.dtype == np.uint8 else 1.0)
    inputs -= _per_channel("mean", source, inputs)
    std = _per_channel("std", source, inputs)
    if not bool((std > 0).all()):
        raise ValueError(f"Expected std > 0 for {source.path}, got {source.std}.")
    inputs /= std
    return inputs


def _per_channel(name: str, source: Source, inputs: Tensor) -> Tensor:
    import torch

    value = getattr(source, name)
    if isinstance(value, tuple) and len(value) != inputs.shape[1]:
        raise ValueError(
            f"Expected {name} to be one number, or {inputs.shape[1]} for the channels or columns "
            f"of {source.path}, got {len(value)}."
        )
    numbers = torch.as_tensor(value, dtype=torch.float32)
    return numbers.view(-1, *[1] * (inputs.dim() - 2)) if numbers.dim() else numbers


def _class_numbers(path: Path, labels: Array, classes: Classes) -> Tensor:
    import torch

    whole = np.issubdtype(labels.dtype, np.integer) or labels.dtype == bool
    if not whole and labels.dtype.kind == "f" and np.array_equal(labels, np.floor(labels)):
        labels, whole = labels.astype(np.int64), True  # 1.0, as tables with gaps have them
    if not whole:
        labels = _numbered(path, labels, classes)
    count = classes if isinstance(classes, int) else len(classes)
    wrong = np.flatnonzero((labels < 0) | (labels >= count))
    if len(wrong):
        raise ValueError(
            f"Expected labels from 0 to {count - 1} in {path}, got another at sample {wrong[0]}. "
            "Correct `classes`, or renumber the labels."
        )
    return torch.from_numpy(labels.astype(np.int64))


def _numbered(path: Path, labels: Array, classes: Classes) -> Array:
    """Texts as the numbers of their names, or as the numbers that they spell."""
    texts = [str(label) for label in labels]
    if isinstance(classes, int):
        for sample, text in enumerate(texts):
            if not text.strip().isdecimal():
                raise ValueError(
                    f"Expected labels from 0 to {classes - 1} in {path}, got another at sample "
                    f"{sample}. List the names of the classes in `classes`."
                )
        return np.array([int(text) for text in texts])
    numbers = {name: number for number, name in enumerate(classes)}
    for sample, text in enumerate(texts):
        if text not in numbers:
            raise ValueError(
                f"Expected labels out of {list(classes)} in {path}, got another at sample "
                f"{sample}. Add it to `classes`, or correct the label."
            )
    return np.array([numbers[text] for text in texts])
