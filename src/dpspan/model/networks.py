"""Small reference models: plain modules, made only of layers that every DP library can handle."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, pad, relu, scaled_dot_product_attention

__all__ = ["MLP", "PaperCNN", "ResNet20", "TransformerEncoder", "WideResNet"]


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
        """Residual branch plus shortcut."""
        shortcut = pad(self.shortcut(x), (0, 0, 0, 0, 0, self.padding))
        x = relu(self.norm1(self.conv1(x)))
        return relu(self.norm2(self.conv2(x)) + shortcut)


class ResNet20(nn.Module):
    """The ResNet-20 of GEP: norms and shortcuts without parameters, 268,346 parameters."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = _norm(16)
        widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
        self.blocks = nn.Sequential(*(_ResidualBlock(a, b) for a, b in pairwise(widths)))
        self.head = nn.Linear(64, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images (n, 3, height, width)."""
        x = self.blocks(relu(self.norm(self.conv(x))))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


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
        """Residual branch plus shortcut."""
        h = relu(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(h)
        result: Tensor = self.conv2(relu(self.norm2(self.conv1(h)))) + shortcut
        return result


class WideResNet(nn.Module):
    """Zagoruyko and Komodakis' WRN with group norms; WRN-28-4 by default, 5.8 M parameters."""

    def __init__(
        self, depth: int = 28, widen: int = 4, classes: int = 10, groups: int = 16
    ) -> None:
        super().__init__()
        if depth % 6 != 4:
            raise ValueError(f"Expected a depth of 6n + 4, such as 16 or 28, got {depth}.")
        blocks, widths = (depth - 4) // 6, [16, 16 * widen, 32 * widen, 64 * widen]
        self.conv = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.blocks = nn.Sequential(
            *(
                _WideBlock(
                    before if block == 0 else width,
                    width,
                    stride=2 if block == 0 and before > widths[0] else 1,
                    groups=groups,
                )
                for before, width in pairwise(widths)
                for block in range(blocks)
            )
        )
        self.norm = nn.GroupNorm(groups, widths[-1])
        self.head = nn.Linear(widths[-1], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images (n, 3, height, width)."""
        x = relu(self.norm(self.blocks(self.conv(x))))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class _EncoderBlock(nn.Module):
    """Pre-norm self-attention and feed-forward network."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states (n, length, width) to the same shape."""
        h = self.norm1(x)
        q, k, v = (
            project(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        attended = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        result: Tensor = x + self.down(gelu(self.up(self.norm2(x))))
        return result


class TransformerEncoder(nn.Module):
    """Text classifier: learned positions, pre-norm blocks, mean pooling, linear head."""

    def __init__(
        self,
        vocabulary: int,
        width: int = 256,
        heads: int = 4,
        hidden: int = 1024,
        layers: int = 4,
        length: int = 64,
        classes: int = 2,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(_EncoderBlock(width, heads, hidden) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of token ids (n, length)."""
        # A row of positions per sample, in memory of its own: Opacus' hooks need the one, its ghost
        # norm of an embedding the other.
        positions = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
        x = self.blocks(self.token(tokens) + self.position(positions))
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits
