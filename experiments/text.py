"""MiniLM for sentences, as the experiments train it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from dpspan.model.text import minilm_encoder


class MeanPooled(nn.Module):
    """MiniLM with the pooling it was trained with, the mean over tokens, and a linear head.

    `trained`: the head alone (a linear probe), the encoder's matrices too, as in RGP's paper, where
    embeddings, norms and biases stay, or all of it.
    """

    def __init__(self, trained: Literal["head", "matrices", "all"]) -> None:
        super().__init__()
        self.encoder = minilm_encoder()
        self.head = nn.Linear(self.encoder.config.hidden_size, 2)
        for name, parameter in self.encoder.named_parameters():
            matrix = parameter.dim() == 2 and "embeddings" not in name
            parameter.requires_grad_(trained == "all" or (matrix and trained == "matrices"))

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of token ids, 0 where a sentence has ended."""
        real = (tokens != 0).long()
        states = self.encoder(input_ids=tokens, attention_mask=real).last_hidden_state
        weights = (real / real.sum(1, keepdim=True)).to(states.dtype)
        scores: Tensor = self.head(torch.einsum("nt,ntd->nd", weights, states))
        return scores
