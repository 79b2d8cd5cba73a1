"""`PatchFeatures` with a rotation: the mean over views, which are the same for every image."""

from __future__ import annotations

import cmath
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpspan import PatchFeatures


def images(count: int, seed: int) -> Tensor:
    """Neighbouring pixels are alike, as in photographs; wider than high."""
    coarse = torch.randn(count, 3, 7, 8, generator=torch.Generator().manual_seed(seed))
    return nn.functional.interpolate(coarse, (14, 16), mode="bilinear")


def rotated_slowly(image: Tensor, degrees: float) -> Tensor:
    """Pixel by pixel: between the four nearest places of the image, which is its own reflection."""
    height, width = image.shape[1:]
    turn = cmath.exp(1j * math.radians(degrees))
    middle = complex((width - 1) / 2, (height - 1) / 2)
    found = torch.zeros_like(image, dtype=torch.float64)

    def inside(at: int, side: int) -> int:
        return -1 - at if at < 0 else 2 * side - 1 - at if at >= side else at

    for y in range(height):
        for x in range(width):
            place = (complex(x, y) - middle) * turn + middle
            left, top = math.floor(place.real), math.floor(place.imag)
            for column, row in itertools.product((left, left + 1), (top, top + 1)):
                share = (1 - abs(place.real - column)) * (1 - abs(place.imag - row))
                found[:, y, x] += share * image[:, inside(row, height), inside(column, width)]
    return found.to(image.dtype)


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("second", [0, 11])
def test_with_a_rotation_responses_are_the_mean_over_rotated_images(
    mirror: bool, second: int
) -> None:
    public = images(60, seed=0)
    made: Any = {"filters": 8, "size": 4, "directions": 9, "mirror": mirror, "second": second}
    learnt = PatchFeatures.learn(public, rotation=20.0, **made)
    plain = PatchFeatures.learn(public, **made).responses  # the same filters
    seen = images(3, seed=1)
    views = [torch.stack([rotated_slowly(x, angle) for x in seen]) for angle in (20.0, -20.0)]
    expected = (plain(seen) + plain(views[0]) + plain(views[1])) / 3
    assert not torch.allclose(plain(seen), expected, atol=0.01)
    assert torch.allclose(learnt.responses(seen), expected, atol=1e-3)
    moved = (expected.pow(learnt.settings["power"]) - learnt.mean) @ learnt.basis
    assert torch.allclose(learnt(seen), nn.functional.normalize(moved), atol=1e-2)
    assert torch.equal(learnt(seen), learnt(seen))


def test_a_rotation_keeps_images_apart_and_mirror_images_together() -> None:
    learnt = PatchFeatures.learn(images(60, seed=0), filters=8, size=4, directions=9, rotation=20.0)
    seen = images(5, seed=1)
    alone = torch.cat([learnt(image[None]) for image in seen])
    assert torch.allclose(learnt(seen), alone, atol=1e-4)
    assert torch.allclose(learnt(seen), learnt(seen.flip(3)), atol=1e-3)
    other = seen.clone()
    other[1:] = 1e4
    assert torch.allclose(learnt(other)[0], learnt(seen)[0], atol=1e-4)
    assert learnt(seen[:0]).shape == (0, 9)  # a batch may be empty
