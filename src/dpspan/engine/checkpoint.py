"""Checkpoints of runs: a file, or of a sharded model a folder into which every process writes.

A file is safetensors with the rest as JSON in the header, written whole or not at all: one, not
two, so that tensors and books never differ in age. In a folder shards are written by
torch.distributed.checkpoint, and can be read into any number of processes; the books, with all that
is not sharded, name the shards that they belong to and are replaced last. Loading executes nothing.
"""

import importlib
import json
import math
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import safetensors
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpspan.support.distributed import Processes, is_sharded
from dpspan.support.files import replacing
from dpspan.support.sharded import Shards, local

_STATE = "dpspan.checkpoint.2"  # the key of the JSON state in the header, and its format
_BOOKS, _SHARDS = "books.safetensors", "shards"


def save(
    path: str | Path | BinaryIO,
    content: Callable[[], dict[str, Any]],
    module: nn.Module,
    processes: Processes,
) -> Path | None:
    """Into one file, which the first process writes; into a folder, if the model is sharded."""
    if Shards(module):
        with processes.together():
            found = content()
        return save_folder(path, found, processes)
    found = content()
    return save_file(path, found) if processes.is_first else None


def load(
    path: str | Path | BinaryIO, keys: set[str], module: nn.Module, processes: Processes
) -> dict[str, Any]:
    """What `save` wrote."""
    if isinstance(path, str | Path) and (Shards(module) or Path(path).is_dir()):
        return load_folder(path, keys, module, processes)
    return load_file(path, keys)


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


def save_folder(path: str | Path | BinaryIO, content: dict[str, Any], processes: Processes) -> Path:
    """Write numbers, text, tensors, lists, tuples and dicts; all processes call it."""
    if not isinstance(path, str | Path) or Path(path).is_file():
        raise ValueError("A sharded model is saved into a folder: give the path of one.")
    leaves, structure = tree_flatten(content)
    shards: dict[str, Tensor] = {}  # by their numbers among all that is saved
    places: set[int] = set()
    for number, leaf in enumerate(leaves):
        if is_sharded(leaf):
            place = local(leaf.detach()).untyped_storage().data_ptr()
            shards[str(number)] = leaf.detach().clone() if place in places else leaf.detach()
            places.add(place)  # what is tied is saved twice
            leaves[number] = None
    sizes = {number: tuple(shard.shape) for number, shard in shards.items()}
    checkpoint, folder = _torch_checkpoint(), Path(path)
    inside = folder / processes.same(f"{_SHARDS}-{secrets.token_hex(8)}")
    writer = checkpoint.HuggingFaceStorageWriter(str(inside), save_distributed=True)
    try:
        checkpoint.save(shards, storage_writer=writer, process_group=processes.group)
    except checkpoint.CheckpointException as error:  # in all processes; it is no Exception
        raise OSError(f"Cannot write a checkpoint to {folder}: {error}") from None
    with processes.together():
        if processes.is_first:
            books = {**tree_unflatten(leaves, structure), _SHARDS: (inside.name, sizes)}
            save_file(folder / _BOOKS, books)
            for old in {*folder.glob(f"{_SHARDS}-*")} - {inside}:
                shutil.rmtree(old, ignore_errors=True)
    return folder


def load_folder(
    path: str | Path, keys: set[str], module: nn.Module, processes: Processes
) -> dict[str, Any]:
    """What `save_folder` wrote, sharded as the model is, or whole if it is not; all call it."""
    checkpoint = _torch_checkpoint()
    with processes.together():
        if Path(path).is_file():
            raise ValueError(f"{path} is of a model that was whole: load it before fully_shard.")
        books = load_file(Path(path, _BOOKS), keys | {_SHARDS})
        inside, sizes = books.pop(_SHARDS)
        leaves, structure = tree_flatten(books)
        try:
            reader = checkpoint.HuggingFaceStorageReader(str(Path(path, Path(inside).name)))
            known = reader.read_metadata().state_dict_metadata
            room = {number: _room(known[number], size, module) for number, size in sizes.items()}
        except Exception:  # whatever torch makes of such files
            raise damaged(path) from None
    group = processes.group
    try:
        checkpoint.load(room, storage_reader=reader, process_group=group, no_dist=group is None)
    except checkpoint.CheckpointException:
        raise damaged(path) from None
    for number, tensor in room.items():
        leaves[int(number)] = tensor
    content: dict[str, Any] = tree_unflatten(leaves, structure)
    return content


def _torch_checkpoint() -> Any:
    """To import it takes long, and few need it."""
    module = importlib.import_module("torch.distributed.checkpoint")
    if not hasattr(module, "HuggingFaceStorageWriter"):
        raise RuntimeError("This torch cannot save shards as safetensors: use a later one.")
    return module


def _room(known: Any, size: tuple[int, ...], module: nn.Module) -> Tensor:
    """A tensor to read into, if all of it is there."""
    if sum(chunk.sizes.numel() for chunk in known.chunks) != math.prod(size):
        raise ValueError("A process's part is missing.")
    dtype, like = known.properties.dtype, next(filter(is_sharded, module.parameters()), None)
    if like is None:
        return torch.zeros(size, dtype=dtype)
    where: Any = {"device_mesh": like.device_mesh, "placements": like.placements}  # type: ignore[attr-defined]
    return dist.tensor.zeros(size, dtype=dtype, **where)
