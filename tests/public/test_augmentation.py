"""Random augmentation: what it does to single images, and that it is the same for nobody else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dpspan import RandomAffine

NOTHING = RandomAffine(degrees=0, shift=0, scale=0, shear=0)


def images(n: int = 6, width: int = 21) -> Tensor:
    """A bright spot a little above and left of the middle, on black."""
    x = torch.zeros(n, 2, 21, width)
    x[:, :, 8, width // 2 - 4] = 1.0
    return x


def centre(x: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of each image's light, from the middle."""
    light = x[:, 0]
    rows, columns = (torch.arange(size, dtype=x.dtype) - size // 2 for size in x.shape[-2:])
    total = light.sum((1, 2))
    return (light.sum(2) @ rows) / total, (light.sum(1) @ columns) / total


def test_nothing_leaves_images_as_they_are() -> None:
    torch.testing.assert_close(NOTHING(images()), images(), atol=1e-5, rtol=0)


def test_shift_is_at_most_its_share() -> None:
    torch.manual_seed(0)
    rows, columns = centre(RandomAffine(degrees=0, shift=0.1, scale=0, shear=0)(images(400)))
    for found, was in ((rows, -2), (columns, -4)):
        moved = (found - was).abs()
        assert moved.max() <= 0.1 * 21 + 1e-3
        assert moved.max() > 0.08 * 21  # 400 draws come near it
        assert found.std() > 0.5


@pytest.mark.parametrize("width", [21, 61])
def test_rotation_keeps_the_distance_from_the_middle(width: int) -> None:
    torch.manual_seed(0)
    turned = RandomAffine(degrees=30, shift=0, scale=0, shear=0)(images(400, width))
    rows, columns = centre(turned)
    there, here = torch.complex(columns, rows), complex(-4, -2)
    torch.testing.assert_close(there.abs(), torch.full((400,), abs(here)), atol=0.2, rtol=0)
    angles = torch.rad2deg((there / here).angle()).abs()
    assert 27 < angles.max() < 32  # 400 draws come near 30; interpolation blurs the spot


def test_scale_moves_light_along_its_ray() -> None:
    torch.manual_seed(0)
    rows, columns = centre(RandomAffine(degrees=0, shift=0, scale=0.3, shear=0)(images(400)))
    torch.testing.assert_close(columns / rows, torch.full((400,), 2.0), atol=0.25, rtol=0)
    assert 4 / 1.35 < columns.abs().min() < 4 / 1.2  # the grid is stretched, the image shrinks
    assert 4 / 0.8 < columns.abs().max() < 4 / 0.65


def test_shear_moves_light_along_its_row() -> None:
    torch.manual_seed(0)
    rows, columns = centre(RandomAffine(degrees=0, shift=0, scale=0, shear=0.5)(images(400)))
    torch.testing.assert_close(rows, torch.full((400,), -2.0), atol=0.05, rtol=0)
    moved = (columns + 4).abs()
    assert 0.8 < moved.max() < 1.1  # half of two rows


def test_a_mirror_turns_half_of_them() -> None:
    torch.manual_seed(0)
    mirrored = RandomAffine(degrees=0, shift=0, scale=0, shear=0, mirror=True)(images(400))
    _, columns = centre(mirrored)
    right = (columns > 0).float().mean()
    assert abs(float(right) - 0.5) < 5 * 0.5 / 20  # five standard deviations of 400 coins
    assert set(columns.round().tolist()) == {-4.0, 4.0}


def test_each_image_has_draws_of_its_own_from_torchs_generator() -> None:
    torch.manual_seed(0)
    first = RandomAffine()(images())
    assert len({tuple(image.flatten().tolist()) for image in first}) == 6
    torch.manual_seed(0)
    torch.testing.assert_close(RandomAffine()(images()), first, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"degrees": -1}, "degrees >= 0"),
        ({"shift": float("nan")}, "shift"),
        ({"scale": 1.0}, "scale < 1"),
        ({"mirror": 1}, "mirror to be True or False"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, float], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        RandomAffine(**settings)


@pytest.mark.parametrize("wrong", [torch.zeros(3, 4), torch.zeros(2, 1, 4, 4).long(), [1]])
def test_what_is_no_image_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"Expected images to augment, floats \(n, channels"):
        NOTHING(wrong)  # type: ignore[arg-type]
