"""Features of sentences by a frozen network, MiniLM, and of sentences that describe a class.

    python -m experiments.sentences --data FOLDER [--device cuda]

Writes sst2_minilm.npz (half of the training phrases, and the development sentences as the test
part) and sst2_minilm_tuning.npz (the other half) into FOLDER, which holds sst2_train.tsv.gz and
sst2_dev.tsv.gz: 384 numbers a sentence, of length 1, the mean over its tokens. Files whose names go
on with _cls and _pooler have the states of the first token, and what the package's pooler makes of
these. Each file has the label sentences too, `labels_NAME`: (2 classes, sentences, 384).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from torch import Tensor
from torch.nn.functional import normalize

from dpspan.model.text import minilm_classifier, minilm_tokenizer
from experiments.data import Sst2Section

AT_ONCE = 256
POOLINGS = ("", "_cls", "_pooler")
# Of each class what might be said of it; written down before any of them was tried.
LABEL_SENTENCES = {
    "movie": (("This is a terrible movie.",), ("This is a great movie.",)),
    "review": (("The review is negative.",), ("The review is positive.",)),
    "several": (
        ("A terrible movie.", "I hated it.", "Dull and boring.", "This film is awful."),
        ("A great movie.", "I loved it.", "Wonderful and moving.", "This film is excellent."),
    ),
}


class Pooled:
    """MiniLM with its pooler, and the three vectors that it gives of a sentence."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._encoder = minilm_classifier(classes=2).bert.to(device).eval()

    @torch.no_grad()
    def features(self, tokens: Tensor) -> np.ndarray:
        """(3, n, 384) of token ids that 0 fills up; sentences of like length are seen together."""
        lengths = (tokens != 0).sum(1)
        order = lengths.argsort()
        found = torch.zeros(len(POOLINGS), len(tokens), self._encoder.config.hidden_size)
        for some in track(order.split(AT_ONCE)):
            part = tokens[some, : int(lengths[some].max())].to(self._device)
            found[:, some] = normalize(self._poolings(part), dim=-1).cpu()
        return found.half().numpy()

    def _poolings(self, tokens: Tensor) -> Tensor:
        real = (tokens != 0).float()
        given = self._encoder(input_ids=tokens, attention_mask=real)
        states = given.last_hidden_state
        mean = torch.einsum("nt,ntd->nd", real / real.sum(1, keepdim=True), states)
        return torch.stack([mean, states[:, 0], given.pooler_output])


def label_features(encoder: Pooled) -> dict[str, np.ndarray]:
    """By name, (3, 2, sentences, 384)."""
    found = {}
    for name, classes in LABEL_SENTENCES.items():
        tokens = minilm_tokenizer()(sum(classes, ()), padding=True, return_tensors="pt")
        own = encoder.features(tokens["input_ids"])
        found[f"labels_{name}"] = own.reshape(len(POOLINGS), 2, -1, own.shape[-1])
    return found


def main() -> None:
    """Write all files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    data = Sst2Section().load(options.data, seed=0, hold_out=False)
    encoder = Pooled(options.device)
    described = label_features(encoder)
    x, y = encoder.features(data.private.x), data.private.y.numpy()
    x_test, y_test = encoder.features(data.test.x), data.test.y.numpy()
    half = x.shape[1] // 2
    for index, pooling in enumerate(POOLINGS):
        labels = {name: found[index] for name, found in described.items()}
        test = {"x_test": x_test[index], "y_test": y_test}
        parts = {"": (slice(half), test), "_tuning": (slice(half, None), {})}
        for part, (rows, more) in parts.items():
            path = options.data / f"sst2_minilm{pooling}{part}.npz"
            np.savez(path, x_train=x[index, rows], y_train=y[rows], **more, **labels)


if __name__ == "__main__":
    main()
