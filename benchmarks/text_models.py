"""A small text encoder for benchmarks and tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


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
