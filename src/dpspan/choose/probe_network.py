"""The GSD paper's probe network: a small stand-in for models too large to compare datasets with.

Its Table 5b: 64 filters of 8 × 8, stride 5; pool 2; 16 filters of 4 × 4, stride 3; pool 2; 144
units into the classes. 144 = 16 × 3 × 3 is what images of 224 × 224 give, so that is their size
here: others are resized. 30,782 parameters for 3 channels and 14 classes.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import interpolate

from dpspan.support.randomness import seeded

_SIDE = 224
_FEATURES = 16 * 3 * 3


class ProbeNetwork(nn.Module):
    """Logits of images (n, channels, height, width) of any size; the same weights for a seed.

    Examples:
        >>> import torch
        >>> from dpspan.choose import ProbeNetwork
        >>> ProbeNetwork(channels=3, classes=10)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, *, channels: int, classes: int, seed: int = 0) -> None:
        super().__init__()
        with seeded(seed):
            self.layers = nn.Sequential(
                nn.Conv2d(channels, 64, 8, stride=5),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(64, 16, 4, stride=3),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(_FEATURES, classes),
            )

    def forward(self, images: Tensor) -> Tensor:
        """Logits, for a softmax or (several labels per image) a sigmoid in the loss."""
        if images.shape[-2:] != (_SIDE, _SIDE):
            images = interpolate(images, (_SIDE, _SIDE), mode="bilinear", antialias=True)
        logits: Tensor = self.layers(images)
        return logits
