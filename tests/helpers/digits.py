"""scikit-learn's digits in the forms in which users have their data."""

from __future__ import annotations

import csv
import gzip
import struct
from pathlib import Path

import numpy as np
import yaml
from PIL import Image
from sklearn.datasets import load_digits

from dpspan.app.config import Config, parse_config


def digits(samples: int = 600, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, 8, 8) of 8 bits, and labels."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))[:samples]
    return (x[order].reshape(-1, 8, 8) * 15.9375).astype(np.uint8), y[order]


def write_npz(folder: Path, samples: int = 600) -> Path:
    public, test = samples // 10, samples // 5
    x, y = digits(samples + public)
    path = folder / "digits.npz"
    parts = {"public": slice(public), "test": slice(public, test), "train": slice(test, samples)}
    parts["other"] = slice(samples, None)
    np.savez(
        path, **{f"{k}_{name}": a[s] for name, s in parts.items() for k, a in (("x", x), ("y", y))}
    )
    return path


def write_idx(path: Path, array: np.ndarray) -> Path:
    header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    content = header + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_images(folder: Path, x: np.ndarray, y: np.ndarray) -> Path:
    for number, (image, label) in enumerate(zip(x, y, strict=True)):
        (folder / f"class{label}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"class{label}" / f"{number:04}.png")
    return folder


def write_csv(path: Path, x: np.ndarray, y: np.ndarray) -> Path:
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow([*(f"p{i}" for i in range(64)), "digit"])
        rows.writerows([*image.flatten(), label] for image, label in zip(x, y, strict=True))
    return path


def settings(folder: Path, **sections: object) -> dict[str, object]:
    """A small run on digits.npz in the folder; sections given replace or (None) remove others."""

    def part(name: str) -> dict[str, str]:
        path = str(folder / "digits.npz")
        return {"format": "npz", "path": path, "inputs": f"x_{name}", "labels": f"y_{name}"}

    whole = {
        "data": {
            "classes": 10,
            "private": part("train"),
            "public": {"optin": part("public")},
            "test": part("test"),
            "test_is_public": True,
        },
        "model": {"name": "logistic"},
        "method": {"name": "dpsgd", "clip": 1.0},
        "budget": {"epsilon": 4.0, "delta": 1e-5, "accountant": "rdp"},
        "training": {
            "epochs": 2,
            "batch_size": 96,
            "optimizer": {"name": "sgd", "learning_rate": 0.5},
        },
        "output": {"folder": str(folder / "run")},
        **sections,
    }
    return {name: section for name, section in whole.items() if section is not None}


def config(folder: Path, **sections: object) -> Config:
    return parse_config(yaml.safe_dump(settings(folder, **sections)))
