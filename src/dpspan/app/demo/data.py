"""The data of the demo, all of it inside scikit-learn and matplotlib: nothing is downloaded.

Every picture is 8 × 8 pixels in [−1, 1]. scikit-learn's digits are counts of ink in 4 × 4 blocks of
a 32 × 32 bitmap; everything else is brought to pixels in the same way.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import torch
from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_digits, load_sample_images
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.utils.data import TensorDataset

SIDE, BLOCK = 8, 4
ITALIC = ("cmti10",)  # in matplotlib since 3.11
OTHERS = ("DejaVu Sans", "DejaVu Sans Mono", "DejaVu Serif", "STIXGeneral",
           "cmb10", "cmr10", "cmss10", "cmtt10")  # fmt: skip

Array = np.ndarray[Any, Any]


class Digits(NamedTuple):
    """Handwritten digits in three parts that share no record."""

    private: TensorDataset
    opt_in: TensorDataset  # what some people agreed to publish
    test: TensorDataset


def handwritten(*, opt_in: int, test: int) -> Digits:
    """scikit-learn's 1,797 digits, split once and for all."""
    x, y = load_digits(return_X_y=True)
    every = TensorDataset(_pixels(x.reshape(-1, 1, SIDE, SIDE)), torch.tensor(y))
    rest, tested = train_test_split(range(len(y)), test_size=test, random_state=0, stratify=y)
    private, public = train_test_split(rest, test_size=opt_in, random_state=0, stratify=y[rest])
    return Digits(*(TensorDataset(*every[part]) for part in (private, public, tested)))


def rendered(
    count: int, *, seed: int, families: Sequence[str] = (*OTHERS, *ITALIC)
) -> tuple[Tensor, Tensor]:
    """Digits in matplotlib's fonts, slanted, stretched and turned a little at random."""
    draw, fonts = np.random.default_rng(seed), _fonts(families)
    labels = np.arange(count) % 10
    bitmaps = [_bitmap(str(label), fonts[draw.integers(len(fonts))], draw) for label in labels]
    return _pixels(_ink(np.stack(bitmaps))), torch.from_numpy(labels)


def photographs(count: int, *, seed: int) -> Tensor:
    """Patches of scikit-learn's two photographs, a temple and a flower, in grey."""
    draw, side = np.random.default_rng(seed), SIDE * BLOCK
    photos = [np.asarray(image).mean(2) / 255 for image in load_sample_images().images]
    patches = []
    for index in range(count):
        photo = photos[index % 2]
        top, left = (draw.integers(size - side) for size in photo.shape)
        patches.append(photo[top : top + side, left : left + side])
    return _pixels(_ink(np.stack(patches)))


def noise(count: int, *, seed: int) -> Tensor:
    """Pixels without any pattern."""
    return _pixels(np.random.default_rng(seed).uniform(0, 16, (count, 1, SIDE, SIDE)))


def _fonts(families: Sequence[str]) -> list[Path]:
    """Those that come with matplotlib: the same on every machine."""
    own = Path(matplotlib.get_data_path())
    paths = {
        Path(font.fname)
        for font in font_manager.fontManager.ttflist
        if font.name in families and own in Path(font.fname).parents
    }
    if not paths:
        raise ValueError(f"This matplotlib has no font {families}: install version 3.11 or newer.")
    return sorted(paths)


def _bitmap(text: str, path: Path, draw: np.random.Generator) -> Array:
    """One digit on 32 × 32 points, as high as the picture."""
    font, side = ImageFont.truetype(str(path), 64), SIDE * BLOCK
    canvas = Image.new("L", (128, 128))
    ImageDraw.Draw(canvas).text((40, 20), text, fill=255, font=font)
    angle, slant = draw.uniform(-12, 12), draw.uniform(-0.25, 0.25)
    canvas = canvas.rotate(angle, Image.Resampling.BILINEAR).transform(
        canvas.size, Image.Transform.AFFINE, (1, slant, -64 * slant, 0, 1, 0)
    )
    glyph = canvas.crop(canvas.getbbox())
    width = int(np.clip(glyph.width * side / glyph.height * draw.uniform(0.8, 1.3), 6, side))
    glyph = glyph.resize((width, side), Image.Resampling.BILINEAR)
    picture = Image.new("L", (side, side))
    picture.paste(glyph, ((side - width) // 2 + int(draw.integers(-2, 3)), 0))
    return (np.asarray(picture) > 127).astype(np.float64)


def _ink(bitmaps: Array) -> Array:
    """The ink in each 4 × 4 block, 0 to 16."""
    blocks = bitmaps.reshape(-1, 1, SIDE, BLOCK, SIDE, BLOCK)
    return np.asarray(blocks.sum((3, 5)))


def _pixels(ink: Array) -> Tensor:
    return torch.tensor(ink, dtype=torch.float32) / 8 - 1
