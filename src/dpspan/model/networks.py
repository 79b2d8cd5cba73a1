"""Small reference models: plain modules, made only of layers that every DP library can handle."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn.functional import pad, relu

from dpspan.support.checks import expect


class MLP(nn.Sequential):
    """Fully connected network with ReLU."""

    def __init__(
        self, inputs: int = 784, hidden: Sequence[int] = (1000, 1000), classes: int = 10
    ) -> None:
        layers: list[nn.Module] = [nn.Flatten()]
        for width in hidden:
            layers += [nn.Linear(inputs, width), nn.ReLU()]
            inputs = width
        super().__init__(*layers, nn.Linear(inputs, classes))


class PaperCNN(nn.Sequential):
    """The network of PDP-SGD, after Papernot et al.: 26,010 parameters for 28 × 28 pixels."""

    def __init__(self, classes: int = 10, channels: int = 1, size: int = 28) -> None:
        side = (size + 4 - 8) // 2  # convolution with padding 2, then the pool takes one away
        side = (side - 4) // 2  # likewise without padding
        super().__init__(
            nn.Conv2d(channels, 16, 8, stride=2, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2, stride=1),
            nn.Conv2d(16, 32, 4, stride=2),
            nn.ReLU(),
            nn.MaxPool2d(2, stride=1),
            nn.Flatten(),
            nn.Linear(32 * side * side, 32),
            nn.ReLU(),
            nn.Linear(32, classes),
        )


def _norm(channels: int) -> nn.GroupNorm:
    """GEP's normalisation: four groups, no parameters."""
    return nn.GroupNorm(4, channels, affine=False)


class _ResNet(nn.Sequential):
    """Named parts in their order; convolutions begin as He et al. have them."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__(OrderedDict(parts))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class _ResidualBlock(nn.Module):
    """Two 3 × 3 convolutions; where the shape changes, the shortcut is strided and zero-padded."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = outputs // inputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = _norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = _norm(outputs)
        self.padding = outputs - inputs
        self.shortcut = (
            nn.Sequential(nn.AvgPool2d(1, stride), _norm(inputs)) if stride > 1 else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = pad(self.shortcut(x), (0, 0, 0, 0, 0, self.padding))
        x = relu(self.norm1(self.conv1(x)))
        return relu(self.norm2(self.conv2(x)) + shortcut)


class ResNet20(_ResNet):
    """The ResNet-20 of GEP: norms and shortcuts without parameters, 268,346 parameters."""

    def __init__(self, classes: int = 10) -> None:
        widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
        super().__init__(
            conv=nn.Conv2d(3, 16, 3, padding=1, bias=False),
            norm=_norm(16),
            relu=nn.ReLU(),
            blocks=nn.Sequential(*(_ResidualBlock(a, b) for a, b in pairwise(widths))),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            head=nn.Linear(64, classes),
        )


class _WideBlock(nn.Module):
    """Pre-activation residual block; its shortcut, where the shape changes, is a convolution."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        same = inputs == outputs and stride == 1
        self.shortcut = None if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = relu(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(h)
        result: Tensor = self.conv2(relu(self.norm2(self.conv1(h)))) + shortcut
        return result


class WideResNet(_ResNet):
    """Zagoruyko and Komodakis' WRN with group norms; WRN-28-4 by default, 5.8 M parameters."""

    def __init__(
        self, depth: int = 28, widen: int = 4, classes: int = 10, groups: int = 16
    ) -> None:
        expect(depth % 6 == 4, "a depth of 6n + 4, such as 16 or 28", depth)
        widths = [16, 16 * widen, 32 * widen, 64 * widen]
        firsts = [True] + [False] * ((depth - 4) // 6 - 1)
        shapes = [
            (before if first else width, width, 2 if first and before > widths[0] else 1)
            for before, width in pairwise(widths)
            for first in firsts
        ]
        super().__init__(
            conv=nn.Conv2d(3, widths[0], 3, padding=1, bias=False),
            blocks=nn.Sequential(*(_WideBlock(*shape, groups) for shape in shapes)),
            norm=nn.GroupNorm(groups, widths[-1]),
            relu=nn.ReLU(),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            head=nn.Linear(widths[-1], classes),
        )
