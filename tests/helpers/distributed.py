"""Several processes on this machine that know each other by torch.distributed (gloo)."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed

SECONDS = 60  # until processes that wait for one another are given up


class Failed(NamedTuple):
    """A process that ended with an exception."""

    kind: str
    text: str
    trace: str


class Killed(NamedTuple):
    """A process that ended without a word."""

    code: int | None


def in_processes(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What function(rank, *args) returns in each of so many processes, or how it ended.

    Forked, so that the function may be any: to import torch anew takes seconds.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        running = []
        for rank in range(world):
            mine, theirs = context.Pipe(duplex=False)
            target = (rank, world, store, theirs, function, args)
            process = context.Process(target=_child, args=target, daemon=True)
            process.start()
            theirs.close()
            running.append((process, mine))
        results: list[Any] = []
        for process, pipe in running:
            try:
                told = pipe.poll(SECONDS)
                results.append(pickle.loads(pipe.recv_bytes()) if told else Killed(None))
            except EOFError:
                process.join(SECONDS)
                results.append(Killed(process.exitcode))
        for process, _ in running:
            process.join(5)
            process.kill()
    return results


def _child(
    rank: int, world: int, store: str, pipe: Any, function: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    try:
        distributed.init_process_group(
            "gloo",
            store=distributed.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=SECONDS // 2),
        )
        result = function(rank, *args)
        distributed.barrier()
    except BaseException as error:
        result = Failed(type(error).__name__, str(error), traceback.format_exc())
    pipe.send_bytes(pickle.dumps(result))  # torch's own way would share memory that is gone
    pipe.close()
    sys.stdout.flush()
    os._exit(0)  # pytest's own clean-up is not for this process
