"""Checkpoint files: written whole or not at all, and refused with a sentence when damaged."""

from __future__ import annotations

import io
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import torch


def save_file(path: str | Path, content: dict[str, Any]) -> Path:
    """Write through a temporary file beside the target, so an old checkpoint is never lost."""
    path = Path(path)
    _check_plain(content)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    except OSError as error:
        raise OSError(f"Cannot write a checkpoint to {path}: {error}") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            torch.save(content, file)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def _check_plain(content: dict[str, Any]) -> None:
    """Refuse now what could not be loaded later: loading executes nothing, so no objects."""
    for name, value in content.items():
        if name in ("module", "optimizer"):
            continue  # large, and plain by torch's own rules
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        try:
            torch.load(buffer, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"Cannot save {name}: expected numbers, text, tensors, lists and dicts only."
            ) from error


def load_file(path: str | Path, keys: set[str]) -> dict[str, Any]:
    """Read a checkpoint of plain data and tensors; nothing in it is executed."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except (RuntimeError, EOFError, pickle.UnpicklingError, OSError, ValueError) as error:
        raise ValueError(
            f"{path} is not a complete dpspan checkpoint (truncated, or another file): {error}"
        ) from error
    if not isinstance(content, dict) or set(content) != keys:
        raise ValueError(f"{path} is not a dpspan checkpoint: expected the entries {sorted(keys)}.")
    return content
