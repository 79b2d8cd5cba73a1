"""Features of sentences by a frozen network: MiniLM, the mean over its tokens.

    python -m experiments.sentences --data FOLDER [--device cuda]

Writes sst2_minilm.npz (half of the training phrases, and the development sentences as the test
part) and sst2_minilm_tuning.npz (the other half) into FOLDER, which holds sst2_train.tsv.gz and
sst2_dev.tsv.gz: 384 numbers a sentence, of length 1.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn.functional import normalize

from experiments.data import Sst2Section
from experiments.text import MeanPooled

AT_ONCE = 256


@torch.no_grad()
def features(model: MeanPooled, tokens: Tensor, device: str) -> np.ndarray:
    """(n, 384) of token ids that 0 fills up; sentences of like length are seen together."""
    lengths = (tokens != 0).sum(1)
    order = lengths.argsort()
    found = torch.zeros(len(tokens), model.encoder.config.hidden_size)
    for some in track(order.split(AT_ONCE)):
        part = tokens[some, : int(lengths[some].max())].to(device)
        found[some] = normalize(model(part)).cpu()
    return found.half().numpy()


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    data = Sst2Section().load(options.data, seed=0, hold_out=False)
    model = MeanPooled("head").to(options.device).eval()
    model.head = nn.Identity()  # type: ignore[assignment]
    x, y = features(model, data.private.x, options.device), data.private.y.numpy()
    half = len(x) // 2
    test = {"x_test": features(model, data.test.x, options.device), "y_test": data.test.y.numpy()}
    np.savez(options.data / "sst2_minilm.npz", x_train=x[:half], y_train=y[:half], **test)
    np.savez(options.data / "sst2_minilm_tuning.npz", x_train=x[half:], y_train=y[half:])


if __name__ == "__main__":
    main()
