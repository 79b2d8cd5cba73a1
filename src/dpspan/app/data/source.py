"""What all sources have in common: from the arrays in a file to checked samples in memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dpspan.app.section import File, Numbers, Positive, Section
from dpspan.support.checks import check_count

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import TensorDataset

Array = np.ndarray[Any, Any]
Classes = int | tuple[str, ...]  # how many, or their names in order
Layout = Literal["as_is", "add_channel", "channels_last"]
Raw = tuple[Array, Array | None, Layout | None]  # inputs, labels (numbers or texts), and layout

_PIXEL = 255.0
_PIECE = 2048  # samples fingerprinted at a time
_LAYOUTS: Mapping[str, Callable[[Array], Array]] = {
    "as_is": lambda x: x,
    "add_channel": lambda x: x[:, None],
    "channels_last": lambda x: np.moveaxis(x, -1, 1),
}


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
        """The arrays; OSError or ValueError, with the path, if that is impossible.

        Without a layout, images without channels get one, and all else stays as it is.
        """


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What was read: the samples, and what a model has to know to take them.

    `raw` are fingerprints of the inputs as the file holds them, before they are scaled.
    """

    dataset: TensorDataset = field(repr=False)
    classes: int
    shape: tuple[int, ...]  # of one sample's inputs
    labelled: bool
    raw: tuple[bytes, ...] = field(repr=False)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """(inputs,) or (inputs, labels)."""
        return self.dataset.tensors

    def copies_of(self, other: Loaded) -> list[int]:
        """Which samples have the inputs of one of the other's, whatever their labels.

        Exact copies, in the files or after scaling: two sources of one file that are scaled
        differently have the first in common, a file and a scaled copy of it the second.
        """
        raw, scaled = set(other.raw), set(other._scaled)
        pairs = zip(self.raw, self._scaled, strict=True)
        return [i for i, (one, two) in enumerate(pairs) if one in raw or two in scaled]

    @cached_property
    def _scaled(self) -> tuple[bytes, ...]:
        return _fingerprints(self.tensors[0])


def _fingerprints(inputs: Tensor) -> tuple[bytes, ...]:
    """One hash a sample; whole numbers and floats of the same value are the same."""
    from dpspan.public.overlap import fingerprints

    return tuple(print_ for piece in inputs.split(_PIECE) for print_ in fingerprints(piece.float()))


def load(source: Source, *, classes: Classes) -> Loaded:
    """Read a source; its labels are classes 0, 1, …, or texts out of the names in `classes`.

    The number of classes is given, not counted: which labels occur is private. Errors show no value
    of the file. They say which sample is the first bad one, and are for the operator's eyes only.
    """
    import torch
    from torch.utils.data import TensorDataset

    count = check_count("classes", classes) if isinstance(classes, int) else len(classes)
    if not source.path.exists():
        raise FileNotFoundError(
            f"There is nothing at {source.path}. Paths are relative to the folder that dpspan is "
            f"started in, {Path.cwd()}."
        )
    inputs, labels, layout = source.read(classes)
    if inputs.dtype == object or inputs.ndim < 2 or not len(inputs):
        raise ValueError(
            f"Expected inputs of shape (samples, …) in {source.path}, all samples of one shape and "
            f"at least one sample, got shape {inputs.shape} of {inputs.dtype}."
        )
    tokens, pixels = getattr(source, "tokens", False), inputs.dtype == np.uint8
    arrays = [_tokens(source.path, inputs) if tokens else _arranged(source.path, inputs, layout)]
    prints = _fingerprints(torch.from_numpy(arrays[0]))  # now, as what follows writes to it
    if not tokens:
        _scale(source, arrays[0], _PIXEL if pixels else 1.0)
    if labels is not None:
        if labels.shape != (len(inputs),):
            raise ValueError(
                f"Expected one label for each of the {len(inputs)} samples in {source.path}, got "
                f"labels of shape {labels.shape}."
            )
        arrays.append(_class_numbers(source.path, labels, classes))
    return Loaded(
        dataset=TensorDataset(*map(torch.from_numpy, arrays)),
        classes=count,
        shape=arrays[0].shape[1:],
        labelled=labels is not None,
        raw=prints,
    )


def _tokens(path: Path, inputs: Array) -> Array:
    if not np.issubdtype(inputs.dtype, np.integer):
        raise ValueError(f"Expected whole numbers as tokens in {path}, got {inputs.dtype}.")
    return inputs.astype(np.int64)


def _arranged(path: Path, inputs: Array, layout: Layout | None) -> Array:
    """The values as they are, in an array of its own."""
    if inputs.dtype.kind not in "buif":
        raise ValueError(f"Expected numbers as inputs in {path}, got {inputs.dtype}.")
    images = inputs.dtype == np.uint8 and inputs.ndim == 3
    move = _LAYOUTS[layout or ("add_channel" if images else "as_is")]
    arranged = np.array(move(inputs), dtype=np.float32, order="C")
    bad = np.flatnonzero(~np.isfinite(arranged).reshape(len(arranged), -1).all(1))
    if len(bad):
        raise ValueError(
            f"{len(bad)} samples in {path} hold NaN or infinity (the first is sample {bad[0]}). "
            "Fill the gaps with a constant that does not depend on the data, or leave these "
            "samples out."
        )
    return arranged


def _scale(source: Source, inputs: Array, usual: float) -> None:
    """In place."""
    mean, std = (_per_channel(name, source, inputs) for name in ("mean", "std"))
    if not (std > 0).all():
        raise ValueError(f"Expected std > 0 for {source.path}, got {source.std}.")
    inputs /= source.scale or usual
    inputs -= mean
    inputs /= std


def _per_channel(name: str, source: Source, inputs: Array) -> Array:
    numbers = np.asarray(getattr(source, name), dtype=np.float32)
    if numbers.ndim and len(numbers) != inputs.shape[1]:
        raise ValueError(
            f"Expected {name} to be one number, or {inputs.shape[1]} for the channels or columns "
            f"of {source.path}, got {len(numbers)}."
        )
    return numbers.reshape(-1, *[1] * (inputs.ndim - 2)) if numbers.ndim else numbers


def _class_numbers(path: Path, labels: Array, classes: Classes) -> Array:
    count = classes if isinstance(classes, int) else len(classes)
    expected, cure = f"from 0 to {count - 1}", "Correct `classes`, or renumber the labels"
    whole = np.issubdtype(labels.dtype, np.integer) or labels.dtype == bool
    if labels.dtype.kind == "f" and np.array_equal(labels, np.floor(labels)):
        whole = True  # 1.0, as tables with gaps have them
    if whole:
        numbers = labels.astype(np.int64)
    elif isinstance(classes, int):  # texts that spell numbers
        texts = [str(label).strip() for label in labels]
        numbers = np.array([int(text) if text.isdecimal() else -1 for text in texts])
        if -1 in numbers:
            cure = "List the names of the classes in `classes`"
    else:
        known = {name: number for number, name in enumerate(classes)}
        numbers = np.array([known.get(str(label), -1) for label in labels])
        expected, cure = f"out of {list(classes)}", "Add it to `classes`, or correct the label"
    wrong = np.flatnonzero((numbers < 0) | (numbers >= count))
    if len(wrong):
        raise ValueError(
            f"Expected labels {expected} in {path}, got another at sample {wrong[0]}. {cure}."
        )
    return numbers
