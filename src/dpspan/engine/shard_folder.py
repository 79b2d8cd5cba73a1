"""Checkpoints of runs: a file, or of a sharded model a folder into which every process writes.

By torch.distributed.checkpoint, as safetensors: loading executes nothing, and into any number of
processes. The books, with all that is not sharded, name the shards that they belong to and are
replaced last: they never differ in age, and an old checkpoint is never lost.
"""

import importlib
import math
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpspan.engine.checkpoint import damaged, load_file, save_file
from dpspan.support.distributed import Processes, is_sharded
from dpspan.support.sharded import Shards, local

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
