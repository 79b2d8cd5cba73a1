"""Checkpoint files: safetensors with the rest as JSON in the header, written whole or not at all.

Loading one executes nothing. One file, not two, so that tensors and books never differ in age.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from dpspan.support.files import replacing

_STATE = "dpspan.checkpoint.2"  # the key of the JSON state in the header, and its format


def save_file(path: str | Path | BinaryIO, content: dict[str, Any]) -> Path | None:
    """Write numbers, text, tensors, lists, tuples and dicts; an old checkpoint is never lost.

    Into a file that is open for bytes it goes as it is, where the file stands.
    """
    tensors: dict[str, Tensor] = {}
    state = {name: _encode(name, value, tensors) for name, value in content.items()}
    places: set[int] = set()
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        if place in places:  # tied weights, or views of one tensor
            tensors[name] = tensor.clone()
        places.add(place)
    header = {_STATE: json.dumps(state, allow_nan=False)}
    if not isinstance(path, str | Path):
        path.write(safetensors.torch.save(tensors, metadata=header))
        return None
    path = Path(path)
    with replacing(path, what="a checkpoint") as temporary:
        safetensors.torch.save_file(tensors, temporary, metadata=header)
    return path


def load_file(path: str | Path | BinaryIO, keys: set[str]) -> dict[str, Any]:
    """What `save_file` wrote, on the CPU; ValueError if the file is damaged or another."""
    if not isinstance(path, str | Path):
        with TemporaryDirectory() as folder:  # safetensors reads headers from files only
            copy = Path(folder, "checkpoint")
            copy.write_bytes(path.read())
            return load_file(copy, keys)
    if not Path(path).exists():
        raise FileNotFoundError(f"There is no checkpoint at {path}.")
    try:
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            state = json.loads((file.metadata() or {})[_STATE])
            content = {name: _decode(value, file) for name, value in state.items()}
    except (safetensors.SafetensorError, OSError, ValueError, KeyError, TypeError):
        raise damaged(path) from None  # whose own words may quote the file
    if set(content) != keys:
        raise ValueError(f"{path} is not a dpspan checkpoint: expected the entries {sorted(keys)}.")
    return content


def damaged(path: str | Path) -> ValueError:
    """The error about a checkpoint that cannot be read."""
    return ValueError(
        f"{path} is not a complete dpspan checkpoint (truncated, or another file). Restore it from "
        "a copy, or remove it and train anew (`dpspan train CONFIG --resume`): what was spent "
        "stays spent."
    )


def _encode(path: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """The value in JSON, and the tensors in it put among the others.

    JSON has neither tuples nor keys that are numbers, and optimizers have both: so every container
    is written with its kind.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise ValueError(f"Cannot save {path}: expected a dense tensor, got {value.layout}.")
        name = f"{len(tensors)}:{path}"  # paths alone could clash: {1: …} and {"1": …}
        tensors[name] = value.detach().cpu().contiguous()
        return {"tensor": name}
    if isinstance(value, Mapping):
        wrong = [key for key in value if isinstance(key, bool) or not isinstance(key, str | int)]
        if wrong:
            raise ValueError(
                f"Cannot save {path}: expected text or numbers as keys, got {wrong[0]!r}."
            )
        return {"dict": [[k, _encode(f"{path}.{k}", v, tensors)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        items = [_encode(f"{path}.{i}", item, tensors) for i, item in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": str(float(value))}
    if isinstance(value, int | float):
        return value
    raise ValueError(
        f"Cannot save {path}: expected numbers, text, tensors, lists and dicts only, got a "
        f"{type(value).__name__}."
    )


def _decode(value: Any, file: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return file.get_tensor(inner)
    if kind == "number":  # infinity or NaN, which JSON lacks
        return float(inner)
    if kind == "dict":
        return {key: _decode(item, file) for key, item in inner}
    return {"list": list, "tuple": tuple}[kind](_decode(item, file) for item in inner)
