"""Random augmentation of images: for warm starts on few public samples, and for `views=`."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from dpspan.support.checks import check_number, expect


@dataclass(frozen=True, kw_only=True)
class RandomAffine:
    """Turns, moves, scales, shears and perhaps mirrors each image of a batch on its own.

    Every number is the most of it, in either direction. What comes in from outside is the image's
    reflection. Draws come from torch's generator.

    Args:
        degrees: of rotation.
        shift: as a share of the image's side.
        scale: 0.1 makes images up to a tenth larger or smaller.
        shear: along the rows, as a share of their length.
        mirror: left to right, with probability 1/2.
    """

    degrees: float = 12.0
    shift: float = 0.1
    scale: float = 0.1
    shear: float = 0.1
    mirror: bool = False

    def __post_init__(self) -> None:
        for name in ("degrees", "shift", "scale", "shear"):
            value = check_number(name, getattr(self, name))
            expect(0 <= value < math.inf, f"{name} >= 0", value)
        expect(self.scale < 1, "scale < 1", self.scale)
        expect(isinstance(self.mirror, bool), "mirror to be True or False", self.mirror)

    def __call__(self, images: Tensor) -> Tensor:
        """(n, channels, height, width), each image changed in its own way."""
        if not isinstance(images, Tensor) or images.dim() != 4 or not images.is_floating_point():
            shape = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
            raise ValueError(
                f"Expected images to augment, floats (n, channels, height, width), got {shape}."
            )
        most = [math.radians(self.degrees), self.scale, self.shear, 2 * self.shift, 2 * self.shift]
        uniform = 2 * torch.rand(5, len(images), device=images.device, dtype=images.dtype) - 1
        angle, stretch, slant, right, down = uniform * images.new_tensor(most)[:, None]
        stretch, flip = stretch + 1, torch.ones_like(angle)
        if self.mirror:
            flip = torch.where(torch.rand_like(angle) < 0.5, -flip, flip)
        cosine, sine = stretch * angle.cos(), stretch * angle.sin()
        # `affine_grid` counts in halves of each side, which are of other lengths.
        height, width = images.shape[2:]
        top = torch.stack([flip * cosine, slant - sine * height / width, right], 1)
        bottom = torch.stack([flip * sine * width / height, cosine, down], 1)
        grid = affine_grid(torch.stack([top, bottom], 1), list(images.shape), align_corners=False)
        return grid_sample(images, grid, padding_mode="reflection", align_corners=False)
