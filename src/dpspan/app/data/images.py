"""Folders of images, one subfolder per class."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from PIL import Image, UnidentifiedImageError
from pydantic import Field

from dpspan.app.config.section import Count
from dpspan.app.data.source import Classes, Raw, Source

_ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
_MODES = {1: "L", 3: "RGB"}


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
        if self.labelled:
            names = _class_names(self.path, classes)
            files = [
                (file, i) for i, name in enumerate(names) for file in _images(self.path / name)
            ]
        else:
            files = [(file, 0) for file in _images(self.path)]
        if not files:
            raise ValueError(
                f"There are no images in {self.path}. Known endings: {', '.join(sorted(_ENDINGS))}."
            )
        pixels = [self._pixels(number, file) for number, (file, _) in enumerate(files, 1)]
        if len({image.shape for image in pixels}) > 1:
            raise ValueError(
                f"Expected images of one size in {self.path}, got several. Set `size: [height, "
                "width]` to resize them."
            )
        labels = np.array([label for _, label in files]) if self.labelled else None
        return Raw(inputs=np.stack(pixels), labels=labels, layout="channels_last")

    def _pixels(
        self, number: int, file: Path
    ) -> np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]:
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


def _images(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.suffix.lower() in _ENDINGS)


def _class_names(folder: Path, classes: Classes) -> list[str]:
    """The subfolders in order. Each class must have one, even if it is empty: or numbers shift."""
    found = sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")
    expected = found if isinstance(classes, int) else list(classes)
    count = classes if isinstance(classes, int) else len(classes)
    unknown = sorted(set(found) - set(expected))
    if unknown or (isinstance(classes, int) and len(found) != count):
        raise ValueError(
            f"Expected one folder for each of the {count} classes in {folder}, got {len(found)}. "
            "List the names of the folders in `classes`, in order."
        )
    return expected
